"""The form of a parameter that the loss did not reach."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form, Index
from autograd_hacks.forms.positions import Positions
from autograd_hacks.forms.projection import RandomMap


class Zero(Form):
    """The rows of a parameter that the loss did not reach: nothing, at no cost.

    like: a tensor of the rows' dtype and device
    """

    cuts_well = True

    def __init__(self, samples: int, shape: torch.Size, like: Tensor) -> None:
        self.samples, self.shape, self._like = samples, shape, like.detach()

    @property
    def like(self) -> Tensor:
        return self._like

    def row_size(self) -> int:
        return 0

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        return self._like.new_zeros(self.samples, *self.shape) if out is None else out.zero_()

    def matrix(self) -> Tensor:
        return self._like.new_zeros(()).expand(self.samples, self.shape.numel())

    def __getitem__(self, index: Index) -> Form:
        samples = torch.empty(self.samples)[index.cpu() if isinstance(index, Tensor) else index].shape[0]
        return Zero(samples, self.shape, self._like)

    def to(self, dtype: torch.dtype) -> Form:
        return Zero(self.samples, self.shape, self._like.new_zeros(0, dtype=dtype))

    def block(self, rows: slice) -> Form:
        return Zero(self.samples, torch.Size((len(range(*rows.indices(self.shape[0]))), *self.shape[1:])), self._like)

    def factors(self, others: Sequence[Form] = ()) -> Positions | None:
        left, right = (self.new_sums(0, 1, size) for size in (self.shape[0], self.shape[1:].numel()))
        return [left], right, None

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        return self.new_sums(self.samples)

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        return self.new_sums(*w.shape[:-1], *self.shape) if total is None else total

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        zeros = self.new_sums(*self.shape).abs()
        return zeros if about is None else zeros + w.to(zeros.dtype).sum() * about.abs().square()

    def gram(self, other: Form, budget: int = BUDGET) -> Tensor:
        return self.new_sums(self.samples, other.samples)

    def norms(self, budget: int = BUDGET) -> Tensor:
        return self.new_sums(self.samples).abs()

    def project(self, random: RandomMap, budget: int = BUDGET) -> Tensor:
        return self.new_sums(self.samples, random.dim)
