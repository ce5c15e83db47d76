"""Rows that come of running a module again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form, Index
from autograd_hacks.forms.numerics import pairs_of, put
from autograd_hacks.forms.source import Source


class Replay(Form):
    """J of a parameter inside a module, by backward passes through the module's own forward.

    source: runs it    name: the parameter's in the module    like: a tensor of the rows' dtype and device
    samples: how many the call has    index: some of them; None for all
    """

    def __init__(
        self, source: Source, name: str, samples: int, shape: torch.Size, like: Tensor, index: Tensor | None = None
    ) -> None:
        self.source, self.name, self.shape, self.index, self._like = source, name, shape, index, like
        self.all_samples, self.samples = samples, samples if index is None else len(index)

    @property
    def like(self) -> Tensor:
        return self._like

    def row_size(self) -> int:
        return self.source.row_size

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        return put(self.source.rows(self.name, self.index, keep=False).to(self.like.dtype), out, factor)

    def matrix(self) -> Tensor:
        rows = self.source.rows(self.name, self.index, keep=True)
        return rows.to(self.like.dtype).reshape(self.samples, self.shape.numel())

    def __getitem__(self, index: Index) -> Form:
        every = torch.arange(self.all_samples, device=self._like.device) if self.index is None else self.index
        return Replay(self.source, self.name, self.all_samples, self.shape, self._like, every[index])

    def to(self, dtype: torch.dtype) -> Form:
        if dtype == self.like.dtype:
            return self
        like = self._like.new_zeros(0, dtype=dtype)
        return Replay(self.source, self.name, self.all_samples, self.shape, like, self.index)

    @property
    def sources(self) -> Sequence[Source]:
        return [self.source]

    def saving(self, fresh: bool = False) -> float:
        return float("inf")  # the module is run once and not twice

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        # A backward pass for each sum, or about one for each sample; the sums of the former don't lead back to the weights.
        differentiable = w.requires_grad and torch.is_grad_enabled()
        if differentiable or (w.ndim == 2 and 2 * len(w) > self.samples):
            return super().weighted_sum(w, budget, total)
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        for each, weights in pairs_of(total, w):
            if self.index is not None:
                weights = weights.new_zeros(self.all_samples).index_add(0, self.index, weights)
            each += self.source.weighted_sum(self.name, weights)
        return total
