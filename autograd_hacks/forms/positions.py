"""Inner products of sums of outer products, position by position, without writing anything of the parameter's size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from autograd_hacks.forms.numerics import stretches


@dataclass(frozen=True)
class OneHot:
    """A factor with a single one in each position.  index: (N, T) integers in [0, entries)"""

    index: Tensor
    entries: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.index.shape, self.entries))


Factor = Tensor | OneHot
"""(N, T, F), for T positions of N samples."""

Pair = tuple[Factor, Factor]
"""A left and a right factor: row n of J is Σₜ left[n, t] ⊗ right[n, t]."""


def own_products(a: Factor, b: Factor) -> Tensor:
    """⟨a[n, t], b[n, s]⟩ for two factors of the same samples.  Returns N T S."""
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return a.index[:, :, None] == b.index[:, None, :]
    if isinstance(a, OneHot):
        assert isinstance(b, Tensor)
        return b.mT.gather(1, a.index[:, :, None].expand(-1, -1, b.shape[1]))
    if isinstance(b, OneHot):
        return own_products(b, a).mT
    return a @ b.mT


def all_products(a: Factor, b: Factor) -> Tensor:
    """⟨a[n, t], b[m, s]⟩ for the factors of N and of M samples.  Returns N T M S."""
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return a.index[:, :, None, None] == b.index
    if isinstance(a, OneHot):
        assert isinstance(b, Tensor)
        return b[..., a.index].permute(2, 3, 0, 1)
    if isinstance(b, OneHot):
        return all_products(b, a).permute(2, 3, 0, 1)
    return torch.tensordot(a, b, dims=([2], [2]))


def norms_by_positions(pairs: Sequence[Pair], budget: int) -> tuple[Tensor, Tensor]:
    """‖Σₜ lₜ ⊗ rₜ‖ over the positions of all pairs, from Σₛₜ ⟨lₛ, lₜ⟩⟨rₛ, rₜ⟩; and which samples' can be trusted.

    The products carry an error of about eps·(Σₜ‖lₜ‖‖rₜ‖)².  Where the square isn't far above it the difference of large
    numbers has no digits left (nearly equal positions of opposite sign: 100 % off in float32); nor where the square has
    left the range of numbers.  Returns N and N booleans.
    """
    dense = next(right for _, right in pairs if isinstance(right, Tensor))
    square, size = dense.new_zeros(dense.shape[0]), dense.new_zeros(dense.shape[0])
    nothing = torch.ones(dense.shape[0], dtype=torch.bool, device=dense.device)
    for number, (left, right) in enumerate(pairs):
        size = size + (_lengths(left) * _lengths(right)).sum(1).detach()
        nothing &= _is_zero(left) | _is_zero(right)
        for other_left, other_right in pairs[number:]:
            each = 2 * dense.shape[0] * other_left.shape[1] * dense.element_size()
            twice = 1 if other_left is left else 2
            for positions in stretches(left.shape[1], budget // max(1, each)):
                lefts = own_products(_at(left, positions), other_left)
                square = square + twice * (lefts * own_products(_at(right, positions), other_right)).sum((1, 2))
    info, found = torch.finfo(square.dtype), square.detach()
    exact = (found > 1e4 * info.eps * size**2) & (found > info.tiny / info.eps**2) & (found <= info.max)
    return torch.where(exact, square, torch.ones_like(square)).sqrt() * ~nothing, exact | nothing


def gram_by_positions(mine: Pair, theirs: Pair, budget: int) -> Tensor:
    """Σₜₛ ⟨lₙₜ, l′ₘₛ⟩⟨rₙₜ, r′ₘₛ⟩.  Returns N M."""
    (left, right), (other_left, other_right) = mine, theirs
    samples, positions = left.shape[:2]
    dense = next(f for f in (right, other_right) if isinstance(f, Tensor))
    each = 2 * positions * other_left.shape[0] * other_left.shape[1] * dense.element_size()
    parts = []
    for piece in stretches(samples, budget // max(1, each)):
        lefts = all_products(_of(left, piece), other_left)
        parts.append((lefts * all_products(_of(right, piece), other_right)).sum((1, 3)))
    return torch.cat(parts)


def _at(factor: Factor, positions: slice) -> Factor:
    return OneHot(factor.index[:, positions], factor.entries) if isinstance(factor, OneHot) else factor[:, positions]


def _of(factor: Factor, samples: slice) -> Factor:
    return OneHot(factor.index[samples], factor.entries) if isinstance(factor, OneHot) else factor[samples]


def _lengths(factor: Factor) -> Tensor:
    """The 2-norm of each position, N T."""
    if isinstance(factor, OneHot):
        return torch.ones(factor.index.shape, device=factor.index.device)
    return torch.linalg.vector_norm(factor, dim=2)


def _is_zero(factor: Factor) -> Tensor:
    """For which samples nothing of a factor is other than zero, N."""
    if isinstance(factor, OneHot) or not factor.shape[1:].numel():
        device = factor.index.device if isinstance(factor, OneHot) else factor.device
        return torch.full(factor.shape[:1], 0 in factor.shape[1:], device=device)
    return torch.linalg.vector_norm(factor.detach().flatten(1), torch.inf, dim=1) == 0
