"""Sums of forms for the same samples, and a form times a number."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Dense, Form, Index
from autograd_hacks.forms.composite import Composite
from autograd_hacks.forms.cost import warm
from autograd_hacks.forms.factored import Factored, norms_by_positions
from autograd_hacks.forms.numerics import stretches


def scale(form: Form, factor: float | Tensor) -> Form:
    """factor · J, for a number, or one for each row, N.  Each verb multiplies by it where that costs least."""
    if isinstance(factor, Tensor) and factor.ndim:
        return Weighted(form, factor)
    if type(form) is Scaled:  # isinstance takes three times as long for abstract classes
        factor, form = form.factor * factor, form.form
    return form if not isinstance(factor, Tensor) and factor == 1 else Scaled(form, factor)


def add(forms: Sequence[Form]) -> Form:
    """J₁ + J₂ + …, row by row, for a parameter that several calls share; every verb keeps the cross terms.

    forms: at least one, for the same samples and of the same shape.  Those that can be merged are, so that the fast verbs
    of their kind see the cross terms.
    """
    if len(forms) == 1 and not (forms[0].form if type(forms[0]) is Scaled else forms[0]).parts:
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


def magnitudes(form: Form) -> Form:
    """The form with the magnitudes of its factors in their place: its rows are the sums of the magnitudes of what the rows
    of J are sums of, relative to which rounding is small however much of them cancels."""
    if isinstance(form, Scaled):
        factor = form.factor
        return Scaled(magnitudes(form.form), factor.abs() if isinstance(factor, Tensor) else abs(factor))
    if isinstance(form, Weighted):
        return Weighted(magnitudes(form.form), form.factor.abs())
    if isinstance(form, Composite):
        return form._of([magnitudes(part) for part in form.parts])
    if isinstance(form, Factored):
        return form._of(*[x.abs() if x.is_floating_point() or x.is_complex() else x for x in form.held])
    return Dense(form.matrix().abs().view(form.samples, *form.shape))


class Scaled(Composite):
    """factor · J.

    factor: a number
    """

    def __init__(self, form: Form, factor: float | Tensor) -> None:
        self.form, self.factor, self.samples, self.shape, self.parts = form, factor, form.samples, form.shape, (form,)

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        (value,) = values
        return value * self.factor if isinstance(self.factor, Tensor) or value.requires_grad else value.mul_(self.factor)

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return [w * self.factor]

    def _of(self, parts: Sequence[Form]) -> Form:
        return Scaled(parts[0], self.factor)

    @property
    def writes_in_place(self) -> bool:  # type: ignore[override]
        return self.form.writes_in_place

    def saving(self, fresh: bool = False) -> float:
        return self.form.saving(fresh)

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        return self.form.dense(out, self.factor * factor)

    def written(self, out: Tensor) -> Form:
        return Scaled(self.form.written(out), self.factor)

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        inside = None if about is None else about / self.factor
        return self.form.second_moment(w, inside, budget) * (self.factor * self.factor)

    def norms(self, budget: int = BUDGET) -> Tensor:
        norms = self.form.norms(budget) * self.factor
        return norms.abs() if isinstance(self.factor, Tensor) or self.factor < 0 else norms


class Weighted(Composite):
    """Row n of J, times factor[n].

    factor: N
    """

    def __init__(self, form: Form, factor: Tensor) -> None:
        if factor.shape != (form.samples,):
            raise ValueError(
                f"the factor has shape {tuple(factor.shape)}; expected a number, or one for each of {form.samples} rows"
            )
        self.form, self.factor, self.samples, self.shape, self.parts = form, factor, form.samples, form.shape, (form,)

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        (value,) = values
        return value * self.factor.to(value.dtype).view(-1, *[1] * (value.ndim - 1))

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return [w * self.factor.to(w.dtype)]

    def _of(self, parts: Sequence[Form]) -> Form:
        return Weighted(parts[0], self.factor)

    def __getitem__(self, index: Index) -> Form:
        return Weighted(self.form[index], self.factor[index])

    @property
    def writes_in_place(self) -> bool:  # type: ignore[override]
        return self.form.writes_in_place

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        rows = self.form.dense(out, factor)
        return self._join([rows]) if out is None else rows.mul_(self.factor.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1)))

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        if about is not None:
            return super().second_moment(w, about, budget)
        return self.form.second_moment(w * self.factor.to(w.dtype).square(), None, budget)

    def norms(self, budget: int = BUDGET) -> Tensor:
        norms = self.form.norms(budget)
        return norms * self.factor.to(norms.dtype).abs()


class Sum(Composite):
    """J₁ + J₂ + …

    parts: forms for the same samples and of the same shape
    """

    def __init__(self, parts: Sequence[Form]) -> None:
        self.parts, self.samples, self.shape = parts, parts[0].samples, parts[0].shape

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        values = iter(values)  # one after the other, so that no two of them are kept
        total = next(values)
        for value in values:
            total += value
        return total

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return [w] * len(self.parts)

    def _of(self, parts: Sequence[Form]) -> Form:
        return Sum(parts)

    def row_size(self) -> int:
        return max(self.shape.numel(), super().row_size())

    def saving(self, fresh: bool = False) -> float:
        return sum(part.saving(fresh) for part in self.parts)

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        total = self.parts[0].dense(out, factor)
        # What is added passes through little memory: 36 ms and 53, of 16 samples of 256 -> 256 channels, 3×3, twice.
        fits = warm(BUDGET, total) // max(1, self.row_size() * total.element_size())
        for part in self.parts[1:]:
            if fits >= self.samples or part.sources or total.requires_grad or part.like.dtype != total.dtype:
                total = torch.add(total, part.dense(factor=factor), out=out)
                continue
            for piece in stretches(self.samples, fits):
                total[piece] += part[piece].dense(factor=factor)
        return total

    def gram(self, other: Form, budget: int = BUDGET) -> Tensor:
        if isinstance(other, Scaled):
            return other.gram(self, budget).mH
        if any(form._cancels(budget) for form in (self, other) if isinstance(form, Sum)):
            return Form.gram(self, other, budget)
        return super().gram(other, budget)

    def _cancels(self, budget: int) -> bool:
        """Whether some row's terms are so much longer than it is that its inner products would have lost their digits."""
        size = self._join(part.norms(budget) for part in self.parts).detach()
        square = self.norms(budget).detach() ** 2
        return bool((square <= 1e4 * torch.finfo(square.dtype).eps * size**2)[size > 0].any())

    def norms(self, budget: int = BUDGET) -> Tensor:
        by_positions = norms_by_positions(self, budget)
        return super().norms(budget) if by_positions is None else by_positions
