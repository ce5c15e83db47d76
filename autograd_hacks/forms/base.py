"""The base class of all forms, which defines every verb, and the forms that are made of other forms."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

BUDGET = 64 * 2**20
"""Bytes that a verb may write out at a time, beside its result."""

Index = slice | Tensor


class Form(ABC):
    """J, the gradients of N samples with respect to one parameter: a matrix with a row for each sample.

    samples: N    shape: the parameter's shape, which the rows have when written out
    Every verb can be differentiated, but for ``dense(out=...)``.
    """

    samples: int
    shape: torch.Size
    writes_in_place = True
    """Whether ``dense(out)`` writes straight into ``out``, and not by way of a copy."""

    @abstractmethod
    def dense(self, out: Tensor | None = None) -> Tensor:
        """J written out, ``(N, *shape)``, in memory of its own; into ``out`` where that is given."""

    @abstractmethod
    def __getitem__(self, index: Index) -> Form:
        """The rows of some samples.  index: a slice of step 1, or a tensor of sample numbers (repeats allowed)."""

    @abstractmethod
    def scaled(self, factor: float | Tensor) -> Form:
        """factor · J, for a number, by way of the smallest thing that it can be put into."""

    def matrix(self) -> Tensor:
        """J written out as a matrix, (N, P) for a parameter of P numbers; to read, since it may be the form's own."""
        return self.dense().reshape(self.samples, self.shape.numel())

    def chunks(self, row: int | None = None) -> Iterator[Form]:
        """The rows in order, as many at a time as fit into `BUDGET` bytes, but one at the least.

        row: numbers that are written out for a row, P unless told
        """
        row_bytes = 8 * max(1, self.shape.numel() if row is None else row)
        step = max(1, BUDGET // row_bytes)
        for start in range(0, max(1, self.samples), step):
            yield self[start : start + step]

    def dot(self, v: Tensor) -> Tensor:
        """J v: every sample's gradient along ``v``.  v: shape.  Returns N."""
        return torch.cat([part.matrix() @ v.flatten() for part in self.chunks()])

    def weighted_sum(self, w: Tensor) -> Tensor:
        """Jᵀ w: the samples' gradients added up with weights.  w: N.  Returns shape."""
        total, start = w.new_zeros(self.shape.numel()), 0
        for part in self.chunks():
            total = total + w[start : start + part.samples] @ part.matrix()
            start += part.samples
        return total.view(self.shape)

    def gram(self, other: Form) -> Tensor:
        """J Kᵀ: inner products of this form's rows with those of ``other``, which has M samples of the same shape.
        Returns (N, M)."""
        return torch.cat(
            [torch.cat([mine.matrix() @ theirs.matrix().mT for theirs in other.chunks()], dim=1) for mine in self.chunks()]
        )

    def norms(self) -> Tensor:
        """The rows' 2-norms, N.  They overflow only where the true norm does."""
        return torch.cat([row_norms(part.matrix()) for part in self.chunks()])

    def __add__(self, other: Form) -> Form:
        """Row by row, for a parameter that several calls share; the cross terms are kept by every verb."""
        return Sum.of([self, other])

    def group(self, rows: Tensor, samples: int) -> Form:
        """Relabelled: row k of the result is the sum of the rows n with rows[n] == k.

        rows: N integers in [0, samples)    samples: the number of rows of the result
        """
        return Grouping(self, rows, samples)

    def merge_key(self) -> Hashable:
        """Forms with the same key, unless that is None, can be added by `merge`."""
        return None

    @classmethod
    def merge(cls, forms: Sequence[Form]) -> Form:
        """The sum of forms with one `merge_key`, as one form of the same kind."""
        raise NotImplementedError(f"{cls.__name__} has a merge_key but no merge")


class Dense(Form):
    """J itself: for small parameters such as biases and affine norms.

    values: ``(N, *shape)``
    """

    def __init__(self, values: Tensor) -> None:
        self.values, self.samples, self.shape = values, values.shape[0], values.shape[1:]

    def dense(self, out: Tensor | None = None) -> Tensor:
        return self.values.clone() if out is None else out.copy_(self.values)

    def matrix(self) -> Tensor:
        return self.values.reshape(self.samples, self.shape.numel())

    def __getitem__(self, index: Index) -> Form:
        return Dense(self.values[index])

    def scaled(self, factor: float | Tensor) -> Form:
        return Dense(self.values * factor)

    def merge_key(self) -> Hashable:
        return Dense

    @classmethod
    def merge(cls, forms: Sequence[Form]) -> Form:
        return Dense(torch.stack([form.values for form in forms if isinstance(form, Dense)]).sum(0))


class Sum(Form):
    """J₁ + J₂ + …, for a parameter that several calls share.

    terms: forms for the same samples and of the same shape
    """

    def __init__(self, terms: Sequence[Form]) -> None:
        self.terms, self.samples, self.shape = terms, terms[0].samples, terms[0].shape

    @staticmethod
    def of(forms: Sequence[Form]) -> Form:
        """The sum of forms: what can be merged is, so that the fast verbs of its kind see the cross terms."""
        terms: list[Form] = []
        for form in forms:
            terms += form.terms if isinstance(form, Sum) else [form]
        alike: dict[Hashable, list[Form]] = {}
        for position, term in enumerate(terms):
            alike.setdefault(term.merge_key() or position, []).append(term)
        merged = [group[0] if len(group) == 1 else type(group[0]).merge(group) for group in alike.values()]
        return merged[0] if len(merged) == 1 else Sum(merged)

    def dense(self, out: Tensor | None = None) -> Tensor:
        total = self.terms[0].dense(out)
        for term in self.terms[1:]:
            total = torch.add(total, term.dense(), out=out)
        return total

    def __getitem__(self, index: Index) -> Form:
        return Sum([term[index] for term in self.terms])

    def scaled(self, factor: float | Tensor) -> Form:
        return Sum([term.scaled(factor) for term in self.terms])

    def dot(self, v: Tensor) -> Tensor:
        return torch.stack([term.dot(v) for term in self.terms]).sum(0)

    def weighted_sum(self, w: Tensor) -> Tensor:
        return torch.stack([term.weighted_sum(w) for term in self.terms]).sum(0)

    def gram(self, other: Form) -> Tensor:
        return torch.stack([term.gram(other) for term in self.terms]).sum(0)


class Grouping(Form):
    """A form whose rows were relabelled: ragged input, routed tokens, users of several samples.

    form: M rows    rows: M integers in [0, samples), the sample that each row belongs to    samples: N
    """

    def __init__(self, form: Form, rows: Tensor, samples: int) -> None:
        if rows.shape != (form.samples,):
            raise ValueError(f"rows has shape {tuple(rows.shape)}; expected one label for each of {form.samples} rows")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < samples:
            raise ValueError(f"rows lie in [{int(rows.min())}, {int(rows.max())}]; expected in [0, {samples})")
        self.form, self.rows, self.samples, self.shape = form, rows, samples, form.shape

    def dense(self, out: Tensor | None = None) -> Tensor:
        total = None if out is None else out.zero_()
        start = 0
        for part in self.form.chunks():
            written = part.dense()
            if total is None:
                total = written.new_zeros(self.samples, *self.shape)
            total = total.index_add_(0, self.rows[start : start + part.samples], written)
            start += part.samples
        assert total is not None  # chunks() yields one part at the least
        return total

    def __getitem__(self, index: Index) -> Form:
        wanted = torch.arange(self.samples, device=self.rows.device)[index]
        new_rows, positions = (wanted[:, None] == self.rows).nonzero(as_tuple=True)
        return Grouping(self.form[positions], new_rows, len(wanted))

    def scaled(self, factor: float | Tensor) -> Form:
        return Grouping(self.form.scaled(factor), self.rows, self.samples)

    def dot(self, v: Tensor) -> Tensor:
        return self._add_up(self.form.dot(v))

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.form.weighted_sum(w[self.rows])

    def gram(self, other: Form) -> Tensor:
        return self._add_up(self.form.gram(other))

    def _add_up(self, values: Tensor) -> Tensor:
        """values: M ... -> N ..."""
        return values.new_zeros(self.samples, *values.shape[1:]).index_add(0, self.rows, values)


class Concatenation(Form):
    """The rows of several forms, one form below the other: appended micro-batches.

    parts: forms of the same shape
    """

    def __init__(self, parts: Sequence[Form]) -> None:
        self.parts, self.shape = parts, parts[0].shape
        self.samples = sum(part.samples for part in parts)

    def dense(self, out: Tensor | None = None) -> Tensor:
        if out is None:
            return torch.cat([part.dense() for part in self.parts])
        for part, piece in zip(self.parts, out.split([part.samples for part in self.parts])):
            part.dense(piece)
        return out

    def __getitem__(self, index: Index) -> Form:
        places = [(p, n) for p, part in enumerate(self.parts) for n in range(part.samples)]
        wanted = torch.arange(self.samples)[index].tolist()
        runs = [(p, [n for _, n in run]) for p, run in groupby([places[n] for n in wanted], key=lambda place: place[0])]
        pieces = [self.parts[p][torch.tensor(run)] for p, run in runs]
        return Concatenation(pieces) if pieces else self.parts[0][:0]

    def scaled(self, factor: float | Tensor) -> Form:
        return Concatenation([part.scaled(factor) for part in self.parts])

    def dot(self, v: Tensor) -> Tensor:
        return torch.cat([part.dot(v) for part in self.parts])

    def weighted_sum(self, w: Tensor) -> Tensor:
        pieces = w.split([part.samples for part in self.parts])
        return torch.stack([part.weighted_sum(piece) for part, piece in zip(self.parts, pieces)]).sum(0)

    def gram(self, other: Form) -> Tensor:
        return torch.cat([part.gram(other) for part in self.parts])

    def norms(self) -> Tensor:
        return torch.cat([part.norms() for part in self.parts])


def row_norms(rows: Tensor) -> Tensor:
    """The 2-norms of a matrix's rows, (N, P) -> N.  They overflow only where the true norm does."""
    scale = row_scales(rows)
    return torch.linalg.vector_norm(rows / scale[:, None], dim=1) * scale


def row_scales(rows: Tensor) -> Tensor:
    """Each row's largest magnitude, (N, P) -> N, or 1 for a row that division by it would spoil (0, ∞, NaN)."""
    if not rows.shape[1]:
        return torch.ones(rows.shape[0], dtype=rows.dtype, device=rows.device)
    largest = rows.detach().abs().amax(1)
    return torch.where(largest.isfinite() & (largest > 0), largest, torch.ones_like(largest))
