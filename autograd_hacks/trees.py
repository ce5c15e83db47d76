"""Tensors in nested arguments: tuples, dicts and packed sequences; and their versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree in order; of a packed sequence the data."""
    if isinstance(tree, Tensor):  # the usual cases first, which need no walk
        return [tree]
    if type(tree) is tuple and all(isinstance(leaf, Tensor) for leaf in tree):
        return list(tree)
    leaves = (leaf.data if is_packed(leaf) else leaf for leaf in tree_leaves(tree, is_packed))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with the function applied to each tensor."""

    def at_leaf(leaf: Any) -> Any:
        if is_packed(leaf):
            return leaf._replace(data=function(leaf.data))
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    if type(tree) is tuple and all(isinstance(leaf, Tensor) for leaf in tree):
        return tuple(function(leaf) for leaf in tree)
    return tree_map(at_leaf, tree, is_leaf=is_packed)


def is_packed(tree: Any) -> bool:
    return isinstance(tree, PackedSequence)


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been overwritten; inference tensors don't count that."""
    return 0 if tensor.is_inference() else tensor._version
