"""Laws of operations on a tape: where the labels of their inputs are, from those of their results.

The tables are those of autograd's nodes, which have the operations' names.  A gradient doesn't reach indices, masks and
sizes, but values depend on them, so laws for these stand here, and so do operations without a derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.graph.axes import AXES, Axes
from autograd_hacks.graph.label import (
    ALONE,
    MIX,
    At,
    Entries,
    Label,
    Links,
    One,
    Owned,
    Shapes,
    Sizes,
    entries,
    linked,
    spread,
    taken,
)
from autograd_hacks.graph.moves import MOVES
from autograd_hacks.graph.values import MASKS, of_mask
from autograd_hacks.probe.tape import READ

OVERWRITING = frozenset("copy fill zero bernoulli uniform normal random exponential geometric cauchy log_normal".split())  # noqa: SIM905 a list of words to be read
"""Operations of which nothing that was in the tensor before is left, if they write into one."""
UNWRITTEN = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())  # noqa: SIM905
"""Operations whose result is memory.  What is read from it before an operation wrote there came another way."""
UNIFORM = frozenset(
    """zeros_like ones_like full_like rand_like randn_like new_zeros new_full new_ones zeros ones full rand randn
    scalar_tensor""".split()  # noqa: SIM905
)
"""Operations whose results are alike, or drawn, all along each axis, and which read no more than sizes."""
TURNS = frozenset("transpose_ t_ unsqueeze_ squeeze_ detach_ as_strided_".split())  # noqa: SIM905
"""Operations that turn a tensor into a view of itself."""
PUTTING = frozenset("index_put _index_put_impl index_copy scatter masked_scatter index_fill masked_fill".split())  # noqa: SIM905
"""Operations that write into a tensor without reading it."""
RAGGED = frozenset("nonzero masked_select repeat_interleave unique_consecutive _unique2 unique_dim".split())  # noqa: SIM905
"""Operations of which the first axis of the result is as long as values say."""
TAKING = frozenset("index_select gather take embedding index _unsafe_index".split())  # noqa: SIM905
"""Operations that take the entries of their first tensor to which an index points."""


@dataclass(frozen=True)
class Operation:
    """What is known of an operation.  name: without the mark of those that write in place"""

    func: Any
    name: str
    arguments: Sequence[str]
    defaults: Mapping[str, Any]
    tensors: Sequence[str]  # the names of the arguments that are tensors
    written: Sequence[str]  # the names of those into which it writes
    makes_view: bool

    @property
    def read(self) -> str:
        return READ.get(self.name, "")


@cache
def operation(func: Any) -> Operation:
    schema = func._schema
    name, arguments = schema.name.removeprefix("aten::"), schema.arguments
    is_turn = name in TURNS
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
    return Operation(
        func,
        name.removesuffix("_") if written and not name.startswith("__") else name,
        [a.name for a in arguments],
        {a.name: a.default_value for a in arguments if a.has_default_value()},
        [a.name for a in arguments if "Tensor" in str(a.type) and (name, a.name) != ("rrelu_with_noise", "noise")],
        () if is_turn or name == "rrelu_with_noise" else written,
        is_turn or is_view or name == "lift_fresh",
    )


REGISTERED: dict[str, Callable[[Step], Sequence[Sequence[Links]]]] = {}
"""{an operation of somebody else: its links, for each of its results}"""


class Unshown(Exception):
    """An operation for which nothing shows which samples depend on which.

    at: its number on the tape    meet: whether its law says that samples meet there, so that no runs need to show it"""

    at: int | None = None
    meet = False


@dataclass
class Step:
    """An operation on a tape.

    given: its arguments by name
    ins: the shapes of its tensors in the order of its arguments; None for one that isn't given
    outs: the shapes of its results
    reached: for each of its tensors, whether it depends on samples
    strides: of the first one
    read: gives the values of the argument that its law reads; noting that they were read, unless with False
    """

    operation: Operation
    given: Mapping[str, Any]
    ins: Shapes
    outs: Shapes
    reached: Sequence[bool]
    strides: Sequence[int]
    read: Callable[..., Any]

    @cached_property
    def values(self) -> Any:
        """What its law reads.  In a tensor without samples indices may point anywhere, but it counts what a mask chooses."""
        values = self.read(False)
        is_moved = self.reached[0] or self.name not in TAKING
        given = values if isinstance(values, list) else [values]
        return self.read() if is_moved or any(x is not None and x.dtype in MASKS for x in given) else values

    @property
    def name(self) -> str:
        return self.operation.name

    def links(self, o: int) -> Sequence[Links] | None:
        """For each axis of each tensor the axis of result number o with which it is in step; None without such a law."""
        if (registered := REGISTERED.get(self.name)) is not None:
            return registered(self)[o]
        entry = AXES.get(self.name, Axes() if torch.Tag.pointwise in self.operation.func.tags else None)
        return None if entry is None else entry.links(o, self.outs, self.ins, self._numbers(entry.reads))

    def _numbers(self, names: Sequence[str]) -> dict[str, Any]:
        return {name: self.given[name] for name in names if name in self.given}

    def labels(self, label: Owned, o: int, samples: int) -> Sequence[Label]:
        """The labels of its tensors, from that of result number o.  Raises Unshown."""
        if (law := _BY_VALUES.get(self.name)) is not None:
            return law(self, label, samples)
        move = MOVES.get(self.name)
        if move is not None and (self.operation.read or not move.by_values):
            is_apart = self.name in TAKING and not self.reached[0]
            ins, given = [None, *self.ins[1:]] if is_apart else self.ins, self._numbers(move.reads)
            if move.by_values:
                given["read"] = lambda *_: self.values
            found = move.law(label, Sizes(o, self.outs, ins), samples, **given)
            if found is not None:
                return found
        links = self.links(o)
        if links is None or (self.name == "_grouped_mm" and len(self.ins) > 2):
            raise Unshown
        return [None if own is None else linked(label, of, own) for of, own in zip(links, self.ins)]


def likely(label: Owned, shape: Sequence[int] | None, out: Sequence[int] | None) -> Label:
    """Whose the entries of what an operation without a law is given are, if it keeps samples apart, on their axis."""
    if isinstance(label, Entries) and label.samples.numel() == 1:
        label = One(int(label.samples))
    if shape == out or isinstance(label, One):
        return label
    is_there = isinstance(label, At) and shape and out and shape[label.dim : label.dim + 1] == out[label.dim : label.dim + 1]
    return label if is_there else None


Law = Callable[[Step, Owned, int], Sequence[Label]]
_BY_VALUES: dict[str, Law] = {}


def _law(names: str) -> Callable[[Law], Law]:
    def enter(law: Law) -> Law:
        _BY_VALUES.update(dict.fromkeys(names.split(), law))
        return law

    return enter


@_law("as_strided as_strided_scatter")
def _(step: Step, label: Owned, samples: int) -> list[Label]:
    """Entries of memory, which begins with the tensor's first one unless the operation says otherwise."""
    own, part = step.ins[0] or (), step.ins[-1] or ()
    if step.given["storage_offset"] is not None:
        raise Unshown

    def take(x: Tensor) -> Tensor:
        memory = torch.empty_strided(tuple(own), tuple(step.strides), dtype=torch.long, device="cpu").copy_(x)
        return memory.as_strided(step.given["size"], step.given["stride"])

    if step.name == "as_strided":
        return [spread(label, [ALONE] * len(own), step.outs[0] or (), own, samples, take)]
    return [label, taken(label, [ALONE] * len(part), own, part, samples, take)]


