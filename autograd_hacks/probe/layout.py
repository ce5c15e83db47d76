"""Where the samples of a batch are in a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Layout:
    """An axis, and what is folded into it: nothing, or T positions of a sample that stand together (N·T) or apart (T·N)."""

    axis: int = 0  # counted from the front
    fold: str = ""  # '', 'N·T' or 'T·N'

    def samples_first(self, x: Tensor, samples: int) -> Tensor:
        """N ..., with the folded positions on an axis of their own where the folded one was."""
        if not self.fold:
            return x.movedim(self.axis, 0)
        # Not -1 for what the sizes tell, which would be unknown for a batch of no samples.
        positions = x.shape[self.axis] // max(1, samples)
        if self.fold == "N·T":
            return x.unflatten(self.axis, (samples, positions)).movedim(self.axis, 0)
        return x.unflatten(self.axis, (positions, samples)).movedim(self.axis + 1, 0)

    def batch_of_one(self, sample: Tensor) -> Tensor:
        """One entry of `samples_first`, as a batch of one sample."""
        return sample if self.fold else sample.unsqueeze(self.axis)

    def rows(self, size: int, samples: int, device: torch.device) -> Tensor:
        """The sample that each of the axis's entries belongs to.  size: the axis's"""
        positions, order = size // max(1, samples), torch.arange(samples, device=device)
        return order.repeat(positions) if self.fold == "T·N" else order.repeat_interleave(positions)

    def over(self, x: Tensor, values: Tensor) -> Tensor:
        """A value for each sample, to be multiplied by a tensor of this layout.  values: N"""
        of_rows = values[self.rows(x.shape[self.axis], len(values), x.device)]
        return of_rows.view([-1 if axis == self.axis else 1 for axis in range(x.ndim)])

    def fits(self, x: Tensor, samples: int) -> bool:
        """Whether a tensor's sizes allow it."""
        if x.ndim <= self.axis:
            return False
        size = x.shape[self.axis]
        return size == samples if not self.fold else samples > 0 and size % samples == 0

    def __str__(self) -> str:
        return f"{self.fold} on axis {self.axis}" if self.fold else f"axis {self.axis}"


class Packed(Layout):
    """In a packed sequence."""

    def samples_first(self, x: Any, samples: int) -> Any:
        """A packed sequence for each sample."""
        return [_sample_of(x, n) for n in range(samples)]

    def batch_of_one(self, sample: Any) -> Any:
        return sample


PACKED = Packed()


def samples_of_rows(packed: PackedSequence) -> Tensor:
    """The sample that each row of the data belongs to."""
    order = [torch.arange(n, device=packed.data.device) for n in packed.batch_sizes.tolist()]
    places = torch.cat(order)
    return places if packed.sorted_indices is None else packed.sorted_indices[places]


def _sample_of(packed: PackedSequence, sample: int) -> PackedSequence:
    data = packed.data[samples_of_rows(packed) == sample]
    only = None if packed.sorted_indices is None else packed.sorted_indices.new_zeros(1)
    return PackedSequence(data, packed.batch_sizes.new_ones(len(data)), only, only)


Layouts = tuple[Layout | None, ...]
"""For each tensor that a call returned where its samples are, None where it has none."""


