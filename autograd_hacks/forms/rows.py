"""Forms that are made of other forms."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form, Index
from autograd_hacks.forms.numerics import stretches
from autograd_hacks.forms.projection import RandomMap


class Scaled(Form):
    """factor · J.

    factor: a number
    """

    is_composite = True

    def __init__(self, form: Form, factor: float | Tensor) -> None:
        self.form, self.factor, self.samples, self.shape = form, factor, form.samples, form.shape

    @property
    def like(self) -> Tensor:
        return self.form.like

    @property
    def writes_in_place(self) -> bool:  # type: ignore[override]
        return self.form.writes_in_place

    @property
    def cuts_well(self) -> bool:  # type: ignore[override]
        return self.form.cuts_well

    def leaves(self) -> Iterator[Form]:
        return self.form.leaves()

    def row_size(self) -> int:
        return self.form.row_size()

    def saving(self) -> float:
        return self.form.saving()

    def dense(self, out: Tensor | None = None) -> Tensor:
        return self.form.dense_times(self.factor, out)

    def __getitem__(self, index: Index) -> Form:
        return Scaled(self.form[index], self.factor)

    def to(self, dtype: torch.dtype) -> Form:
        return Scaled(self.form.to(dtype), self.factor)

    def block(self, rows: slice) -> Form:
        return Scaled(self.form.block(rows), self.factor)

    def multiplied(self, factor: float | Tensor) -> Form:
        return self.form.multiplied(self.factor * factor)

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        return self.form.dot(v, budget) * self.factor

    def add_weighted_sum(self, total: Tensor, w: Tensor, budget: int) -> None:
        self.form.add_weighted_sum(total, w * self.factor, budget)

    def weighted_sum(self, w: Tensor, budget: int = BUDGET) -> Tensor:
        return self.form.weighted_sum(w * self.factor, budget)

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        inside = None if about is None else about / self.factor
        return self.form.second_moment(w, inside, budget) * (self.factor * self.factor)

    def _gram(self, other: Form, budget: int) -> Tensor:
        inner = self.form.gram(other, budget)
        return inner * self.factor if isinstance(self.factor, Tensor) or inner.requires_grad else inner.mul_(self.factor)

    def norms(self, budget: int = BUDGET) -> Tensor:
        norms = self.form.norms(budget) * self.factor
        return norms.abs() if isinstance(self.factor, Tensor) or self.factor < 0 else norms

    def project(self, random: RandomMap, budget: int = BUDGET) -> Tensor:
        return self.form.project(random, budget) * self.factor


class Sum(Form):
    """J₁ + J₂ + …, for a parameter that several calls share.

    terms: forms for the same samples and of the same shape
    """

    is_composite = True

    def __init__(self, terms: Sequence[Form]) -> None:
        self._terms, self.samples, self.shape = terms, terms[0].samples, terms[0].shape

    @staticmethod
    def of(forms: Sequence[Form]) -> Form:
        """The sum of forms: what can be merged is, so that the fast verbs of its kind see the cross terms."""
        if len(forms) == 1 and not (forms[0].form if isinstance(forms[0], Scaled) else forms[0]).is_composite:
            return forms[0]
        scaled = [form for form in forms if isinstance(form, Scaled) and not isinstance(form.factor, Tensor)]
        if len(scaled) == len(forms) and len({form.factor for form in scaled}) == 1:
            return Scaled(Sum.of([form.form for form in scaled]), scaled[0].factor)
        terms = [term for form in forms for term in form.terms]
        alike: dict[Hashable, list[Form]] = {}
        for position, term in enumerate(terms):
            alike.setdefault(term.merge_key() or position, []).append(term)
        merged = [group[0] if len(group) == 1 else type(group[0]).merge(group) for group in alike.values()]
        return merged[0] if len(merged) == 1 else Sum(merged)

    @property
    def terms(self) -> Sequence[Form]:
        return self._terms

    @property
    def like(self) -> Tensor:
        return self.terms[0].like

    @property
    def cuts_well(self) -> bool:  # type: ignore[override]
        return all(term.cuts_well for term in self.terms)

    def leaves(self) -> Iterator[Form]:
        return (leaf for term in self.terms for leaf in term.leaves())

    def row_size(self) -> int:
        return max(self.shape.numel(), *(term.row_size() for term in self.terms))

    def saving(self) -> float:
        return sum(term.saving() for term in self.terms)

    def dense(self, out: Tensor | None = None) -> Tensor:
        total = self.terms[0].dense(out)
        for term in self.terms[1:]:
            total = torch.add(total, term.dense(), out=out)
        return total

    def __getitem__(self, index: Index) -> Form:
        return Sum([term[index] for term in self.terms])

    def to(self, dtype: torch.dtype) -> Form:
        return Sum([term.to(dtype) for term in self.terms])

    def block(self, rows: slice) -> Form:
        return Sum([term.block(rows) for term in self.terms])

    def multiplied(self, factor: float | Tensor) -> Form:
        return Sum([term.multiplied(factor) for term in self.terms])

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        return self._added(lambda term: term.dot(v, budget))

    def add_weighted_sum(self, total: Tensor, w: Tensor, budget: int) -> None:
        for term in self.terms:
            term.add_weighted_sum(total, w, budget)

    def _gram(self, other: Form, budget: int) -> Tensor:
        if isinstance(other, Scaled):
            return other.gram(self, budget).mH
        both = (self, other) if isinstance(other, Sum) else (self,)
        if any(form._cancels(budget) for form in both):
            return super()._gram(other, budget)
        return self._added(lambda term: term.gram(other, budget))

    def _cancels(self, budget: int) -> bool:
        """Whether some row's terms are so much longer than it is that its inner products would have lost their digits."""
        size = self._added(lambda term: term.norms(budget)).detach()
        square = self.norms(budget).detach() ** 2
        return bool((square <= 1e4 * torch.finfo(square.dtype).eps * size**2)[size > 0].any())

    def norms(self, budget: int = BUDGET) -> Tensor:
        by_positions = self._norms_by_positions(budget)
        return super().norms(budget) if by_positions is None else by_positions

    def project(self, random: RandomMap, budget: int = BUDGET) -> Tensor:
        return self._added(lambda term: term.project(random, budget))

    def _added(self, verb: Callable[[Form], Tensor]) -> Tensor:
        total = verb(self.terms[0])
        for term in self.terms[1:]:
            total += verb(term)
        return total


