"""A parameter that is read by way of a value that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form, Index
from autograd_hacks.forms.numerics import put, stretches
from autograd_hacks.forms.source import Source
from autograd_hacks.forms.sums import add

Pull = Callable[[Tensor, bool], Tensor]
"""φ's vector-Jacobian product: from v's shape to the parameter's, of many rows below each other or of one.  It is linear,
and can be differentiated where the rows require gradients."""


def pull_along(v: Tensor, leaf: Tensor) -> Pull:
    """The vector-Jacobian product of φ, where v = φ(leaf) has its graph, which is kept."""

    def pull(rows: Tensor, batched: bool) -> Tensor:
        grows = rows.requires_grad and torch.is_grad_enabled()
        options = {"retain_graph": True, "create_graph": grows, "is_grads_batched": batched}
        return torch.autograd.grad(v, leaf, rows.to(v.dtype), **options)[0]

    return pull


class Chained(Form):
    """J of a parameter θ by way of a value v = φ(θ), where φ knows of no samples: v's J times that of φ.

    form: v's J    pull: see `Pull`; with `pull_along`, in v's own dtype    shape: θ's
    like: a tensor of the rows' dtype and device
    """

    writes_in_place = False

    def __init__(self, form: Form, pull: Pull, shape: torch.Size, like: Tensor) -> None:
        self.form, self.pull, self.samples, self.shape = form, pull, form.samples, torch.Size(shape)
        self._like = like.detach().new_empty(0)
        self.held = tuple(tensor for leaf in form.leaves() for tensor in leaf.held)

    @property
    def like(self) -> Tensor:
        return self._like

    @property
    def sources(self) -> Sequence[Source]:
        return self.form.sources

    @property
    def sums_cheaply(self) -> bool:  # type: ignore[override]
        return self.form.sums_cheaply

    def saving(self) -> float:
        return self.form.saving() * self.form.shape.numel() / max(1, self.shape.numel()) if self.samples else 0.0

    def row_size(self) -> int:
        return 2 * self.shape.numel() + self.form.shape.numel() + self.form.row_size()

    def held_size(self) -> int:
        return self.form.held_size()

    def _pulled(self, rows: Tensor) -> Tensor:
        """Rows of v's shape below each other, brought to θ."""
        if not len(rows):
            return self.like.new_zeros(0, *self.shape)
        try:
            return self.pull(rows, True)
        except RuntimeError:  # φ has an operation that torch can't run for many rows; whatever else it is comes again
            return torch.stack([self.pull(row, False) for row in rows])

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        return put(self._pulled(self.form.dense(factor=factor)).to(self.like.dtype).contiguous(), out)

    def matrix(self) -> Tensor:
        rows = self._pulled(self.form.matrix().view(self.samples, *self.form.shape))
        return rows.to(self.like.dtype).reshape(self.samples, self.shape.numel())

    def __getitem__(self, index: Index) -> Form:
        return Chained(self.form[index], self.pull, self.shape, self.like)

    def to(self, dtype: torch.dtype) -> Form:
        if self.like.dtype == dtype:
            return self
        inside = dtype.to_complex() if self.form.like.is_complex() else dtype.to_real()
        return Chained(self.form.to(inside), self.pull, self.shape, self.like.to(dtype))

    def blocks(self, budget: int) -> Iterator[tuple[slice, Form]]:
        yield slice(0, self.shape[0] if self.shape else 1), self  # some entries cost as much as all

    def merge_key(self) -> Hashable:
        return Chained, self.pull, self.form.shape, self.shape, self.like.dtype

    def merge(self, others: Sequence[Form]) -> Form:
        forms = [self.form, *(other.form for other in others if isinstance(other, Chained))]
        return Chained(add(forms), self.pull, self.shape, self.like)

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        if w.ndim == 2 and len(w) > self.samples:
            return super().weighted_sum(w, budget, total)
        if w.ndim == 1:  # one sum, brought to θ once
            found = self.pull(self.form.weighted_sum(w, budget), False).to(self.sum_dtype)
            return found.contiguous() if total is None else total.add_(found)
        total = self.new_sums(len(w), *self.shape) if total is None else total
        each = (self.form.shape.numel() + 2 * self.shape.numel()) * self.sum_dtype.itemsize
        for piece in stretches(len(w), budget // max(1, 2 * each)):
            total[piece] += self._pulled(self.form.weighted_sum(w[piece], budget // 2)).to(total.dtype)
        return total
