"""Where the samples of a batch are in a tensor."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

POSITIONS = "B, T"
"""A fold in which each position is a row: samples on axis 0, positions on axis 1."""


@dataclass(frozen=True)
class Layout:
    """An axis, and what is folded into it: nothing, or the T positions of a sample, adjacent (N·T) or apart (T·N).

    Or two axes, with each position as a row."""

    axis: int = 0  # counted from the front
    fold: str = ""  # '', 'N·T', 'T·N', or `POSITIONS`

    def samples_first(self, x: Tensor, samples: int) -> Tensor:
        """N ..., with folded positions on an axis of their own, at the place of the folded axis."""
        if not self.fold:
            return x.movedim(self.axis, 0) if self.axis else x
        if self.fold == POSITIONS:
            return x.flatten(0, 1)
        # Not -1, which is ambiguous if there are no samples.
        positions = x.shape[self.axis] // max(1, samples)
        if self.fold == "N·T":
            return x.unflatten(self.axis, (samples, positions)).movedim(self.axis, 0)
        return x.unflatten(self.axis, (positions, samples)).movedim(self.axis + 1, 0)

    def rows(self, size: int, samples: int, device: torch.device) -> Tensor:
        """The sample of each entry on the axis.  size: the axis's"""
        positions, order = size // max(1, samples), torch.arange(samples, device=device)
        return order.repeat(positions) if self.fold == "T·N" else order.repeat_interleave(positions)

    def over(self, x: Tensor, values: Tensor) -> Tensor:
        """A value for each sample, shaped so that it multiplies a tensor with this layout.  values: N"""
        of_rows = values[self.rows(x.shape[self.axis], len(values), x.device)]
        return of_rows.view([-1 if axis == self.axis else 1 for axis in range(x.ndim)])

    def fits(self, x: Tensor, samples: int) -> bool:
        """Whether a tensor's sizes fit the layout."""
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
    """The sample of each row of the data."""
    order = [torch.arange(n, device=packed.data.device) for n in packed.batch_sizes.tolist()]
    places = torch.cat(order)
    return places if packed.sorted_indices is None else packed.sorted_indices[places]


Layouts = tuple[Layout | None, ...]
"""For each tensor that a call returned, where its samples are; None if it has none."""


def likeliest(shape: Sequence[int], samples: int, axes: Iterable[int]) -> Layout | None:
    """The first layout that fits the sizes."""
    return next(iter(candidates(shape, samples, axes)), None)


def candidates(shape: Sequence[int], samples: int, axes: Iterable[int]) -> list[Layout]:
    """The layouts on some axes that fit the sizes."""
    axes = [axis for axis in axes if axis < len(shape)]
    plain = [Layout(axis) for axis in axes if shape[axis] == samples]
    folded = [axis for axis in axes if shape[axis] != samples and samples and shape[axis] % samples == 0 and shape[axis]]
    return plain + [Layout(axis, fold) for axis in folded for fold in (("N·T",) if samples == 1 else ("N·T", "T·N"))]


def is_time_first(module: nn.Module) -> bool:
    """Whether a layer uses axis 1 as the batch, so that its model may too."""
    return getattr(module, "batch_first", True) is False


def rounding_of(x: Tensor) -> Tensor | None:
    """How far a tensor of sums may differ if they were added up in another order, for broadcasting; None for exact dtypes.

    It is computed by column, because one large column would hide changes in the others.
    """
    if not x.numel() or not (x.is_floating_point() or x.is_complex()):
        return None
    rows = tuple(range(max(1, x.ndim - 1))) if x.ndim else ()
    return x.abs().nan_to_num_(posinf=0).amax(rows, keepdim=True).mul_(min(100 * torch.finfo(x.dtype).eps, 1e-2))


def differs(x: Tensor, y: Tensor, slack: Tensor | None) -> Tensor:
    """Where two tensors of one shape differ by more than rounding, elementwise.  slack: `rounding_of` one of them

    The same kernel gives unchanged rows the same bits, except for operations that add in a varying order.
    """
    different = _differs_at_all(x, y)
    return different if slack is None else different & ~((x - y).abs() <= slack)


def same(x: Tensor, y: Tensor) -> bool:
    """Whether tensors have the same bits, except where both are NaN."""
    return x.shape == y.shape and not _differs_at_all(x, y).any()


def _differs_at_all(x: Tensor, y: Tensor) -> Tensor:
    return (x != y) & ((x == x) | (y == y))
