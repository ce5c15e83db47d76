"""The tape of a forward: which operations ran on what.  It tells whether the forward is known to be independent.

A path without a gradient leaves no node in autograd's graph, but its operations are on the tape.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import chain
from threading import get_ident
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_PRIVATE, ProbeFailed, SamplesMixed
from autograd_hacks.support.contexts import drawn_from, is_seeded
from autograd_hacks.support.graph import Leaf
from autograd_hacks.support.internals import address_of, dispatch_modes, never_compile, pop_dispatch_mode, push_dispatch_mode
from autograd_hacks.support.restored import kept
from autograd_hacks.support.trees import ByTensor, version_of

_LIFT: Any = torch.ops.aten.lift_fresh.default
_SORT: Any = torch.ops.aten.sort
_DIV: Any = torch.ops.aten.div
_KEPT: Any = {_SORT, _DIV, torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward}
MIXING = "samples mix"
"""The beginning of messages that say that samples mix."""
Site = tuple[Any, ...]
"""What no law shows: its kind, and where it is."""
READ_BY_PYTHON = "a value that Python reads"
"""The kind of a place at which it does."""
ARGUMENT, NAMED, CONSTANT, FRESH, OUTSIDE = "argument", "named", "constant", "fresh", "outside"
"""Kinds of tensors that no operation on the tape made: an argument, a parameter or buffer, a tensor that is older than the
forward, one made of Python's numbers, and one of unknown origin."""


class Entry(NamedTuple):
    """An operation.  Tensors are tuples of one number, that of the operation's output, or of one source."""

    func: Any
    args: Sequence[Any]
    kwargs: Sequence[tuple[str, Any]] | None
    outputs: Sequence[tuple[int, torch.Size, tuple[int, ...], torch.dtype]]  # number, shape, strides


class Source(NamedTuple):
    """A tensor that no operation on the tape made."""

    kind: str
    name: Hashable
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype


