"""Laws of operations that move entries as a saved tensor says: the index family, masks, sorting, packing.

A law is called as in `moves.py`, with ``read`` too: ``read(name)`` gives a saved tensor.
The walk notes what a law has read, since it rests on these values.  Laws read only if that may move samples, and ``index``
notes the sizes of its indices else; ``index_put`` and masks always read.

Laws hold for nodes and for operations on a tape.  A gradient reaches no index and no mask, so a node has no inputs for
these; an operation has them among its inputs, where they stand among its arguments, and gets their labels too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.graph.axes import axis, broadcast
from autograd_hacks.graph.label import (
    ALONE,
    MIXED,
    NOBODY,
    SUM,
    At,
    Entries,
    Label,
    Owned,
    Shape,
    Sizes,
    entries,
    linked,
    spread,
    taken,
    varying,
    viewed,
)
from autograd_hacks.graph.moves import along, move

MASKS = (torch.bool, torch.uint8)
Read = Callable[..., Any]
"""``read(name)`` gives a saved tensor, or several; ``read(name, False)`` if the law needs only the sizes of indices."""


def _thin(x: Tensor) -> Tensor:
    """A tensor with one entry on each axis on which it is expanded."""
    for d, (size, stride) in enumerate(zip(x.shape, x.stride())):
        if stride == 0 and size > 1:
            x = x.narrow(d, 0, 1)
    return x


def _gather(x: Tensor, d: int, index: Tensor) -> Tensor:
    """``x.gather(d, index)``; where both are alike along an axis of x, one entry long."""
    thin = _thin(index)
    sizes = [n if k == d or x.shape[k] != 1 or thin.shape[k] != 1 else 1 for k, n in enumerate(index.shape)]
    x = x.expand([-1 if k == d else max(n, x.shape[k]) for k, n in enumerate(sizes)])
    return x.gather(d, thin.expand(sizes))


def _gathered(label: Owned, d: int, index: Tensor, sizes: Sizes, samples: int) -> Label:
    """The label of a tensor of which the output's entries were taken by an index along axis d."""
    links = [ALONE if k == d or n != 1 else k for k, n in enumerate(_thin(index).shape)]
    return spread(label, links, sizes.out, sizes.own, samples, lambda x: _gather(x, d, index), device=index.device)


def _longer(label: Label, out: Shape, own: Shape, samples: int) -> Label:
    """The label of a tensor of which an index has used the first entries on each axis."""
    if isinstance(label, At) and own[label.dim] != out[label.dim]:
        label = Entries(entries(label, out, samples))
    if not isinstance(label, Entries):
        return label
    at = label.samples
    sizes = [(0, n - at.shape[d] if at.shape[d] != 1 else 0) for d, n in enumerate(own)]
    return Entries(F.pad(at, [n for pair in reversed(sizes) for n in pair], value=NOBODY))


def _narrowed(found: Tensor, own: Shape) -> Label:
    """The label of a tensor that was broadcast, from the labels of the copies."""
    if not found.numel() and 0 not in own:  # zeros arrive, of nobody
        return Entries(torch.full([1] * len(own), NOBODY, device="cpu"))
    found = found.view([1] * max(0, len(own) - found.ndim) + list(found.shape))
    return linked(Entries(found), broadcast(found.shape, own), own)


def _is_moved(label: Owned, dims: Collection[int]) -> bool:
    """Whether taking entries along axes moves samples.  If all that were taken are one's, others may be another's."""
    return not (along := varying(label)) or not set(along).isdisjoint(dims)


def _first(label: Owned, sizes: Sizes) -> Label:
    """The label of a tensor of which an index takes entries, if it takes none; None if no samples are in the tensor."""
    return None if sizes.ins[0] is None else label


# Along one axis.


