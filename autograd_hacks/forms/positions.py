"""Norms and inner products of sums of outer products, computed from products between positions.

Nothing of the parameter's size is written.  These functions work on tensors; forms write out rows that cancel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms.numerics import accumulation_dtype, looks_free, slices_of


@dataclass(frozen=True)
class OneHot:
    """A factor with a single one at each position.  index: (N, T) integers in [0, entries)"""

    index: Tensor
    entries: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.index.shape, self.entries))

    @property
    def device(self) -> torch.device:
        return self.index.device

    def __getitem__(self, index: slice | Tensor | tuple[slice, slice]) -> OneHot:
        return OneHot(self.index[index], self.entries)

    def __matmul__(self, matrix: Tensor) -> Tensor:
        return matrix[self.index]

    def to(self, dtype: torch.dtype) -> OneHot:
        return self


@dataclass(eq=False, slots=True)
class Windows:
    """A convolution's windows, which are cut only if that saves something: their products are sums of products of pixels.

    x: (N, C, *S)
    kernel, stride, padding, dilation: a number for each spatial dimension
    counts: *L, the number of windows
    """

    x: Tensor
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    counts: Sequence[int]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.x.shape[0], prod(self.counts), self.x.shape[1] * prod(self.kernel)))

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def shifts(self) -> int:
        """How many numbers are added up for a sample's products, after the products of pixels."""
        sizes, count = [size + 2 * pad for size, pad in zip(self.x.shape[2:], self.padding)], 0
        for axis, (size, windows) in enumerate(zip(self.kernel, self.counts)):
            count += prod(sizes) ** 2 if axis == 0 else 0  # padding
            sizes[axis] = windows
            count += size * prod(sizes) ** 2
        return count

    @property
    def overlap(self) -> bool:
        """Whether the products of all pixels are fewer than the products of all numbers in the windows."""
        return prod(self.x.shape[2:]) ** 2 < prod(self.counts) ** 2 * prod(self.kernel)

    @property
    def one_by_one(self) -> bool:
        # Whether they are copied window by window, as patches: 16 × 16 of 3·16·16 in 37 µs instead of 249.
        return self.stride[-1] > 1 and self.kernel[-1] > self.counts[-1]

    def __getitem__(self, index: slice | Tensor) -> Windows:
        return replace(self, x=self.x[index])

    def to(self, dtype: torch.dtype) -> Windows:
        return replace(self, x=self.x.to(dtype))

    def cut(self) -> Tensor:
        """The windows, N C *K *L, in the order that is cheapest to copy; a view if there is no padding."""
        n, pads = len(self.kernel), [pad for pad in reversed(self.padding) for _ in range(2)]
        x = torch.constant_pad_nd(self.x, pads) if any(pads) else self.x
        for axis, (size, stride, dilation) in enumerate(zip(self.kernel, self.stride, self.dilation), start=2):
            whole = x.unfold(axis, (size - 1) * dilation + 1, stride)
            x = whole if dilation == 1 else whole[..., ::dilation]
        x = x.movedim(1, 1 + n).contiguous().movedim(1 + n, 1) if self.one_by_one else x  # C comes last in memory, before K
        return x.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))

    def written(self) -> Tensor:
        """The windows as positions, (N, T, F)."""
        return self.cut().flatten(1, 1 + len(self.kernel)).flatten(2).mT

    def products(self, other: Windows) -> Tensor:
        """⟨a[n, t], b[n, s]⟩, N T S, for windows with the same settings."""
        n = len(self.kernel)
        if not (self.overlap and other.overlap):
            return self.written() @ other.written().mT
        # For every two windows, add up the products of the pixels at equal places, axis by axis.
        total = (self.x.flatten(2).mT @ other.x.flatten(2)).view(-1, *self.x.shape[2:], *other.x.shape[2:])
        total = F.pad(total, [pad for w in (other, self) for pad in reversed(w.padding) for _ in range(2)])
        for axis in range(n):
            places = (self._at(other._at(total, axis, n, place), axis, 0, place) for place in range(self.kernel[axis]))
            total = sum(places, start=next(places))
        return total.reshape(-1, self.shape[1], other.shape[1])

    def _at(self, values: Tensor, axis: int, skipped: int, place: int) -> Tensor:
        """The pixels that all windows have at one place along one of their axes, ``1 + skipped + axis`` of values."""
        start, stride = place * self.dilation[axis], self.stride[axis]
        inside = slice(start, start + (self.counts[axis] - 1) * stride + 1, stride)
        return values[(slice(None),) * (1 + skipped + axis) + (inside,)]


