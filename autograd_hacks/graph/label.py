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

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final, NamedTuple

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
    is_shared: whether all outputs have this label
    """

    o: int
    outs: Shapes
    ins: Shapes
    is_shared: bool = False

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


def taken(
    label: Owned, links: Links, whole: Shape, own: Shape, samples: int, take: Callable[[Tensor], Tensor], device: Any = None
) -> Label:
    """The label of an input that the output contains: of what ``take`` takes of the output.

    links: for each axis of the input the output's; ALONE for one along which it takes
    whole, own: the shapes of output and input
    """
    if isinstance(label, One) or (varying(label) and set(varying(label)) <= set(links)):
        return linked(label, links, own)
    at = entries(label, whole, samples, device)
    found = take(at.expand([1 if d in links and at.shape[d] == 1 else size for d, size in enumerate(whole)]))
    return One(int(found)) if found.numel() == 1 and bool(found >= 0) else Entries(found)


def spread(
    label: Owned, links: Links, out: Shape, whole: Shape, samples: int, take: Callable[[Tensor], Tensor],
    lost: Several = MIXED, kept: Container[int] = (), device: Any = None, is_whole: bool = False,
) -> Label:  # fmt: skip
    """The label of an input of which ``take`` took the output's entries; `NOBODY` has what it left.

    links: for each axis of the input the output's with the same entries; ALONE for one along which it takes
    out, whole: the shapes of output and input
    lost: what is said if entries of several samples were taken from one
    kept: linked axes along which ``take`` is not alike
    device: of the tensors that ``take`` takes by
    is_whole: whether other outputs with this label have the rest of the input
    """
    along = varying(label)
    if (type(label) is At and label.dim in links) or (is_whole and set(along) <= set(links)):
        return linked(label, links, whole)
    small = [size if links[d] < 0 or links[d] in along or d in kept else 1 for d, size in enumerate(whole)]
    places = take(torch.arange(prod(small), device=device or "cpu").view(small))
    at = entries(label, out, samples, device)
    order, index = torch.broadcast_tensors(at, places.to(at.device))
    found = scattered(order.flatten(), index.flatten(), prod(small))
    return lost if found is None else Entries(found.view(small))


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


def scattered(order: Tensor, index: Tensor, size: int) -> Tensor | None:
    """The sample of each of so many entries, of which ``index`` says where some went; None if samples meet in one.

    order, index: the sample and the entry of each
    """
    found = torch.full((size,), NOBODY, dtype=order.dtype, device=order.device).scatter_reduce_(0, index, order, "amax")
    return None if bool(((found[index] != order) & (order >= 0)).any()) else found


def narrowed(found: Tensor) -> Tensor:
    """The sample of each entry, with one entry on each axis along which it is the same, or of no sample."""
    for d, size in enumerate(found.shape):
        most = found.amax(d, keepdim=True) if found.numel() else found
        if size > 1 and bool(((found == most) | (found < 0)).all()):
            found = most
    return found


def ascends(order: Tensor) -> bool:
    """Whether entries along the only axis that is longer than one are in the order of their samples."""
    along = [size for size in order.shape if size > 1]
    own = order.flatten()
    return len(along) <= 1 and bool((own[own >= 0].diff() >= 0).all())
