"""S J: forms made of others, whose rows are scaled, relabelled, added up, or below each other."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby, repeat

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Dense, Form, Index, written_bytes
from autograd_hacks.forms.factored import Factored, Paired, takes_positions
from autograd_hacks.forms.numerics import members, pairs_of, slices_of
from autograd_hacks.forms.outer import Outer, Zero
from autograd_hacks.forms.positions import Positions
from autograd_hacks.forms.projection import AnyMap
from autograd_hacks.support.internals import times_each


def scale(form: Form, factor: float | Tensor) -> Form:
    """factor · J, for a number, or one for each row, N.  Each verb multiplies by it where that costs least."""
    is_number = type(factor) in (int, float) or not isinstance(factor, Tensor)
    if not is_number and not factor.ndim:  # type: ignore[union-attr]  # it is a tensor
        factor = factor.expand(form.samples)  # type: ignore[union-attr]  # a tensor
    if type(form) is Scaled:  # isinstance takes three times as long for abstract classes
        factor, form = form.factor * factor, form.form
    return form if type(factor) in (int, float) and factor == 1 else Scaled(form, factor)


def without_factor(forms: Mapping[str, Form]) -> tuple[Mapping[str, Form], float]:
    """Forms, and the number that all their rows are to be multiplied by; themselves and 1 where they have several."""
    plain, factors = dict[str, Form](), set[float]()
    for name, form in forms.items():
        factor, plain[name] = 1.0, form
        if type(form) is Scaled and not isinstance(form.factor, Tensor):
            factor, plain[name] = form.factor, form.form
        factors |= set() if type(plain[name]) is Zero else {factor}
    return (plain, factors.pop()) if len(factors) == 1 else (forms, 1.0)


def scaled_at_once(forms: Mapping[str, Form | None], small: int) -> dict[str, Tensor]:
    """Rows that lack only a number as a factor, by one call for all: a call for each takes longer than its work if they are
    small, or on a GPU, where each launch takes the host's time.

    small: the most bytes of one parameter's rows"""
    lacking = {n: own for n, own in forms.items() if type(own) is Scaled and not isinstance(own.factor, Tensor)}
    few = {n: own.form for n, own in lacking.items() if written_bytes(own) < small}
    pairs = {n: x for n, x in few.items() if type(x) is Outer and x.shape == (x.fan_out, x.fan_in) and x.flat is not None}
    given = {
        name: form.like
        for name, form in lacking.items()
        if type(form.form) is Dense and form.like.is_contiguous() and (name in few or form.like.is_cuda)
    } | {n: own.held[own.smallest] for n, own in pairs.items()}
    factors, kinds = [lacking[n].factor for n in given], {(x.dtype, x.is_cpu) for x in given.values()}
    # A tensor takes 1 µs for each of them, and a number 2.
    is_one = len({*factors}) == 1 and kinds == {(torch.float32, True)}
    factor = torch.tensor(factors[0], device="cpu") if is_one else factors
    found = dict(zip(given, times_each([*given.values()], factor))) if given else {}
    sides = [(own.left, found[n]) if own.smallest else (found[n], own.right) for n, own in pairs.items()]
    rows = times_each([left.mT for left, _ in sides], [right for _, right in sides]) if sides else ()
    return found | {n: own.contiguous() for n, own in zip(pairs, rows)}


def magnitudes(form: Form) -> Form:
    """The form with each factor replaced by its magnitudes.  Its rows sum the magnitudes of the terms that J's rows sum.
    Relative to these, rounding is small even if the terms cancel."""
    if isinstance(form, Scaled):
        return scale(magnitudes(form.form), form.size)
    if isinstance(form, Composite):
        return form._of([magnitudes(part) for part in form.parts])
    if isinstance(form, Factored):
        return form._of(*[x.abs() if x.is_floating_point() or x.is_complex() else x for x in form.held])
    return Dense(form.matrix().abs().view(form.samples, *form.shape))


