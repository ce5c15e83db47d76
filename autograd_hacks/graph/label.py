"""Labels: whose sample each entry of a gradient belongs to.

A label is one of

- None: no gradient arrives;
- `One`: every entry belongs to one sample (a loop over samples, a batch of one);
- `At`: the samples lie on one axis, in a regular order;
- `Entries`: a sample for each entry, read from values (routing, permutations, parts of an axis);
- `SUM`: several samples contribute to an entry, since the value has no samples' axis: a parameter, a table of positions;
- `MIXED`: several samples contribute to an entry along the samples' axis itself: a softmax over the batch.  Also said where
  SUM and a label with owners come to one value, and where a node can't be asked.

`At`, `One` and `Entries` say whose an entry is *if it isn't zero*: they may name a sample where no gradient arrives, never a
wrong one.  SUM and MIXED are both "several samples"; which of them decides only whether it can be a use of a parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple, TypeGuard

import torch
from torch import Tensor

NOBODY: Final = -1
"""In `Entries`: no gradient arrives at this entry."""

Shape = Sequence[int]
Shapes = Sequence[Shape | None]
Links = Sequence[int]
"""For each axis of an input the axis of the output with which it is walked in step; ALONE or MIX for an axis without one.
`Reader.links` are something else: they follow a gradient to its parameter."""
ALONE: Final = -1
"""The gradient is the same, or made of the same samples, all along this axis of the input."""
MIX: Final = -2
"""The operation works along this axis: if the samples lie on an axis of the output that no axis is linked to, they mix."""


class Sizes(NamedTuple):
    """The sizes of a node's outputs and inputs, and the number of the output whose label is moved.

    Inputs without a graph, and outputs that nobody has, have none.
    """

    o: int
    outs: Shapes
    ins: Shapes

    @property
    def out(self) -> Shape:
        return self.outs[self.o] or ()

    @property
    def n(self) -> int:
        """How many axes that output has."""
        return len(self.out)

    @property
    def own(self) -> Shape:
        """The first input's."""
        return self.ins[0] or ()


@dataclass(frozen=True, slots=True)
class At:
    """Entry i on axis ``dim`` belongs to sample (i // inner) % N; the axis is outer × N × inner."""

    dim: int
    outer: int = 1
    inner: int = 1

    def moved(self, dim: int) -> At:
        return At(dim, self.outer, self.inner)


@dataclass(frozen=True, slots=True)
class One:
    """All entries belong to one sample."""

    sample: int


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """A sample for each entry, or `NOBODY`.

    samples: integers, with as many axes as the value; an axis of size 1 stands for all entries on it
    """

    samples: Tensor


@dataclass(frozen=True, slots=True)
class Several:
    """Several samples contribute to an entry."""

    along: bool  # along the samples' axis itself

    def __repr__(self) -> str:
        return "MIXED" if self.along else "SUM"


SUM: Final = Several(False)
MIXED: Final = Several(True)

Owned = At | One | Entries
Label = At | One | Entries | Several | None


def is_owned(label: Label) -> TypeGuard[Owned]:
    return label is not None and type(label) is not Several


def same(a: Label, b: Label) -> bool:
    """Whether two labels say the same of every entry, in the same form."""
    if isinstance(a, Entries) and isinstance(b, Entries):
        return a.samples.shape == b.samples.shape and torch.equal(a.samples, b.samples.to(a.samples.device))
    return a is b or a == b


def varying(label: Owned) -> Sequence[int]:
    """The axes along which the sample changes."""
    if type(label) is At:
        return (label.dim,)
    return [d for d, size in enumerate(label.samples.shape) if size != 1] if isinstance(label, Entries) else ()


@lru_cache(16)
def _regular(size: int, inner: int, samples: int, device: Any) -> Tensor:
    """The sample of each entry on an axis.  Never written to."""
    return torch.arange(size, device=device or "cpu") // inner % samples


def order_on(label: Owned, dim: int, size: int, samples: int) -> Tensor | None:
    """The sample of each entry on one axis, if it changes along no other."""
    if set(varying(label)) - {dim}:
        return None
    return entries(label, [*[1] * dim, size], samples).flatten().expand(size)


def entries(label: Owned, shape: Shape, samples: int, device: Any = None) -> Tensor:
    """The label as a tensor that broadcasts to the value's shape."""
    if isinstance(label, Entries):
        return label.samples.to(device=device)
    sizes = [1] * len(shape)
    if isinstance(label, One):
        return torch.full(sizes, label.sample, device=device or "cpu")
    sizes[label.dim] = shape[label.dim]
    return _regular(shape[label.dim], label.inner, samples, device).view(sizes)


def on_axis(order: Tensor, dim: int, axes: int) -> Entries:
    """The label of a value of so many axes whose samples change along one of them."""
    return Entries(order.view([-1 if d == dim else 1 for d in range(axes)]))


def joined(a: Label, b: Label, shape: Shape, samples: int) -> Label:
    """The label of a value to which two gradients come."""
    if a is None or b is None:
        return b if a is None else a
    if a is b or (not isinstance(a, Entries) and a == b):
        return a
    if isinstance(a, Several) or isinstance(b, Several):
        return MIXED  # SUM and an owner: a value of the batch, and a statistic of it
    device = next((own.samples.device for own in (a, b) if isinstance(own, Entries)), None)
    mine, theirs = (entries(own, shape, samples, device) for own in (a, b))
    differ = (mine != theirs) & (mine >= 0) & (theirs >= 0)
    if bool(differ.any()):
        return MIXED
    for own in (a, b):
        if not isinstance(own, Entries):
            return own  # it speaks of every entry
    return Entries(torch.maximum(mine, theirs))


