"""Sums of outer products: Linear, and whatever reduces to a matrix product."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from einops import einsum, rearrange
from torch import Tensor

from autograd_hacks.forms.base import Form, Index, row_norms, row_scales


class Outer(Form):
    """Row n of J is Σₜ left[n, t] ⊗ right[n, t], the sum over T positions.

    left: (N, T, O), or (N, O) for one position    right: (N, T, I), or (N, I)
    shape: the parameter's, any view of (O, I), which it is unless told
    """

    def __init__(self, left: Tensor, right: Tensor, shape: torch.Size | None = None) -> None:
        self.left = left[:, None] if left.ndim == 2 else left
        self.right = right[:, None] if right.ndim == 2 else right
        if self.left.shape[:2] != self.right.shape[:2]:
            raise ValueError(
                f"Outer was given a left factor of shape {tuple(left.shape)} and a right one of {tuple(right.shape)}; "
                "expected (N, T, O) and (N, T, I) with the same N and T"
            )
        self.samples, self.positions, self.fan_out = self.left.shape
        self.fan_in = self.right.shape[-1]
        self.shape = torch.Size((self.fan_out, self.fan_in)) if shape is None else shape

    def dense(self, out: Tensor | None = None) -> Tensor:
        target = None if out is None else out.view(self.samples, self.fan_out, self.fan_in)
        if self.positions == 1 and not self._outgrows_the_cache():
            rows = torch.mul(self.left.mT, self.right, out=target)
        else:
            rows = torch.bmm(self.left.mT, self.right, out=target)
        return rows.view(self.samples, *self.shape) if out is None else out

    def _outgrows_the_cache(self) -> bool:
        """Whether a matrix kernel beats a multiplication even for one position.

        It has more to set up, but doesn't read the memory that it writes.  Measured on two cores, multiplication against
        matrix kernel: 302 MB, 16.8 ms and 12.1; 67 MB, 1.40 and 1.45; 0.3 MB, 0.009 and 0.011.
        """
        size = self.samples * self.fan_out * self.fan_in * self.left.element_size()
        return self.left.is_cpu and size > 128 * 2**20

    def __getitem__(self, index: Index) -> Form:
        return Outer(self.left[index], self.right[index], self.shape)

    def scaled(self, factor: float | Tensor) -> Form:
        if self.fan_out < self.fan_in:
            return Outer(self.left * factor, self.right, self.shape)
        return Outer(self.left, self.right * factor, self.shape)

    def dot(self, v: Tensor) -> Tensor:
        v = v.reshape(self.fan_out, self.fan_in)
        if self.fan_in < self.fan_out:
            return einsum(self.left @ v, self.right, "n t i, n t i -> n")
        return einsum(self.left, self.right @ v.mT, "n t o, n t o -> n")

    def weighted_sum(self, w: Tensor) -> Tensor:
        left, right, w = self.left, self.right, w[:, None, None]
        left, right = (left * w, right) if self.fan_out < self.fan_in else (left, right * w)
        total = rearrange(left, "n t o -> o (n t)") @ rearrange(right, "n t i -> (n t) i")
        return total.view(self.shape)

    def gram(self, other: Form) -> Tensor:
        if not (isinstance(other, Outer) and self.positions == other.positions == 1 and self._fans == other._fans):
            return super().gram(other)
        return (self.left[:, 0] @ other.left[:, 0].mT) * (self.right[:, 0] @ other.right[:, 0].mT)

    def norms(self) -> Tensor:
        if self.positions == 1:
            return row_norms(self.left[:, 0]) * row_norms(self.right[:, 0])
        # Multiplications for a sample: T·T·(O + I) for products over positions, T·O·I to write it out.
        if self.positions * (self.fan_out + self.fan_in) >= self.fan_out * self.fan_in:
            return super().norms()
        return torch.cat([_norms_by_positions(part) for part in self.chunks(row=3 * self.positions**2)])

    def merge_key(self) -> Hashable:
        return Outer, self._fans, self.shape

    @classmethod
    def merge(cls, forms: Sequence[Form]) -> Form:
        outers = [form for form in forms if isinstance(form, Outer)]
        left, right = (torch.cat([getattr(form, side) for form in outers], dim=1) for side in ("left", "right"))
        return Outer(left, right, outers[0].shape)

    @property
    def _fans(self) -> tuple[int, int]:
        return self.fan_out, self.fan_in


def _norms_by_positions(form: Form) -> Tensor:
    """‖Σₜ lₜ ⊗ rₜ‖² = Σₛₜ ⟨lₛ, lₜ⟩⟨rₛ, rₜ⟩, nothing of size O·I; samples in which that sum cancels are written out.

    The products carry an error of about eps·(Σₜ‖lₜ‖‖rₜ‖)².  Where the square isn't far above it the difference of large
    numbers has no digits left (nearly equal positions of opposite sign: 100 % off in float32), and writing out has.
    """
    assert isinstance(form, Outer)
    left_scale, right_scale = row_scales(form.left.flatten(1)), row_scales(form.right.flatten(1))
    left, right = form.left / left_scale[:, None, None], form.right / right_scale[:, None, None]
    products = (left @ left.mT) * (right @ right.mT)
    square = products.sum((1, 2))
    size = products.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(1) ** 2
    exact = square > 1e4 * torch.finfo(square.dtype).eps * size
    norms = torch.where(exact, square, torch.ones_like(square)).sqrt() * left_scale * right_scale
    written = (~exact).nonzero()[:, 0]
    return norms.index_put((written,), Form.norms(form[written])) if len(written) else norms
