"""Forms whose rows are those of others, relabelled or below each other."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Dense, Form, Index
from autograd_hacks.forms.composite import Composite
from autograd_hacks.forms.factored import Paired
from autograd_hacks.forms.numerics import stretches
from autograd_hacks.forms.positions import Positions


def group(form: Form, rows: Tensor, samples: int) -> Form:
    """The form relabelled: row k of the result is the sum of the rows n with rows[n] == k.

    rows: N integers in [0, samples)    samples: the number of rows of the result
    Raises ValueError for labels of another number, or out of range.
    """
    return Grouping(form, rows, samples)


def gathered(form: Form, rows: Tensor, samples: int) -> Form:
    """The same, where a row is but one position or small: positions of one sample stand beside each other at once.  It costs
    as much as if all samples had as many rows as the one with the most."""
    if isinstance(form, Dense):
        return Dense(form.values.new_zeros(samples, *form.shape).index_add(0, rows, form.values))
    if not isinstance(form, Paired) or not len(rows):
        return group(form, rows, samples)
    counts, order = torch.bincount(rows, minlength=samples), rows.argsort(stable=True)
    places, starts = torch.arange(int(counts.max()), device=rows.device), counts.cumsum(0) - counts
    chosen = order[(starts[:, None] + places).clamp(max=len(order) - 1)]
    return form.side_by_side(chosen, places < counts[:, None])


class Grouping(Composite):
    """A form whose rows were relabelled: ragged input, routed tokens, users of several samples.

    form: M rows    rows: M integers in [0, samples), the sample that each row belongs to    samples: N
    """

    def __init__(self, form: Form, rows: Tensor, samples: int) -> None:
        if rows.shape != (form.samples,):
            raise ValueError(f"rows has shape {tuple(rows.shape)}; expected one label for each of {form.samples} rows")
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < samples:
            raise ValueError(f"rows lie in [{int(rows.min())}, {int(rows.max())}]; expected in [0, {samples})")
        self.form, self.rows, self.samples, self.shape, self.parts = form, rows, samples, form.shape, (form,)

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        (value,) = values
        return value.new_zeros(self.samples, *value.shape[1:]).index_add(0, self.rows, value)

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return [w[..., self.rows]]

    def _of(self, parts: Sequence[Form]) -> Form:
        return Grouping(parts[0], self.rows, self.samples)

    def held_size(self) -> int:
        return self.form.held_size() * int(self._counts().max()) if len(self.rows) else 0

    def row_size(self) -> int:
        return self.shape.numel() + max(self.shape.numel(), self.form.row_size())  # what is added up, and to what

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        total = self.like.new_zeros(self.samples, *self.shape) if out is None else out.zero_()
        for piece in stretches(self.form.samples, max(1, self.samples)):  # as much again as the result
            total.index_add_(0, self.rows[piece], self.form[piece].dense(factor=factor))
        return total

    def __getitem__(self, index: Index) -> Form:
        wanted = torch.arange(self.samples, device=self.rows.device)[index]
        new_rows, positions = (wanted[:, None] == self.rows).nonzero(as_tuple=True)
        return Grouping(self.form[positions], new_rows, len(wanted))

    def factors(self, others: Sequence[Form] = ()) -> Positions | None:
        if (found := self.form.factors()) is None or found[2] is not None:
            return None
        lefts, right, _ = found
        return lefts, right, self.rows[: len(right)]  # those of one pass

    def norms(self, budget: int = BUDGET) -> Tensor:
        if not isinstance(self.form, Paired) or not len(self.rows):
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

    def _counts(self) -> Tensor:
        return torch.bincount(self.rows, minlength=self.samples)


class Concatenation(Composite):
    """The rows of several forms, one form below the other: appended micro-batches.

    parts: forms of the same shape
    """

    def __init__(self, parts: Sequence[Form]) -> None:
        self.parts, self.shape = parts, parts[0].shape
        self.samples = sum(part.samples for part in parts)

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(values))

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return w.split([part.samples for part in self.parts], dim=-1)

    def _of(self, parts: Sequence[Form]) -> Form:
        return Concatenation(parts)

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        if out is None:
            return torch.cat([part.dense(factor=factor) for part in self.parts])
        for part, piece in zip(self.parts, out.split([part.samples for part in self.parts])):
            part.dense(piece, factor)
        return out

    def __getitem__(self, index: Index) -> Form:
        places = [(p, n) for p, part in enumerate(self.parts) for n in range(part.samples)]
        wanted = torch.arange(self.samples, device="cpu")[index.cpu() if isinstance(index, Tensor) else index].tolist()
        runs = [(p, [n for _, n in run]) for p, run in groupby([places[n] for n in wanted], key=lambda place: place[0])]
        pieces = [self.parts[p][torch.tensor(run, device=self.like.device)] for p, run in runs]
        return Concatenation(pieces) if pieces else self.parts[0][:0]

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        total = self.new_sums(*self.shape).abs()
        for part, piece in zip(self.parts, self._split(w)):
            total += part.second_moment(piece, about, budget)
        return total

    def norms(self, budget: int = BUDGET) -> Tensor:
        return self._join(part.norms(budget) for part in self.parts)