class Tape(torch.utils._python_dispatch.TorchDispatchMode):
    """Records a forward's operations.  Outputs, graphs and other modes stay as they are.

    model: the model that runs
    arguments: the tensors among its arguments
    constants: tensors known to be older than the forward
    from_before: tensors that an earlier forward made of its samples
    expected: the entries of a tape that this one probably repeats
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Sequence[Any],
        constants: ByTensor[bool] | tuple[()] = (),
        from_before: Sequence[Tensor] = (),
        expected: Sequence[Entry] = (),
    ) -> None:
        super().__init__()
        self._expected = expected
        self.entries: list[Entry] = []
        self.sources: dict[int, Source] = {}
        self.sites: set[Site] = set()  # what no law shows
        self._read_by_python: list[tuple[int, Site]] = []  # by number of operation
        self.items: dict[int, Any] = {}  # by number of operation, what Python read, or what a loss is divided by
        self.outside: list[Tensor] = []  # tensors of unknown origin
        self.values: dict[int, Tensor] = {}  # tensors without samples whose values may decide which samples meet
        self.placed: set[int] = (
            set()
        )  # tensors without samples of which each sample meets the part at its place, and their makers
        self.refused: Exception | None = None
        self.goes_on = False  # whether a refused forward goes on, until all processes know of it
        self.opaque: list[tuple[Entry, tuple[str, int]]] = []  # operations of other packages, and the lines that ran them
        self.thread = get_ident()
        self.is_paused = False  # while hooks of this library run
        self.is_to_count = False  # whether it must be tried if the forward does something else for other numbers of samples
        self.told: set[Site] = set()  # where outputs were compared with those of other answers to Python
        self.tried: list[Tensor] | None = None  # the samples that runs must keep for such answers; None if that isn't known
        self.untold: set[Site] = set()  # of that, what can't be called alone, so that no forward is known by it
        self.model, self._constants, self._from_before = model, constants, from_before
        self.lines: list[tuple[str, int]] | None = None  # of the user's code, for each operation, if they are asked
        self.read: dict[int, tuple[Tensor, int]] = {}  # values by which entries are moved, and how often they were written
        self._names: dict[Any, str] = {}  # of parameters and buffers, by identity
        self._names_by_key: dict[Any, str] = {}
        self._numbers: dict[Any, int] = {}  # of outputs and sources, by memory, shape and strides
        self._held: list[Any] = []  # tensors without memory, which are known by identity
        self._count = 0
        # The numbers of the arguments, by their numbers on the tape.
        given = ((n, x) for n, x in enumerate(arguments) if isinstance(x, Tensor))
        self.arguments = {self._source(x, self._key(x), ARGUMENT, n): n for n, x in given}

    ignore_compile_internals = classmethod(lambda cls: True)  # otherwise compiled functions would run uncompiled ever after
    _should_skip_dynamo = classmethod(lambda cls: False)  # torch's way costs a third of an operation; see `never_compile`

    def start(self) -> None:
        self.__enter__()
        _OPEN.append(self)
        if len(_OPEN) == 1:
            for name in DOORS:
                _OWN[name] = vars(Tensor).get(name)
                setattr(Tensor, name, _door(name, getattr(Tensor, name)))

    def stop(self) -> None:
        """Takes this mode off, also from below modes that were put on since."""
        if self in _OPEN:
            _OPEN.remove(self)
            if not _OPEN:
                for name, own in _OWN.items():
                    setattr(Tensor, name, own) if own is not None else delattr(Tensor, name)
        above = []
        while self in dispatch_modes() and dispatch_modes()[-1] is not self:
            above.append(pop_dispatch_mode())
        if self in dispatch_modes():
            self.__exit__(None, None, None)
        for mode in reversed(above):
            push_dispatch_mode(mode)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which nothing is recorded."""
        with kept(self, "is_paused"):
            self.is_paused = True
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _kind(func)
        if self.is_paused or kind == _MARK:
            return func(*args, **kwargs) if kwargs else func(*args)
        expected, at = self._expected, len(self.entries)
        noted: list[Any] = []
        if func is _LIFT and self.number(args[0]) is None:
            self.values[self._source(args[0], self._key(args[0]), FRESH, len(self.sources))] = args[0]
        given = [x if type(x) in _NUMBERS else self._noted(x) for x in args]
        named = [(name, self._noted(x)) for name, x in kwargs.items()] if kwargs else None
        if kind == _DRAWING and is_seeded(drawn_from(args, kwargs or {})):  # numbers of places in the batch, in each forward
            named = [*(named or ()), (SEEDED, True)]
        if (place_of_values := _read_at(func)) is not None:
            self._keep(args[place_of_values], given[place_of_values])
        out = func(*args, **kwargs) if kwargs else func(*args)
        is_one = isinstance(out, Tensor)
        for x in (out,) if is_one else out if type(out) in (tuple, list) else ():
            if isinstance(x, Tensor):
                self._count = n = self._count + 1
                self._numbers[self._key(x)] = n
                noted.append((n, x.shape, _strides(x), x.dtype))
            elif is_one or x is None:
                noted.append((0, (), (), None))
        if (packet := func.overloadpacket) in _KEPT:
            if packet is _SORT:
                self._keep(out[1], noted[1])
            elif packet is not _DIV or (isinstance(args[1], Tensor) and not args[1].ndim):
                self.items[at] = args[1] if packet is _DIV else out[1]
        entry = Entry(func, given, named, noted)
        if at < len(expected) and entry == expected[at]:
            entry = expected[at]  # what isn't kept doesn't make Python collect garbage
        self.entries.append(entry)
        if self.lines is not None:
            self.lines.append(place())
        if kind == _OPAQUE:
            self.opaque.append((entry, place()))
        if not noted and kind != _SILENT and not func._schema.is_mutable:
            self.items[at] = out
            self.sites.add(site := (READ_BY_PYTHON, place()))
            self._read_by_python.append((at, site))
        return out

    def _noted(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            number = self._numbers.get(key := self._key(x))
            return (self._found(x, key) if number is None else number,)
        if type(x) in (list, tuple):
            return [y if type(y) in _NUMBERS else self._noted(y) for y in x]
        if isinstance(x, torch.ScriptObject):  # a process group: it can't be compared
            return str(x._type())
        return x.device if isinstance(x, torch.Generator) else x  # a copy of a model has another one

    def _keep(self, x: Any, number: Any) -> None:
        if isinstance(x, Tensor):
            self.read[number[0]] = x, version_of(x)
        elif isinstance(x, list | tuple):
            for own, n in zip(x, number):
                self._keep(own, n)

    def value(self, number: int) -> Tensor | None:
        """The values of a tensor, by which entries are moved; None if it was overwritten since it was read."""
        x, version = self.read.get(number, (None, 0))
        return self.values.get(number) if x is None else x if version_of(x) == version else None

    def _key(self, x: Tensor) -> Any:
        """What identifies a tensor until other memory takes its place."""
        try:
            at = address_of(x)
        except (RuntimeError, NotImplementedError):  # sparse
            at = 0
        if at and x.layout is torch.strided:
            return at, x.shape, x.stride()
        self._held.append(x)
        return id(x)

    def _source(self, x: Tensor, key: Any, kind: str, name: Hashable) -> int:
        self._count = number = self._count + 1
        self._numbers[key], self.sources[number] = number, Source(kind, name, x.shape, _strides(x), x.dtype)
        return number

    def _found(self, x: Tensor, key: Any) -> int:
        """The number of a tensor that the tape sees for the first time."""
        if not self._names:
            self._names = {id(p): name for name, p in self._named()}
        if (name := self._names.get(id(x))) is None:
            self._names_by_key = self._names_by_key or {self._key(p): name for name, p in self._named()}
            name = self._names_by_key.get(key) or self._of_parameter(x)
        if name is not None:
            number = self._source(x, key, NAMED, name)
            if not x.requires_grad:
                self.values[number] = x
            return number
        if any(x is other for other in self._from_before):
            self._refuse(
                SamplesMixed(
                    f"{MIXING}: the forward reads a tensor of shape {tuple(x.shape)} that the model has kept since its last "
                    "forward, at {}:{}. It depends on that step's samples, which enter this step's gradients without a "
                    "bound. Update it outside of the training, or without samples.".format(*place())
                    + ON_PRIVATE
                )
            )
        is_older = x in self._constants
        if not is_older:
            self.outside.append(x)
        number = self._source(x, key, CONSTANT if is_older else OUTSIDE, len(self.sources))
        self.values[number] = x
        return number

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return chain(self.model.named_parameters(), self.model.named_buffers())

    def _of_parameter(self, x: Tensor) -> str | None:
        """The name of a parameter that was cast or viewed before, as autocast's cache does."""
        node: Any = x.grad_fn
        while node is not None and len(node.next_functions) == 1:
            node = node.next_functions[0][0]
            if type(node) is Leaf:
                return self._names.get(id(node.variable))
        return None

    def take_as_same(self, before: Sequence[Tensor], after: Sequence[Tensor]) -> None:
        """Tells that tensors with the same values replace others."""
        for x, y in zip(before, after):
            self._numbers[self._key(y)] = self._noted(x)[0]

    def sizes(self) -> set[int]:
        """The lengths of the arguments: along axis 0, and of whole numbers the largest one."""
        given = [self.sources[n] for n in self.arguments if self.sources[n].shape]
        return {own.shape[0] if own.dtype.is_floating_point else max(own.shape) for own in given}

    def number(self, x: Tensor) -> int | None:
        """The number of a tensor; None if the tape doesn't have it."""
        return self._numbers.get(self._key(x))

    def reached(self) -> set[int]:
        """The numbers of the tensors that may depend on arguments of the forward, so far."""
        found = set(self.arguments)
        for entry in self.entries:
            given = numbers_of(entry)
            if not found.isdisjoint(given):
                found.update(n for n, *_ in entry.outputs)
                found.update(given if entry.func._schema.is_mutable else ())
        return found

    def reads(self) -> dict[int, Site]:
        """Where Python read what may depend on arguments, by number of operation.  What follows in Python is on no tape."""
        found = self.reached() if self._read_by_python else set[int]()
        return {k: site for k, site in self._read_by_python if not found.isdisjoint(numbers_of(self.entries[k]))}

    def answers(self) -> dict[int, Any]:
        """What it read there."""
        return {k: self.items[k] for k in self.reads()}

    def kept(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of some tensors that the forward made of its arguments."""
        made = [(x, n) for x in tensors if (n := self.number(x)) is not None and n not in self.sources]
        found = self.reached() if made else set[int]()
        return [x for x, n in made if n in found]

    def repeats(self, other: Tape, loosely: bool = False) -> bool:
        """Whether a second run of the same forward did the same.  loosely: without casts and tensors' origins"""
        if loosely:
            return _numbers(self) == _numbers(other)
        mine, theirs = ([s._replace(kind=CONSTANT if s.kind == OUTSIDE else s.kind) for s in own.sources.values()]
                        for own in (self, other))  # fmt: skip
        return mine == theirs and self.entries == other.entries

    def _refuse(self, why: Exception) -> None:
        self.refused = why
        if not self.goes_on:
            raise why

    def leaves(self, x: Tensor, way: str) -> None:
        """Called as values leave PyTorch, or change without an operation.  Raises if they depend on arguments."""
        if type(x) is not torch.nn.Parameter and self.number(x) in self.reached():
            file, line = place()
            self._refuse(
                ProbeFailed(
                    f"independence of samples: the forward calls {DOORS[way]} on a tensor that depends on its arguments, at "
                    f"{file}:{line}. What is computed of it outside of PyTorch can't be followed, so nothing would show "
                    "that no sample enters the gradients of others. Compute it with PyTorch's operations, or outside the "
                    "model and pass it as an argument with a row for each sample." + ON_PRIVATE
                )
            )


never_compile(Tape.__torch_dispatch__)


def _strides(x: Tensor) -> tuple[int, ...]:
    return x.stride() if x.layout is torch.strided else ()


def _numbers(tape: Tape) -> list[Any]:
    """The operations that are no casts, with their numbers."""
    return [
        (entry.func, [x for x in entry.args if type(x) is not tuple])
        for entry in tape.entries
        if entry.func.overloadpacket not in (torch.ops.aten._to_copy, torch.ops.aten.detach)
    ]


def numbers_of(entry: Entry) -> list[int]:
    """The numbers of an operation's tensors."""
    return [*numbers_in(entry.args), *numbers_in([y for _, y in entry.kwargs or ()])]


def numbers_in(given: Any) -> Iterator[int]:
    """The numbers of the tensors among an operation's arguments."""
    for x in given:
        if type(x) is tuple:
            yield x[0]
        elif type(x) is list:
            yield from numbers_in(x)


READ = {
    **{f"{name}{more}": "index" for name in ("index", "scatter") for more in ("_add", "_reduce")},
    **dict.fromkeys(("index_select", "gather", "take", "index_copy", "scatter"), "index"),
    **dict.fromkeys(("index", "_unsafe_index", "index_put", "_unsafe_index_put", "_index_put_impl", "embedding"), "indices"),
    "masked_select": "mask", "masked_scatter": "mask", "nonzero": "self", "bincount": "self", "repeat_interleave": "repeats",
    "_embedding_bag": "offsets", "_embedding_bag_forward_only": "offsets",
}  # fmt: skip
"""{an operation: the argument that says which entries it takes, or where it puts them}"""


@cache
def _read_at(func: Any) -> int | None:
    """The place of the argument whose values say how an operation moves entries; None if there is none."""
    name = READ.get(func._schema.name.removeprefix("aten::").removesuffix("_"))
    return next((n for n, a in enumerate(func._schema.arguments) if a.name == name), None)


_TORCHS = frozenset("aten prim prims inductor mkldnn quantized torchvision autograd_hacks".split())  # noqa: SIM905
"""Whose operations compute from their arguments alone."""
_OF_SIZES = torch.ops.aten._fused_sdp_choice, torch.ops.aten.is_same_size
"""Operations that return no tensor and read no values."""
_NUMBERS = frozenset((int, float, bool, type(None), torch.dtype, torch.device, torch.layout))
_MARK, _OPAQUE, _SILENT, _DRAWING, _READING = "mark", "opaque", "silent", "drawing", "reading"
"""Kinds of operations: marks for profilers, as DistributedDataParallel sets them; those of other packages; those that
read no values; those that draw; and those that read values if they return no tensor and write into none."""
SEEDED = "seeded"
"""An argument that the tape adds to an operation that draws the first numbers after a seed."""


@cache
def _kind(func: Any) -> str:
    if func.namespace not in _TORCHS:
        return _MARK if func.namespace == "profiler" else _OPAQUE
    drawing = _DRAWING if torch.Tag.nondeterministic_seeded in func.tags else _READING
    return _SILENT if func.overloadpacket in _OF_SIZES else drawing


def place() -> tuple[str, int]:
    """The file and line of the user's code that runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and re.search(r"/torch/|/autograd_hacks/|^<", frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


# Ways on which values leave PyTorch, or change, without an operation.  They are watched while a tape runs.

DOORS = {
    "numpy": "numpy()", "tolist": "tolist()", "__array__": "numpy.asarray", "__dlpack__": "from_dlpack",
    "data_ptr": "data_ptr(), as kernels do that PyTorch doesn't run,", "data": ".data =",
}  # fmt: skip
_OWN: dict[str, Any] = {}  # what stood in their places
_OPEN: list[Tape] = []


@cache
def _door(name: str, own: Any) -> Any:
    def looked(x: Tensor) -> None:
        if (tape := next((tape for tape in reversed(_OPEN) if tape.thread == get_ident()), None)) is not None:
            tape.leaves(x, name)

    def write(x: Tensor, to: Tensor) -> None:
        looked(x)
        own.__set__(x, to)

    @wraps(own)
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        looked(x)
        return own(x, *args, **kwargs)

    return property(own.__get__, write) if name == "data" else call
