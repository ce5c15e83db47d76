"""Sums of outer products: Linear, and everything that reduces to a matrix product."""

from __future__ import annotations

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form
from autograd_hacks.forms.cost import saving
from autograd_hacks.forms.factored import Paired, norms_by_positions
from autograd_hacks.forms.numerics import pairs_of, row_norms

CALL = 2**17
"""How many multiplications take as long as a call of the kernel."""


class Outer(Paired):
    """Row n of J is Σₜ left[n, t] ⊗ right[n, t], the sum over T positions.

    left: (N, T, O), or (N, O) for one position; positions on several axes are flattened
    right: (N, T, I), or (N, I)
    shape: the parameter's, any view of (O, I); by default (O, I)
    gradient: which factor is the gradient, 0 or 1; the other is the input
    present: (N, T) booleans, the positions that aren't padding with zeros; None for all
    """

    cuts_well = True

    def __init__(
        self, left: Tensor, right: Tensor, shape: torch.Size | None = None, gradient: int = 0, present: Tensor | None = None
    ) -> None:
        axes = left.ndim, right.ndim
        self.flat = (left, right) if axes == (2, 2) else None  # for one position, without its axis
        if axes[0] > 3:
            left, right = left.flatten(1, -2), right.flatten(1, -2)
        self.pair = left.unsqueeze(1) if axes[0] == 2 else left, right.unsqueeze(1) if axes[1] == 2 else right
        self.left, self.right = self.pair
        (self.samples, self.positions, self.fan_out), (*rows, self.fan_in) = self.left.shape, self.right.shape
        if rows != [self.samples, self.positions]:
            raise ValueError(
                f"Outer: the left factor has shape {tuple(left.shape)} and the right one {tuple(right.shape)}; "
                "expected (N, T, O) and (N, T, I) with the same N and T."
            )
        self.shape = torch.Size((self.fan_out, self.fan_in)) if shape is None else shape
        self.gradient, self.present, self.varies = gradient, present, (gradient, 1 - gradient)
        self.held = self.pair if present is None else (*self.pair, present)
        self.smallest = 0 if self.fan_out < self.fan_in else 1

    def _of(self, *held: Tensor) -> Outer:
        left, right, *present = held
        return Outer(left, right, self.shape, self.gradient, *present)

    def viewed(self, shape: torch.Size) -> Outer:
        """The same rows in another shape."""
        return Outer(self.left, self.right, shape, self.gradient, self.present)

    def transposed(self, shape: torch.Size) -> Outer:
        """The rows of the parameter's transpose.  shape: the transpose's"""
        return Outer(self.right, self.left, shape, 1 - self.gradient, self.present)

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        is_matrix, left, right = self.shape == (self.fan_out, self.fan_in), self.left, self.right
        target = out if out is None or is_matrix else out.view(self.samples, self.fan_out, self.fan_in)
        # A matrix kernel has a larger overhead than a multiplication, but doesn't read the memory that it writes.  Measured
        # on two cores, multiplication first, in ms: 302 MB, 16.8 and 12.1; 67 MB, 1.40 and 1.45; 0.3 MB, 0.009 and 0.011.
        size = self.samples * self.fan_out * self.fan_in * left.dtype.itemsize
        is_multiplied = self.positions == 1 and not (left.is_cpu and size > 128 * 2**20)
        if is_multiplied or not factor:  # times 0, in half precision, the kernel leaves what the memory held
            (left, right, *_), factor = self._times(factor), 1.0
        if is_multiplied:
            rows = torch.mul(left.mT, right, out=target)
        elif target is not None and self.present is not None and (ends := self._ends(self.present)):
            for own, a, b, end in zip(target, left, right, ends):
                torch.addmm(own, a[:end].mT, b[:end], beta=0, alpha=factor, out=own)
        elif factor == 1:
            rows = torch.bmm(left.mT, right, out=target)
        else:  # the matrix kernel multiplies by it at no cost
            nothing = left.new_empty(()) if target is None else target
            rows = torch.baddbmm(nothing, left.mT, right, beta=0, alpha=factor, out=target)
        # A view would keep its base, so that whoever wants memory of its own copies it.
        return (
            out if out is not None else rows.contiguous() if is_matrix else rows.contiguous().view(self.samples, *self.shape)
        )

    def _ends(self, present: Tensor) -> list[int]:
        """How many positions each sample has, without padding; empty if leaving that out saves less than calls take."""
        each, numbers = self.fan_out * self.fan_in, torch.arange(1, self.positions + 1, device=present.device)
        ends = (present * numbers).amax(1).tolist() if present.is_cpu and self.positions * each > CALL else []
        return ends if (self.samples * self.positions - sum(ends)) * each > self.samples * CALL else []

    def block(self, rows: slice) -> Form:
        entries = self.shape[0]
        each = self.fan_out // max(1, entries)  # numbers of the left factor
        if each * entries != self.fan_out:
            return super().block(rows)
        first, last, _ = rows.indices(entries)
        left = self.left[..., first * each : last * each]
        return Outer(left, self.right, torch.Size((max(0, last - first), *self.shape[1:])), self.gradient, self.present)

    def saving(self, fresh: bool = False) -> float:
        return 0.0 if self.positions == 1 else saving([self.pair], fresh)

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        # Multiplications per sample and entry: K·T for one sum after the other, T + K with written rows.
        if w.ndim == 2 and len(w) * self.positions > len(w) + self.positions:
            return super().weighted_sum(w, max_bytes, total)
        size = self.positions * min(self.fan_in, self.fan_out)
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        for each, weights in pairs_of(total, w):
            sums = each.view(self.fan_out, self.fan_in)
            for samples, part in self.chunks(max_bytes, size):
                left, right, *_ = part._times(weights[samples].to(total.dtype))
                sums.addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))
        return total

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        if self.shape == (1, self.fan_out, self.fan_in):  # one of several matrices, for which v is a product
            u, v = u * v[:, :: self.fan_in], v[:, : self.fan_in]
        if (u.shape[1], v.shape[1]) != (self.fan_out, self.fan_in):
            return super().terms(u, v)
        left, right = (self.left.flatten(0, 1), self.right.flatten(0, 1)) if self.flat is None else self.flat
        return (u @ left.mT).to(self.sum_dtype) * (v @ right.mT)

    def second_moment(self, w: Tensor, about: Tensor | None = None, max_bytes: int = BUDGET) -> Tensor:
        if self.positions > 1 or about is not None or self.like.is_complex():
            return super().second_moment(w, about, max_bytes)
        total = self.new_sums(*self.shape)
        for samples, part in self.chunks(max_bytes // 2, self.fan_in + self.fan_out):
            Outer(part.left.square(), part.right.square(), self.shape).weighted_sum(w[samples], max_bytes // 2, total)
        return total

    def norms(self, max_bytes: int = BUDGET) -> Tensor:
        if self.positions == 1:
            sizes = [row_norms(part.left[:, 0]) * row_norms(part.right[:, 0]) for _, part in self.chunks(max_bytes, 1)]
            return torch.cat(sizes) if len(sizes) > 1 else sizes[0]
        return norms_by_positions(self, max_bytes)

    def tangent(self, place: int, v: Tensor) -> Tensor:
        v = v.reshape(self.fan_out, self.fan_in)
        return self.right @ v.mT if place == 0 else self.left @ v


class Zero(Outer):
    """The rows of a parameter that the loss did not reach: outer products over no positions, which cost nothing.

    like: a tensor with the rows' dtype and device
    """

    def __init__(self, samples: int, shape: torch.Size, like: Tensor) -> None:
        left, right = (like.new_zeros(samples, 0, size) for size in (shape[:1].numel(), shape[1:].numel()))
        super().__init__(left, right, shape)
