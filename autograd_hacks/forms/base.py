"""The base class of all forms, which defines every verb, and `Dense`, the form that stores its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autograd_hacks.forms.cost import cache_budget
from autograd_hacks.forms.numerics import accumulation_dtype, put, row_norms, slices_of
from autograd_hacks.forms.positions import Pair, Positions, Windows
from autograd_hacks.forms.projection import AnyMap, check_is_map
from autograd_hacks.support.display import Hinting, Shown, Table, bytes_of, with_unit

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11

BUDGET = 64 * 2**20
"""How many bytes a verb may use beside its result, by default."""

Index = slice | Tensor
INTERNAL = frozenset(
    """pair leaves factors cuts_well saving held_size wide written merge_key merge terms
    new_sums blocks varies smallest tangent varied side_by_side""".split()  # noqa: SIM905 to be read
)
"""Methods that the library needs and users don't: hidden from tab completion and from the reference."""


class Form(Hinting, Shown, ABC):
    """J, the gradients of N samples with respect to one parameter: a matrix with a row for each sample.

    A form sets ``samples`` (N) and ``shape`` (the parameter's), and defines `dense`, indexing, and `like`.  Everything else
    follows from these; an override may be faster or smaller, never different.

    Every verb except ``dense(out=...)`` can be differentiated.  All verbs except ``dense`` compute sums of half precision in
    single precision and return that.  They use at most ``max_bytes`` beside their result, if one entry of the parameter's
    first axis fits into that.
    """

    samples: int
    shape: torch.Size

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in INTERNAL]

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor with the rows' dtype and device."""

    @abstractmethod
    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """factor · J written out, ``(N, *shape)``, in new memory, or into ``out`` (any strides) if given."""

    @abstractmethod
    def __getitem__(self, index: Index) -> Form:
        """The rows of some samples.  index: a slice of step 1, or a tensor of sample numbers (repeats allowed)."""

    # Its parts.

    parts: Sequence[Form] = ()
    """The forms that it consists of, if any."""
    pair: Pair | None = None
    """The left and right factor, for a form whose row n is Σₜ left[n, t] ⊗ right[n, t]."""

    @cached_property
    def held(self) -> tuple[Tensor, ...]:
        """The tensors that it consists of, by default those of its parts.  Reading raises if one of them was overwritten."""
        return tuple(x for part in self.parts for x in part.held)

    def leaves(self) -> Sequence[Form]:
        """The innermost forms that this one consists of; itself if it has no parts."""
        return [leaf for part in self.parts for leaf in part.leaves()] if self.parts else [self]

    def factors(self, others: Sequence[Form] = ()) -> Sequence[Positions]:
        """The products of gradients and inputs whose sums are the rows, block by block of the parameter's first axis.

        Empty if the rows are not such sums.

        others: further passes, forms that differ from this one in the gradient only
        """
        return ()

    # Costs.  Verbs and readers use these to choose the cheaper way; they change no number.

    cuts_well = False
    """Whether the time and memory of a `block` are proportional to its size."""

    def saving(self, fresh: bool = False) -> float:
        """The saving per number if rows are written once for norms and weighted sum; see ``cost``.  fresh: into new
        memory"""
        return 0.0

    def row_size(self) -> int:
        """How many numbers are written in order to write out one row."""
        return self.shape.numel()

    def held_size(self) -> int:
        """How many numbers are held per sample, which `to` copies."""
        return sum(tensor.shape[1:].numel() for tensor in self.held)

    # The same rows in another representation.

    def to(self, dtype: torch.dtype) -> Form:
        """The same rows, computed in another dtype; the form itself if it has that dtype."""
        return self if self.like.dtype == dtype else Dense(self.matrix().to(dtype).view(self.samples, *self.shape))

    def wide(self) -> Self:
        """The form in the dtype that its verbs use for sums."""
        return self.to(self.sum_dtype)  # type: ignore[return-value]  # or rows written out, whose verbs are the base class's

    def block(self, rows: slice) -> Form:
        """J for some entries of the parameter's first axis."""
        return Dense(self.matrix().view(self.samples, *self.shape)[:, rows])

    def matrix(self) -> Tensor:
        """J written out as a matrix, (N, P) for a parameter of P numbers.  Read only: it may be the form's own memory."""
        return self.dense().reshape(self.samples, self.shape.numel())

    def written(self, out: Tensor) -> Form:
        """The form with its rows written into ``out``; a scalar factor is kept separately."""
        return Dense(self.dense(out))

    def merge_key(self) -> Hashable:
        """Forms with equal keys can be added by `merge`, unless the key is None."""
        return None

    def merge(self, others: Sequence[Form]) -> Form:
        """The sum of this form and others with the same `merge_key`, as one form of the same kind."""
        raise NotImplementedError(f"{type(self).__name__} has a merge_key but no merge")

    # Some rows at a time.

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype that the verbs use for sums."""
        return accumulation_dtype(self.like.dtype)

    def new_sums(self, *shape: int) -> Tensor:
        """Zeros in which to add up."""
        return torch.zeros(shape, dtype=self.sum_dtype, device=self.like.device)

    def chunks(self, max_bytes: int, row: int | None = None) -> Iterator[tuple[slice, Self]]:
        """Slices of the samples in order, with their forms: as many samples at a time as fit a budget, but at least one.

        row: how many numbers are written per sample, by default `row_size`"""
        copied = 0 if self.like.dtype == (dtype := self.sum_dtype) else self.held_size()
        each = max(1, (self.row_size() if row is None else row) + copied) * dtype.itemsize
        for piece in slices_of(self.samples, max_bytes // each):
            part = self if piece.stop - piece.start == self.samples else self[piece]
            yield piece, part.wide()  # type: ignore[misc]  # rows of a form are of its kind, or the base class's verbs read them

    def blocks(self, max_bytes: int) -> Iterator[tuple[slice, Form]]:
        """Slices of the parameter's first axis, with their forms: as many entries at a time as can be written out."""
        entries = self.shape[:1].numel()
        numbers = max(1, self.samples * self.row_size()) * self.like.element_size()
        fits = entries < 2 or numbers <= max_bytes
        for rows in slices_of(entries, entries if fits else max_bytes * entries // numbers):
            yield rows, self if fits else self.block(rows)

    def _written(self, max_bytes: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """J piece by piece: samples, entries of the parameter's first axis, and (samples, entries · rest)."""
        max_bytes = cache_budget(max_bytes // 2, self.like)  # the caller still holds one piece while the next is written
        for samples, part in self.chunks(max_bytes):
            for rows, block in part.blocks(max_bytes):
                yield samples, rows, block.matrix()

    # The verbs.

    def dot(self, v: Tensor, max_bytes: int = BUDGET) -> Tensor:
        """J v: every sample's gradient along ``v``.  v: shape.  Returns N."""
        v = v.to(self.sum_dtype).reshape(self.shape if self.shape else (1,))
        found = self.new_sums(self.samples)
        for samples, rows, written in self._written(max_bytes):
            found[samples] += written @ v[rows].flatten()
        return found

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        """Jᵀ w: the weighted sum of the samples' gradients.

        w: N, or (K, N) for K sums at once
        total: the result of an earlier call, to add to in place
        Returns shape, or ``(K, *shape)``.
        """
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        weights = (w if w.ndim == 2 else w[None]).to(total.dtype)
        sums = total.view(len(weights), self.shape[:1].numel(), self.shape[1:].numel())
        for samples, rows, written in self._written(max_bytes):
            sums[:, rows].add_((weights[:, samples] @ written).view(sums[:, rows].shape))
        return total

    def second_moment(self, w: Tensor, about: Tensor | None = None, max_bytes: int = BUDGET) -> Tensor:
        """Σₙ wₙ (gₙ - about)², elementwise.  w: N    about: shape, zero by default.  Returns shape."""
        total = self.new_sums(self.shape[:1].numel(), self.shape[1:].numel()).abs()
        about = None if about is None else about.to(self.sum_dtype).reshape(total.shape)
        for samples, rows, written in self._written(max_bytes // 2):
            size = written if about is None else written - about[rows].flatten()
            size = size.abs() if size.is_complex() else size
            squares = size.square() if size is written or size.requires_grad else size.square_()
            total[rows] += (w[samples].to(total.dtype) @ squares).view(total[rows].shape)
        return total.view(self.shape)

    def reduce(self, f: Callable[[Tensor], Tensor], max_bytes: int = BUDGET) -> Tensor:
        """Σₙ f(gₙ), elementwise.  Returns shape, in the dtype that ``f`` returns; integers and booleans are converted.

        f: an elementwise function of pieces of rows, (samples, numbers), which it must not change
        """
        total = None
        for _, rows, written in self._written(max_bytes // 4):  # f may keep several tensors of this size
            found = f(written)
            is_whole = not (found.is_floating_point() or found.is_complex())
            dtype = self.sum_dtype.to_real() if is_whole else accumulation_dtype(found.dtype)
            if total is None:
                total = found.new_zeros(self.shape[:1].numel(), self.shape[1:].numel(), dtype=dtype)
            total[rows] += found.sum(0, dtype=dtype).view(total[rows].shape)
        assert total is not None  # there is at least one piece, which is empty for no samples
        return total.view(self.shape)

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        """Numbers that add up to Σₙ ⟨gₙ, uₖ vₖᵀ⟩, (K, M): one for each sample, or for each of its positions.

        u, v: (K, O) and (K, I), as `directions` gives them
        """
        return torch.stack([self.dot(torch.outer(a, b).view(self.shape)) for a, b in zip(u, v)])

    def gram(self, other: Form, max_bytes: int = BUDGET) -> Tensor:
        """J Kᵀ: inner products of this form's rows with the rows of ``other``, which has M samples of the same shape.

        Returns (N, M)."""
        if other.parts and not self.parts:  # a form with parts may have a cheaper way
            return other.gram(self, max_bytes).mH
        # Written out: everything at once if that fits, then in pieces of samples, so that nothing is written twice; else
        # some entries of the parameter at a time, else some samples.
        mine, theirs, width = self.samples * self.row_size(), other.samples * other.row_size(), self.sum_dtype.itemsize
        is_same = other is self  # then it is written once
        size = (mine if is_same else mine + theirs) * width
        whole = (self.samples if is_same else self.samples + other.samples) * self.shape.numel() * width
        room = max_bytes - max(0, size - whole)  # beside what is copied for each block
        entries, is_pair = self.shape[0] if self.shape else 1, self.samples <= 1 and other.samples <= 1
        cuts_well = self.cuts_well and other.cuts_well and whole <= room * entries
        if size <= max_bytes or whole <= max_bytes // 4 or (is_pair and entries == 1):
            some = 2 * max_bytes if size <= max_bytes else max_bytes // 2
            rows = self._rows(some)
            return rows @ (rows if is_same else other._rows(some)).mH
        if entries > 1 and (is_pair or cuts_well):
            pieces = slices_of(entries, max(0, room) * entries // max(1, whole))
            total = self.new_sums(self.samples, other.samples)
            for piece in pieces:
                block = self.block(piece)
                total += block.gram(block if is_same else other.block(piece), max_bytes)
            return total
        if other.samples <= 1 or (self.samples > 1 and mine >= theirs):
            return torch.cat(
                [self[half].gram(other, max_bytes) for half in slices_of(self.samples, (self.samples + 1) // 2)]
            )
        return torch.cat(
            [self.gram(other[half], max_bytes) for half in slices_of(other.samples, (other.samples + 1) // 2)], 1
        )

    def _rows(self, max_bytes: int) -> Tensor:
        """J written out as a matrix in the dtype for sums, some samples at a time."""
        pieces = [part.matrix() for _, part in self.chunks(max_bytes)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def norms(self, max_bytes: int = BUDGET) -> Tensor:
        """The rows' 2-norms, N.  They overflow only if the true norm does."""
        size, like = self.samples * self.row_size() * self.like.dtype.itemsize, self.like
        if like.dtype == accumulation_dtype(like.dtype) and size <= cache_budget(max_bytes // 2, like):
            return row_norms(self.matrix())  # the usual case, with few calls
        found: dict[int, list[Tensor]] = {}
        for samples, _, written in self._written(max_bytes):
            found.setdefault(samples.start, []).append(row_norms(written))
        return torch.cat([cut[0] if len(cut) == 1 else row_norms(torch.stack(cut, dim=1)) for cut in found.values()])

    def project(self, random: AnyMap, max_bytes: int = BUDGET) -> Tensor:
        """J R, for a random map R that is not stored; see `RandomMap` and `SparseMap`.  Returns (N, dim)."""
        check_is_map(random)
        found, pair = self.new_sums(self.samples, random.dim), self.pair
        if pair is not None and self.shape[:1] == pair[0].shape[2:] and random.takes_factors(pair):
            for samples, part in self.chunks(max_bytes, random.memory_of_factors(pair) + 2 * pair[1].shape[1:].numel()):
                left, right = (f.written() if isinstance(f, Windows) else f for f in part.pair or pair)
                found[samples] = random.of_factors(left, right, max_bytes)  # type: ignore[arg-type]  # right is no table
            return found
        for samples, part in self.chunks(max_bytes, self.row_size() + random.memory()):
            for rows, block in part.blocks(max_bytes):
                random.add_to(found[samples], block.matrix(), rows)
        return found

    def _table(self) -> Table:
        kinds = f" of {kinds_of(self)}" if self.parts else ""
        size = f"holds {with_unit(held_bytes(self))}, {with_unit(written_bytes(self))} written out"
        title = f"{type(self).__name__}{kinds}: {self.samples} rows of shape {tuple(self.shape)}, {size}"
        return Table(title, [("form", "shape", "made of tensors of shape", "holds"), *self._tree()])

    def _tree(self, depth: int = 0) -> Iterator[tuple[str, ...]]:
        tensors = "" if self.parts else ", ".join(str(tuple(x.shape)) for x in self.held)
        name = "  " * depth + type(self).__name__
        yield name, str((self.samples, *self.shape)), tensors, with_unit(held_bytes(self))
        for part in self.parts:
            yield from part._tree(depth + 1)


def kinds_of(form: Form) -> str:
    """The names of the innermost forms, for messages."""
    return " + ".join(dict.fromkeys(type(leaf).__name__ for leaf in form.leaves()))


def held_bytes(*forms: Form) -> int:
    """The bytes of the tensors that forms hold.  Memory that several of them share counts once."""
    return bytes_of(x for form in forms for x in form.held)


def written_bytes(form: Form) -> int:
    """The bytes of the rows, written out."""
    return form.samples * form.shape.numel() * form.like.dtype.itemsize


class Dense(Form):
    """J itself, as ``(N, *shape)``: for small parameters such as biases and affine norms."""

    cuts_well = True

    def __init__(self, values: Tensor) -> None:
        self.values, self.held, self.samples, self.shape = values, (values,), (shape := values.shape)[0], shape[1:]

    @property
    def like(self) -> Tensor:
        return self.values

    def row_size(self) -> int:
        return 0 if self.values.is_contiguous() else self.shape.numel()  # nothing is written if J is there already

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        return put(self.values.clone() if out is None and factor == 1 else self.values, out, factor)

    def matrix(self) -> Tensor:
        return self.values.reshape(self.samples, self.shape.numel())

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        if total is None and self.values.is_contiguous() and self.values.dtype == self.sum_dtype:  # it is read where it is
            return (w.to(self.sum_dtype) @ self.matrix()).view((*w.shape[:-1], *self.shape))
        return super().weighted_sum(w, max_bytes, total)

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        if v.shape[1] == 1:
            return (u * v @ self.matrix().mT).to(self.sum_dtype)
        return ((self.values.reshape(self.samples, u.shape[1], v.shape[1]) @ v.mT).to(self.sum_dtype) * u.mT).sum(1).mT

    def __getitem__(self, index: Index) -> Form:
        return Dense(self.values[index])

    def block(self, rows: slice) -> Form:
        return Dense(self.values[:, rows])

    def merge_key(self) -> Hashable:
        return Dense

    def merge(self, others: Sequence[Form]) -> Form:
        return Dense(torch.stack([form.held[0] for form in (self, *others)]).sum(0))