class Fits:
    """The layouts under which a tensor was the same for all samples that were kept, over the traces shown so far.

    There is none that fits where samples mix, or rows are not the batch's; there are several where too little has changed
    to tell.

    real: the tensor in the batch's own trace    samples: N    rows: of a packed sequence, the sample of each row
    """

    def __init__(self, real: Tensor, samples: int, rows: Tensor | None = None) -> None:
        self.real, self.rows, self.seen, self.same_shape = real, rows, 0, True
        self.mixes_by_rows = False  # whether in a packed sequence a kept sample's row has changed
        self._fitting = dict.fromkeys((True, False), _candidates(real.shape, samples, range(real.ndim)))
        self._changed = {True: False, False: False}

    def see(self, other: Tensor, kept: Tensor) -> None:
        """other: the tensor in a trace with samples replaced    kept: N, those that were not"""
        self.seen += 1
        if other.shape != self.real.shape:
            self.same_shape, self._fitting = False, {True: [], False: []}
            self._changed = {True: True, False: True}
            return
        if torch.equal(other, self.real):
            return
        kept = kept.to(self.real.device)
        if self.rows is not None:
            self.mixes_by_rows |= bool(differs(self.real, other)[kept[self.rows.to(kept.device)]].any())
        for exactly in (True, False):
            change = (differs if exactly is False else _differs_at_all)(self.real, other)
            along = {layout.axis: _along(change, layout.axis) for layout in self._fitting[exactly]}
            self._changed[exactly] |= bool(change.any())
            self._fitting[exactly] = [
                layout
                for layout in self._fitting[exactly]
                if not layout.samples_first(along[layout.axis], len(kept))[kept].any()
            ]

    @property
    def depends_on_rounding(self) -> bool:
        return self._fitting[True] != self._fitting[False]

    def layouts(self, axes: Iterable[int], exactly: bool) -> tuple[list[Layout], bool]:
        """Those along some axes, and whether the tensor has changed at all.  exactly: whether rounding counts as a change"""
        fitting = self._fitting[exactly]
        along = [layout for axis in axes for layout in fitting if layout.axis == axis]
        found = sorted(along, key=lambda layout: bool(layout.fold))
        return found, self._changed[exactly]


def likeliest(shape: Sequence[int], samples: int, axes: Iterable[int]) -> Layout | None:
    """The layout by sizes alone: the first that fits."""
    return next(iter(_candidates(shape, samples, axes)), None)


def only_by_sizes(shape: Sequence[int], samples: int, axes: Iterable[int]) -> Layout | None:
    """The layout by sizes alone, if there is but one axis of N and none that may be folded."""
    found = _candidates(shape, samples, [axis for axis in axes if axis < len(shape)])
    return found[0] if len(found) == 1 and not found[0].fold else None


def _candidates(shape: Sequence[int], samples: int, axes: Iterable[int]) -> list[Layout]:
    axes = [axis for axis in axes if axis < len(shape)]
    plain = [Layout(axis) for axis in axes if shape[axis] == samples]
    folded = [axis for axis in axes if shape[axis] != samples and samples and shape[axis] % samples == 0 and shape[axis]]
    return plain + [Layout(axis, fold) for axis in folded for fold in (("N·T",) if samples == 1 else ("N·T", "T·N"))]


def _along(changed: Tensor, axis: int) -> Tensor:
    """Whether anything has changed, along one axis; the others have size 1."""
    others = [n for n in range(changed.ndim) if n != axis]
    return changed.any(others, keepdim=True) if others else changed


def has_axis_of_one(index: Tensor) -> bool:
    """Whether a lookup's index has an axis for the batch, of one entry.  By its rank: one of a single position has none."""
    return index.ndim > 1 and index.shape[0] == 1


def for_each_sample(x: Tensor, samples: int, has_axis: bool) -> Tensor:
    """A copy for each sample, without memory of its own: x is 1 ... where it has an axis for that, else ...; the result
    N ..."""
    return x.expand(samples, *(x.shape[1:] if has_axis else x.shape))


def differs(x: Tensor, y: Tensor) -> Tensor:
    """Where tensors of one shape differ by more than rounding, elementwise."""
    different = _differs_at_all(x, y)
    if x.numel() and (x.is_floating_point() or x.is_complex()):
        # Rows that no change touched come out of the same kernels with the same bits, but for operations that add in an
        # order of their own.  By column, since a large one would hide what changes in the others.
        rows = tuple(range(max(1, x.ndim - 1))) if x.ndim else ()
        largest, eps = x.abs().nan_to_num(posinf=0).amax(rows, keepdim=True), torch.finfo(x.dtype).eps
        different &= ~((x - y).abs() <= min(100 * eps, 1e-2) * largest)
    return different


def same(x: Tensor, y: Tensor) -> bool:
    """Whether tensors have the same bits, but for what is no number in both."""
    return x.shape == y.shape and not _differs_at_all(x, y).any()


def _differs_at_all(x: Tensor, y: Tensor) -> Tensor:
    return (x != y) & ~((x != x) & (y != y))
