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

    def back(self, rows: Tensor) -> Tensor:
        """What `samples_first` was given."""
        if not self.fold:
            return rows.movedim(0, self.axis)
        at = self.axis if self.fold == "N·T" else self.axis + 1
        return rows.movedim(0, at).flatten(self.axis, self.axis + 1)

    def one_of(self, batch: Tensor) -> Tensor:
        """The sample of a batch of one."""
        return batch if self.fold else batch.squeeze(self.axis)

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


def samples_of_rows(packed: PackedSequence) -> Tensor:
    """The sample that each row of the data belongs to."""
    order = [torch.arange(n, device=packed.data.device) for n in packed.batch_sizes.tolist()]
    places = torch.cat(order)
    return places if packed.sorted_indices is None else packed.sorted_indices[places]


Layouts = tuple[Layout | None, ...]
"""For each tensor that a call returned where its samples are, None where it has none."""


class Fits:
    """The layouts under which a tensor was the same for all samples that were kept, over the traces shown so far.

    There is none that fits where samples mix, or rows are not the batch's; there are several where too little has changed
    to tell.

    real: the tensor in the batch's own trace    samples: N    rows: of a packed sequence, the sample of each row
    """

    def __init__(self, real: Tensor, samples: int, rows: Tensor | None = None) -> None:
        self.real, self.samples, self.rows, self.seen, self.same_shape = real, samples, rows, 0, True
        self.mixes_by_rows = False  # whether in a packed sequence a kept sample's row has changed
        self._fitting = dict.fromkeys((True, False), _candidates(real.shape, samples, range(real.ndim)))
        self._changed = {True: False, False: False}
        self._slack: Tensor | None = None  # how far rounding may lead, while that is needed

    def told(self) -> tuple[Any, ...]:
        """What has been found, for processes that see other parts of the same tensor."""
        return self._fitting, self._changed, self.same_shape, self.mixes_by_rows

    def agree(self, told: Sequence[tuple[Any, ...]]) -> None:
        """Takes what all processes have found: what fits must fit all parts."""
        for fitting, changed, same_shape, mixes in told:
            for exactly in (True, False):
                self._fitting[exactly] = [layout for layout in self._fitting[exactly] if layout in fitting[exactly]]
                self._changed[exactly] |= changed[exactly]
            self.same_shape &= same_shape
            self.mixes_by_rows |= mixes

    def see(self, other: Tensor, kept: Tensor, replaced: Tensor) -> None:
        """other: the tensor in a trace with samples replaced    kept, replaced: the samples' numbers"""
        self.seen += 1
        if other.shape != self.real.shape:
            self.same_shape, self._fitting = False, {True: [], False: []}
            self._changed = {True: True, False: True}
            return
        if torch.equal(other, self.real):
            return
        kept, replaced = kept.to(other.device), replaced.to(other.device)
        if self.rows is not None:
            of_kept = torch.isin(self.rows.to(kept.device), kept)
            self.mixes_by_rows |= bool(differs(self.real, other, self._tolerance())[of_kept].any())
        fitting = {layout: self._agrees(layout, other, kept) for layout in self._first_fitting(other, kept)}
        if not all(self._changed.values()) and any(
            self._agrees(at, other, replaced[:1]) is False for at in self._fitting[False]
        ):
            self._changed = {True: True, False: True}
        for exactly in [exactly for exactly, is_changed in self._changed.items() if not is_changed]:
            change = _differs_at_all(self.real, other) if exactly else differs(self.real, other, self._tolerance())
            self._changed[exactly] = bool(change.any())
        self._fitting[True] = [at for at in self._fitting[True] if fitting.get(at) is True]
        self._fitting[False] = [at for at, how in fitting.items() if how is not False]

    def _first_fitting(self, other: Tensor, kept: Tensor) -> list[Layout]:
        """The layouts that one kept sample alone doesn't rule out, which takes less time than all."""
        left = self._fitting[False]
        return left if len(left) < 2 else [at for at in left if self._agrees(at, other, kept[:1]) is not False]

    def _agrees(self, layout: Layout, other: Tensor, some: Tensor) -> bool | None:
        """Whether the tensors are the same for some samples; None for but for rounding."""
        x, y = (layout.samples_first(own, self.samples).index_select(0, some) for own in (self.real, other))
        if torch.equal(x, y):
            return True
        slack = self._tolerance()
        if slack is not None:
            slack = layout.samples_first(slack.expand_as(self.real), self.samples).index_select(0, some)
        if differs(x, y, slack).any():
            return False
        return None if _differs_at_all(x, y).any() else True

    def _tolerance(self) -> Tensor | None:
        self._slack = rounding_of(self.real) if self._slack is None else self._slack
        return self._slack

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


def rounding_of(x: Tensor) -> Tensor | None:
    """How far a tensor of sums may be from one that was added in another order, to be broadcast; None where that is nothing.

    By column, since a large one would hide what changes in the others.
    """
    if not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return None
    rows = tuple(range(max(1, x.ndim - 1))) if x.ndim else ()
    return x.abs().nan_to_num_(posinf=0).amax(rows, keepdim=True).mul_(min(100 * torch.finfo(x.dtype).eps, 1e-2))


def differs(x: Tensor, y: Tensor, slack: Tensor | None) -> Tensor:
    """Where tensors of one shape differ by more than rounding, elementwise.  slack: `rounding_of` one of them

    Rows that no change touched come out of the same kernels with the same bits, but for operations that add in an order of
    their own.
    """
    different = _differs_at_all(x, y)
    return different if slack is None else different & ~((x - y).abs() <= slack)


def same(x: Tensor, y: Tensor) -> bool:
    """Whether tensors have the same bits, but for what is no number in both."""
    return x.shape == y.shape and not _differs_at_all(x, y).any()


def _differs_at_all(x: Tensor, y: Tensor) -> Tensor:
    if not (x.is_floating_point() or x.is_complex()):
        return x != y
    return (x != y) & ((x == x) | (y == y))
