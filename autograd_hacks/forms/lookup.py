"""The weight of a table that is read by index."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import Form, Index, row_norms


class Lookup(Form):
    """Row n of J has g[n, t] added at the table's row index[n, t], over T positions: a one-hot left factor.

    index: (N, T) integers in [0, entries)    g: (N, T, D)    The parameter's shape is (entries, D).
    """

    def __init__(self, index: Tensor, g: Tensor, entries: int) -> None:
        self.index, self.g, self.entries = index, g, entries
        self.samples, self.shape = len(index), torch.Size((entries, g.shape[2]))

    def dense(self, out: Tensor | None = None) -> Tensor:
        rows = self.g.new_zeros(self.samples, *self.shape) if out is None else out.zero_()
        rows.view(self.samples * self.entries, self.shape[1]).index_add_(0, self._slots(), self.g.flatten(0, 1))
        return rows

    def __getitem__(self, index: Index) -> Form:
        return Lookup(self.index[index], self.g[index], self.entries)

    def scaled(self, factor: float | Tensor) -> Form:
        return Lookup(self.index, self.g * factor, self.entries)

    def dot(self, v: Tensor) -> Tensor:
        return (v[self.index] * self.g).sum((1, 2))

    def weighted_sum(self, w: Tensor) -> Tensor:
        values = (self.g * w[:, None, None]).flatten(0, 1)
        return values.new_zeros(self.shape).index_add(0, self.index.flatten(), values)

    def norms(self) -> Tensor:
        # Positions that read the same entry are added up first; entries that were not read are zero.
        slots, place = self._slots().unique(return_inverse=True)
        touched = self.g.new_zeros(len(slots), self.shape[1]).index_add(0, place, self.g.flatten(0, 1))
        norms = row_norms(touched)
        largest = norms.new_zeros(self.samples).scatter_reduce(0, slots // self.entries, norms.detach(), "amax")
        scale = torch.where(largest.isfinite() & (largest > 0), largest, torch.ones_like(largest))
        shares = (norms / scale[slots // self.entries]) ** 2
        return norms.new_zeros(self.samples).index_add(0, slots // self.entries, shares).sqrt() * scale

    def merge_key(self) -> Hashable:
        return Lookup, self.shape

    @classmethod
    def merge(cls, forms: Sequence[Form]) -> Form:
        lookups = [form for form in forms if isinstance(form, Lookup)]
        index, g = (torch.cat([getattr(form, name) for form in lookups], dim=1) for name in ("index", "g"))
        return Lookup(index, g, lookups[0].entries)

    def _slots(self) -> Tensor:
        """Where each (sample, position) lands in N tables laid end to end."""
        samples = torch.arange(self.samples, device=self.index.device)
        return (samples[:, None] * self.entries + self.index).flatten()
