"""Where the samples of a batch are in a tensor."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

POSITIONS = "B, T"
"""A fold by which each position is a row: samples on axis 0, positions on axis 1."""


@dataclass(frozen=True)
class Layout:
    """An axis, and what is folded into it: nothing, or T positions of a sample that stand together (N·T) or apart (T·N); or
    two axes, each position being a row."""

    axis: int = 0  # counted from the front
    fold: str = ""  # '', 'N·T', 'T·N', or `POSITIONS`

    def samples_first(self, x: Tensor, samples: int) -> Tensor:
        """N ..., with the folded positions on an axis of their own where the folded one was."""
        if not self.fold:
            return x.movedim(self.axis, 0)
        if self.fold == POSITIONS:
            return x.flatten(0, 1)
        # Not -1 for what the sizes tell, which would be unknown for a batch of no samples.
        positions = x.shape[self.axis] // max(1, samples)
        if self.fold == "N·T":
            return x.unflatten(self.axis, (samples, positions)).movedim(self.axis, 0)
        return x.unflatten(self.axis, (positions, samples)).movedim(self.axis + 1, 0)

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
        return self.fits_shape(x.shape, samples)

    def fits_shape(self, shape: Sequence[int], samples: int) -> bool:
        if len(shape) <= self.axis:
            return False
        if self.fold == POSITIONS:
            return len(shape) > 1 and shape[0] * shape[1] == samples
        size = shape[self.axis]
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


def likeliest(shape: Sequence[int], samples: int, axes: Iterable[int]) -> Layout | None:
    """The layout by sizes alone: the first that fits."""
    return next(iter(candidates(shape, samples, axes)), None)


def candidates(shape: Sequence[int], samples: int, axes: Iterable[int]) -> list[Layout]:
    """The layouts that sizes allow along some axes."""
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