def linked(label: Owned, links: Links, shape: Shape) -> Label:
    """The label of an input, from that of an output.

    links: of each axis of the input
    shape: the input's
    """
    if isinstance(label, One):
        return label
    if isinstance(label, At):
        for d, e in enumerate(links):
            if e == label.dim:
                return label if d == e else label.moved(d)
        return MIXED if MIX in links else SUM
    own = label.samples
    if lost := [e for e in varying(label) if e not in links]:
        most = own.amax(lost, keepdim=True) if own.numel() else own
        if not own.numel() or bool(((own != most) & (own >= 0)).any()):
            return MIXED if MIX in links else SUM
        own = most
    taken = [e for e in links if e >= 0]
    rest = [e for e in range(own.ndim) if e not in taken]
    sizes = [own.shape[e] if e >= 0 else 1 for e in links]
    return Entries(own.permute([*taken, *rest]).reshape(sizes))


def viewed(label: Owned, old: Shape, new: Shape, samples: int) -> Owned:
    """The label after entries are laid out in another shape, in the same order."""
    if isinstance(label, One):
        return label
    changes = varying(label)
    if len(changes) == 1:
        dim = changes[0]
        period = samples if isinstance(label, At) else old[dim]
        inner = label.inner if isinstance(label, At) else 1
        at = _regrouped(dim, inner, old, new, period)
        if at is not None and isinstance(label, At):
            return at
        if at is not None and isinstance(label, Entries):
            order = label.samples.flatten().repeat_interleave(at.inner).repeat(at.outer)
            return on_axis(order, at.dim, len(new))
    elif not changes and isinstance(label, Entries):
        return Entries(label.samples.view([1] * len(new)))
    return Entries(entries(label, old, samples).expand(*old).reshape(*new))


def _regrouped(dim: int, inner: int, old: Shape, new: Shape, period: int) -> At | None:
    """Where a period is after a view; None if no axis holds it whole."""
    stride, below = inner * prod(old[dim + 1 :]), 1
    if not period or not stride:
        return None
    for d in range(len(new) - 1, -1, -1):
        if stride % below == 0 and (below * new[d]) % (stride * period) == 0:
            return At(d, below * new[d] // (stride * period), stride // below)
        below *= new[d]
    return None


def cut(label: Owned, dim: int, start: int, size: int, step: int, shape: Shape, samples: int) -> Owned:
    """The label of entries start, start + step, ... on an axis, ``size`` of them.  shape: of the whole"""
    if dim not in varying(label):
        return label
    if isinstance(label, At):
        unit = samples * label.inner
        if step == 1 and start % unit == 0 and size % unit == 0:
            return At(dim, size // unit, label.inner)
        if size == 1:
            return One(start // label.inner % samples)
    own = entries(label, shape, samples)
    return Entries(own.index_select(dim, torch.arange(size, device=own.device) * step + start))


def put(label: Owned, dim: int, start: int, size: int, step: int, shape: Shape, samples: int) -> Owned:
    """The label of the whole, from that of entries start, start + step, ... on an axis, ``size`` of them.

    Where the order lies on other axes, it holds for the whole axis, unless a single entry was taken: of samples taken one by
    one, each is another's.  shape: of the whole
    """
    is_taken_alone = isinstance(label, One) or (isinstance(label, Entries) and size == 1)
    if samples == 1 or (dim not in varying(label) and not is_taken_alone):
        return label
    if isinstance(label, At) and step == 1 and start % (unit := samples * label.inner) == 0 and shape[dim] % unit == 0:
        return At(dim, shape[dim] // unit, label.inner)
    part = [size if d == dim else s for d, s in enumerate(shape)]
    own = entries(label, part, samples)
    sizes = [shape[d] if d == dim else s for d, s in enumerate(own.shape)]
    index = torch.arange(size, device=own.device) * step + start
    whole = torch.full(sizes, NOBODY, dtype=own.dtype, device=own.device)
    return Entries(whole.index_copy_(dim, index, own.expand([size if d == dim else s for d, s in enumerate(own.shape)])))


def folded(label: Owned, dim: int, times: int, shape: Shape, samples: int) -> Label:
    """The label of a value that stood ``times`` times behind itself on an axis.  shape: the value's own"""
    if dim not in varying(label) or times == 1:
        return label
    if not times:
        return None
    size = shape[dim]
    if isinstance(label, At) and size % (samples * label.inner) == 0:
        return At(dim, size // (samples * label.inner), label.inner)
    own = entries(label, [s * times if d == dim else s for d, s in enumerate(shape)], samples)
    parts = own.unflatten(dim, (times, size))
    most = parts.amax(dim, keepdim=True)
    return Entries(most.squeeze(dim)) if bool(((parts == most) | (parts < 0)).all()) else SUM


def tidied(found: Entries, shape: Shape, samples: int) -> Owned:
    """`At`, if every entry that gets anything is where it would be."""
    own = found.samples
    for d in varying(found):
        size = shape[d]
        if size and size % samples == 0:
            for inner in dict.fromkeys((size // samples, 1)):
                at = At(d, size // (samples * inner), inner)
                if not bool(((own != entries(at, shape, samples, own.device)) & (own >= 0)).any()):
                    return at
    return found


def scattered(order: Tensor, index: Tensor, size: int, dim: int = 0) -> Tensor | None:
    """The sample of each entry of an axis of ``size``, of which ``index`` says where some went; None if samples meet in one.

    order, index: the sample and the entry of each, of one shape
    """
    sizes = [size if d == dim else s for d, s in enumerate(order.shape)]
    found = torch.full(sizes, NOBODY, dtype=order.dtype, device=order.device).scatter_reduce_(dim, index, order, "amax")
    return None if bool(((found.gather(dim, index) != order) & (order >= 0)).any()) else found
