"""Which sample's outputs each value of a forward reaches, without gradients too: its tape, read from the outputs back.

Autograd's graph shows where gradients come from.  Indices, masks and statistics without a gradient aren't in it, but their
operations are on the tape, and the laws of `tape_laws.py` say what these do to labels.  If each entry of an argument
reaches the outputs of its own sample only, samples are independent.

Arguments may be packed: graphs of many sizes, bags with offsets, patches of images.  Then no axis of theirs has the samples;
which sample an entry belongs to is found, and the samples must be in their order.  An axis that is as long as values say
gives entries other places if other samples change, so nothing may depend on a place along it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.graph.axes import axis
from autograd_hacks.graph.label import (
    MIXED,
    NOBODY,
    At,
    Entries,
    Label,
    One,
    Owned,
    Several,
    Sizes,
    ascends,
    entries,
    joined,
    narrowed,
    scattered,
    tidied,
    varying,
)
from autograd_hacks.graph.moves import MOVES
from autograd_hacks.graph.orders import ORDERS, Call, finds_back, is_undone
from autograd_hacks.graph.places import Places, is_ragged
from autograd_hacks.graph.tape_laws import (
    OVERWRITING,
    PUTTING,
    UNIFORM,
    UNWRITTEN,
    Operation,
    Step,
    Unshown,
    likely,
    operation,
)
from autograd_hacks.probe.tape import ARGUMENT, FRESH, OUTSIDE, Entry, Tape, numbers_in, numbers_of

MOST = 2**24
"""The largest number of entries of memory that is followed entry by entry, where parts of it are written."""
_SEVERAL = -2  # in memory: an entry that reaches outputs of several samples


def read_values(
    tape: Tape, axes: Sequence[int | None] | None, samples: int, roots: Sequence[tuple[Tensor, Label]],
    packed: dict[int, frozenset[int]],
) -> set[int]:  # fmt: skip
    """Shows that each sample's outputs depend on its own entries of the arguments.

    axes: the samples' axis in each argument, None for one that all samples share; None if the samples are packed
    samples: N
    roots: the outputs, each with whose its entries are
    packed: by argument, the axes along which samples were packed in earlier forwards; those of this one are added

    Returns the numbers of the tensors on whose values that rests.  Raises Unshown, with the operation.
    """
    reading = _Reading(tape, axes, samples, packed)
    if (why := _unshown(reading, roots)) is None:
        return reading.read
    why.at, found = reading.at, why
    for entrywise in (False, True):  # the label of an axis also says something of entries that a view has left out
        reading = _Reading(tape, axes, samples, {}, surely=True, entrywise=entrywise)
        met = _unshown(reading, roots)
        if met is None or not (reading.lost is not None or reading.is_elsewhere):
            raise why
        met.at, met.meet, found = reading.lost, True, met
    raise found


def _unshown(reading: _Reading, roots: Sequence[tuple[Tensor, Label]]) -> Unshown | None:
    """Why a reading doesn't show it; None if it does."""
    try:
        reading.run(roots)
    except Unshown as error:
        return error
    except Exception as error:  # a law lacks a case, so it shows nothing but what was seen so far
        return Unshown(f"the law of an operation failed with {type(error).__name__}: {error}").with_traceback(
            error.__traceback__
        )
    return None


def is_kept(tape: Tape, axes: Sequence[int | None] | None) -> bool:
    """Whether what a forward has written to parameters or buffers may depend on its arguments.

    Laws of values don't matter for that, so it also holds for one sample.  axes: see `read_values`"""
    reading = _Reading(tape, axes, 1, {}, surely=True)
    try:
        reading.leave()
    except Unshown:
        return True
    return reading.is_kept or bool(tape.reads())


@dataclass
class _Memory:
    """Memory of which parts are written: which sample's outputs each of its entries reaches.

    places: {a tensor's number: where its entries are}
    """

    samples: Tensor
    places: dict[int, Tensor] = field(default_factory=dict)


