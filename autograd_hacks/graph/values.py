"""Laws of operations that move entries as a saved tensor says: the index family, masks, sorting, packing.

A law is called as in `moves.py`, with ``read`` too: ``read(name)`` gives a saved tensor.
The walk notes what a law has read, since it rests on these values.  Laws along one axis read only if that may move
samples; those of ``index``, ``index_put`` and masks always read.

Laws hold for nodes and for operations on a tape.  A gradient reaches no index and no mask, so a node has no inputs for
these; an operation has them among its inputs, where they stand among its arguments, and gets their labels too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.graph.axes import axis, broadcast
from autograd_hacks.graph.label import (
    ALONE,
    MIXED,
    NOBODY,
    SUM,
    Entries,
    Label,
    Owned,
    Shape,
    Sizes,
    entries,
    is_owned,
    linked,
    scattered,
    tidied,
    varying,
    viewed,
)
from autograd_hacks.graph.moves import Law, Move, entering

VALUES: dict[str, Move] = {}
MASKS = (torch.bool, torch.uint8)
Read = Callable[[str], Any]


def value(names: str, reads: str = "") -> Callable[[Law], Law]:
    return entering(VALUES, names, reads)


def _thin(x: Tensor) -> Tensor:
    """A tensor with one entry on each axis on which it is expanded."""
    for d, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if stride == 0 and size > 1:
            x = x.narrow(d, 0, 1)
    return x


def _scattered(label: Owned, d: int, index: Tensor, out: Shape, own: Shape, samples: int) -> Label:
    """The label of a tensor of which the output's entries were taken by an index along axis d.  index: of out's shape"""
    index = _thin(index)
    at = entries(label, out, samples, index.device)
    sizes = [max(a, b) if a and b else 0 for a, b in zip(at.shape, index.shape)]
    found = scattered(at.expand(sizes), index.expand(sizes), own[d], d)
    return MIXED if found is None else tidied(Entries(_longer(found, own)), own, samples)


def _longer(at: Tensor, own: Shape) -> Tensor:
    """Owners of a part, for a tensor that is longer or shorter on some axes."""
    for d, size in enumerate(own):
        if at.shape[d] > size:
            at = at.narrow(d, 0, size)
        elif 1 < at.shape[d] < size:
            rest = [size - at.shape[d] if k == d else s for k, s in enumerate(at.shape)]
            at = torch.cat([at, at.new_full(rest, NOBODY)], d)
    return at


def _gathered(label: Owned, d: int, index: Tensor, out: Shape, samples: int) -> Entries:
    """The label of a tensor whose entries were written to the output at an index along axis d."""
    index = _thin(index)
    at = entries(label, out, samples, index.device)
    at = at.expand([out[k] if k == d else size for k, size in enumerate(at.shape)])
    for k, (a, b) in enumerate(zip(at.shape, index.shape)):
        if k != d and a > b > 1:
            at = at.narrow(k, 0, b)
    sizes = [b if k == d else max(a, b) if a and b else 0 for k, (a, b) in enumerate(zip(at.shape, index.shape))]
    at = at.expand([at.shape[d] if k == d else size for k, size in enumerate(sizes)])
    return Entries(at.gather(d, index.expand(sizes)))


def _narrowed(found: Tensor, own: Shape) -> Label:
    """The label of a tensor that was broadcast, from the labels of the copies."""
    found = found.view([1] * max(0, len(own) - found.ndim) + list(found.shape))
    if not found.numel() and 0 not in own:  # zeros arrive, of nobody
        return Entries(torch.full([1] * len(own), NOBODY, device="cpu"))
    links = broadcast(found.shape, own)
    lost = [k for k in range(found.ndim) if k not in links and found.shape[k] != 1]
    if lost and found.numel():
        most = found.amax(lost, keepdim=True)
        if bool(((found != most) & (found >= 0)).any()):
            return SUM
        found = most
    return Entries(found.reshape(found.shape[found.ndim - len(own) :]))


def _is_moved(label: Owned, dims: Collection[int]) -> bool:
    """Whether taking entries along axes moves samples.  If all that were taken are one's, others may be another's."""
    return not (along := varying(label)) or not set(along).isdisjoint(dims)


def _first(label: Owned, sizes: Sizes) -> Label:
    """The label of a tensor of which an index takes entries, if it takes none; None if no samples are in the tensor."""
    return None if sizes.ins[0] is None else label


# Along one axis.


@value("index_select", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d, found = axis(dim, sizes.n), _first(label, sizes)
    if found is not None and _is_moved(label, [d]) and sizes.own:
        index = read("index").view([-1 if k == d else 1 for k in range(sizes.n)])
        found = _scattered(label, d, index, sizes.out, sizes.own, samples)
    return [found, *(linked(label, [d] * len(own or ()), own or ()) for own in sizes.ins[1:])]


@value("gather", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d, found = axis(dim, sizes.n), _first(label, sizes)
    if sizes.out and is_owned(found):
        found = _scattered(label, d, read("index"), sizes.out, sizes.own, samples) if _is_moved(label, [d]) else label
        found = _as_long(found, sizes.own) if is_owned(found) else found
    return [found, *[label] * (len(sizes.ins) - 1)]


@value("sort topk", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d = axis(dim, sizes.n)
    return [_scattered(label, d, read("indices"), sizes.out, sizes.own, samples) if _is_moved(label, [d]) else label]


@value("index_add index_copy index_reduce", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d = axis(dim, sizes.n)

    def of(own: Shape) -> Label:
        if len(own) != sizes.n:
            return MIXED
        index = [-1 if k == d else 1 for k in range(sizes.n)]
        return _gathered(label, d, read("index").view(index), sizes.out, samples) if d in varying(label) else label

    _, *index, source = sizes.ins
    moved = None if source is None else of(source)
    return [label, *(linked(moved, [d] * len(own or ()), own or ()) if is_owned(moved) else moved for own in index), moved]


@value("scatter scatter_add scatter_reduce", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d = axis(dim, sizes.n)

    def of(own: Shape) -> Label:
        return _as_long(_gathered(label, d, read("index"), sizes.out, samples) if d in varying(label) else label, own)

    return [label, *(None if own is None else of(own) for own in sizes.ins[1:])]


def _as_long(label: Owned, own: Shape) -> Owned:
    """The label of a tensor that is longer or shorter on some axes than the part of it that was used."""
    if not isinstance(label, Entries):
        return label
    return Entries(_longer(label.samples, own))


# Indices of several axes, and masks.


def of_mask(mask: Tensor, rows: Label, shape: Shape, samples: int) -> Label:
    """The label of a mask, from that of the entries that it chooses."""
    if not is_owned(rows):
        return rows
    found = torch.full(mask.shape, NOBODY, device=mask.device)
    found[mask.bool()] = entries(rows, shape, samples, mask.device).expand(*shape)
    return Entries(found)


class Indexed:
    """x[i, j, ...] with None for axes that aren't indexed: where the axes of x and of the indices are in the result."""

    def __init__(self, indices: Sequence[Tensor | None], whole: Shape) -> None:
        given: list[Tensor | None] = []
        for index in indices:
            is_mask = index is not None and index.dtype in MASKS
            given += index.nonzero().unbind(1) if is_mask and index is not None else [index]
        self.dims = [d for d, index in enumerate(given) if index is not None]
        there = [index if index.dtype == torch.long else index.long() for index in given if index is not None]
        self.indices = there if len(there) == 1 else torch.broadcast_tensors(*there)
        self.shape = self.indices[0].shape
        self.whole, self.axes = whole, len(self.shape)
        self.start = self.dims[0] if all(b == a + 1 for a, b in pairwise(self.dims)) else 0
        self.left = [d for d in range(len(whole)) if d not in self.dims]

    def place_of(self, d: int) -> int:
        """The axis in the result of an axis that isn't indexed."""
        before = self.left.index(d)
        return before + (self.axes if before >= self.start else 0)

    def scattered(self, at: Tensor, samples: int) -> Label:
        """The label of the whole, from that of the result."""
        sizes = [self.whole[d] for d in self.dims]
        rest = [self.place_of(d) for d in self.left]
        at = at.permute([*[k for k in range(at.ndim) if k not in rest], *rest])
        rows = at.expand(*self.shape, *at.shape[self.axes :]).reshape(-1, *at.shape[self.axes :])
        flat: Any = 0  # where the indices point to in the indexed axes, laid out one behind the other
        for size, index in zip(sizes, self.indices):
            flat = flat * size + index % max(1, size)
        found = scattered(rows, flat.reshape(-1, *[1] * (rows.ndim - 1)).expand(rows.shape), prod(sizes))
        if found is None:
            return MIXED
        axes = [*self.dims, *self.left]
        found = found.view(*sizes, *found.shape[1:]).permute([axes.index(d) for d in range(len(axes))])
        return tidied(Entries(found), self.whole, samples)

    def labels(self, indices: Sequence[Tensor | None], label: Owned, samples: int) -> list[Label]:
        """The labels of indices, from that of the entries that they point to."""
        found: list[Label] = []
        for index in indices:
            if index is None:
                found.append(None)
            elif index.dtype in MASKS:
                found.append(of_mask(index, linked(label, [self.start], self.shape), self.shape, samples))
            else:
                sizes = [1] * (self.axes - index.ndim) + list(index.shape)
                links = [self.start + d if size == self.shape[d] else ALONE for d, size in enumerate(sizes)]
                found.append(linked(label, links[self.axes - index.ndim :], index.shape))
        return found

    def read(self, at: Tensor) -> Tensor:
        """The label of the result, from that of the whole."""
        at = at.expand([self.whole[d] if d in self.dims else at.shape[d] for d in range(at.ndim)])
        index: list[Any] = [slice(None)] * at.ndim
        for d, own in zip(self.dims, self.indices):
            index[d] = own
        return at[tuple(index)]