Factor = Tensor | OneHot | Windows
"""(N, T, F), for T positions of N samples."""

Pair = tuple[Factor, Factor]
"""A left and a right factor: row n of J is Σₜ left[n, t] ⊗ right[n, t]."""

Written = tuple[Tensor | OneHot, Tensor]
"""A pair without windows."""


class Positions(NamedTuple):
    """The products whose sums are the rows of one block, which is a slice of the parameter's first axis.

    In the block, row k · N + n of J, for pass k and sample n, is Σₘₜ gradients[k][m, t] ⊗ inputs[m, t], over sample n's m.
    """

    gradients: Sequence[Tensor]  # of each of K passes, M T O
    inputs: Factor  # the same for all passes, M T I
    rows: slice  # of the parameter's first axis
    is_turned: bool = False  # whether the block is stored as I O
    present: Tensor | None = None  # M T, booleans: the positions that count; None for all
    owners: Tensor | None = None  # M, the sample of each m, if a sample has several


def multiplications(pair: Pair) -> int:
    """Multiplications for the products of one position, O + I; a one-hot factor needs only a look-up."""
    return pair[1].shape[2] + (1 if isinstance(pair[0], OneHot) else pair[0].shape[2])


def own_products(a: Factor, b: Factor) -> Tensor:
    """⟨a[n, t], b[n, s]⟩ for two factors of the same samples.  Returns N T S."""
    if isinstance(a, Windows) or isinstance(b, Windows):
        return a.products(b)  # type: ignore[union-attr, arg-type]  # windows meet windows alone
    if isinstance(b, OneHot):
        return a.index[:, :, None] == b.index[:, None, :] if isinstance(a, OneHot) else own_products(b, a).mT
    return b.mT.gather(1, a.index[:, :, None].expand(-1, -1, b.shape[1])) if isinstance(a, OneHot) else torch.bmm(a, b.mT)


def all_products(a: Tensor | OneHot, b: Tensor | OneHot) -> Tensor:
    """⟨a[n, t], b[m, s]⟩ for the factors of N and of M samples.  Returns N T M S."""
    if isinstance(b, OneHot):
        return a.index[:, :, None, None] == b.index if isinstance(a, OneHot) else all_products(b, a).permute(2, 3, 0, 1)
    return b[..., a.index].permute(2, 3, 0, 1) if isinstance(a, OneHot) else torch.tensordot(a, b, dims=([2], [2]))


def norms_of_pairs(pairs: Sequence[Pair], max_bytes: int, in_double: bool = False) -> tuple[Tensor, Tensor | None]:
    """‖Σₜ lₜ ⊗ rₜ‖ over the positions of all pairs, from Σₛₜ ⟨lₛ, lₜ⟩⟨rₛ, rₜ⟩; and which samples' norms are accurate.

    Each product has an error of a few eps·aₛaₜ, where aₜ = ‖lₜ‖‖rₜ‖ is on the diagonals.  The total error is at most
    eps·(Σaₜ)², and about eps·Σaₜ² if errors are independent.  If the square isn't far above both, cancellation leaves no
    correct digits (for nearly equal positions of opposite sign: 100 % off in float32).  The square must not overflow either,
    nor be so small that lengths below √tiny would count, because their squares underflow: not below
    tiny·(1/eps + 10⁵·Σ(‖lₜ‖ + ‖rₜ‖))², for which a bound is taken from Σ(‖lₜ‖² + ‖rₜ‖²), which the diagonals have.

    in_double: for single or half precision, take products in float64.  Then all results are accurate, so the host needn't
    look: the products' errors are smaller than those that single precision leaves in the positions, and their range is
    twice as large

    Returns N, and N booleans, or None if all are accurate.
    """
    pairs = [(left.to(torch.float64), right.to(torch.float64)) for left, right in pairs] if in_double else pairs
    like = next(factor for factor in pairs[0] if isinstance(factor, Tensor))
    square = size = spread = reach = like.new_zeros(like.shape[0])
    for start, lefts, rights in _between(pairs, like, max_bytes):
        products = lefts * rights
        found = products.sum((1, 2))
        square = square + (2 * found if start is None else found)
        if start is not None and not in_double:
            squares = products.detach().diagonal(start, 1, 2)
            size, spread = size + squares.sqrt().sum(1), spread + squares.sum(1)
            own, others = (p.detach().diagonal(start, 1, 2) for p in (lefts, rights))
            reach = reach + (own + others).sum(1)
    if in_double:
        is_nothing = square <= 0
        return torch.where(is_nothing, torch.ones_like(square), square).sqrt() * ~is_nothing, None
    info, found, count = torch.finfo(square.dtype), square.detach(), sum(left.shape[1] for left, _ in pairs)
    least = torch.add(1e4 * info.eps * spread, reach, alpha=4e10 * count * info.tiny)
    least = torch.addcmul(least, size, size, value=2e3 * info.eps)
    exact = (found > least + 2 * info.tiny / info.eps**2) & (found <= info.max)
    if bool(exact.all()):  # as nearly always
        return square.sqrt(), None
    nothing, blank = torch.zeros_like(exact), (found == 0).nonzero()[:, 0]
    if len(blank):
        nothing[blank] = torch.stack([_is_zero((left[blank], right[blank])) for left, right in pairs]).all(0)
    return torch.where(exact, square, torch.ones_like(square)).sqrt() * ~nothing, exact | nothing