def group(form: Form, rows: Tensor, samples: int) -> Form:
    """The form relabelled: row k of the result is the sum of the rows n with rows[n] == k.

    rows: N integers in [0, samples)    samples: the number of rows of the result
    Raises ValueError for labels of another number, or out of range.
    """
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < samples:
        raise ValueError(f"rows lie in [{int(rows.min())}, {int(rows.max())}]; expected in [0, {samples})")
    return Grouping(form, rows, samples)


def gathered(form: Form, rows: Tensor, samples: int, most: int | None = None) -> Form:
    """The same for rows that are small or have one position: the positions of each sample are laid beside each other at
    once. It costs as much as if all samples had as many rows as the one with the most, which are ``most`` if that is known.
    """
    rows = rows.to(form.like.device)  # labels lie on the CPU
    if isinstance(form, Dense):
        return Dense(form.values.new_zeros(samples, *form.shape).index_add(0, rows, form.values))
    if not isinstance(form, Paired) or not len(rows):
        return Grouping(form, rows, samples)
    # If samples have different numbers of rows, the shorter ones are padded with rows that don't count.
    # `torch.bincount` would ask the device for the smallest and the largest label.
    counts, order = rows.new_zeros(samples).index_add(0, rows, torch.ones_like(rows)), rows.argsort(stable=True)
    places = torch.arange(int(counts.max()) if most is None else most, device=rows.device)
    chosen = order[((counts.cumsum(0) - counts)[:, None] + places).clamp(max=len(order) - 1)]
    return form.side_by_side(chosen, places < counts[:, None])


class Composite(Form):
    """Σ S B M over several forms B, where S scales, sums or reorders rows, and M puts columns where they belong.

    A composite says what S and Sᵀ do to something with an entry for each row, and M to something of the parameter's shape;
    the verbs that are linear in J follow.

    parts: the forms    samples, shape: of the sum
    """

    adds_up = False  # whether S adds rows to each other, whose digits may cancel

    def __init__(self, parts: Sequence[Form], samples: int, shape: torch.Size) -> None:
        self.parts, self.samples, self.shape = parts, samples, shape
        self.cuts_well = all(part.cuts_well for part in parts)

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        """S values, N ...  values: (M, ...) for each part of M rows, in memory that may be written to

        By default S sums the parts."""
        values = iter(values)  # one after the other, so that two of them are never held at once
        total = next(values)
        for value in values:
            total += value
        return total

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        """w S, (..., M) for each part of M rows.  w: ... N"""
        return [w] * len(self.parts)

    def _cut(self, x: Tensor, axis: int = 0) -> Iterator[Tensor]:
        """M x, for each part: the part's entries of the parameter's first axis, by default all.  axis: x's, for that"""
        return repeat(x, len(self.parts))

    @abstractmethod
    def _of(self, parts: Sequence[Form]) -> Form:
        """S and M of other parts."""

    def _below(self, others: Sequence[Form]) -> Form | None:
        """The rows of this form and others below it as one form of the same kind; None if S differs."""
        return None

    @property
    def like(self) -> Tensor:
        return self.parts[0].like

    def __getitem__(self, index: Index) -> Form:
        return self._of([part[index] for part in self.parts])

    def row_size(self) -> int:
        return max(part.row_size() for part in self.parts)

    def to(self, dtype: torch.dtype) -> Form:
        parts = [part.to(dtype) for part in self.parts]
        return self if all(now is part for now, part in zip(parts, self.parts)) else self._of(parts)

    def block(self, rows: slice) -> Form:
        return self._of([part.block(rows) for part in self.parts])

    def dot(self, v: Tensor, max_bytes: int = BUDGET) -> Tensor:
        return self._join(part.dot(own, max_bytes) for part, own in zip(self.parts, self._cut(v)))

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        leads_back = any(x.requires_grad for x in (w, *self.held))
        for part, weights, own in zip(self.parts, self._split(w), self._cut(total, w.ndim - 1)):
            if leads_back:  # after a first in-place write torch may treat a view as a leaf
                own.add_(part.weighted_sum(weights, max_bytes))
            else:
                part.weighted_sum(weights, max_bytes, own)
        return total

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.cat([part.terms(own, v) for part, own in zip(self.parts, self._cut(u, 1))], 1)

    def gram(self, other: Form, max_bytes: int = BUDGET) -> Tensor:
        if isinstance(other, Scaled) and not isinstance(self, Scaled):
            return other.gram(self, max_bytes).mH
        # If rows are written out, then once, and not once for each part of the other form.
        is_written = len(self.parts) > 1 and not takes_positions(self, other)
        if is_written or (self.adds_up and self._cancels(max_bytes)):
            return Form.gram(self, other, max_bytes)
        return self._join(part.gram(other, max_bytes) for part in self.parts)

    def _cancels(self, max_bytes: int) -> bool:
        """Whether some row's terms are so much longer than the row that its inner products would lose their digits."""
        size = self._join(part.norms(max_bytes) for part in self.parts).detach()
        square = self.norms(max_bytes).detach() ** 2
        return bool(((square <= 1e4 * torch.finfo(square.dtype).eps * size**2) & (size > 0)).any())

    def project(self, random: AnyMap, max_bytes: int = BUDGET) -> Tensor:
        return self._join(part.project(random, max_bytes) for part in self.parts)


