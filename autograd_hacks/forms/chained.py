"""A parameter that is used through a value computed from it."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form, Index
from autograd_hacks.forms.directions import directions
from autograd_hacks.forms.numerics import put, slices_of
from autograd_hacks.forms.terms import add

Pull = Callable[[Tensor, bool], Tensor]
"""φ's vector-Jacobian product, from v's shape to θ's.  The second argument says whether there are several rows or one.  It
can be differentiated if the rows require gradients."""

_SMALL = 2**16
"""Rows up to this size go back in one batch.  Measured on one core, in ms, in one batch and one by one: 64 numbers, 0.05
and 0.29; a product of 256 × 64 with 64 × 256, 4.2 and 1.9; 512 × 256 normalised, 10.8 and 8.5; a standardised
256 × 64 × 3 × 3, 33 and 18."""


class Chained(Form):
    """J of a parameter θ that is used through v = φ(θ), where φ involves no samples: v's J times φ's Jacobian.

    form: v's J
    pull: see ``Pull``
    shape: θ's
    like: a tensor with the rows' dtype and device
    """

    writes_in_place = False

    def __init__(self, form: Form, pull: Pull, shape: torch.Size, like: Tensor) -> None:
        self.form, self.pull, self.samples, self.shape = form, pull, form.samples, torch.Size(shape)
        self._like = like.detach().new_empty(0)
        self.held = tuple(tensor for leaf in form.leaves() for tensor in leaf.held)
        self.sums_cheaply = form.sums_cheaply

    @property
    def like(self) -> Tensor:
        return self._like

    def saving(self, fresh: bool = False) -> float:
        return self.form.saving()

    def row_size(self) -> int:
        return 2 * self.shape.numel() + self.form.shape.numel() + self.form.row_size()

    def _pulled(self, rows: Tensor) -> Tensor:
        """Several rows of v's shape, converted to θ's shape."""
        if not len(rows):
            return self.like.new_zeros(0, *self.shape)
        if not self.like.is_cpu or rows[0].numel() + self.shape.numel() <= _SMALL:
            with suppress(RuntimeError):  # torch can't run some operations for many rows; any other error comes again
                return self.pull(rows, True)
        return torch.stack([self.pull(row, False) for row in rows])

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        pieces = slices_of(self.samples, BUDGET // (self.row_size() * self.sum_dtype.itemsize))
        if len(pieces) == 1:
            return put(self._pulled(self.form.dense(factor=factor)).to(self.like.dtype).contiguous(), out)
        out = self.like.new_empty(self.samples, *self.shape) if out is None else out
        for piece in pieces:
            out[piece] = self._pulled(self.form[piece].dense(factor=factor))
        return out

    def __getitem__(self, index: Index) -> Form:
        return Chained(self.form[index], self.pull, self.shape, self.like)

    def to(self, dtype: torch.dtype) -> Form:
        if self.like.dtype == dtype:
            return self
        inside = dtype.to_complex() if self.form.like.is_complex() else dtype.to_real()
        return Chained(self.form.to(inside), self.pull, self.shape, self.like.to(dtype))

    def blocks(self, budget: int) -> Iterator[tuple[slice, Form]]:
        yield slice(0, self.shape[0] if self.shape else 1), self  # a few entries cost as much as all

    def merge_key(self) -> Hashable:
        return Chained, self.pull, self.form.shape, self.shape, self.like.dtype

    def merge(self, others: Sequence[Form]) -> Form:
        forms = [self.form, *(other.form for other in others if isinstance(other, Chained))]
        return Chained(add(forms), self.pull, self.shape, self.like)

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        """Two numbers, whose size says how much the way back may make of rounding."""
        like = self.form.like
        at = directions("", 0, self.form.shape, like.dtype, like.device)
        values = self.form.weighted_sum(torch.ones(self.samples, dtype=self.sum_dtype.to_real(), device=like.device))
        size = torch.linalg.vector_norm(self.form.terms(*at)[0]) + torch.linalg.vector_norm(values)
        noise = torch.outer(at[0][0], at[1][0]).to(values.dtype).view(values.shape)
        noise = self.pull(noise * (size / torch.linalg.vector_norm(noise)), False)
        total = (u.to(self.sum_dtype) @ self.pull(values, False).reshape(u.shape[1], v.shape[1]).to(self.sum_dtype) * v).sum(
            1
        )
        spread = torch.linalg.vector_norm(noise).to(total.dtype)
        return torch.stack([total - spread, spread.expand_as(total)], 1)

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        if w.ndim == 2 and (len(w) > self.samples or len(w) * self.row_size() * self.sum_dtype.itemsize > budget):
            return super().weighted_sum(w, budget, total)
        sums = self.form.weighted_sum(w, budget)
        found = (self._pulled(sums) if w.ndim == 2 else self.pull(sums, False)).to(self.sum_dtype)
        return found.contiguous() if total is None else total.add_(found)