@value("index _unsafe_index")
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    indices, found = read("indices"), _first(label, sizes)
    by = Indexed(indices, sizes.own)
    moved = range(by.start, by.start + by.axes)
    if is_owned(found) and _is_moved(label, moved):
        found = by.scattered(entries(label, sizes.out, samples, by.indices[0].device), samples)
    elif is_owned(found):
        found = linked(label, [ALONE if d in by.dims else by.place_of(d) for d in range(len(sizes.own))], sizes.own)
    return [found, *(by.labels(indices, label, samples) if len(sizes.ins) > 1 else ())]


@value("index_put _unsafe_index_put _index_put_impl")
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    _, *given, source = sizes.ins
    if not given and source is None:
        return [label, None]
    indices = read("indices")
    by = Indexed(indices, sizes.out)
    at = by.read(entries(label, sizes.out, samples, by.indices[0].device))
    moved = None if source is None else _narrowed(at, source)
    return [label, *(by.labels(indices, Entries(at), samples) if given else ()), moved]


@value("masked_select")
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    own, mask = sizes.own, read("mask")
    mask = mask.expand(torch.broadcast_shapes(mask.shape, torch.Size(own)))
    order = entries(label, sizes.out, samples, mask.device).expand(sizes.out)
    found = torch.full(mask.shape, NOBODY, dtype=order.dtype, device=order.device)
    found[mask] = order
    chosen: Owned = Entries(found)
    return [_narrowed(found, own), *(linked(chosen, broadcast(mask.shape, at or ()), at or ()) for at in sizes.ins[1:])]


