"""A parameter of which slices of the first axis are read: an expert of a stack, a third of a joint projection."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form
from autograd_hacks.forms.composite import Composite
from autograd_hacks.forms.numerics import row_norms
from autograd_hacks.forms.outer import Zero
from autograd_hacks.forms.projection import RandomMap
from autograd_hacks.forms.sums import Sum, add

Bounds = tuple[int, int]
"""Where a slice of the first axis starts and stops."""


class Placed(Composite):
    """J that has the rows of other forms in slices of the parameter's first axis, and zeros elsewhere.

    entries: {(start, stop): form of shape ``(stop - start, *shape[1:])``}, at least one, for the same samples, disjoint
    shape: the parameter's
    Raises ValueError for others.
    """

    def __init__(self, entries: Mapping[Bounds, Form], shape: torch.Size) -> None:
        self.entries, self.shape = dict(sorted(entries.items())), torch.Size(shape)
        self.parts = list(self.entries.values())
        wrong = [
            f"a form of shape {tuple(form.shape)} at {start}:{stop}"
            for (start, stop), form in self.entries.items()
            if not 0 <= start <= stop <= self.shape[:1].numel() or form.shape != (stop - start, *self.shape[1:])
        ]
        if (
            wrong
            or not (self.parts and self.shape)
            or _overlap(self.entries)
            or len({form.samples for form in self.parts}) > 1
        ):
            raise ValueError(
                f"Placed was given {wrong[0] if wrong else self.entries} for a parameter of shape {tuple(self.shape)}; "
                "expected disjoint slices of its first axis, at least one, each with a form of the slice's shape, for the "
                "same samples"
            )
        self.samples = self.parts[0].samples

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        return reduce(torch.add, values)

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return [w] * len(self.parts)

    def _of(self, parts: Sequence[Form]) -> Form:
        return Placed(dict(zip(self.entries, parts)), self.shape)

    @property
    def writes_in_place(self) -> bool:  # type: ignore[override]
        return all(part.writes_in_place for part in self.parts)

    def saving(self) -> float:
        numbers = max(1, self.shape.numel())
        return sum(part.saving() * part.shape.numel() for part in self.parts if part.shape.numel()) / numbers

    def row_size(self) -> int:
        return self.shape.numel() + max(part.shape.numel() + part.row_size() for part in self.parts)

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        rows = self.like.new_empty(self.samples, *self.shape) if out is None else out
        end = 0
        for (start, stop), form in self.entries.items():
            rows[:, end:start] = 0
            if out is None:  # which can be differentiated
                rows[:, start:stop] = form.dense(factor=factor)
            else:
                form.dense(rows[:, start:stop], factor)
            end = stop
        rows[:, end:] = 0
        return rows

    def block(self, rows: slice) -> Form:
        first, last, _ = rows.indices(self.shape[0])
        shape, cut = torch.Size((max(0, last - first), *self.shape[1:])), dict[Bounds, Form]()
        for (start, stop), form in self.entries.items():
            low, high = max(start, first), min(stop, last)
            if low < high:
                is_whole = (low, high) == (start, stop)
                cut[low - first, high - first] = form if is_whole else form.block(slice(low - start, high - start))
        if not cut:
            return Zero(self.samples, shape, self.like)
        return cut.get((0, last - first)) or Placed(cut, shape)

    def merge_key(self) -> Hashable:
        return Placed, self.shape

    def merge(self, others: Sequence[Form]) -> Form:
        found: dict[Bounds, list[Form]] = {}
        for placed in (self, *others):
            for bounds, form in placed.entries.items() if isinstance(placed, Placed) else ():
                found.setdefault(bounds, []).append(form)
        if _overlap(sorted(found)):
            return Sum([self, *others])
        return Placed({bounds: add(forms) for bounds, forms in found.items()}, self.shape)

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        v = v.reshape(self.shape)
        return self._join(form.dot(v[start:stop], budget) for (start, stop), form in self.entries.items())

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        for (start, stop), form in self.entries.items():
            form.weighted_sum(w, budget, total.narrow(w.ndim - 1, start, stop - start))
        return total

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        total = self.new_sums(*self.shape).abs()
        if about is not None:
            total = total + w.to(total.dtype).sum() * about.to(self.sum_dtype).abs().square()
        for (start, stop), form in self.entries.items():
            total[start:stop] = form.second_moment(w, None if about is None else about[start:stop], budget)
        return total

    def gram(self, other: Form, budget: int = BUDGET) -> Tensor:
        if isinstance(other, Composite) and not isinstance(other, Placed):
            return other.gram(self, budget).mH  # which knows whether its terms cancel
        are_alike = isinstance(other, Placed) and other.entries.keys() == self.entries.keys()
        if not are_alike and not (self.cuts_well and other.cuts_well):
            return Form.gram(self, other, budget)
        return self._join(form.gram(other.block(slice(*bounds)), budget) for bounds, form in self.entries.items())

    def norms(self, budget: int = BUDGET) -> Tensor:
        return row_norms(torch.stack([part.norms(budget) for part in self.parts], dim=1))

    def project(self, random: RandomMap, budget: int = BUDGET) -> Tensor:
        found = self.new_sums(self.samples, random.dim)
        for (start, _), form in self.entries.items():
            row = form.row_size() + RandomMap.COLUMNS * min(random.fans)
            for samples, part in form.chunks(budget, row):
                for rows, block in part.blocks(budget):
                    random.add_to(found[samples], block.matrix(), slice(start + rows.start, start + rows.stop))
        return found


def _overlap(bounds: Iterable[Bounds]) -> bool:
    """Whether two of these slices, which are in order, have a number in common."""
    return any(stop > start for (_, stop), (start, _) in pairwise(bounds))
