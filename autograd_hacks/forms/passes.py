"""The rows of several backward passes through one call, which differ only in their gradients."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Dense, Form
from autograd_hacks.forms.composite import Concatenation, Grouping
from autograd_hacks.forms.factored import Factored
from autograd_hacks.forms.numerics import pairs_of, slices_of
from autograd_hacks.forms.outer import Outer
from autograd_hacks.forms.placed import Placed
from autograd_hacks.forms.positions import Positions


class Passes(Concatenation):
    """K forms of the same kind with N rows each, which share a factor.  Row k · N + n belongs to pass k and sample n.

    A row is linear in the pass's gradient, so K passes cost little more than one.  For J v the output's tangent along v is
    computed once.  For Jᵀ w the gradients are added up first.

    parts: see ``of``
    varying: the number in ``held`` of the factor that differs
    """

    parts: Sequence[Factored]

    def __init__(self, parts: Sequence[Factored], varying: int) -> None:
        super().__init__(parts)
        self.varying, self.each = varying, parts[0].samples

    @staticmethod
    def of(parts: Sequence[Form]) -> Form:
        """The rows of several passes through one call.  Equal factors are stored once."""
        first, groupings = parts[0], [part for part in parts if isinstance(part, Grouping)]
        if all(isinstance(part, Dense) for part in parts):
            values = torch.cat([part.matrix() for part in parts])
            return Dense(values.view(len(values), *first.shape))
        if len(groupings) == len(parts) and all(_same(own.rows, groupings[0].rows) for own in groupings):
            rows = torch.cat([own.rows + k * first.samples for k, own in enumerate(groupings)])
            return Grouping(Passes.of([own.form for own in groupings]), rows, len(parts) * first.samples)
        if isinstance(first, Placed) and all(
            isinstance(p, Placed) and p.entries.keys() == first.entries.keys() for p in parts
        ):
            slices = {
                at: Passes.of([part.entries[at] for part in parts if isinstance(part, Placed)]) for at in first.entries
            }
            return Placed(slices, first.shape)
        if not isinstance(first, Factored) or any(type(part) is not type(first) for part in parts):
            return Concatenation(parts)
        for varying in first.varies:
            if all(_same(first.held[1 - varying], part.held[1 - varying]) for part in parts[1:]):
                return Passes([first.varied(varying, part.held[varying]) for part in parts], varying)
        return Concatenation(parts)

    def to(self, dtype: torch.dtype) -> Form:
        if self.like.dtype == dtype:
            return self
        first = self.parts[0].to(dtype)
        return Passes([first.varied(self.varying, p.held[self.varying].to(dtype)) for p in self.parts], self.varying)

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        found = []
        for piece in slices_of(self.each, budget // (2 * self._size())):
            tangent = self.parts[0][piece].wide().tangent(self.varying, v.to(self.sum_dtype)).flatten(1)
            found.append(torch.stack([torch.einsum("nf,nf->n", f, tangent) for f in self._factors(piece)]))
        return torch.cat(found, dim=1).flatten()

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        total = self.new_sums(*w.shape[:-1], *self.shape) if total is None else total
        for each, weights in pairs_of(total, w):
            by_pass = weights.to(total.dtype).view(len(self.parts), self.each, 1)
            for piece in slices_of(self.each, budget // (4 * self._size())):
                form = self.parts[0][piece].wide()
                factors = self._factors(piece)
                combined = next(factors) * by_pass[0, piece]
                for factor, scales in zip(factors, by_pass[1:, piece]):
                    combined = combined.addcmul_(factor, scales)
                form = form.varied(self.varying, combined.view(form.held[self.varying].shape))
                form.weighted_sum(weights.new_ones(form.samples), budget // 2, each)
        return total

    def factors(self, others: Sequence[Form] = ()) -> Sequence[Positions]:
        first, *more = self.parts
        return first.factors(more) if self.varying == first.varies[0] else ()

    def _factors(self, piece: slice) -> Iterator[Tensor]:
        """The factors that differ, for some samples, pass by pass: N F."""
        return (part.held[self.varying][piece].flatten(1).to(self.sum_dtype) for part in self.parts)

    def _size(self) -> int:
        """The bytes of a sample's factor."""
        return max(1, self.parts[0].held[self.varying].shape[1:].numel() * self.sum_dtype.itemsize)

    def gram(self, other: Form, budget: int = BUDGET) -> Tensor:
        first, second = self.parts[0], other.parts[0] if isinstance(other, Passes) else other
        if isinstance(first, Outer) and isinstance(second, Outer) and first.positions == second.positions == 1:
            return super().gram(other, budget)
        return Form.gram(self, other, budget)  # each row is written out once, not once for each pass of the other form


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share their memory, or have the same numbers."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return (one.data_ptr() == other.data_ptr() and one.stride() == other.stride()) or torch.equal(one, other)
