"""Tensors in nested arguments: tuples, dicts and packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree in order; of a packed sequence the data."""
    if isinstance(tree, Tensor):
        return [tree]
    leaves = (leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in tree_leaves(tree))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with the function applied to each tensor."""

    def at_leaf(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=function(leaf.data))
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(at_leaf, tree)