@value("masked_scatter")
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    def of(own: Shape) -> Label:
        mask, out = read("mask"), sizes.out
        at = entries(label, out, samples, mask.device).expand(*out)[mask.expand(*out)]
        whole = torch.full((prod(own),), NOBODY, dtype=at.dtype, device=at.device)
        whole[: len(at)] = at
        return Entries(whole.view(*own))

    first, *mask, source = sizes.ins  # what a place gets depends on how many places before it the mask chooses
    found = [None if first is None else linked(label, broadcast(sizes.out, first), first), *[MIXED] * len(mask)]
    return [*found, None if source is None else of(source)]


@value("embedding")
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    """The rows of a table of activations."""
    found = _first(label, sizes)
    if not _is_moved(label, range(sizes.n - 1)):
        found = linked(label, [ALONE, sizes.n - 1], sizes.own)
    elif found is not None:
        by = Indexed([read("indices"), None], sizes.own)
        found = by.scattered(entries(label, sizes.out, samples, by.indices[0].device), samples)
    return [found, *(linked(label, range(len(own or ())), own or ()) for own in sizes.ins[1:])]


@value("_pack_padded_sequence", reads="batch_first")
def _(label: Owned, sizes: Sizes, samples: int, read: Read, batch_first: bool) -> list[Label]:
    """Rows of padded sequences, by time and then by sequence."""
    if not _is_moved(label, [0]):
        return [viewed(label, sizes.out, (1, *sizes.out), samples)]
    lengths = read("result1").tolist()
    time = torch.cat([torch.full((n,), t, device="cpu") for t, n in enumerate(lengths)])
    row = torch.cat([torch.arange(n, device="cpu") for n in lengths])
    by = Indexed([row, time] if batch_first else [time, row], sizes.own)
    return [by.scattered(entries(label, sizes.out, samples, row.device), samples)]