def _between(pairs: Sequence[Pair], like: Tensor, max_bytes: int) -> Iterator[tuple[int | None, Tensor, Tensor]]:
    """The products of left factors and of right factors between positions of all pairs.

    For a pair with itself, also gives the number of the first position.  Each two different pairs come once, with None."""
    for number, pair in enumerate(pairs):
        positions = pair[0].shape[1]
        for later, (other_left, other_right) in enumerate(pairs[number:]):
            each = 2 * like.shape[0] * other_left.shape[1] * like.element_size()
            for piece in slices_of(positions, positions if isinstance(pair[1], Windows) else max_bytes // max(1, each)):
                left, right = (pair[0][:, piece], pair[1][:, piece]) if is_written(pair) else pair
                products = own_products(left, other_left), own_products(right, other_right)
                yield (None if later else piece.start, *products)


def gram_of_pairs(mine: Written, theirs: Written, max_bytes: int) -> Tensor | None:
    """Σₜₛ ⟨lₙₜ, l′ₘₛ⟩⟨rₙₜ, r′ₘₛ⟩, N M; None if positions cancel."""
    dtype = accumulation_dtype(mine[1].dtype)
    if dtype == torch.float32 and not looks_free(mine[1]):
        mine, theirs = _wide(mine, torch.float64), _wide(theirs, torch.float64)
    elif max(mine[1].shape[1], theirs[1].shape[1]) > 1:
        exact = [norms_of_pairs([_wide(pair)], max_bytes)[1] for pair in (mine, theirs)]
        if not all(own is None or bool(own.all()) for own in exact):
            return None
    mine, theirs = _wide(mine), _wide(theirs)
    each, parts = 2 * mine[1].shape[1] * theirs[1].shape[:2].numel() * mine[1].element_size(), []
    for piece in slices_of(len(mine[1]), max_bytes // max(1, each)):
        lefts = all_products(mine[0][piece], theirs[0])
        parts.append((lefts * all_products(mine[1][piece], theirs[1])).sum((1, 3)))
    return torch.cat(parts).to(dtype)


def is_written(pair: Pair) -> TypeGuard[Written]:
    """Whether no factor is cut into windows."""
    return not any(isinstance(factor, Windows) for factor in pair)


def _wide(pair: Written, dtype: torch.dtype | None = None) -> Written:
    """The pair in another dtype, by default the one used for sums."""
    left, right = pair
    dtype = dtype or accumulation_dtype(right.dtype)
    return pair if right.dtype == dtype else (left.to(dtype), right.to(dtype))


def _is_zero(pair: Pair) -> Tensor:
    """For each sample, N: whether one of its factors is zero everywhere."""
    sizes = [f.x if isinstance(f, Windows) else f for f in pair if not isinstance(f, OneHot)]
    return torch.stack([(size == 0).flatten(1).all(1) for size in sizes]).any(0)
