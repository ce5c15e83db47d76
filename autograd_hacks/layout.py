"""Where the samples of a batch are in a tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """An axis and what is folded into it: nothing, or T positions of each sample, which stand together (N·T) or apart (T·N).

    axis: counted from the front    fold: '', 'N·T' or 'T·N'
    """

    axis: int = 0
    fold: str = ""

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


def find_layout(real: Tensor, other: Tensor, kept: Tensor, axes: Iterable[int]) -> Layout | None:
    """The layout under which a tensor is the same for all samples that were kept when the others were replaced.

    real, other: before and after    kept: N, whether a sample was kept    axes: where the batch may be, first choice first
    Returns None where there is none: samples mix, or rows are not the batch's.
    """
    if real.shape != other.shape:
        return None
    samples, changed = len(kept), differs(real, other)
    profiles = {axis: _any_but(changed, axis) for axis in axes if axis < real.ndim}
    for axis, profile in profiles.items():
        if len(profile) == samples and not profile[kept].any():
            return Layout(axis)
    for axis, profile in profiles.items():
        if len(profile) % samples or len(profile) == samples:
            continue
        if not profile.view(samples, -1)[kept].any():
            return Layout(axis, "N·T")
        if not profile.view(-1, samples)[:, kept].any():
            return Layout(axis, "T·N")
    return None


def for_each_sample(x: Tensor, samples: int) -> Tensor:
    """A copy for each sample, without memory of its own: x is 1 ... or ..., the result N ..."""
    return x.expand(samples, *(x.shape[1:] if x.shape[0] == 1 else x.shape))


def differs(x: Tensor, y: Tensor) -> Tensor:
    """Where tensors of one shape differ by more than rounding, elementwise."""
    different = (x != y) & ~((x != x) & (y != y))
    if x.numel() and (x.is_floating_point() or x.is_complex()):
        # Rows that no change touched come out of the same kernels with the same bits, but for operations that add in an
        # order of their own.
        largest = x.abs().nan_to_num(posinf=0).amax()
        different &= ~((x - y).abs() <= 1e3 * torch.finfo(x.dtype).eps * largest)
    return different


def _any_but(changed: Tensor, axis: int) -> Tensor:
    """Whether anything has changed, along one axis."""
    return changed.movedim(axis, 0).flatten(1).any(1) if changed.ndim > 1 else changed