class Scaled(Composite):
    """factor · J.

    factor: a number, or one for each row, N
    """

    def __init__(self, form: Form, factor: float | Tensor) -> None:
        if isinstance(factor, Tensor) and factor.shape != (form.samples,):
            raise ValueError(
                f"the factor has shape {tuple(factor.shape)}; expected a number, or one for each of {form.samples} rows"
            )
        self.parts, self.samples, self.shape, self.held = (form,), form.samples, form.shape, form.held
        self.cuts_well, self.form, self.factor = form.cuts_well, form, factor

    @property
    def size(self) -> float | Tensor:
        """The factor's magnitude."""
        return self.factor.abs() if isinstance(self.factor, Tensor) else abs(self.factor)

    def _factor(self, rows: Tensor) -> float | Tensor:
        """The factor in the shape and dtype that rows are multiplied in."""
        factor = self.factor
        return factor.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1)) if isinstance(factor, Tensor) else factor

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        (value,) = values
        is_plain = not (isinstance(self.factor, Tensor) or value.requires_grad)
        return value.mul_(self.factor) if is_plain else value * self._factor(value)

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return [w * self.factor]

    def _of(self, parts: Sequence[Form]) -> Form:
        return Scaled(parts[0], self.factor)

    def __getitem__(self, index: Index) -> Form:
        return Scaled(self.form[index], self.factor[index] if isinstance(self.factor, Tensor) else self.factor)

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        # A form's terms needn't be one for each row.
        return Form.terms(self, u, v) if isinstance(self.factor, Tensor) else super().terms(u, v) * self.factor

    def saving(self, fresh: bool = False) -> float:
        return self.form.saving(fresh)

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        if not isinstance(self.factor, Tensor):
            return self.form.dense(out, self.factor * factor)
        rows = self.form.dense(out, factor)
        return self._join([rows]) if out is None else rows.mul_(self._factor(rows))

    def written(self, out: Tensor) -> Form:
        return self._of([self.form.written(out)])

    def second_moment(self, w: Tensor, about: Tensor | None = None, max_bytes: int = BUDGET) -> Tensor:
        if about is not None and (isinstance(self.factor, Tensor) or not self.factor):
            return super().second_moment(w, about, max_bytes)
        inside, weights = None if about is None else about / self.factor, w.to(self.sum_dtype.to_real())
        return self.form.second_moment(weights * self.size**2, inside, max_bytes)

    def norms(self, max_bytes: int = BUDGET) -> Tensor:
        norms = self.form.norms(max_bytes)
        return (norms * self.size).to(norms.dtype)


