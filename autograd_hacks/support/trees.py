"""Tensors in nested arguments: tuples, dicts and packed sequences; their versions; and modules in a model."""

import weakref
from collections.abc import Callable
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree in order; of a packed sequence the data."""
    if isinstance(tree, Tensor):  # the usual cases first, which need no walk
        return [tree]
    if _is_flat(tree):
        return list(tree)
    leaves = (leaf.data if is_packed(leaf) else leaf for leaf in tree_leaves(tree, is_packed))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with the function applied to each tensor."""

    def at_leaf(leaf: Any) -> Any:
        if is_packed(leaf):
            return leaf._replace(data=function(leaf.data))
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    if isinstance(tree, Tensor):
        return function(tree)
    if _is_flat(tree):
        return tuple([function(leaf) for leaf in tree])
    return tree_map(at_leaf, tree, is_leaf=is_packed)


def weakly(tree: Any) -> Any:
    """The tree with a weak reference in the place of each tensor, and of each object that takes one; see `held`."""

    def at_leaf(leaf: Any) -> Any:
        try:
            return weakref.ref(leaf)
        except TypeError:  # numbers and strings take none
            return leaf

    return tree_map(at_leaf, tree, is_leaf=is_packed)


def held(tree: Any) -> Any:
    """What `weakly` was given.  Raises ReferenceError where something in it is gone."""

    def at_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, weakref.ref):
            return leaf
        if (found := leaf()) is None:
            raise ReferenceError("an argument is gone")
        return found

    return tree_map(at_leaf, tree, is_leaf=is_packed)


def _is_flat(tree: Any) -> bool:
    """Whether a tree is a tuple of tensors, as most arguments are."""
    if type(tree) is not tuple:
        return False
    for leaf in tree:  # noqa: SIM110  # half the time of a generator within all()
        if not isinstance(leaf, Tensor):
            return False
    return True


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, in the order of ``model.modules()``, which spells their names and takes four times as long."""
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            waiting.extend(child for child in reversed(list(module._modules.values())) if child is not None)
    return list(found.values())


def parameter_at(module: nn.Module, name: str) -> Tensor | None:
    """What a parameter's slot holds: another tensor within functional_call, or None."""
    path, _, local = name.rpartition(".")
    slots = module.get_submodule(path)._parameters  # of a scripted module these are no dictionary
    return slots[local] if local in slots else None  # noqa: SIM401


def is_packed(tree: Any) -> bool:
    return isinstance(tree, PackedSequence)


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been overwritten; inference tensors don't count that."""
    return 0 if tensor.is_inference() else tensor._version
