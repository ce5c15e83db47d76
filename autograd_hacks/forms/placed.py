"""A parameter whose slices along the first axis are used separately: experts in a stack, parts of a joint projection."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import reduce
from itertools import pairwise

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form
from autograd_hacks.forms.composite import Composite, Sum, add
from autograd_hacks.forms.numerics import row_norms
from autograd_hacks.forms.outer import Zero
from autograd_hacks.forms.positions import Positions
from autograd_hacks.forms.projection import AnyMap, SparseMap


class Placed(Composite):
    """A J that consists of other forms in slices of the parameter's first axis, and of zeros elsewhere.

    entries: {(start, stop): form of shape ``(stop - start, *shape[1:])``}, at least one, disjoint, for the same samples
    shape: the parameter's
    Raises ValueError for other entries.
    """

    def __init__(self, entries: Mapping[tuple[int, int], Form], shape: torch.Size) -> None:
        self.entries = dict(sorted(entries.items()))
        forms, ends = list(self.entries.values()), [0, *(end for bounds in self.entries for end in bounds)]
        fits = all(form.shape == (stop - start, *shape[1:]) for (start, stop), form in entries.items())
        if ends != sorted(ends) or ends[-1] > shape[:1].numel() or not fits or len({f.samples for f in forms}) != 1:
            raise ValueError(
                f"Placed: {self.entries} was given for a parameter of shape {tuple(shape)}; expected at least one form. "
                "Slices of the first axis must be disjoint, and forms must have their slice's shape and the same samples."
            )
        super().__init__(forms, forms[0].samples, torch.Size(shape))

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        return reduce(torch.add, values)

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return [w] * len(self.parts)

    def _of(self, parts: Sequence[Form]) -> Form:
        return Placed(dict(zip(self.entries, parts)), self.shape)

    def factors(self, others: Sequence[Form] = ()) -> Sequence[Positions]:
        found = list[Positions]()
        for (start, _), form in self.entries.items():
            own = form.factors()
            if not own:
                return ()
            found += [each._replace(rows=slice(start + each.rows.start, start + each.rows.stop)) for each in own]
        return found

    def saving(self, fresh: bool = False) -> float:
        return max(part.saving() for part in self.parts)

    def row_size(self) -> int:
        return self.shape.numel() + max(part.shape.numel() + part.row_size() for part in self.parts)

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        rows = self.like.new_empty(self.samples, *self.shape) if out is None else out
        for (_, end), (start, _) in pairwise([(0, 0), *self.entries, (self.shape[0], 0)]):
            rows[:, end:start] = 0
        for (start, stop), form in self.entries.items():
            if out is None:  # so that it can be differentiated
                rows[:, start:stop] = form.dense(factor=factor)
            else:
                form.dense(rows[:, start:stop], factor)
        return rows

    def block(self, rows: slice) -> Form:
        first, last, _ = rows.indices(self.shape[0])
        cut = dict[tuple[int, int], Form]()
        for (start, stop), form in self.entries.items():
            low, high = max(start, first), min(stop, last)
            if low < high:
                own = form if (low, high) == (start, stop) else form.block(slice(low - start, high - start))
                cut[low - first, high - first] = own
        shape = torch.Size((max(0, last - first), *self.shape[1:]))
        return cut.get((0, last - first)) or (Placed(cut, shape) if cut else Zero(self.samples, shape, self.like))

    def merge_key(self) -> Hashable:
        return Placed, self.shape

    def merge(self, others: Sequence[Form]) -> Form:
        found: dict[tuple[int, int], list[Form]] = {}
        for placed in (self, *others):
            for bounds, form in placed.entries.items() if isinstance(placed, Placed) else ():
                found.setdefault(bounds, []).append(form)
        if any(stop > start for (_, stop), (start, _) in pairwise(sorted(found))):
            return Sum([self, *others])
        return Placed({bounds: add(forms) for bounds, forms in found.items()}, self.shape)

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        v = v.reshape(self.shape)
        return self._join(form.dot(v[start:stop], budget) for (start, stop), form in self.entries.items())

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.cat([form.terms(u[:, start:stop], v) for (start, stop), form in self.entries.items()], 1)

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        leads_back = w.requires_grad or any(x.requires_grad for leaf in self.leaves() for x in leaf.held)
        for (start, stop), form in self.entries.items():
            own = total.narrow(w.ndim - 1, start, stop - start)
            if leads_back:  # after a first in-place write torch may treat a view as a leaf
                own.add_(form.weighted_sum(w, budget))
            else:
                form.weighted_sum(w, budget, own)
        return total

    def sum_and_dot(self, w: Tensor, v: Tensor, budget: int = BUDGET) -> tuple[Tensor, Tensor]:
        v, total, along = v.reshape(self.shape), self.new_sums(*self.shape), list[Tensor]()
        for (start, stop), form in self.entries.items():
            total[start:stop], own = form.sum_and_dot(w, v[start:stop], budget)
            along.append(own)
        return total, self._join(along)

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        total = Zero(self.samples, self.shape, self.like).second_moment(w, about, budget)
        for (start, stop), form in self.entries.items():
            total[start:stop] = form.second_moment(w, None if about is None else about[start:stop], budget)
        return total

    def gram(self, other: Form, budget: int = BUDGET) -> Tensor:
        if isinstance(other, Composite) and not isinstance(other, Placed):
            return other.gram(self, budget).mH  # the other form knows whether its terms cancel
        is_alike = isinstance(other, Placed) and other.entries.keys() == self.entries.keys()
        if not is_alike and not (self.cuts_well and other.cuts_well):
            return Form.gram(self, other, budget)
        return self._join(form.gram(other.block(slice(*bounds)), budget) for bounds, form in self.entries.items())

    def norms(self, budget: int = BUDGET) -> Tensor:
        return row_norms(torch.stack([part.norms(budget) for part in self.parts], dim=1))

    def project(self, random: AnyMap, budget: int = BUDGET) -> Tensor:
        if not isinstance(random, SparseMap):  # its signs for the whole parameter would be drawn again for each slice
            return Form.project(self, random, budget)
        slices = (form.project(random.part(slice(*bounds)), budget) for bounds, form in self.entries.items())
        return self._join(slices)
