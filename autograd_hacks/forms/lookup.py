"""The weight of a table that is read by index."""

from __future__ import annotations

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form
from autograd_hacks.forms.factored import Paired
from autograd_hacks.forms.numerics import divisors, pairs_of, row_norms
from autograd_hacks.forms.positions import OneHot


class Lookup(Paired):
    """Row n of J has g[n, t] added at the table's row index[n, t], over T positions: a one-hot left factor.

    index: (N, T) integers in [0, entries)    g: (N, T, D)
    shape: the parameter's, any view of (entries, D), which it is unless told
    """

    cuts_well, varies, smallest = True, (0,), 0

    def __init__(self, index: Tensor, g: Tensor, entries: int, shape: torch.Size | None = None) -> None:
        self.index, self.g, self.entries, self.samples = index, g, entries, len(index)
        self.shape = torch.Size((entries, g.shape[2])) if shape is None else shape
        self.pair, self.held = (OneHot(index, entries), g), (g, index)

    def _of(self, *held: Tensor) -> Lookup:
        g, index = held
        return Lookup(index, g, self.entries, self.shape)

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        if out is not None and not out.is_contiguous():
            return out.copy_(self.dense(factor=factor))
        values, _ = self._times(factor)
        rows = self.g.new_zeros(self.samples, *self.shape) if out is None else out.zero_()
        rows.view(self.samples * self.entries, self.g.shape[2]).index_add_(0, self._slots(), values.flatten(0, 1))
        return rows

    def block(self, rows: slice) -> Form:
        first, last, _ = rows.indices(self.entries)
        inside = (self.index >= first) & (self.index < last)
        index, entries = torch.where(inside, self.index - first, 0), max(0, last - first)
        return Lookup(index, self.g.masked_fill(~inside[..., None], 0), entries, torch.Size((entries, *self.shape[1:])))

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        for each, weights in pairs_of(total, w):
            for samples, part in self.chunks(budget, self.held_size()):
                values, _ = part._times(weights[samples].to(total.dtype))
                each.view(self.entries, self.g.shape[2]).index_add_(0, part.index.flatten(), values.flatten(0, 1))
        return total

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        if about is not None:
            return super().second_moment(w, about, budget)
        total = self.new_sums(*self.shape).abs()
        for samples, part in self.chunks(budget, 3 * self.held_size()):
            slots, touched = part._touched()
            weights = w[samples][slots // self.entries].to(total.dtype)
            total.view(self.entries, touched.shape[1]).index_add_(
                0, slots % self.entries, touched.abs().square() * weights[:, None]
            )
        return total

    def norms(self, budget: int = BUDGET) -> Tensor:
        found = []
        for _, part in self.chunks(budget, 3 * self.held_size()):
            slots, touched = part._touched()
            samples, norms = slots // self.entries, row_norms(touched)
            largest = norms.new_zeros(part.samples).scatter_reduce(0, samples, norms.detach(), "amax")
            scale = divisors(largest)
            shares = (norms / scale[samples]) ** 2
            found.append(norms.new_zeros(part.samples).index_add(0, samples, shares).sqrt() * scale)
        return torch.cat(found)

    def tangent(self, place: int, v: Tensor) -> Tensor:
        return v.reshape(self.entries, self.g.shape[2])[self.index]

    def _slots(self) -> Tensor:
        """Where each (sample, position) lands in N tables laid end to end."""
        samples = torch.arange(self.samples, device=self.index.device)
        return (samples[:, None] * self.entries + self.index).flatten()

    def _touched(self) -> tuple[Tensor, Tensor]:
        """The slots that were read, and what is there; positions that read the same entry are added up."""
        slots, place = self._slots().unique(return_inverse=True)
        return slots, self.g.new_zeros(len(slots), self.g.shape[2]).index_add(0, place, self.g.flatten(0, 1))
