"""Tensors in nested arguments: tuples, dicts and packed sequences; their versions; and modules in a model."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

Put = Callable[[Tensor], None]


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree in order; of a packed sequence the data."""
    if isinstance(tree, Tensor):  # the usual cases first, which need no walk
        return [tree]
    if _is_flat(tree):
        return list(tree)
    leaves = (leaf.data if is_packed(leaf) else leaf for leaf in tree_leaves(tree, is_packed))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def outputs_of(tree: Any) -> list[Tensor]:
    """`tensors_of`, and then those in dataclasses and other objects, a distribution say, and in functions made inside."""
    if isinstance(tree, Tensor) or _is_flat(tree):
        return tensors_of(tree)
    return [*tensors_of(tree), *(x for _, x in hidden_in(tree))]


def hidden_in(tree: Any) -> list[tuple[Put | None, Tensor]]:
    """The tensors that `outputs_of` finds in objects, each with what puts another one in its place where that can be."""
    seen: dict[int, Any] = {}
    leaves = [leaf for leaf in tree_leaves(tree, is_packed) if not isinstance(leaf, _CLOSED)]
    return [found for leaf in leaves for found in _walk(leaf, None, seen)]


def _walk(value: Any, put: Put | None, seen: dict[int, Any]) -> Iterator[tuple[Put | None, Tensor]]:
    if isinstance(value, Tensor):
        yield put, value
    if isinstance(value, _CLOSED) or id(value) in seen:
        return
    seen[id(value)] = value
    parts: Any = getattr(value, "__dict__", None)
    if isinstance(value, list | dict):
        parts = value
    elif isinstance(value, tuple):
        for part in value:
            yield from _walk(part, None, seen)
    elif isinstance(value, FunctionType):
        for cell in value.__closure__ or ():
            if cell != CellType():  # an empty one
                yield from _walk(cell.cell_contents, partial(setattr, cell, "cell_contents"), seen)
    elif is_dataclass(value) and parts is None:  # with slots
        for field in fields(value):
            yield from _walk(getattr(value, field.name, None), partial(object.__setattr__, value, field.name), seen)
    if parts is not None:
        for at, part in list(enumerate(parts) if isinstance(parts, list) else parts.items()):
            yield from _walk(part, partial(parts.__setitem__, at), seen)


_CLOSED = (Tensor, nn.Module, PackedSequence, type, str, int, float, complex, bytes, type(None))

Key = tuple[str, str, int]
"""A tensor that a module keeps: the module's path, the attribute's name, and which of its tensors, counted from the last."""


def kept_by(model: nn.Module) -> dict[Key, Tensor]:
    """The tensors with a graph that a model's modules keep in attributes, or in lists and dictionaries there."""
    found: dict[Key, Tensor] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in OF_MODULE and isinstance(value, Tensor | dict | list | tuple):
                tensors = tensors_of(value)
                found |= {(path, name, n - len(tensors)): x for n, x in enumerate(tensors) if x.grad_fn is not None}
    return found


def with_alias(model: nn.Module, key: Key) -> Tensor | None:
    """What a module keeps there; replaced by an alias where that can be, so that its graph's node is of later uses alone."""
    path, name, index = key
    try:
        owner = vars(model.get_submodule(path))
        x = tensors_of(owner.get(name))[index]
    except (AttributeError, IndexError):
        return None
    if x.grad_fn is None:
        return None
    holder, alias = owner[name], x.view_as(x)
    if holder is x:
        owner[name] = alias
        return alias
    for at, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        if value is x and not isinstance(holder, tuple):
            holder[at] = alias
            return alias
    return x


OF_MODULE = frozenset(vars(nn.Module()))
"""The attributes that every module has."""


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
