"""Follows parameters through torch's functions, as Python calls them: what comes of parameters alone, and where the batch is
met."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autograd_hacks.probe.labels import carried
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.tracker import Frame
from autograd_hacks.rules.operations import ELEMENTWISE, OPERATIONS
from autograd_hacks.support.trees import leaves_of

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11

V = TypeVar("V")

# fmt: off
BROADCASTING = frozenset((
    "where", "div", "maximum", "minimum", "pow", "addcmul", "addcdiv", "lerp", "hypot", "atan2", "logaddexp", "clamp",
    "true_divide", "cat", "concat", "mul_", "add_", "sub_", "div_",
))
"""Functions that put tensors of unequal shapes beside each other, the last axis of one by the last of the other."""

BATCHED = frozenset(("matmul", "bmm", "baddbmm", "scaled_dot_product_attention"))
"""The same but for the last two axes, where no tensor is but a matrix."""

QUIET = frozenset((
    "size", "dim", "numel", "len", "stride", "storage_offset", "untyped_storage", "data_ptr", "element_size", "get_device",
    "is_floating_point", "is_complex", "is_contiguous", "type", "requires_grad_", "detach", "bool", "item", "tolist",
    "hash", "format", "repr", "set", "eq", "ne", "lt", "le", "gt", "ge",
))
"""Functions through which no gradient comes."""
# fmt: on

SIZED = frozenset(("expand_as", "view_as", "reshape_as", "type_as", "to"))
"""Functions that look at another tensor's sizes or kind alone."""

_OTHERS = {torch.embedding, torch.batch_norm, torch.instance_norm, torch.embedding_bag}
"""They take what functions of the same name in torch.nn.functional do in another order."""


_CONSTANT = {torch.Tensor.data, torch.Tensor.grad}


class Key(NamedTuple):
    """A call of a function of torch: in which call of which module, and how many of the same name came before there."""

    frame: Frame
    function: str
    number: int


def name_of(function: Any) -> str:
    """A function's name, without the underscores of Python's operators."""
    name: str = getattr(function, "__name__", "?")
    return f"torch.{name}" if function in _OTHERS else name.strip("_") if name.startswith("__") else name


def is_constant(getter: Any) -> bool:
    """Whether a property of a tensor leads no gradient to it."""
    return getattr(getter, "__self__", None) in _CONSTANT


def aligned(shape: Iterable[int], ndim: int) -> tuple[int, ...]:
    """A shape with as many axes as another, the new ones in front."""
    shape = tuple(shape)
    return (*[1] * (ndim - len(shape)), *shape)


def broadcasts(name: str, ndim: int, axis: int, values: Iterable[int]) -> bool:
    """Whether a function gives each sample its own, if its values get one for each.

    ndim: of its output    axis: of the samples there    values: how many axes each value has
    """
    if name in BATCHED:
        return axis < ndim - 2 and all(rank > 2 for rank in values)
    return name in BROADCASTING or name in ELEMENTWISE


