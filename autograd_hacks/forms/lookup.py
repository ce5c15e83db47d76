"""The weight of a table that is read by index, entry by entry or in bags."""

from __future__ import annotations

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form, Index
from autograd_hacks.forms.cost import costs_of
from autograd_hacks.forms.factored import Factored, Paired
from autograd_hacks.forms.numerics import divisors, looks_free, members, pairs_of, row_norms, slices_of
from autograd_hacks.forms.positions import OneHot
from autograd_hacks.forms.projection import AnyMap, SparseMap, check_is_map


class Lookup(Paired):
    """Row n of J has g[n, t] added at the table's row index[n, t], over T positions: a one-hot left factor.

    index: (N, T) integers in [0, entries)    g: (N, T, D)
    shape: the parameter's, any view of (entries, D), which is the default
    present: (N, T) booleans, the positions that aren't padding with zeros; None for all
    """

    cuts_well, varies, smallest, gradient = True, (0,), 0, 1

    def __init__(
        self, index: Tensor, g: Tensor, entries: int, shape: torch.Size | None = None, present: Tensor | None = None
    ) -> None:
        self.index, self.g, self.entries, self.samples, self.present = index, g, entries, index.shape[0], present
        self.shape = torch.Size((entries, g.shape[2])) if shape is None else shape
        self.pair, self.held = (OneHot(index, entries), g), (g, index) if present is None else (g, index, present)

    def _of(self, *held: Tensor) -> Lookup:
        g, index, *present = held
        return Lookup(index, g, self.entries, self.shape, *present)

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        if out is not None and not out.is_contiguous():
            return out.copy_(self.dense(factor=factor))
        return self.added_to(self.g.new_zeros(self.samples, *self.shape) if out is None else out.zero_(), factor)

    def added_to(self, rows: Tensor, factor: float = 1.0) -> Tensor:
        """rows + factor · J, in the memory of the rows, which must be contiguous."""
        values = self._times(factor)[0].to(rows.dtype)
        if self.samples > 1 and not self.index.stride(0):  # one index for all: 48 µs instead of 93, of 16 × 289 entries of 4
            rows.view(self.samples, self.entries, self.g.shape[2]).index_add_(1, self.index[0], values)
        else:
            rows.view(self.samples * self.entries, self.g.shape[2]).index_add_(0, self._slots(), values.flatten(0, 1))
        return rows

    def block(self, rows: slice) -> Form:
        first, last, _ = rows.indices(self.shape[0])
        each, count = self.entries // max(1, self.shape[0]), max(0, last - first)
        inside = (self.index >= first * each) & (self.index < last * each)
        index, shape = torch.where(inside, self.index - first * each, 0), torch.Size((count, *self.shape[1:]))
        return Lookup(index, self.g.masked_fill(~inside[..., None], 0), count * each, shape)

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        if u.shape[1] != self.entries:
            return super().terms(u, v)
        return (v @ self.g.flatten(0, 1).mT).to(self.sum_dtype) * u[:, self.index.flatten()]

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        for each, weights in pairs_of(total, w):
            for samples, part in self.chunks(max_bytes, self.held_size()):
                values, *_ = part._times(weights[samples].to(total.dtype))
                each.view(self.entries, self.g.shape[2]).index_add_(0, part.index.flatten(), values.flatten(0, 1))
        return total

    def second_moment(self, w: Tensor, about: Tensor | None = None, max_bytes: int = BUDGET) -> Tensor:
        if about is not None:
            return super().second_moment(w, about, max_bytes)
        total = self.new_sums(*self.shape).abs()
        for samples, part in self.chunks(max_bytes, 3 * self.held_size()):
            slots, touched = part._touched()
            weights = w[samples][slots // self.entries].to(total.dtype)
            total.view(self.entries, touched.shape[1]).index_add_(
                0, slots % self.entries, touched.abs().square() * weights[:, None]
            )
        return total

    def norms(self, max_bytes: int = BUDGET) -> Tensor:
        found, costs = [], costs_of(self.g.device)
        for _, part in self.chunks(max_bytes, 3 * self.held_size()):
            if part.samples * self.shape.numel() * costs.write < 2 * costs.call + 5 * costs.write * part.g.numel():
                # Rows are written sooner than it is found which entries were read: of 16 samples of 64 positions, on one
                # core, 64 × 128 in 250 µs instead of 540, and 500 × 128 in 440 instead of 450.
                found.append(Form.norms(part, max_bytes))
            else:
                slots, touched = part._touched()
                found.append(_joined(row_norms(touched), slots // self.entries, part.samples))
        return torch.cat(found)

    def tangent(self, place: int, v: Tensor) -> Tensor:
        return v.reshape(self.entries, self.g.shape[2])[self.index]

    def _slots(self) -> Tensor:
        """Where each (sample, position) lands in N tables laid end to end."""
        samples = torch.arange(self.samples, device=self.index.device)
        return (samples[:, None] * self.entries + self.index).flatten()

    def _touched(self) -> tuple[Tensor, Tensor]:
        """The slots that were read, and their values; positions that read the same entry are added up."""
        return _added(self._slots(), self.g.flatten(0, 1))


def _added(slots: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Each slot once, and the sum of its values.  slots: M integers, at least 0    values: M ...

    Where the host would have to wait for their number there are M of both, as many slots 0 with sums 0 behind the others.
    """
    if looks_free(slots) and not slots.is_meta:
        found, place = slots.unique(return_inverse=True)
    else:
        ordered, order = slots.sort()
        is_first = torch.cat([ordered.new_ones(min(1, len(slots)), dtype=torch.bool), ordered[1:] != ordered[:-1]])
        number = is_first.cumsum(0) - 1
        found, place = (
            torch.zeros_like(slots).scatter_(0, number, ordered),
            torch.empty_like(order).scatter_(0, order, number),
        )
    return found, values.new_zeros(len(found), *values.shape[1:]).index_add(0, place, values)


def _joined(norms: Tensor, samples: Tensor, count: int) -> Tensor:
    """The norms of samples, N, from those of their parts.  norms, samples: M    count: N"""
    scale = divisors(norms.new_zeros(count).scatter_reduce(0, samples, norms.detach(), "amax"))
    shares = (norms / scale[samples]) ** 2
    return norms.new_zeros(count).index_add(0, samples, shares).sqrt() * scale


class Bags(Factored):
    """Row n of J is c[n] ⊗ g[n], c[n] having scale[m] added at index[m] for each entry m of bag n.  Nothing of size M × D is
    stored.

    g: (N, D)    scale: (M,)    index: (M,) integers in [0, entries)    bags: (M,) in [0, N), ascending: each entry's bag
    """

    cuts_well, varies, smallest = True, (0,), 0

    def __init__(self, g: Tensor, scale: Tensor, index: Tensor, bags: Tensor, entries: int) -> None:
        self.g, self.scale, self.index, self.bags, self.entries = g, scale, index, bags, entries
        self.held, self.samples, self.shape = (g, scale, index, bags), len(g), torch.Size((entries, g.shape[1]))

    def _of(self, *held: Tensor) -> Bags:
        return Bags(*held, self.entries)  # type: ignore[call-arg, arg-type]  # four tensors, as in `held`

    def __getitem__(self, index: Index) -> Bags:
        if isinstance(index, slice) and index == slice(0, self.samples):
            return self
        wanted = torch.arange(self.samples, device=self.bags.device)[index]
        entries, bags = members(self.bags, wanted)
        return self._of(self.g[wanted], self.scale[entries], self.index[entries], bags)

    def block(self, rows: slice) -> Bags:
        first, last, _ = rows.indices(self.entries)
        inside = ((self.index >= first) & (self.index < last)).nonzero()[:, 0]
        return Bags(self.g, self.scale[inside], self.index[inside] - first, self.bags[inside], max(0, last - first))

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        if out is not None and not out.is_contiguous():
            return out.copy_(self.dense(factor=factor))
        rows = self.g.new_zeros(self.samples, *self.shape) if out is None else out.zero_()
        by_slot = rows.view(self.samples * self.entries, self.shape[1])
        self._add_to(by_slot, self.bags * self.entries + self.index, self.scale * factor, BUDGET)
        return rows

    def row_size(self) -> int:
        return self.shape.numel() + 2 * self.entries

    def tangent(self, place: int, v: Tensor) -> Tensor:
        return self._of_table(v)

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        return (v @ self.g.mT).to(self.sum_dtype) * self._of_table(u.mT).mT

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        for each, weights in pairs_of(total, w):
            self._add_to(each, self.index, self.scale * weights.to(total.dtype)[self.bags], max_bytes)
        return total

    def second_moment(self, w: Tensor, about: Tensor | None = None, max_bytes: int = BUDGET) -> Tensor:
        if about is not None:
            return super().second_moment(w, about, max_bytes)
        wide = self.wide()
        slots, counts = _added(self.bags * self.entries + self.index, wide.scale)
        squares = wide.g.abs().square(), counts.square(), slots % self.entries, slots // self.entries
        return self._of(*squares).weighted_sum(w, max_bytes)

    def norms(self, max_bytes: int = BUDGET) -> Tensor:
        wide = self.wide()
        slots, counts = _added(self.bags * self.entries + self.index, wide.scale)
        return _joined(counts.abs(), slots // self.entries, self.samples) * row_norms(wide.g)

    def gram(self, other: Form, max_bytes: int = BUDGET) -> Tensor:
        if not isinstance(other, Bags):
            return super().gram(other, max_bytes)
        mine, theirs, found = self.wide(), other.wide(), []
        for piece in slices_of(other.samples, max_bytes // (4 * max(1, self.entries) * self.sum_dtype.itemsize)):
            part = theirs[piece]
            counts = part.scale.new_zeros(self.entries, part.samples)
            found.append(mine._of_table(counts.index_put((part.index, part.bags), part.scale, accumulate=True)))
        return torch.cat(found, 1) * (mine.g @ theirs.g.mH)

    def project(self, random: AnyMap, max_bytes: int = BUDGET) -> Tensor:
        check_is_map(random)
        if isinstance(random, SparseMap):
            return super().project(random, max_bytes)
        wide, along = self.wide(), self.new_sums(self.samples, random.dim)
        for columns, u, v in random.columns(along):
            along[:, columns] = wide._of_table(u.mT) * (wide.g @ v.mT)
        return along

    def _add_to(self, total: Tensor, slots: Tensor, scale: Tensor, max_bytes: int) -> None:
        """Adds scale[m] times its bag's g to total[slots[m]] for each entry m, some at a time."""
        some = max_bytes // (4 * max(1, self.shape[1]) * total.element_size())
        for piece in slices_of(len(slots), some) if len(slots) else ():
            values = self.g[self.bags[piece]].to(total.dtype) * scale[piece, None]
            total.index_add_(0, slots[piece], values.to(total.dtype))

    def _of_table(self, table: Tensor) -> Tensor:
        """c · table, (N, F).  table: entries F"""
        # Where each bag begins; `torch.bincount` would make the host wait for the largest.
        starts = torch.searchsorted(self.bags, torch.arange(self.samples, device=self.bags.device))
        # The function of torch.nn.functional may be a user's.
        return torch.embedding_bag(table.contiguous(), self.index, starts, False, 0, False, self.scale.to(table))[0]
