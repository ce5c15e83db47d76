"""Tensors in nested arguments (tuples, dicts, packed sequences, objects), as keys, their versions, and a model's modules."""

import weakref
from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass
from itertools import chain
from operator import attrgetter, methodcaller
from types import NoneType, SimpleNamespace
from typing import Any, Generic, TypeGuard, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.utils.rnn import PackedSequence

from autograd_hacks.support.internals import register_pytree_node, tree_leaves, tree_map

T = TypeVar("T")

_CLOSED = (Tensor, NoneType, bool, int, float, complex, str, bytes, torch.dtype, torch.device, nn.Module, PackedSequence)
_BASES = (OrderedDict, dict, list, SimpleNamespace, object)
"""An object is opened if its class creates instances in the same way as one of these."""


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order.  For a packed sequence, its data."""
    if isinstance(tree, Tensor):
        return [tree]
    kind = type(tree)
    if kind is tuple or kind is list or kind is dict:  # torch's functions take twice as long, and more
        return [
            x for part in (tree.values() if kind is dict else tree) if type(part) not in SIMPLE for x in tensors_of(part)
        ]
    if isinstance(tree, _CLOSED):
        return [tree.data] if is_packed(tree) else []
    leaves = tree_leaves(tree, is_packed)
    if not all(isinstance(leaf, _CLOSED) for leaf in leaves):
        leaves = tree_leaves(unpacked(tree, everything=True), is_packed)
    leaves = [leaf.data if is_packed(leaf) else leaf for leaf in leaves]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """All tensors among a call's arguments, in order."""
    return tensors_of(args) + tensors_of(kwargs) if kwargs else tensors_of(args)


def made_by(tensors: Iterable[Tensor]) -> frozenset[Node]:
    return frozenset([x.grad_fn for x in tensors if x.grad_fn is not None])


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The tree with the function applied to each tensor."""
    if isinstance(tree, Tensor):
        return function(tree)
    if _is_flat(tree):
        return _mapped(function, tree)

    def at_leaf(leaf: Any) -> Any:
        if is_packed(leaf):
            return leaf._replace(data=function(leaf.data))
        return function(leaf) if isinstance(leaf, Tensor) else leaf

    return tree_map(at_leaf, unpacked(tree, everything=True), is_leaf=is_packed)


class Unpacked:
    """The contents of an object, which replace it in a tree, so that torch's tree functions can enter it."""

    def __init__(self, parts: list[Any], context: tuple[type, tuple[Any, ...], tuple[str, ...]]) -> None:
        self.parts, self.context = parts, context  # its class, the keys of its items, the names of its attributes


def _closed(parts: Iterable[Any], context: tuple[type, tuple[Any, ...], tuple[str, ...]]) -> Any:
    """An object of a class with these parts, made without calling code of the class."""
    kind, keys, names = context
    base: Any = next(base for base in _BASES if issubclass(kind, base))
    made, left = base.__new__(kind), iter(parts)
    for key in keys:
        list.append(made, next(left)) if base is list else base.__setitem__(made, key, next(left))
    for name, part in zip(names, left):
        object.__setattr__(made, name, made if part is _ITSELF else part)  # works for frozen ones too
    return made


_ITSELF = object()

register_pytree_node(Unpacked, lambda x: (x.parts, x.context), _closed)


def unpacked(tree: Any, everything: bool = False) -> Any:
    """The tree with its objects opened: dataclasses and similar objects, and user-defined dictionaries and lists.

    With ``everything``, also all others that hold a tensor.  Mapping or unflattening gives copies of the objects."""
    if _is_flat(tree) or (type(tree) is tuple and all(map(_is_flat, tree))):
        return tree  # most arguments
    known: dict[int, Any] = {}

    def at_leaf(leaf: Any) -> Any:
        if isinstance(leaf, _CLOSED):
            return leaf
        if id(leaf) in known:
            if known[id(leaf)] is _ITSELF:  # it is being unpacked, and contains itself
                known[id(leaf)] = leaf
            return known[id(leaf)]
        kind, is_record = type(leaf), _is_record(leaf)
        new: Any = kind.__new__
        base = next(base for base in _BASES if isinstance(leaf, base))
        if not (is_record or everything) or new is not base.__new__ or kind in (object, OrderedDict, dict, list):
            return leaf
        items = dict(leaf) if isinstance(leaf, dict) else dict(enumerate(leaf)) if isinstance(leaf, list) else {}
        own = slots_of(leaf) | getattr(leaf, "__dict__", {})
        known[id(leaf)] = _ITSELF
        held_parts = [_ITSELF if part is leaf else part for part in (*items.values(), *own.values())]
        parts = [tree_map(at_leaf, part, is_leaf=is_packed) for part in held_parts]
        is_circle, known[id(leaf)] = known[id(leaf)] is leaf, leaf
        if is_circle:  # it can't be copied part by part
            return leaf
        if is_record or any(isinstance(x, Tensor | PackedSequence) for x in tree_leaves(parts, is_packed)):
            known[id(leaf)] = Unpacked(parts, (kind, tuple(items), tuple(own)))
        return known[id(leaf)]

    return tree_map(at_leaf, tree, is_leaf=is_packed)


