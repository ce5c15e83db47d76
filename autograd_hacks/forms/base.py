"""The base class of all forms, which defines every verb."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autograd_hacks.forms.numerics import accumulation_dtype, row_norms, stretches
from autograd_hacks.forms.positions import Pair, norms_of_pairs, prefers_positions
from autograd_hacks.forms.projection import RandomMap

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11

BUDGET = 64 * 2**20
"""Bytes that a verb may take beside its result, unless it is told another number."""

Index = slice | Tensor


def pairs_of(total: Tensor, w: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each sum of a weighted sum, as a view, with its weights, N."""
    yield from ((total[k], w[k]) for k in range(len(w))) if w.ndim == 2 else [(total, w)]


def put(rows: Tensor, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
    """factor · rows, into ``out`` where that is given, as `Form.dense` returns them; ``rows`` itself if nothing is to do."""
    if isinstance(factor, Tensor) or factor != 1:
        return torch.mul(rows, factor, out=out)
    return rows if out is None else out.copy_(rows)


class Form(ABC):
    """J, the gradients of N samples with respect to one parameter: a matrix with a row for each sample.

    samples: N    shape: the parameter's shape, which the rows have when written out
    Every verb can be differentiated, but for ``dense(out=...)``.  All but ``dense`` add half precision up in single, and
    return that, and take no more than ``budget`` bytes beside their result, as far as one entry of the parameter's first
    axis allows.
    """

    samples: int
    shape: torch.Size
    writes_in_place = True
    """Whether ``dense(out)`` writes straight into ``out``, and not by way of a copy."""
    parts: Sequence[Form] = ()
    """The forms that it is made of, if it is."""
    cuts_well = False
    """Whether `block` is as cheap as a part of the whole."""
    held: tuple[Tensor, ...] = ()
    """The tensors that it is made of, samples first, unless it is made of forms."""
    pair: Pair | None = None
    """The factors of a form whose row n is Σₜ left[n, t] ⊗ right[n, t]."""
    varies: Sequence[int] = ()
    """The places in ``held`` in which `varied` can put another factor, and that `tangent` can go without."""

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """Some tensor of the rows' dtype and device."""

    @abstractmethod
    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        """factor · J written out, ``(N, *shape)``, in memory of its own; into ``out`` where that is given."""

    @abstractmethod
    def __getitem__(self, index: Index) -> Form:
        """The rows of some samples.  index: a slice of step 1, or a tensor of sample numbers (repeats allowed)."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> Form:
        """The same rows, computed in another dtype; the form itself where it has that."""

    @abstractmethod
    def block(self, rows: slice) -> Form:
        """J for some entries of the parameter's first axis."""

    @property
    def terms(self) -> Sequence[Form]:
        """The forms whose sum this is: itself, unless it is made of several."""
        return [self]

    def saving(self) -> float:
        """Multiplications for a sample and an entry that norms and a weighted sum share, if both read rows that were written
        out once."""
        return 0.0

    def leaves(self) -> Iterator[Form]:
        """The forms that this is made of, in the end; itself, if of none."""
        yield from (leaf for part in self.parts for leaf in part.leaves()) if self.parts else [self]

    def matrix(self) -> Tensor:
        """J written out as a matrix, (N, P) for a parameter of P numbers; to read, since it may be the form's own."""
        return self.dense().reshape(self.samples, self.shape.numel())

    def wide(self) -> Self:
        """The form in the dtype that its verbs add up in."""
        form = self.to(self.sum_dtype)
        assert isinstance(form, type(self))
        return form

    @property
    def sum_dtype(self) -> torch.dtype:
        """What the verbs add up in."""
        return accumulation_dtype(self.like.dtype)

    def new_sums(self, *shape: int) -> Tensor:
        """Zeros to add up in."""
        return torch.zeros(shape, dtype=self.sum_dtype, device=self.like.device)

    def row_size(self) -> int:
        """How many numbers are written out for a sample when its row is."""
        return self.shape.numel()

    def held_size(self) -> int:
        """How many numbers the form holds for a sample, which `to` copies."""
        return sum(tensor.shape[1:].numel() for leaf in self.leaves() for tensor in leaf.held)

    def chunks(self, budget: int, row: int | None = None) -> Iterator[tuple[slice, Self]]:
        """The samples in order with their forms, as many at a time as fit into a budget, but one at the least.

        row: numbers that are written out for a sample, `row_size` unless told
        """
        each = self.row_size() if row is None else row
        if self.like.dtype != self.sum_dtype:
            each += self.held_size()
        each = max(1, each) * self.sum_dtype.itemsize
        for piece in stretches(self.samples, budget // each):
            part = self if piece == slice(0, self.samples) else self[piece]
            yield piece, part.wide()  # type: ignore[misc]  # rows of a form are a form of its kind, or verbs are called again

    def blocks(self, budget: int) -> Iterator[tuple[slice, Form]]:
        """The entries of the parameter's first axis with their forms, as many at a time as can be written out."""
        entries = self.shape[0] if self.shape else 1
        numbers = max(1, self.samples * self.row_size()) * self.like.element_size()
        if entries < 2 or numbers <= budget:
            yield slice(0, entries), self
            return
        for rows in stretches(entries, budget * entries // numbers):
            yield rows, self.block(rows)

    def _written(self, budget: int) -> Iterator[tuple[slice, slice, Tensor]]:
        """J piece by piece: samples, entries of the parameter's first axis, and (samples, entries · rest)."""
        for samples, part in self.chunks(budget // 2):  # while the next is written, who asked still has the one before
            for rows, block in part.blocks(budget // 2):
                yield samples, rows, block.matrix()

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        """J v: every sample's gradient along ``v``.  v: shape.  Returns N."""
        v = v.to(self.sum_dtype).reshape(self.shape if self.shape else (1,))
        found = self.new_sums(self.samples)
        for samples, rows, written in self._written(budget):
            found[samples] += written @ v[rows].flatten()
        return found

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        """Jᵀ w: the samples' gradients added up with weights.

        w: N, or (K, N) for K sums at once    total: what an earlier call returned, to add to in place
        Returns shape, or ``(K, *shape)``.
        """
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        weights = (w if w.ndim == 2 else w[None]).to(total.dtype)
        entries = self.shape[0] if self.shape else 1
        sums = total.view(len(weights), entries, self.shape[1:].numel())
        for samples, rows, written in self._written(budget):
            sums[:, rows].add_((weights[:, samples] @ written).view(sums[:, rows].shape))
        return total

    def second_moment(self, w: Tensor, about: Tensor | None = None, budget: int = BUDGET) -> Tensor:
        """Σₙ wₙ (gₙ - about)², elementwise.  w: N    about: shape, zero unless told.  Returns shape."""
        entries = self.shape[0] if self.shape else 1
        total = self.new_sums(entries, self.shape[1:].numel()).abs()
        about = None if about is None else about.to(self.sum_dtype).reshape(total.shape)
        for samples, rows, written in self._written(budget // 2):
            deviation = written if about is None else written - about[rows].flatten()
            size = deviation.abs() if deviation.is_complex() else deviation
            total[rows] += (w[samples].to(total.dtype) @ size.square()).view(-1, total.shape[1])
        return total.view(self.shape)

    def gram(self, other: Form, budget: int = BUDGET) -> Tensor:
        """J Kᵀ: inner products of this form's rows with those of ``other``, which has M samples of the same shape.
        Returns (N, M)."""
        if other.parts and not self.parts:  # a form made of others knows more
            return other.gram(self, budget).mH
        # Written out: all at once where that fits; or else some entries of the parameter at a time, so that nothing is
        # written twice; or else some samples.
        mine, theirs = self.samples * self.row_size(), other.samples * other.row_size()
        width = self.sum_dtype.itemsize
        size, whole = (mine + theirs) * width, (self.samples + other.samples) * self.shape.numel() * width
        room = budget - max(0, size - whole)  # beside what is copied for each block anew
        entries, is_pair = self.shape[0] if self.shape else 1, self.samples <= 1 and other.samples <= 1
        cuts_well = self.cuts_well and other.cuts_well and whole <= room * entries
        if size <= budget or (is_pair and entries == 1):
            return self.wide().matrix() @ other.wide().matrix().mH
        if entries > 1 and (is_pair or cuts_well):
            pieces = stretches(entries, max(0, room) * entries // max(1, whole))
            total = self.new_sums(self.samples, other.samples)
            for rows in pieces:
                total += self.block(rows).gram(other.block(rows), budget)
            return total
        if other.samples <= 1 or (self.samples > 1 and mine >= theirs):
            return torch.cat([self[half].gram(other, budget) for half in _halves(self.samples)])
        return torch.cat([self.gram(other[half], budget) for half in _halves(other.samples)], dim=1)

    def norms(self, budget: int = BUDGET) -> Tensor:
        """The rows' 2-norms, N.  They overflow only where the true norm does."""
        found = []
        for _, part in self.chunks(budget):
            blocks = [row_norms(block.matrix()) for _, block in part.blocks(budget)]
            found.append(blocks[0] if len(blocks) == 1 else row_norms(torch.stack(blocks, dim=1)))
        return torch.cat(found)

    def _norms_by_positions(self, budget: int) -> Tensor | None:
        """The norms from products over positions; None where writing out is cheaper.  Rows that cancel are written out."""
        pairs, found = [term.pair for term in self.terms], []
        if not prefers_positions(pairs, self.shape.numel()):
            return None
        for _, part in self.chunks(budget, 2 * sum(right.shape[1] for _, right in pairs) ** 2):
            norms, exact = norms_of_pairs([term.pair for term in part.terms if term.pair is not None], budget)
            written = (~exact).nonzero()[:, 0]
            found.append(norms.index_put((written,), Form.norms(part[written], budget)) if len(written) else norms)
        return torch.cat(found)

    def project(self, random: RandomMap, budget: int = BUDGET) -> Tensor:
        """J R, for a map R that is drawn and not stored; see `RandomMap`.  Returns (N, dim)."""
        found = self.new_sums(self.samples, random.dim)
        row = self.row_size() + RandomMap.COLUMNS * min(random.fans)
        for samples, part in self.chunks(budget, row):
            for rows, block in part.blocks(budget):
                written = block.matrix().view(part.samples, rows.stop - rows.start, random.fans[1])
                for columns, left, right in random.columns(found):
                    # Products for a sample, dim · O · I and then dim · min(O, I): the longer axis goes first.
                    if random.fans[0] < random.fans[1]:
                        found[samples, columns] += ((written @ right.mT) * left[:, rows].mT).sum(1)
                    else:
                        found[samples, columns] += ((written.mT @ left[:, rows].mT) * right.mT).sum(1)
        return found

    def cross(self, other: Form, budget: int = BUDGET) -> Tensor:
        """Jᵀ K: Σₙ gₙ ⊗ hₙ, for the rows h of another parameter's form for the same samples.  Returns ``(P, Q)`` for
        parameters of P and Q numbers."""
        total = self.new_sums(self.shape.numel(), other.shape.numel())
        both = max(1, self.row_size() + other.row_size()) * self.sum_dtype.itemsize
        for piece in stretches(self.samples, budget // both):
            whole = piece == slice(0, self.samples)
            mine, theirs = ((form if whole else form[piece]).wide().matrix() for form in (self, other))
            total.addmm_(mine.mT, theirs.to(total.dtype))
        return total

    def varied(self, place: int, factor: Tensor) -> Self:
        """The form with another factor, for one of the places that it `varies` in; J is linear in it."""
        raise NotImplementedError(f"{type(self).__name__} has no factors to be changed")

    def tangent(self, place: int, v: Tensor) -> Tensor:
        """What gives J v by its inner product with a factor, sample by sample: of the shape of ``held[place]``, without
        looking at it.  v: shape"""
        raise NotImplementedError(f"{type(self).__name__} has no tangents")

    def merge_key(self) -> Hashable:
        """Forms with the same key, unless that is None, can be added by `merge`."""
        return None

    @classmethod
    def merge(cls, forms: Sequence[Form]) -> Form:
        """The sum of forms with one `merge_key`, as one form of the same kind."""
        raise NotImplementedError(f"{cls.__name__} has a merge_key but no merge")


def _halves(samples: int) -> list[slice]:
    return stretches(samples, (samples + 1) // 2)
