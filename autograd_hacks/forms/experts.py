"""Experts in one stack: row n has for each expert the sum over those positions of sample n that were sent to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form
from autograd_hacks.forms.composite import gathered
from autograd_hacks.forms.cost import costs_of, takes_kernel
from autograd_hacks.forms.numerics import row_norms
from autograd_hacks.forms.outer import Outer, Zero
from autograd_hacks.forms.terms import Placed


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