class _Reading:
    """surely: whether orders that are undone, and what no law shows, are taken to keep samples apart
    entrywise: whether views are followed entry by entry"""

    def __init__(
        self, tape: Tape, axes: Sequence[int | None] | None, samples: int, packed: dict[int, frozenset[int]],
        surely: bool = False, entrywise: bool = False,
    ) -> None:  # fmt: skip
        self.surely, self.entrywise = surely, entrywise
        self.tape, self.axes, self.samples, self.packed = tape, axes, samples, packed
        self.shapes = {n: tuple(source.shape) for n, source in tape.sources.items()}
        self.strides = {n: source.strides for n, source in tape.sources.items()}
        for entry in tape.entries:
            self.shapes.update((n, tuple(shape)) for n, shape, *_ in entry.outputs)
            self.strides.update((n, strides) for n, _, strides, _ in entry.outputs)
        self.labels: dict[int, Label] = {}
        self.owners: dict[int, int] = {}  # by number, that of the first tensor with the same memory
        self.memory: dict[int, _Memory] = {}  # by that number
        self.read: set[int] = set()
        self.at: int | None = None  # the operation that is read
        self.lost: int | None = None  # where samples of one output meet first, from the outputs back
        self.is_elsewhere = False  # whether an argument's entries reach other samples than their own
        self.is_kept = False  # whether what depends on arguments stays in parameters or buffers

    def leave(self) -> list[int]:
        """Returns the numbers of what the forward has written to parameters and buffers, where it stays."""
        tape, (viewed, written) = self.tape, self._forwards()
        for owner in viewed & written:
            self._follow(owner)
        for owner in viewed - written if self.entrywise else ():
            if self._is_reached(owner) and prod(self.shapes[owner]) <= MOST:
                try:
                    self._follow(owner)
                except Unshown:  # its label stays
                    del self.memory[owner]
        sources = [n for n in written if n in tape.sources and tape.sources[n].kind not in (ARGUMENT, FRESH)]
        numbers = map(tape.number, (*tape.model.parameters(), *tape.model.buffers()))
        kept = [number for number in numbers if number is not None and number not in tape.sources]
        self.is_kept = any(n in self.reached for n in sources) or any(map(self._is_reached, kept))
        return [*(n for n in sources if n in self.memory), *kept]

    def run(self, roots: Sequence[tuple[Tensor, Label]]) -> set[int]:
        kept = self.leave()
        self.returned = [self.tape.number(x) for x, _ in roots]
        for number, (_, label) in zip(self.returned, roots):
            if number is None:
                raise Unshown("the forward returns a tensor that no operation of PyTorch made")
            self._add(number, label)
        for number in kept:
            self._add(number, MIXED)
        for k in reversed(range(len(self.tape.entries))):
            self.at = k
            self._backwards(self.tape.entries[k])
            if not self.tape.placed.isdisjoint(n for n, *_ in self.tape.entries[k].outputs):
                self.tape.placed.update(numbers_of(self.tape.entries[k]))
        self.read |= self.tape.placed & self.tape.values.keys()
        self.at = self.lost
        self._check_arguments()
        if self.axes is None or self.is_ragged:
            self._check_places()
        return self.read

    # Forwards: what depends on arguments with samples, and which tensors share memory.

    def _forwards(self) -> tuple[set[int], set[int]]:
        """Returns the memory of which views are made, and the memory that is written to."""
        tape = self.tape
        self.reached = {k for k, n in tape.arguments.items() if self.axes is None or self.axes[n] is not None}
        self.is_ragged = is_ragged(tape)
        viewed, written, unwritten = set[int](), set[int](), set[int]()
        for k, entry in enumerate(tape.entries):
            self.at, own = k, operation(entry.func)
            numbers = [n for n, *_ in entry.outputs if n]
            ins = self._ins(entry, own)
            there = [n for n in ins if n is not None]
            is_put = bool(own.written) and own.name in PUTTING
            if not unwritten.isdisjoint(there[is_put:]) and not own.makes_view:
                raise Unshown(f"{own.name} reads memory into which no operation of PyTorch has written")
            if own.name in UNWRITTEN:
                unwritten.update(numbers)
            if own.makes_view and (base := next(iter(there), None)) is not None:
                owner = self.owners.get(base, base)
                self.owners.update(dict.fromkeys(numbers, owner))
                if not self._is_whole(own, base, numbers):
                    viewed.add(owner)
                if base in unwritten:
                    unwritten.update(numbers)
            if not self.surely and any(n in tape.sources and tape.sources[n].kind == OUTSIDE for n in there):
                raise Unshown(f"{own.name} reads a tensor that is not an argument, a parameter or a buffer")
            given = self._given(entry, own)
            if own.name.endswith("batch_norm") and given.get("training") is True and given.get("running_mean") is not None:
                raise Unshown(f"{own.name} writes what buffers keep of samples")
            reaches = any(map(self._is_reached, there))
            if own.written:
                if own.written != [own.arguments[0]] or not numbers:
                    raise Unshown(f"{entry.func._schema.name} writes into its arguments")
                old = given[own.written[0]][0]
                owner = self.owners.get(old, old)
                self.owners[numbers[0]] = owner
                written.add(owner)
                unwritten -= {n for n in unwritten if self.owners.get(n, n) == owner}
                if reaches:
                    self.reached.add(owner)
            if reaches:
                self.reached.update(numbers)
        return viewed, written

    def _is_whole(self, own: Operation, base: int, views: Sequence[int]) -> bool:
        """Whether a view is all of a tensor, as it lies in memory: then the tape takes it for the tensor itself."""
        alike = ((self.shapes[n], self.strides[n]) == (self.shapes[base], self.strides[base]) for n in views)
        return own.name != "as_strided" and all(alike)

    def _is_reached(self, number: int) -> bool:
        return number in self.reached or self.owners.get(number) in self.reached

    @staticmethod
    def _given(entry: Entry, own: Operation) -> Mapping[str, Any]:
        return {**own.defaults, **dict(zip(own.arguments, entry.args)), **dict(entry.kwargs or ())}

    def _ins(self, entry: Entry, own: Operation) -> list[int | None]:
        """The numbers of the tensors that an operation reads, in the order of its arguments."""
        if own.name in UNWRITTEN or own.name in UNIFORM:
            return []
        given, found = self._given(entry, own), list[int | None]()
        for name in own.tensors:
            x = None if name in own.written and own.name in OVERWRITING else given.get(name)
            found += [y[0] if type(y) is tuple else None for y in (x if type(x) is list else [x])]
        return found

    def _follow(self, owner: int) -> None:
        """Prepares memory of which parts are written."""
        shape = self.shapes[owner]
        if prod(shape) > MOST:
            raise Unshown(f"parts of a tensor of shape {shape} are written, which is too large to be followed")
        own = self.memory[owner] = _Memory(torch.full((prod(shape),), NOBODY, device="cpu"))
        own.places[owner] = torch.arange(prod(shape), device="cpu").view(shape)
        for entry in self.tape.entries:
            what = operation(entry.func)
            numbers = [n for n, *_ in entry.outputs if n]
            if not numbers or self.owners.get(numbers[0]) != owner:
                continue
            before = own.places[next(numbers_in(entry.args))]
            if what.written:
                own.places[numbers[0]] = before
                continue
            if what.name == "as_strided" and self.strides[owner] != own.places[owner].stride():
                raise Unshown("as_strided is a view of memory that is laid out otherwise")
            try:  # some turn the tensor itself
                views = entry.func(before.view(before.shape), *entry.args[1:], **dict(entry.kwargs or ()))
            except (RuntimeError, TypeError, ValueError) as error:  # a view of bits, or of memory that is laid out otherwise
                raise Unshown(f"{what.name} is a view of memory of which parts are written ({error})") from error
            own.places.update(zip(numbers, views if isinstance(views, list | tuple) else [views]))

    # Backwards.

    def _label(self, number: int) -> Label:
        memory = self.memory.get(self.owners.get(number, number))
        if memory is None:
            return self.labels.get(number)
        found = memory.samples[memory.places[number]]
        if not found.numel() or bool((found == NOBODY).all()):
            return None
        return (
            MIXED if bool((found == _SEVERAL).any()) else tidied(Entries(narrowed(found)), self.shapes[number], self.samples)
        )

    def _add(self, number: int, label: Label) -> None:
        """Notes that a tensor reaches outputs of some samples."""
        if label is None:
            return
        memory = self.memory.get(self.owners.get(number, number))
        shape = self.shapes[number]
        if memory is None:
            self.labels[number] = joined(self.labels.get(number), label, shape, self.samples)
            return
        places = memory.places[number].flatten()
        new = torch.full((len(places),), _SEVERAL, device="cpu")
        if isinstance(label, Owned):
            order = entries(label, shape, self.samples, "cpu").expand(shape).flatten()
            whole = scattered(order, places, len(memory.samples))
            new = new if whole is None else whole[places]
        old = memory.samples[places]
        memory.samples[places] = torch.where(old == NOBODY, new, torch.where((new == NOBODY) | (new == old), old, _SEVERAL))

    def _backwards(self, entry: Entry) -> None:
        own = operation(entry.func)
        numbers = [n for n, *_ in entry.outputs]
        labels = [self._label(n) if n else None for n in numbers]
        is_same_memory = own.makes_view and self.owners.get(next(iter(numbers), 0), 0) in self.memory
        for n, label in zip(numbers, labels):
            if label is not None and own.written and (memory := self.memory.get(self.owners.get(n, n))) is not None:
                memory.samples[memory.places[n].flatten()] = NOBODY
        ins = self._ins(entry, own)
        is_met = not is_same_memory and any(labels) and any(map(self._is_reached, filter(None, ins)))
        is_lost = self.lost is None and not any(isinstance(label, Several) for label in labels)
        for at, label in zip(ins, self._through(entry, own, ins, labels)) if is_met else ():
            if at is not None and self._is_reached(at):
                self._add(at, label)
                self.lost = self.at if is_lost and isinstance(self._label(at), Several) else self.lost
            elif at is not None and isinstance(label, Owned):
                shape, strides = self.shapes[at], self.strides[at]
                self.tape.placed |= (
                    {at} if any(shape[d] > 1 and strides[d : d + 1] != (0,) for d in varying(label)) else set()
                )

    def _through(self, entry: Entry, own: Operation, ins: Sequence[int | None], labels: Sequence[Label]) -> Sequence[Label]:
        """The labels of an operation's tensors, from those of its results."""
        if any(isinstance(label, Several) for label in labels):
            return [MIXED] * len(ins)
        step = self._step(entry, own, ins)
        found: list[Label] = [None] * len(ins)
        for o, label in enumerate(labels):
            if isinstance(label, Owned):
                try:
                    answer = self._ordered(step, entry, label, o) or step.labels(label, o, self.samples)
                except Unshown:
                    if not self.surely:
                        raise Unshown(f"there is no law for the operation {entry.func._schema.name}") from None
                    answer = [likely(label, shape, step.outs[o]) for shape in step.ins]
                found = [joined(a, b, shape or (), self.samples) for a, b, shape in zip(found, answer, step.ins)]
        return found

    def _ordered(self, step: Step, entry: Entry, label: Owned, o: int) -> Sequence[Label]:
        """The labels of what is put in an order along the samples; none if it isn't."""
        number, is_sort = next(numbers_in(entry.args), 0), step.name == "sort"
        if (
            not self.surely
            or step.name not in ORDERS
            or isinstance(label, One)
            or not self._is_reached(number)
            or (is_sort and axis(step.given["dim"], len(step.outs[0] or ())) not in varying(label))
        ):
            return []
        is_back = is_sort and finds_back(self.tape, step, number)
        if not (is_back or is_undone(self._calls(self.at or 0), self.owners, filter(None, self.returned))):
            return [MIXED] * len(step.ins)
        if not is_sort:
            return [likely(label, own, step.outs[o]) for own in step.ins]
        read, dim = lambda _: self._values((entry.outputs[1][0],), step.operation, False), step.given["dim"]
        return MOVES["sort"].law(label, Sizes(o, step.outs, step.ins), self.samples, read=read, dim=dim) or []

    def _calls(self, begin: int) -> Iterator[Call]:
        for entry in self.tape.entries[begin:]:
            ins = self._ins(entry, own := operation(entry.func))
            yield self._step(entry, own, ins), ins, [n for n, *_ in entry.outputs]

    def _step(self, entry: Entry, own: Operation, ins: Sequence[int | None]) -> Step:
        given, shapes = self._given(entry, own), [None if n is None else self.shapes[n] for n in ins]
        return Step(
            own,
            given,
            shapes,
            [self.shapes[n] if n else None for n, *_ in entry.outputs],
            [n is not None and self._is_reached(n) for n in ins],
            self.strides.get(ins[0] or 0, ()) if ins else (),
            lambda noted=True: self._values(given[own.read], own, noted),
        )

    def _values(self, given: Any, own: Operation, noted: bool) -> Any:
        if type(given) is list:
            return [None if x is None else self._values(x, own, noted) for x in given]
        if noted:
            self.read.add(given[0])
        x = self.tape.value(given[0])
        if x is None:
            raise Unshown(f"{own.name} reads values that were overwritten")
        return x

    # The arguments.

    def _check_arguments(self) -> None:
        for number, n in self.tape.arguments.items():
            label, shape = self._label(number), self.shapes[number]
            is_one = self.axes is None and prod(shape) <= 1
            if (
                label is None
                or (self.axes is not None and self.axes[n] is None)
                or (is_one and not isinstance(label, Owned))
            ):
                continue
            if not isinstance(label, Owned):
                where = "" if self.lost is None else f", at {operation(self.tape.entries[self.lost].func).name}"
                raise Unshown(f"an argument of shape {shape} reaches several samples{where}")
            if self.axes is not None:
                at = self.axes[n] % len(shape)  # type: ignore[operator]  # it isn't None, as was seen above
                right = entries(At(at), shape, self.samples)
                own = entries(label, shape, self.samples, "cpu")
                if bool(((own != right) & (own >= 0)).any()):
                    self.is_elsewhere = True
                    raise Unshown(f"an argument of shape {shape} reaches other samples than those on its axis {at}")
            elif not ascends(narrowed(entries(label, shape, self.samples, "cpu"))):
                raise Unshown(f"an argument of shape {shape} reaches samples in another order than it has them")

    def _check_places(self) -> None:
        loose = dict[int, frozenset[int]]()
        for number, n in self.tape.arguments.items() if self.axes is None else ():
            label, shape = self._label(number), self.shapes[number]
            axes, before = frozenset[int](), self.packed.get(n, frozenset())
            if isinstance(label, Owned) and 0 not in shape:
                axes = frozenset(varying(Entries(narrowed(entries(label, shape, self.samples, "cpu")))))
                self.packed[n] = before | axes
            if not axes and label is not None and shape and 0 not in shape:  # all of one sample
                axes = before or frozenset([max(range(len(shape)), key=lambda d: (shape[d], d))])
            loose[number] = frozenset(d for d in axes if shape[d] != self.samples or label != At(d))
        lengths = {self.shapes[n][d] for n, own in loose.items() for d in own} - {self.samples}
        places = Places(loose, lengths, self._is_reached, self.samples)
        places.origins.update((n, frozenset([n])) for n in loose if not self.tape.sources[n].dtype.is_floating_point)
        places.uniform.update(n for n, shape in self.shapes.items() if prod(shape) == 1)
        for k, call in enumerate(self._calls(0)):
            self.at = k
            places.pass_(*call)
        places.check_uses()