def _is_record(x: Any) -> bool:
    like = isinstance(x, SimpleNamespace | dict | list | UserDict | UserList) or hasattr(type(x), "__attrs_attrs__")
    return like or (is_dataclass(x) and not isinstance(x, type))


def slots_of(thing: object) -> dict[str, Any]:
    """The values in an object's slots, by name."""
    slots = [vars(kind).get("__slots__", ()) for kind in type(thing).__mro__]
    names = [name for slot in slots for name in ([slot] if isinstance(slot, str) else slot)]
    return {name: getattr(thing, name) for name in names if not name.startswith("__") and hasattr(thing, name)}


def weakly(tree: Any) -> Any:
    """The tree with weak references instead of tensors, and of objects that support them; see `held`."""
    if not tree or _is_flat(tree):
        return _mapped(weakref.ref, tree) if tree else tree

    def at_leaf(leaf: Any) -> Any:
        try:
            return weakref.ref(leaf)
        except TypeError:  # numbers and strings don't support them
            return leaf

    return tree_map(at_leaf, unpacked(tree), is_leaf=is_packed)


def held(tree: Any) -> Any:
    """The tree that was given to `weakly`.  Raises ReferenceError if something in it is gone."""

    def at_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, weakref.ref):
            return leaf
        if (found := leaf()) is None:
            raise ReferenceError("an argument is gone")
        return found

    return tree_map(at_leaf, unpacked(tree), is_leaf=is_packed)


def _is_flat(tree: Any) -> bool:
    """Whether a tree is a tuple or a dictionary of tensors, as most arguments are."""
    parts = tree if type(tree) is tuple else tree.values() if type(tree) is dict else (None,)
    return not [x for x in parts if not isinstance(x, Tensor)]


