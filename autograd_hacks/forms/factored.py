"""The base class of forms that are products of tensors."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form, Index
from autograd_hacks.forms.cost import by_products, by_writing, gram_by_positions, memory_of_products
from autograd_hacks.forms.numerics import looks_free
from autograd_hacks.forms.positions import Positions, Windows, Written, gram_of_pairs, norms_of_pairs

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11


def takes_positions(form: Form, other: Form) -> bool:
    """Whether inner products of rows should come from products between their positions."""
    theirs = None if other is form else [leaf.pair for leaf in other.leaves()]
    mine = [leaf.pair for leaf in form.leaves()]
    return gram_by_positions(mine, theirs, (form.samples, other.samples), form.shape.numel())


def norms_by_positions(form: Form, max_bytes: int = BUDGET) -> Tensor:
    """The norms of a form, or of a sum of forms.

    They come from products over positions, unless writing the rows out is cheaper, or the positions cancel."""
    pairs, found = [term.pair for term in form.parts or [form] if term.pair is not None], []
    if len(pairs) < (len(form.parts) or 1) or (like := form.like).dtype.is_complex:
        return Form.norms(form, max_bytes)
    single = not looks_free(like) and form.sum_dtype == torch.float32
    if by_products(pairs, single) > by_writing(pairs):
        return Form.norms(form, max_bytes)
    # In float64 products are twice as large, and factors are copied.
    memory = memory_of_products(pairs) if not single else 2 * (memory_of_products(pairs) + form.held_size())
    if isinstance(pairs[0][1], Windows) and memory * form.sum_dtype.itemsize > max_bytes:  # windows can't be read in pieces
        return Form.norms(form, max_bytes)
    for _, part in form.chunks(max_bytes, memory):
        pairs = [term.pair for term in part.parts or [part] if term.pair is not None]
        norms, exact = norms_of_pairs(pairs, max_bytes, single)
        if exact is not None and len(written := (~exact).nonzero()[:, 0]):
            norms = norms.index_put((written,), Form.norms(part[written], max_bytes))
        found.append(norms.to(form.sum_dtype))
    return found[0] if len(found) == 1 else torch.cat(found)


class Factored(Form):
    """A J that is linear in each floating-point tensor in ``held``.

    Some of its rows, or multiples of them, are the same kind of form with other factors."""

    smallest: int
    """The number in ``held`` of the smallest factor in which J is linear."""
    varies: Sequence[int]
    """The numbers in ``held`` that `tangent` accepts, the gradient's first."""

    @abstractmethod
    def _of(self, *held: Tensor) -> Self:
        """The same kind of form with other factors."""

    @abstractmethod
    def tangent(self, place: int, v: Tensor) -> Tensor:
        """The tensor whose inner product with a factor is J v, sample by sample.

        It has the shape of ``held[place]`` and is computed without that factor.  v: shape"""

    @property
    def like(self) -> Tensor:
        return self.held[0]

    def __getitem__(self, index: Index) -> Self:
        return self._of(*[factor[index] for factor in self.held])

    def to(self, dtype: torch.dtype) -> Self:
        if self.like.dtype == dtype:
            return self
        return self._of(*(f.to(dtype) if f.is_floating_point() or f.is_complex() else f for f in self.held))

    def dot(self, v: Tensor, max_bytes: int = BUDGET) -> Tensor:
        place, v = self.smallest if self.smallest in self.varies else self.varies[0], v.to(self.sum_dtype)
        chunks = self.chunks(max_bytes, 2 * self.held[place].shape[1:].numel())
        return torch.cat([(part.tangent(place, v) * part.held[place]).flatten(1).sum(1) for _, part in chunks])

    def varied(self, place: int, factor: Tensor) -> Self:
        """The form with one factor in ``held`` replaced."""
        return self._of(*self.held[:place], factor, *self.held[place + 1 :])

    def _times(self, factor: float | Tensor) -> Sequence[Tensor]:
        """The factors of factor · J, with the factor folded into the smallest tensor.

        factor: a number, or one for each row, N
        """
        smallest = self.held[self.smallest]
        if isinstance(factor, Tensor):
            factor = factor.view(-1, *[1] * (smallest.ndim - 1)) if factor.ndim else factor
        elif factor == 1:
            return self.held
        return [smallest * factor if place == self.smallest else own for place, own in enumerate(self.held)]


class Paired(Factored):
    """Row n of J is Σₜ left[n, t] ⊗ right[n, t], the sum over T positions.

    Positions are axis 1 of all tensors in ``held``: two factors, and a mask if samples with fewer positions are padded with
    zeros."""

    pair: Written
    present: Tensor | None = None
    """(N, T) booleans: the positions that aren't padding; None for all."""
    gradient: int
    """The place of the gradient in its pair, 0 or 1."""

    def gram(self, other: Form, max_bytes: int = BUDGET) -> Tensor:
        if (
            isinstance(other, Paired) and takes_positions(self, other)
            and (products := gram_of_pairs(self.pair, other.pair, max_bytes)) is not None
        ):  # fmt: skip
            return products
        return super().gram(other, max_bytes)

    def factors(self, others: Sequence[Form] = ()) -> Sequence[Positions]:
        gradients = [form.held[self.varies[0]] for form in (self, *others)]
        rows, is_turned = slice(0, self.shape[:1].numel()), self.gradient == 1
        return [Positions(gradients, self.pair[1 - self.gradient], rows, is_turned, self.present)]

    def side_by_side(self, rows: Tensor, present: Tensor) -> Self:
        """Row n of the result has the positions of this form's rows[n, :], where present[n, :].  rows, present: M R"""
        # Of the rest a row of zeros is taken, which takes a fifth of the time of filling it in.
        padded = [torch.cat([factor, factor.new_zeros(1, *factor.shape[1:])]) for factor in self._with_mask()]
        chosen = rows.masked_fill(~present, self.samples).flatten()
        return self._of(*(x.index_select(0, chosen).view(*rows.shape, *x.shape[1:]).flatten(1, 2) for x in padded))

    def merge_key(self) -> Hashable:
        return type(self), self.pair[0].shape[2:], self.pair[1].shape[2:], self.shape, tuple(self.varies)

    def merge(self, others: Sequence[Form]) -> Form:
        forms = [form for form in (self, *others) if isinstance(form, Paired)]  # merge_key ensures it
        has_mask = any(form.present is not None for form in forms)
        held = [form._with_mask() if has_mask else form.held for form in forms]
        return self._of(*(torch.cat(tensors, dim=1) for tensors in zip(*held)))

    def _with_mask(self) -> Sequence[Tensor]:
        """Its tensors, including a mask of its positions."""
        own = torch.ones(self.held[0].shape[:2], dtype=torch.bool, device=self.like.device)
        return (*self.held[:2], own if self.present is None else self.present)
