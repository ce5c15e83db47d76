"""Experts in one stack: row n has for each expert the sum over those positions of sample n that were sent to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Dense, Form, Index
from autograd_hacks.forms.composite import gathered
from autograd_hacks.forms.cost import costs_of, takes_kernel
from autograd_hacks.forms.numerics import put, row_norms
from autograd_hacks.forms.outer import Outer, Zero
from autograd_hacks.forms.placed import Placed
from autograd_hacks.support.contexts import without_autocast


def of_experts(x: Tensor, g: Tensor, ends: Tensor, owners: Tensor, samples: int) -> Form:
    """Rows (N, E, I, O) of W in y = x W[e], where expert e has the positions between ends[e - 1] and ends[e].

    x: M I    g: M O    ends: E    owners: M, the sample of each position
    """
    parts, begin, shape = dict[tuple[int, int], Form](), 0, torch.Size((len(ends), x.shape[1], g.shape[1]))
    for expert, end in enumerate(ends.tolist()):
        if end > begin:
            rows = slice(begin, end)
            own = Outer(x[rows, None], g[rows, None], torch.Size((1, *shape[1:])), gradient=1)
            parts[expert, expert + 1] = gathered(own, owners[rows], samples)
        begin = end
    return Routed(parts, shape, (x, g, ends, owners)) if parts else Zero(samples, shape, g)


class Routed(Placed):
    """Experts' rows, expert by expert.  given: x, g, ends and owners of `of_experts`"""

    def __init__(self, parts: Mapping[tuple[int, int], Form], shape: torch.Size, given: Sequence[Tensor]) -> None:
        super().__init__(parts, shape)
        self._given = given

    def norms(self, budget: int = BUDGET) -> Tensor:
        x, g, ends, owners = self._given
        own = len(x) * x.shape[1] * g.shape[1]
        rows = self.samples * self.shape.numel() * costs_of(g.device).write  # an expert's are written, and read
        if not takes_kernel(own + rows, own, x, g):
            return super().norms(budget)
        from autograd_hacks.kernels import tiles  # imports Triton

        # Positions lie by expert.  Within an expert's, a sample's come to lie beside each other.
        keys = torch.searchsorted(ends, torch.arange(len(x), device=ends.device), right=True) * self.samples + owners
        keys, order = keys.sort()
        segments = torch.arange(len(ends) * self.samples, device=keys.device)
        norms = tiles.row_norms(x, g, torch.searchsorted(keys, segments, right=True), order)
        return row_norms(norms.view(len(ends), self.samples).mT)


@torch.library.custom_op("autograd_hacks::rows_of_experts", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _rows(x: Tensor, g: Tensor, ends: Tensor, owners: Tensor, like: Tensor) -> Tensor:
    with without_autocast([g]):
        return of_experts(x, g, ends, owners, len(like)).dense()


@_rows.register_fake
def _(x: Tensor, g: Tensor, ends: Tensor, owners: Tensor, like: Tensor) -> Tensor:
    return g.new_empty(like.shape[0], ends.shape[0], x.shape[1], g.shape[1])


@torch.library.custom_op("autograd_hacks::squares_of_experts", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _squares(x: Tensor, g: Tensor, ends: Tensor, owners: Tensor, like: Tensor) -> Tensor:
    with without_autocast([g]):
        return of_experts(x, g, ends, owners, len(like)).norms().square()


@_squares.register_fake
def _(x: Tensor, g: Tensor, ends: Tensor, owners: Tensor, like: Tensor) -> Tensor:
    return g.new_empty(like.shape[0])


class Experts(Form):
    """`of_experts` in a graph that is traced, where its numbers aren't known: operations that a compiler leaves alone.

    like_samples: a tensor of N entries    is_turned: whether the parameter is (E, O, I)
    """

    def __init__(
        self, x: Tensor, g: Tensor, ends: Tensor, owners: Tensor, like_samples: Tensor, is_turned: bool = False
    ) -> None:
        self._given, self.is_turned = (x, g, ends, owners, like_samples), is_turned
        self.held = self._given
        sizes = (x.shape[1], g.shape[1])
        self.samples, self.shape = like_samples.shape[0], torch.Size((ends.shape[0], *(sizes[::-1] if is_turned else sizes)))

    @property
    def like(self) -> Tensor:
        return self._given[1]

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        rows: Tensor = _rows(*self._given)
        return put(rows.mT if self.is_turned else rows, out, factor)

    def squares(self) -> Tensor:
        """The rows' squared norms, N."""
        found: Tensor = _squares(*self._given)
        return found

    def turned(self) -> Experts:
        """With the parameter's last two axes exchanged."""
        return Experts(*self._given, is_turned=not self.is_turned)

    def __getitem__(self, index: Index) -> Form:
        return Dense(self.dense()[index])