def _mapped(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """A flat tree with the function applied to each tensor."""
    return tuple(map(function, tree)) if type(tree) is tuple else {key: function(x) for key, x in tree.items()}


SIMPLE = {int, float, bool, str, type(None)}
"""Types that hold no tensor."""

_CHILDREN, _PARAMETERS = attrgetter("_modules"), attrgetter("_parameters")
_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")  # a scripted module has a mapping of its own
OF_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has."""


class Tree:
    """A model's modules and parameters.  To see that they are those of before takes a fraction of finding them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._modules: list[nn.Module] = []
        self._children: list[tuple[nn.Module | None, ...]] | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        self._owned: list[Any] | None = None
        self._counts: list[int] = []  # of each module's attributes
        # Of those that not every module has: the module's number, the name, and a value that holds no tensor for ever.
        self._attributes: list[tuple[int, str, Any]] = []

    def modules(self) -> list[nn.Module]:
        """The model's modules: the same list as long as it has the same ones."""
        if self._children is None or self._all_children() != self._children:
            model = self._model()
            self._modules, self._owned, self._counts = [] if model is None else [*model.modules()], None, []
            self._children = self._all_children()
        return self._modules

    def _all_children(self) -> list[tuple[nn.Module | None, ...]]:
        return [*map(tuple, map(_VALUES, map(_CHILDREN, self._modules)))]  # few calls, since a model has many modules

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's parameters by name, which must not be changed."""
        return self.all()[1]

    def all(self) -> tuple[list[nn.Module], dict[str, nn.Parameter]]:
        modules = self.modules()
        own = [*map(_PARAMETERS, modules)]
        names, values = chain.from_iterable(map(_KEYS, own)), chain.from_iterable(map(_VALUES, own))
        owned = [[*map(len, own)], *names, *map(id, values)]
        model = self._model()
        if model is not None and (owned != self._owned or type(model).named_parameters is not nn.Module.named_parameters):
            self._parameters, self._owned = dict(model.named_parameters()), owned
        return modules, self._parameters

    def kept(self) -> list[Any]:
        """The tensors that modules keep in attributes of their own, and the collections that may hold some."""
        own, found = [*map(vars, self._modules)], list[Any]()
        if self._counts != [*map(len, own)] or [n for n, name, _ in self._attributes if name not in own[n]]:
            self._counts = [*map(len, own)]
            self._attributes = [(n, name, None) for n, each in enumerate(own) for name in sorted(each.keys() - OF_MODULE)]
        for at, value in [
            (at, value)
            for at, (n, name, known) in enumerate(self._attributes)
            if type(value := own[n][name]) not in SIMPLE and value is not known
        ]:
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
            if isinstance(value, Tensor) or not {type(x) for x in items} <= SIMPLE:
                found.append(value)
            elif type(value) is tuple:
                self._attributes[at] = *self._attributes[at][:2], value  # most are sizes
        return found


def like_its_kind(kind: Tensor, x: Tensor) -> Tensor:
    """x with the class of the user's tensor subclass, if x has lost it, and its attributes."""
    is_plain = type(kind) is Tensor or isinstance(kind, nn.Parameter) or not holds_numbers(kind)
    if is_plain or type(x) not in (Tensor, type(kind)):
        return x
    if type(x) is Tensor:
        x = x.as_subclass(type(kind))
    vars(x).update(vars(kind))
    return x


def plain(x: Tensor) -> Tensor:
    """x without its graph, as torch's own class."""
    x = x.detach()
    return x if type(x) is Tensor or not holds_numbers(x) else x.as_subclass(Tensor)


def holds_numbers(x: Tensor) -> bool:
    """Whether a tensor has its own memory, and is not a wrapper around others that computes in its own way."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def is_packed(tree: Any) -> TypeGuard[PackedSequence]:
    return isinstance(tree, PackedSequence)


def stepped_outside(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The trainable parameters that an optimizer steps and the model doesn't have."""
    ours = {id(p) for p in model.parameters()}
    return [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad and id(p) not in ours]


Versions = Sequence[tuple[Tensor, int]]
"""Tensors, and how often each had been overwritten."""


def versions_of(tensors: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    return [(x, version_of(x)) for x in tensors]


def overwritten_in(versions: Iterable[tuple[Tensor | None, int]]) -> str:
    """What is wrong if a tensor has been overwritten since, for messages; "" if none has."""
    for tensor, version in versions:
        if tensor is not None and version_of(tensor) != version:
            now = f"version {version_of(tensor)}; expected {version}"
            return f"of shape {tuple(tensor.shape)}, was overwritten in place ({now})"
    return ""


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been overwritten; 0 for inference tensors, which don't count that."""
    return 0 if tensor.is_inference() else tensor._version


def versions_among(*tensors: Tensor) -> list[int]:
    """`version_of` tensors, which usually aren't inference tensors."""
    try:
        return [x._version for x in tensors]
    except RuntimeError:
        return list(map(version_of, tensors))


class ByTensor(Generic[T]):
    """A dictionary with tensors as keys, compared by identity and not kept alive.

    A look-up takes 0.2 µs; in torch's own WeakTensorKeyDictionary it takes 1 µs.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Tensor], T]] = {}

    def __setitem__(self, tensor: Tensor, value: T) -> None:
        held, key = self._held, id(tensor)
        held[key] = weakref.ref(tensor, lambda reference: _forget(held, key, reference)), value

    def __contains__(self, tensor: Tensor) -> bool:
        return self.get(tensor) is not None

    def get(self, tensor: Tensor) -> T | None:
        found = self._held.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def of(self, tensors: Iterable[Tensor]) -> list[T | None]:
        """The values of several tensors."""
        tensors = [*tensors]
        found = zip(tensors, map(self._held.get, map(id, tensors)))
        return [None if own is None or own[0]() is not x else own[1] for x, own in found]

    def keys(self) -> Iterator[Tensor]:
        return iter([x for reference, _ in list(self._held.values()) if (x := reference()) is not None])

    def values(self) -> Iterator[T]:
        return iter([value for _, value in list(self._held.values())])


def _forget(held: dict[int, tuple[weakref.ref[Tensor], T]], key: int, reference: weakref.ref[Tensor]) -> None:
    if key in held and held[key][0] is reference:  # another tensor may have the same address by now
        del held[key]