@_law("slice_scatter select_scatter diagonal_scatter")
def _(step: Step, label: Owned, samples: int) -> list[Label]:
    part = MOVES[step.name.replace("scatter", "backward")]  # which takes from a gradient what is written here
    return [label, *(part.law(label, Sizes(0, step.outs, step.ins[1:]), samples, **step._numbers(part.reads)) or ())]


@_law("nonzero")
def _(step: Step, label: Owned, samples: int) -> list[Label]:
    count = (step.outs[0] or (0,))[0]
    rows = linked(label, [0], (count,))
    return [of_mask(step.values != 0, rows, (count,), samples)]


@_law("bincount")
def _(step: Step, label: Owned, samples: int) -> list[Label]:
    places, out = step.values, step.outs[0] or ()
    return [taken(label, [ALONE], out, places.shape, samples, lambda x: x[places], places.device)] * len(step.ins)


@_law("repeat_interleave")
def _(step: Step, label: Owned, samples: int) -> list[Label]:
    """Entry i of the result is the number of the repeated entry."""
    if len(step.ins) != 1:
        raise Unshown
    times = step.values
    take = lambda x: x.repeat_interleave(times)  # noqa: E731
    return [spread(label, [ALONE], step.outs[0] or (), step.ins[0] or (), samples, take, device=times.device)]


@_law("_embedding_bag _embedding_bag_forward_only")
def _(step: Step, label: Owned, samples: int) -> list[Label]:
    """Bags of rows of a table: each entry is in the bag that its place says."""
    offsets, out, count = step.values, step.outs[0] or (), (step.ins[1] or (0,))[0]
    bags = linked(label, [0], out[:1])
    if not isinstance(bags, Owned):
        return [bags] * len(step.ins)
    places = torch.arange(count, device=offsets.device)
    bag = torch.searchsorted(offsets[: out[0]].contiguous(), places, right=True) - 1
    at = entries(bags, out[:1], samples, offsets.device).expand(out[0])
    own = Entries(at[bag])
    whole = spread(bags, [ALONE], out[:1], (len(offsets),), samples, lambda x: x[: out[0]])
    return [linked(own, [ALONE, MIX], step.ins[0] or ()), own, whole, *[own] * (len(step.ins) - 3)]
