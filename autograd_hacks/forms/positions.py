"""Norms and inner products of sums of outer products, from products between their positions: nothing of the parameter's size
is written.  Tensors alone; forms write out the rows that cancel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from autograd_hacks.forms.numerics import accumulation_dtype, stretches

PRODUCTS = 3
"""How much longer a multiplication takes in products of positions than in writing out.  Measured on two cores, for norms by
positions and by writing out: 16 samples of 128 positions, 1024 × 256, 6.5 ms and 3.9; of 64, 128 × 1152, 4.8 and 1.9."""


@dataclass(frozen=True)
class OneHot:
    """A factor with a single one in each position.  index: (N, T) integers in [0, entries)"""

    index: Tensor
    entries: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.index.shape, self.entries))

    def __getitem__(self, index: slice | tuple[slice, slice]) -> OneHot:
        return OneHot(self.index[index], self.entries)

    def __matmul__(self, matrix: Tensor) -> Tensor:
        return matrix[self.index]


Factor = Tensor | OneHot
"""(N, T, F), for T positions of N samples."""

Pair = tuple[Factor, Tensor]
"""A left and a right factor: row n of J is Σₜ left[n, t] ⊗ right[n, t]."""

Positions = tuple[Sequence[Tensor], Tensor, Tensor | None]
"""For each of K passes a left factor (M, T, O); the right factor of all, (M, T, I); and the sample of each of the M rows, if
several of them are one's.  Row k · N + n of J is Σₘₜ lefts[k][m, t] ⊗ right[m, t] over the m of sample n."""


def multiplications(pair: Pair) -> int:
    """Multiplications for one position's products, O + I; a one-hot factor's is a look-up."""
    return pair[1].shape[2] + (1 if isinstance(pair[0], OneHot) else pair[0].shape[2])


def cost_of_products(positions: int, fans: tuple[int, int]) -> float:
    """How long products between T positions take, where writing the row out takes 1.

    Multiplications for a sample: T·T·(O + I) for products, each `PRODUCTS` times as long; T·O·I to write out.  fans: O and I
    """
    return PRODUCTS * positions * sum(fans) / max(1, fans[0] * fans[1])


def prefer_products(pairs: Sequence[Pair | None]) -> TypeGuard[Sequence[Pair]]:
    """Whether the norms of a sum of forms are best taken from products between all their positions."""
    known = [pair for pair in pairs if pair is not None]
    if len(known) < len(pairs) or known[0][1].is_complex():
        return False
    fans, positions = {_fans(pair) for pair in known}, sum(right.shape[1] for _, right in known)
    return len(fans) == 1 and cost_of_products(positions, min(fans)) < 1


def own_products(a: Factor, b: Factor) -> Tensor:
    """⟨a[n, t], b[n, s]⟩ for two factors of the same samples.  Returns N T S."""
    if isinstance(b, OneHot):
        return a.index[:, :, None] == b.index[:, None, :] if isinstance(a, OneHot) else own_products(b, a).mT
    if isinstance(a, OneHot):
        return b.mT.gather(1, a.index[:, :, None].expand(-1, -1, b.shape[1]))
    return a @ b.mT


def all_products(a: Factor, b: Factor) -> Tensor:
    """⟨a[n, t], b[m, s]⟩ for the factors of N and of M samples.  Returns N T M S."""
    if isinstance(b, OneHot):
        return a.index[:, :, None, None] == b.index if isinstance(a, OneHot) else all_products(b, a).permute(2, 3, 0, 1)
    if isinstance(a, OneHot):
        return b[..., a.index].permute(2, 3, 0, 1)
    return torch.tensordot(a, b, dims=([2], [2]))


def norms_of_pairs(pairs: Sequence[Pair], budget: int) -> tuple[Tensor, Tensor]:
    """‖Σₜ lₜ ⊗ rₜ‖ over the positions of all pairs, from Σₛₜ ⟨lₛ, lₜ⟩⟨rₛ, rₜ⟩; and which samples' can be trusted.

    The products carry an error of about eps·(Σₜ‖lₜ‖‖rₜ‖)².  Where the square isn't far above it the difference of large
    numbers has no digits left (nearly equal positions of opposite sign: 100 % off in float32); nor where the square has
    left the range of numbers.  Returns N and N booleans.
    """
    dense = pairs[0][1]
    square, size = dense.new_zeros(dense.shape[0]), dense.new_zeros(dense.shape[0])
    nothing = torch.ones(dense.shape[0], dtype=torch.bool, device=dense.device)
    for number, (left, right) in enumerate(pairs):
        size = size + (_lengths(left) * _lengths(right)).sum(1).detach()
        nothing &= _is_zero(left) | _is_zero(right)
        for twice, (other_left, other_right) in zip([1, *[2] * len(pairs)], pairs[number:]):
            each = 2 * dense.shape[0] * other_left.shape[1] * dense.element_size()
            for positions in stretches(left.shape[1], budget // max(1, each)):
                lefts = own_products(left[:, positions], other_left)
                square = square + twice * (lefts * own_products(right[:, positions], other_right)).sum((1, 2))
    info, found = torch.finfo(square.dtype), square.detach()
    exact = (found > 1e4 * info.eps * size**2) & (found > info.tiny / info.eps**2) & (found <= info.max)
    return torch.where(exact, square, torch.ones_like(square)).sqrt() * ~nothing, exact | nothing


def gram_of_pairs(mine: Pair | None, theirs: Pair | None, numbers: int, budget: int) -> Tensor | None:
    """Σₜₛ ⟨lₙₜ, l′ₘₛ⟩⟨rₙₜ, r′ₘₛ⟩, N M; None where writing rows of so many numbers out is cheaper, or positions cancel."""
    if mine is None or theirs is None or _fans(mine) != _fans(theirs) or mine[1].is_complex():
        return None
    (n, t), (m, s) = mine[1].shape[:2], theirs[1].shape[:2]
    # Multiplications: N·M·T·S·(O + I) by positions; N·T·O·I and M·S·O·I to write out, and N·M·O·I for the product.
    if n * m * t * s * min(multiplications(mine), multiplications(theirs)) > (n * t + m * s + n * m) * numbers:
        return None
    mine, theirs = _wide(mine), _wide(theirs)
    if max(t, s) > 1 and not all(bool(norms_of_pairs([pair], budget)[1].all()) for pair in (mine, theirs)):
        return None
    each, parts = 2 * t * m * s * mine[1].element_size(), []
    for piece in stretches(n, budget // max(1, each)):
        lefts = all_products(mine[0][piece], theirs[0])
        parts.append((lefts * all_products(mine[1][piece], theirs[1])).sum((1, 3)))
    return torch.cat(parts)


def _fans(pair: Pair) -> tuple[int, int]:
    return pair[0].shape[2], pair[1].shape[2]


def _wide(pair: Pair) -> Pair:
    """In the dtype that sums are taken in."""
    left, right = pair
    dtype = accumulation_dtype(right.dtype)
    return pair if right.dtype == dtype else (left if isinstance(left, OneHot) else left.to(dtype), right.to(dtype))


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
