"""Sums of forms: of the whole parameter, or of slices of its first axis, as experts in a stack or parts of a projection."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form
from autograd_hacks.forms.composite import Composite, Concatenation, Scaled, gathered
from autograd_hacks.forms.cost import cache_budget
from autograd_hacks.forms.factored import norms_by_positions
from autograd_hacks.forms.lookup import Lookup
from autograd_hacks.forms.numerics import row_norms, slices_of
from autograd_hacks.forms.outer import Outer, Zero
from autograd_hacks.forms.positions import Positions


def add(forms: Sequence[Form]) -> Form:
    """J₁ + J₂ + …, row by row, for a parameter that several calls share; every verb keeps the cross terms.

    forms: at least one, for the same samples and of the same shape.  Those that can be merged are, so that the fast verbs
    of their kind see the cross terms.
    """
    if len(forms) == 1:
        return forms[0]
    scaled = [form for form in forms if isinstance(form, Scaled) and not isinstance(form.factor, Tensor)]
    if len(scaled) == len(forms) and len({form.factor for form in scaled}) == 1:
        return Scaled(add([form.form for form in scaled]), scaled[0].factor)
    alike: dict[Hashable, list[Form]] = {}
    terms = [term for form in forms for term in (form.parts if isinstance(form, Sum) else [form])]
    for position, term in enumerate(terms):
        alike.setdefault(term.merge_key() or position, []).append(term)
    merged = [group[0] if len(group) == 1 else group[0].merge(group[1:]) for group in alike.values()]
    return merged[0] if len(merged) == 1 else Sum(merged)


class Sum(Composite):
    """J₁ + J₂ + …

    parts: forms for the same samples and of the same shape
    """

    adds_up = True

    def __init__(self, parts: Sequence[Form]) -> None:
        super().__init__(parts, parts[0].samples, parts[0].shape)

    def _of(self, parts: Sequence[Form]) -> Form:
        return Sum(parts)

    def row_size(self) -> int:
        return max(self.shape.numel(), super().row_size())

    def saving(self, fresh: bool = False) -> float:
        return sum(part.saving(fresh) for part in self.parts)

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        # A table comes last: its entries are added to rows that others have written, since it has few and rows are large.
        first, *others = sorted(self.parts, key=lambda part: isinstance(part, Lookup))
        total = first.dense(out, factor)
        # What is added passes through little memory: 36 ms and 53, of 16 samples of 256 -> 256 channels, 3×3, twice.
        fits = cache_budget(BUDGET, total) // max(1, self.row_size() * total.element_size())
        for part in others:
            if isinstance(part, Lookup) and total.is_contiguous():
                part.added_to(total, factor)
            else:
                for piece in slices_of(self.samples, fits):
                    total[piece] += part[piece].dense(factor=factor)
        return total

    norms = norms_by_positions


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

    def _of(self, parts: Sequence[Form]) -> Form:
        return Placed(dict(zip(self.entries, parts)), self.shape)

    def _cut(self, x: Tensor, axis: int = 0) -> Iterator[Tensor]:
        return (x.narrow(axis, start, stop - start) for start, stop in self.entries)

    def _below(self, others: Sequence[Form]) -> Form | None:
        forms = [form for form in (self, *others) if isinstance(form, Placed) and form.entries.keys() == self.entries.keys()]
        if len(forms) <= len(others):
            return None
        return self._of([Concatenation.of(parts) for parts in zip(*(form.parts for form in forms))])

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

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        rows = self.like.new_empty(self.samples, *self.shape) if out is None else out
        for (_, end), (start, _) in pairwise([(0, 0), *self.entries, (self.shape[0], 0)]):
            rows[:, end:start] = 0
        for form, own in zip(self.parts, self._cut(rows, 1)):
            if out is None:  # so that it can be differentiated
                own.copy_(form.dense(factor=factor))
            else:
                form.dense(own, factor)
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

    def second_moment(self, w: Tensor, about: Tensor | None = None, max_bytes: int = BUDGET) -> Tensor:
        total = Zero(self.samples, self.shape, self.like).second_moment(w, about, max_bytes)
        for (start, stop), form in self.entries.items():
            total[start:stop] = form.second_moment(w, None if about is None else about[start:stop], max_bytes)
        return total

    def gram(self, other: Form, max_bytes: int = BUDGET) -> Tensor:
        if isinstance(other, Composite) and not isinstance(other, Placed):
            return other.gram(self, max_bytes).mH  # the other form knows whether its terms cancel
        is_alike = isinstance(other, Placed) and other.entries.keys() == self.entries.keys()
        if not (is_alike or (self.cuts_well and other.cuts_well)):
            return Form.gram(self, other, max_bytes)
        return self._join(form.gram(other.block(slice(*bounds)), max_bytes) for bounds, form in self.entries.items())

    def norms(self, max_bytes: int = BUDGET) -> Tensor:
        return row_norms(torch.stack([part.norms(max_bytes) for part in self.parts], dim=1))

    project = Form.project  # a map is drawn for the whole parameter


# Experts in one stack: row n has for each expert the sum over those positions of sample n that were sent to it.


def of_experts(x: Tensor, g: Tensor, ends: Tensor, owners: Tensor, samples: int) -> Form:
    """Rows (N, E, I, O) of W in y = x W[e], where expert e has the positions between ends[e - 1] and ends[e].

    x: M I    g: M O    ends: E    owners: M, the sample of each position
    """
    parts, begin, shape = dict[tuple[int, int], Form](), 0, torch.Size((len(ends), x.shape[1], g.shape[1]))
    experts = torch.searchsorted(ends, torch.arange(len(x), dtype=ends.dtype, device=ends.device), right=True)
    counts = owners.new_zeros((len(ends) + 1) * samples).index_add_(0, experts * samples + owners, torch.ones_like(owners))
    asked = [ends.long(), counts.view(-1, samples)[:-1].amax(1)]  # at once
    for expert, (end, most) in enumerate(zip(*torch.stack(asked).tolist())):
        if end > begin:
            rows = slice(begin, end)
            own = Outer(x[rows, None], g[rows, None], torch.Size((1, *shape[1:])), gradient=1)
            parts[expert, expert + 1] = gathered(own, owners[rows], samples, most)
        begin = end
    return Placed(parts, shape) if parts else Zero(samples, shape, g)