class Grouping(Composite):
    """A form whose rows were relabelled: ragged input, routed tokens, users of several samples.

    form: M rows    rows: M integers in [0, samples), the sample that each row belongs to, which `group` checks    samples: N
    """

    adds_up = True

    def __init__(self, form: Form, rows: Tensor, samples: int) -> None:
        if rows.shape != (form.samples,):
            raise ValueError(f"rows has shape {tuple(rows.shape)}; expected one label for each of {form.samples} rows")
        super().__init__((form,), samples, form.shape)
        self.form, self.rows = form, rows

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        (value,) = values
        return value.new_zeros(self.samples, *value.shape[1:]).index_add(0, self.rows, value)

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return [w[..., self.rows]]

    def _of(self, parts: Sequence[Form]) -> Form:
        return Grouping(parts[0], self.rows, self.samples)

    def held_size(self) -> int:
        return self.form.held_size() * int(torch.bincount(self.rows).max()) if len(self.rows) else 0

    def row_size(self) -> int:
        return self.shape.numel() + max(self.shape.numel(), self.form.row_size())  # what is added up, and to what

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        total = self.like.new_zeros(self.samples, *self.shape) if out is None else out.zero_()
        for piece in slices_of(self.form.samples, max(1, self.samples)):  # as much again as the result
            total.index_add_(0, self.rows[piece], self.form[piece].dense(factor=factor))
        return total

    def __getitem__(self, index: Index) -> Form:
        wanted = torch.arange(self.samples, device=self.rows.device)[index]
        positions, new_rows = members(self.rows, wanted)
        return Grouping(self.form[positions], new_rows, len(wanted))

    def factors(self, others: Sequence[Form] = ()) -> Sequence[Positions]:
        found = self.form.factors()
        if any(own.owners is not None for own in found):
            return ()
        return [own._replace(owners=self.rows[: own.inputs.shape[0]]) for own in found]  # those of one pass

    def norms(self, max_bytes: int = BUDGET) -> Tensor:
        if len(self.rows) == len(self.rows.unique()):  # nothing is added up
            return self._join([self.form.norms(max_bytes)])
        if not isinstance(self.form, Paired):
            return super().norms(max_bytes)
        pieces = slices_of(self.samples, max_bytes // max(1, 8 * self.held_size()))
        if len(pieces) > 1:
            return torch.cat([self[piece].norms(max_bytes) for piece in pieces])
        return gathered(self.form, self.rows, self.samples).norms(max_bytes)


class Concatenation(Composite):
    """The rows of several forms, one form below the other: micro-batches, or backward passes.

    Passes through one call differ only in their gradients and share the other factor.  Then K passes cost little more than
    one: for J v the output's tangent along v is computed once, and for Jᵀ w the gradients are added up first.

    parts: forms of the same shape
    varying: the number in ``held`` of the factor that differs, where the others are shared
    """

    def __init__(self, parts: Sequence[Form], varying: int | None = None) -> None:
        super().__init__(parts, sum(part.samples for part in parts), parts[0].shape)
        self.varying, self.each = varying, parts[0].samples
        self._sharing = [part for part in parts if isinstance(part, Factored)] if varying is not None else []

    @staticmethod
    def of(parts: Sequence[Form]) -> Form:
        """The rows of several passes through one call: row k · N + n belongs to pass k and sample n.  Equal factors are
        stored once."""
        first = parts[0]
        if all(isinstance(part, Dense) for part in parts):
            return Dense(torch.cat([part.held[0] for part in parts]))
        if isinstance(first, Composite) and (found := first._below(parts[1:])) is not None:
            return found
        alike = [part for part in parts if isinstance(part, Factored) and type(part) is type(first)]
        for varying in alike[0].varies if len(alike) == len(parts) else ():
            if all(_same(alike[0].held[1 - varying], part.held[1 - varying]) for part in alike[1:]):
                return Concatenation([alike[0].varied(varying, part.held[varying]) for part in alike], varying)
        return Concatenation(parts)

    def _join(self, values: Iterable[Tensor]) -> Tensor:
        return torch.cat(list(values))

    def _split(self, w: Tensor) -> Sequence[Tensor]:
        return w.split([part.samples for part in self.parts], dim=-1)

    def _of(self, parts: Sequence[Form]) -> Form:
        return Concatenation(parts)

    def to(self, dtype: torch.dtype) -> Form:
        return self if self.like.dtype == dtype else Concatenation([part.to(dtype) for part in self.parts], self.varying)

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        if out is None:
            return torch.cat([part.dense(factor=factor) for part in self.parts])
        for part, piece in zip(self.parts, out.split([part.samples for part in self.parts])):
            part.dense(piece, factor)
        return out

    def __getitem__(self, index: Index) -> Form:
        if isinstance(index, slice):  # nothing is copied
            first, last, _ = index.indices(self.samples)
            starts = accumulate((part.samples for part in self.parts[:-1]), initial=0)
            cut = [part[max(0, first - start) : max(0, last - start)] for part, start in zip(self.parts, starts)]
            return Concatenation([part for part in cut if part.samples] or cut[:1])
        places = [(p, n) for p, part in enumerate(self.parts) for n in range(part.samples)]
        wanted = torch.arange(self.samples, device="cpu")[index.cpu()].tolist()
        runs = [(p, [n for _, n in run]) for p, run in groupby([places[n] for n in wanted], key=lambda place: place[0])]
        pieces = [self.parts[p][torch.tensor(run, device=self.like.device)] for p, run in runs]
        return Concatenation(pieces) if pieces else self.parts[0][:0]

    def second_moment(self, w: Tensor, about: Tensor | None = None, max_bytes: int = BUDGET) -> Tensor:
        total = self.new_sums(*self.shape).abs()
        for part, piece in zip(self.parts, self._split(w)):
            total += part.second_moment(piece, about, max_bytes)
        return total

    def norms(self, max_bytes: int = BUDGET) -> Tensor:
        return self._join(part.norms(max_bytes) for part in self.parts)

    def dot(self, v: Tensor, max_bytes: int = BUDGET) -> Tensor:
        if self.varying is None:
            return super().dot(v, max_bytes)
        found = []
        for _, form, factors in self._pieces(self.varying, max_bytes // 2):
            tangent = form.tangent(self.varying, v.to(self.sum_dtype)).flatten(1)
            found.append(torch.stack([torch.einsum("nf,nf->n", factor, tangent) for factor in factors]))
        return torch.cat(found, dim=1).flatten()

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        if self.varying is None:
            return super().weighted_sum(w, max_bytes, total)
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        for each, weights in pairs_of(total, w):
            by_pass = weights.to(total.dtype).view(len(self.parts), self.each, 1)
            for piece, form, factors in self._pieces(self.varying, max_bytes // 4):
                combined = next(factors) * by_pass[0, piece]
                for factor, scales in zip(factors, by_pass[1:, piece]):
                    combined = combined.addcmul_(factor, scales)
                form = form.varied(self.varying, combined.view(form.held[self.varying].shape))
                form.weighted_sum(weights.new_ones(form.samples), max_bytes // 2, each)
        return total

    def factors(self, others: Sequence[Form] = ()) -> Sequence[Positions]:
        first = next(iter(self._sharing), None)
        return () if first is None or self.varying != first.varies[0] else first.factors(self._sharing[1:])

    def _pieces(self, varying: int, max_bytes: int) -> Iterator[tuple[slice, Factored, Iterator[Tensor]]]:
        """Some samples at a time, with a form of theirs, and the factors that differ, pass by pass: N F."""
        first, *_ = factors = [part.held[varying] for part in self._sharing]
        for piece in slices_of(self.each, max_bytes // max(1, first.shape[1:].numel() * self.sum_dtype.itemsize)):
            yield piece, self._sharing[0][piece].wide(), (own[piece].flatten(1).to(self.sum_dtype) for own in factors)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share their memory, or have the same numbers."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return (one.data_ptr() == other.data_ptr() and one.stride() == other.stride()) or torch.equal(one, other)