@cache
def opened(function: Any) -> Callable[..., Any] | None:
    """A function of torch that is Python code, in which those that it calls are seen one by one; None for others.

    It is the same code in a namespace in which torch doesn't ask, once more, who would like to see the function itself.
    """
    if type(function) is not FunctionType or function.__module__ != F.__name__ or name_of(function) in OPERATIONS:
        return None
    asked = [name for name in function.__code__.co_names if name.startswith("has_torch_function")]
    space = {**vars(F), **dict.fromkeys(asked, lambda *_: False)}
    made = FunctionType(function.__code__, space, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made if asked else None


class Following(TorchFunctionMode, Generic[V]):
    """Sees the functions of torch that are given parameters, or what follows from them.

    Tensors are known by their identity; who follows them keeps them alive.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        chosen: Any = cls
        return super().__new__(_uncompiled(chosen) if "torch._dynamo" in sys.modules else cls)

    def __init__(self, parameters: Mapping[int, V]) -> None:
        super().__init__()
        self.values: dict[int, V] = dict(parameters)  # by the id of a tensor
        self.held: list[Tensor] = []  # those tensors
        self.counts: dict[tuple[Frame, str], int] = {}
        self.rows: dict[int, Tensor] = {}  # labels by the id of a tensor
        self.is_aside = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which the library's own code runs, of which nothing is seen.  An interrupt at its end leaves no more
        than this object as it is inside."""
        before, self.is_aside = self.is_aside, True
        try:
            yield
        finally:
            self.is_aside = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_aside:
            return func(*args, **(kwargs or {}))
        out = self._called(func, args, kwargs)
        if self.rows and type(args) is tuple and args:
            self._carry(func, args, out)
        return out

    def _carry(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        for x in out if type(out) in (tuple, list) else (out,):
            if isinstance(x, Tensor) and (labels := carried(name_of(func), args, x, self.rows)) is not None:
                self.label(x, labels)

    def label(self, tensor: Tensor, labels: Tensor) -> None:
        """Knows whose the rows of a tensor are."""
        self.rows[id(tensor)] = labels
        self.held.append(tensor)

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        values = self.values
        for x in args:
            if id(x) in values:
                return self.see(func, args, kwargs or {})
            if type(x) is list or type(x) is tuple:
                for y in x:
                    if id(y) in values:
                        return self.see(func, args, kwargs or {})
        if not kwargs:
            return func(*args)
        for x in kwargs.values():
            if id(x) in values:
                return self.see(func, args, kwargs)
        return func(*args, **kwargs)

    def see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that is given a value, and returns what it returns."""
        name = name_of(func)
        if name in QUIET:
            return self.run(func, args, kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # the operations inside tell that it is used there
            return func(*args, **kwargs)
        if (inner := opened(func)) is not None:
            with self:
                return inner(*args, **kwargs)
        if name == "get":
            out = self.run(func, args, kwargs)
            if isinstance(out, Tensor) and not is_constant(func) and id(out) not in self.values:
                self.make(func, args, kwargs, [out])
            return out
        return self.meet(name, func, args, kwargs)

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function, and no more."""
        return func(*args, **kwargs)

    @abstractmethod
    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[Tensor]) -> None:
        """Knows what a function has made of values alone."""

    @abstractmethod
    def meet(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function that may be given something of the batch beside a value, and returns what it returns."""

    def count(self, frame: Frame, name: str) -> Key:
        number = self.counts[frame, name] = self.counts.get((frame, name), -1) + 1
        return Key(frame, name, number)

    def know(self, tensor: Tensor, value: V) -> None:
        self.values[id(tensor)] = value
        self.held.append(tensor)

    def known(self, tree: Any) -> list[Tensor]:
        """The tensors of a tree that follow from parameters alone."""
        return [x for x in leaves_of(tree) if isinstance(x, Tensor) and id(x) in self.values]

    def others(self, tree: Any) -> list[Tensor]:
        """Its other tensors."""
        return [x for x in leaves_of(tree) if isinstance(x, Tensor) and id(x) not in self.values]


@cache
def _uncompiled(cls: type[Any]) -> type[Any]:
    """The same class, which torch's compiler leaves alone once it is there: code that it compiles runs as it is, then."""
    hidden = sys.modules["torch._dynamo"].disable(cls.__torch_function__)
    return type(cls.__name__, (cls,), {"__torch_function__": hidden})


def grown(name: str, value: Tensor, others: Sequence[Tensor], out: Tensor, samples: int) -> Layout | None:
    """Where a value has got N entries, in a function without a batch, that may be the samples'; None where it has not.

    others: the tensors beside it, an index that was expanded, say
    """
    if samples == 1:
        return None
    after, before = out.shape, aligned(value.shape, out.ndim)
    if name == "repeat":
        folds = (n for n, size in enumerate(after) if size == samples * before[n] != samples)
        if (axis := next(folds, None)) is not None:
            return Layout(axis, "N·T")
    if name in ELEMENTWISE:
        axis = next((n for n, size in enumerate(after) if size == samples and before[n] == 1), None)
        return None if axis is None else Layout(axis)
    if name in OPERATIONS and after[:1] == (samples,) and any(x.shape[:1] == (samples,) for x in others):
        return Layout(0)
    given = {axis for x in others if (axis := only_axis(x, samples)) is not None}
    if name in OPERATIONS and len(given) == 1 and after[min(given) : min(given) + 1] == (samples,):
        return Layout(min(given))
    axis = only_axis(out, samples)
    has = axis is not None and samples not in value.shape and any(only_axis(x, samples) is not None for x in others)
    return Layout(axis) if has and axis is not None else None


def only_axis(x: Tensor, samples: int) -> int | None:
    """The axis of N entries, where there is but one."""
    axes = [n for n, size in enumerate(x.shape) if size == samples]
    return axes[0] if len(axes) == 1 else None