@move("index_select", reads="dim", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d, found = axis(dim, sizes.n), _first(label, sizes)
    if found is not None and _is_moved(label, [d]) and sizes.own:
        found = Indexed([*[None] * d, read("index").view(-1)], sizes.own).spread(label, sizes.out, samples)
    return [found, *(linked(label, [d] * len(own or ()), own or ()) for own in sizes.ins[1:])]


@move("gather", reads="dim", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d, found = axis(dim, sizes.n), _first(label, sizes)
    if sizes.out and found is not None:
        found = (
            _gathered(label, d, read("index"), sizes, samples)
            if _is_moved(label, [d])
            else _longer(label, sizes.out, sizes.own, samples)
        )
    return [found, *[label] * (len(sizes.ins) - 1)]


@move("take", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    index, found = read("index"), _first(label, sizes)
    if found is not None:
        links = [ALONE] * len(sizes.own)
        found = spread(label, links, sizes.out, sizes.own, samples, lambda x: x.take(index), device=index.device)
    return [found, *[label] * (len(sizes.ins) - 1)]


@move("sort topk", reads="dim", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d = axis(dim, sizes.n)
    return [_gathered(label, d, read("indices"), sizes, samples) if _is_moved(label, [d]) else label]


@move("index_add index_copy index_reduce", reads="dim", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d = axis(dim, sizes.n)

    def of(own: Shape) -> Label:
        if len(own) != sizes.n or d not in varying(label):
            return label if len(own) == sizes.n else MIXED
        index = read("index")
        return taken(
            label, along(d, sizes.n), sizes.out, own, samples, lambda x: x.index_select(d, index.view(-1)), index.device
        )

    _, *index, source = sizes.ins
    moved = None if source is None else of(source)
    return [
        label,
        *(linked(moved, [d] * len(own or ()), own or ()) if isinstance(moved, Owned) else moved for own in index),
        moved,
    ]


@move("scatter scatter_add scatter_reduce", reads="dim", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read, dim: int) -> list[Label]:
    d = axis(dim, sizes.n)

    def of(own: Shape) -> Label:
        if d not in varying(label):
            return _longer(label, sizes.out, own, samples)
        index = read("index")
        take = lambda x: _gather(x, d, index)  # noqa: E731
        return _longer(taken(label, along(d, sizes.n), sizes.out, own, samples, take, index.device), sizes.out, own, samples)

    return [label, *(None if own is None else of(own) for own in sizes.ins[1:])]


# Indices of several axes, and masks.


def of_mask(mask: Tensor, rows: Label, shape: Shape, samples: int) -> Label:
    """The label of a mask, from that of the entries that it chooses."""
    take, links = (lambda x: x[mask.bool()]), [ALONE] * mask.ndim
    return spread(rows, links, shape, mask.shape, samples, take, device=mask.device) if isinstance(rows, Owned) else rows


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
        self.links = [ALONE if d in self.dims else self.place_of(d) for d in range(len(whole))]

    def place_of(self, d: int) -> int:
        """The axis in the result of an axis that isn't indexed."""
        before = self.left.index(d)
        return before + (self.axes if before >= self.start else 0)

    def spread(self, label: Owned, out: Shape, samples: int) -> Label:
        """The label of the whole, from that of the result."""
        return spread(label, self.links, out, self.whole, samples, self.read, device=self.indices[0].device)

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

    def read(self, x: Tensor) -> Tensor:
        """What the indices point to, in a tensor that may be one entry long on some axes."""
        x = x.expand([self.whole[d] if d in self.dims else x.shape[d] for d in range(x.ndim)])
        index: list[Any] = [slice(None)] * x.ndim
        for d, own in zip(self.dims, self.indices):
            index[d] = own
        return x[tuple(index)]


@move("index _unsafe_index", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    indices, found = read("indices", False), _first(label, sizes)
    by = Indexed(indices, sizes.own)
    if found is not None and _is_moved(label, range(by.start, by.start + by.axes)):
        read("indices")
        found = by.spread(label, sizes.out, samples)
    elif found is not None:
        found = linked(label, by.links, sizes.own)
    return [found, *(by.labels(indices, label, samples) if len(sizes.ins) > 1 else ())]


@move("index_put _unsafe_index_put _index_put_impl", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    _, *given, source = sizes.ins
    if not given and source is None:
        return [label, None]
    indices = read("indices")
    by = Indexed(indices, sizes.out)
    at = by.read(entries(label, sizes.out, samples, by.indices[0].device))
    moved = None if source is None else _narrowed(at, source)
    masks = [0 if index is None or index.dtype not in MASKS else index.ndim for index in indices]
    own = zip(indices, masks, accumulate((k or 1 for k in masks), initial=0)) if given else ()
    # A mask decides of entries that it doesn't choose, too.
    of_masks = [linked(label, range(d, d + k), index.shape) if k else None for index, k, d in own]
    found = [a or b for a, b in zip(of_masks, by.labels(indices, Entries(at), samples) if given else ())]
    return [label, *found, moved]


@move("masked_select", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    own, mask = sizes.own, read("mask")
    mask = mask.expand(torch.broadcast_shapes(mask.shape, torch.Size(own)))

    def of(shape: Shape) -> Label:
        take = lambda x: x.expand(mask.shape)[mask]  # noqa: E731
        return spread(label, [ALONE] * len(shape), sizes.out, shape, samples, take, SUM, device=mask.device)

    return [None if shape is None else of(shape) for shape in sizes.ins]


@move("masked_scatter", by_values=True)
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


@move("embedding", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read) -> list[Label]:
    """The rows of a table of activations."""
    found = _first(label, sizes)
    if not _is_moved(label, range(sizes.n - 1)):
        found = linked(label, [ALONE, sizes.n - 1], sizes.own)
    elif found is not None:
        found = Indexed([read("indices"), None], sizes.own).spread(label, sizes.out, samples)
    return [found, *(linked(label, range(len(own or ())), own or ()) for own in sizes.ins[1:])]


@move("_pack_padded_sequence", reads="batch_first", by_values=True)
def _(label: Owned, sizes: Sizes, samples: int, read: Read, batch_first: bool) -> list[Label]:
    """Rows of padded sequences, by time and then by sequence."""
    if not _is_moved(label, [0]):
        return [viewed(label, sizes.out, (1, *sizes.out), samples)]
    lengths = read("result1").tolist()
    time = torch.cat([torch.full((n,), t, device="cpu") for t, n in enumerate(lengths)])
    row = torch.cat([torch.arange(n, device="cpu") for n in lengths])
    return [Indexed([row, time] if batch_first else [time, row], sizes.own).spread(label, sizes.out, samples)]