class Grouping(Form):
    """A form whose rows were relabelled: ragged input, routed tokens, users of several samples.

    form: M rows    rows: M integers in [0, samples), the sample that each row belongs to    samples: N
    """

    is_composite = True

    def __init__(self, form: Form, rows: Tensor, samples: int) -> None:
        if rows.shape != (form.samples,):
            raise ValueError(f"rows has shape {tuple(rows.shape)}; expected one label for each of {form.samples} rows")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < samples:
            raise ValueError(f"rows lie in [{int(rows.min())}, {int(rows.max())}]; expected in [0, {samples})")
        self.form, self.rows, self.samples, self.shape = form, rows, samples, form.shape

    @property
    def like(self) -> Tensor:
        return self.form.like

    @property
    def cuts_well(self) -> bool:  # type: ignore[override]
        return self.form.cuts_well

    def leaves(self) -> Iterator[Form]:
        return self.form.leaves()

    def held_size(self) -> int:
        return self.form.held_size() * int(self._counts().max()) if len(self.rows) else 0

    def row_size(self) -> int:
        return self.shape.numel() + max(self.shape.numel(), self.form.row_size())  # what is added up, and to what

    def dense(self, out: Tensor | None = None) -> Tensor:
        total = self.like.new_zeros(self.samples, *self.shape) if out is None else out.zero_()
        for piece in stretches(self.form.samples, max(1, self.samples)):  # as much again as the result
            total.index_add_(0, self.rows[piece], self.form[piece].dense())
        return total

    def __getitem__(self, index: Index) -> Form:
        wanted = torch.arange(self.samples, device=self.rows.device)[index]
        new_rows, positions = (wanted[:, None] == self.rows).nonzero(as_tuple=True)
        return Grouping(self.form[positions], new_rows, len(wanted))

    def to(self, dtype: torch.dtype) -> Form:
        return Grouping(self.form.to(dtype), self.rows, self.samples)

    def block(self, rows: slice) -> Form:
        return Grouping(self.form.block(rows), self.rows, self.samples)

    def multiplied(self, factor: float | Tensor) -> Form:
        return Grouping(self.form.multiplied(factor), self.rows, self.samples)

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        return self._add_up(self.form.dot(v, budget))

    def add_weighted_sum(self, total: Tensor, w: Tensor, budget: int) -> None:
        self.form.add_weighted_sum(total, w[..., self.rows], budget)

    def _gram(self, other: Form, budget: int) -> Tensor:
        return self._add_up(self.form.gram(other, budget))

    def norms(self, budget: int = BUDGET) -> Tensor:
        if not hasattr(self.form, "side_by_side") or not len(self.rows):
            return super().norms(budget)
        counts, found = self._counts(), []
        order = self.rows.argsort(stable=True)
        starts = counts.cumsum(0) - counts
        for piece in stretches(self.samples, budget // max(1, 8 * self.held_size())):
            # Samples of unequal numbers of rows: the shorter ones are filled up with rows that count nothing.
            places = torch.arange(int(counts[piece].max()), device=self.rows.device)
            present = places < counts[piece, None]
            rows = order[(starts[piece, None] + places).clamp(max=len(order) - 1)]
            found.append(self.form.side_by_side(rows, present).norms(budget))
        return torch.cat(found)

    def project(self, random: RandomMap, budget: int = BUDGET) -> Tensor:
        return self._add_up(self.form.project(random, budget))

    def _counts(self) -> Tensor:
        return torch.bincount(self.rows, minlength=self.samples)

    def _add_up(self, values: Tensor) -> Tensor:
        """values: M ... -> N ..."""
        return values.new_zeros(self.samples, *values.shape[1:]).index_add(0, self.rows, values)


class Concatenation(Form):
    """The rows of several forms, one form below the other: appended micro-batches.

    parts: forms of the same shape
    """

    is_composite = True

    def __init__(self, parts: Sequence[Form]) -> None:
        self.parts, self.shape = parts, parts[0].shape
        self.samples = sum(part.samples for part in parts)

    @property
    def like(self) -> Tensor:
        return self.parts[0].like

    @property
    def cuts_well(self) -> bool:  # type: ignore[override]
        return all(part.cuts_well for part in self.parts)

    def leaves(self) -> Iterator[Form]:
        return (leaf for part in self.parts for leaf in part.leaves())

    def row_size(self) -> int:
        return max(part.row_size() for part in self.parts)

    def dense(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            return torch.cat([part.dense() for part in self.parts])
        for part, piece in zip(self.parts, out.split(self._sizes())):
            part.dense(piece)
        return out

    def __getitem__(self, index: Index) -> Form:
        places = [(p, n) for p, part in enumerate(self.parts) for n in range(part.samples)]
        wanted = torch.arange(self.samples)[index.cpu() if isinstance(index, Tensor) else index].tolist()
        runs = [(p, [n for _, n in run]) for p, run in groupby([places[n] for n in wanted], key=lambda place: place[0])]
        pieces = [self.parts[p][torch.tensor(run, device=self.like.device)] for p, run in runs]
        return Concatenation(pieces) if pieces else self.parts[0][:0]

    def to(self, dtype: torch.dtype) -> Form:
        return Concatenation([part.to(dtype) for part in self.parts])

    def block(self, rows: slice) -> Form:
        return Concatenation([part.block(rows) for part in self.parts])

    def multiplied(self, factor: float | Tensor) -> Form:
        return Concatenation([part.multiplied(factor) for part in self.parts])

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        return torch.cat([part.dot(v, budget) for part in self.parts])

    def add_weighted_sum(self, total: Tensor, w: Tensor, budget: int) -> None:
        for part, piece in zip(self.parts, w.split(self._sizes(), dim=-1)):
            part.add_weighted_sum(total, piece, budget)

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        total = self.new_sums(*self.shape).abs()
        for part, piece in zip(self.parts, w.split(self._sizes())):
            total += part.second_moment(piece, about, budget)
        return total

    def _gram(self, other: Form, budget: int) -> Tensor:
        return torch.cat([part.gram(other, budget) for part in self.parts])

    def norms(self, budget: int = BUDGET) -> Tensor:
        return torch.cat([part.norms(budget) for part in self.parts])

    def project(self, random: RandomMap, budget: int = BUDGET) -> Tensor:
        return torch.cat([part.project(random, budget) for part in self.parts])

    def _sizes(self) -> list[int]:
        return [part.samples for part in self.parts]
