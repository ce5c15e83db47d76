"""The random maps of projections: signs drawn piece by piece, and sparse maps made of hashes."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from autograd_hacks.forms.cost import sketches_factors
from autograd_hacks.forms.numerics import slices_of
from autograd_hacks.forms.positions import OneHot, Pair, multiplications
from autograd_hacks.support.internals import dispatch_modes
from autograd_hacks.support.philox import BITS, by_byte, hashed, key_of, packed_signs, unpacked

_WRITTEN_OUT = 2**19
"""Numbers of a map that is written out, and kept from batch to batch: one product took 4.4 ms where two took 8.6 (64
samples, 128 × 64), and drawing took a quarter of the time of projecting 32 batches of 200 images."""
_MAPS_KEPT = 16
"""How many such maps are kept."""

_BYTES_AT_A_TIME = 2**20
"""Bytes of random bits that are drawn at a time, each of eight signs."""
_BYTES_KEPT = 2**16
"""Bytes of a map's bits up to which they are kept from batch to batch."""

_INDICES_AT_A_TIME = 2**16
"""Numbers of a sparse map's index, of 8 bytes each, at a time."""


@dataclass(frozen=True)
class _Map:
    """The fields that maps have in common."""

    name: str
    shape: torch.Size
    dim: int
    seed: int

    @property
    def fans(self) -> tuple[int, int]:
        """O and I; I is 1 for a vector."""
        return self.shape[:1].numel(), self.shape[1:].numel()


@dataclass(frozen=True)
class RandomMap(_Map):
    """R of shape (P, dim), for a parameter seen as a matrix O I: coordinate k of a gradient G is uₖᵀ G vₖ / √dim.

    u and v are independent signs.  So E ⟨G R, H R⟩ = ⟨G, H⟩; and since E (uᵀa)⁴ ≤ 3 ‖a‖⁴, the squared length of a unit
    rank-one gradient has a standard deviation of √8 / √dim at most.  R is a function of these fields alone, so that it is
    the same for every batch, form and device: a sign is a bit of Philox' words, which each device draws by their indices.
    Large maps are never stored: P · dim numbers would be needed.

    name: the parameter's    shape: the parameter's, (O, ...); further axes are flattened    dim: how many coordinates
    """

    COLUMNS: ClassVar[int] = 32
    """How many coordinates are drawn at a time."""

    def columns(self, like: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some coordinates k at a time with their u / √dim, (K, O), and v, (K, I), of the dtype and device of ``like``."""
        fan_out, fan_in = self.fans
        last = fan_out + fan_in
        rows, across = slice(0, fan_out), slice(fan_out, last)
        left, right = (_kept(_values)(like.dtype, like.device, size) for size in (self.dim**-0.5, 1.0))
        each = BITS // 8 * -(-last // BITS)
        draw = _kept(_bits) if self.dim * each <= _BYTES_KEPT else _bits.__wrapped__
        for some in slices_of(self.dim, max(self.COLUMNS, _BYTES_AT_A_TIME // each)):
            bits = draw(self, some.start, some.stop, like.device)
            for columns in slices_of(some.stop - some.start, self.COLUMNS):
                drawn = slice(some.start + columns.start, some.start + columns.stop)
                yield drawn, unpacked(bits[columns], rows, left), unpacked(bits[columns], across, right)

    def memory(self) -> int:
        """Numbers that `add_to` holds for a sample."""
        return self.COLUMNS * min(self.fans)

    def takes_factors(self, pair: Pair) -> bool:
        """Whether outer products are projected through their factors, instead of written out.

        Multiplications for a sample and coordinate: T·(O + I) with the factors, O·I with written rows."""
        return pair[1].shape[1] * multiplications(pair) < prod(self.fans)

    def memory_of_factors(self, pair: Pair) -> int:
        """Numbers that `of_factors` holds for a sample."""
        return 3 * pair[1].shape[1] * self.COLUMNS

    def of_factors(self, left: Tensor | OneHot, right: Tensor, max_bytes: int) -> Tensor:
        """J R, N dim, for rows Σₜ left[n, t] ⊗ right[n, t].  left: N T O    right: N T I"""
        found = right.new_zeros(len(right), self.dim)
        for columns, u, v in self.columns(found):
            found[:, columns] = ((left @ u.mT) * (right @ v.mT)).sum(1)
        return found

    def add_to(self, found: Tensor, written: Tensor, rows: slice) -> None:
        """Adds what some entries of the parameter's first axis give, (N, entries · I) written out, to N dim in place."""
        if len(written) > 8 and self.dim * self.fans[0] * self.fans[1] <= _WRITTEN_OUT:
            found.addmm_(written, _kept(_written)(self, found.dtype, found.device)[:, rows].flatten(1).mT)
            return
        written = written.view(len(written), rows.stop - rows.start, self.fans[1])
        for columns, left, right in self.columns(found):
            # Products for a sample, dim · O · I and then dim · min(O, I): the longer axis goes first.
            if self.fans[0] < self.fans[1]:
                found[:, columns].add_(((written @ right.mT) * left[:, rows].mT).sum(1))
            else:
                found[:, columns].add_(((written.mT @ left[:, rows].mT) * right.mT).sum(1))


@lru_cache(256)
def _bits(random: RandomMap, start: int, stop: int, device: torch.device) -> Tensor:
    """`packed_signs` of some coordinates: of u, and then of v."""
    key = key_of(random.seed, random.name, tuple(random.shape), random.dim)
    return packed_signs(key, slice(start, stop), slice(0, sum(random.fans)), device)


@lru_cache(_MAPS_KEPT)
def _values(dtype: torch.dtype, device: torch.device, size: float) -> Tensor:
    return by_byte(torch.empty(0, dtype=dtype, device=device), size)


@lru_cache(_MAPS_KEPT)
def _written(random: RandomMap, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A map itself, (dim, O, I)."""
    like = torch.empty(0, dtype=dtype, device=device)
    return torch.cat([left[:, :, None] * right[:, None] for _, left, right in random.columns(like)])


class Hashes(NamedTuple):
    """Where the rows and columns of a sparse map go, integers in [0, dim), and their signs, ±1; all int64."""

    row_place: Tensor
    row_sign: Tensor
    column_place: Tensor
    column_sign: Tensor


@dataclass(frozen=True)
class SparseMap(_Map):
    """R of shape (P, dim) with one number other than 0 in each row, for a parameter seen as a matrix O I.

    Entry (o, i) of a gradient goes to coordinate (h₁(o) + h₂(i)) mod dim with the sign s₁(o) s₂(i), by random hashes h and
    signs s.  So E ⟨G R, H R⟩ = ⟨G, H⟩, and the squared length of a unit gradient G has a variance of at most
    (6 + 4 / dim) / dim, of (2 + 2 ‖GᵀG‖² + 2 ‖GGᵀ‖²) / dim up to the small term: 6 / dim for rank one, near 2 / dim for many
    singular values.

    The sketch of an outer product is the circular convolution of its factors' sketches, so it is taken by FFTs where that
    costs less than writing rows; see ``cost``.  Hashes are words of Philox, which each device draws by their indices.

    name: the parameter's    shape: the parameter's, (O, ...); further axes are flattened    dim: how many coordinates

    Source: Kane and Nelson 2014 (arXiv:1012.1577) for sparse maps; Pham and Pagh 2013, "Fast and scalable polynomial kernels
    via explicit feature maps", for structured hashes; Hu et al. 2025, "GraSS" (arXiv:2505.18976), for gradients.
    """

    def hashes(self, device: torch.device) -> Hashes:
        return _kept(_hashes)(self, device)

    def memory(self) -> int:
        """Numbers that `add_to` holds for a sample."""
        return 2 * self.dim

    def add_to(self, found: Tensor, written: Tensor, rows: slice) -> None:
        """Adds what some entries of the parameter's first axis give, (N, entries · I) written out, to N dim in place."""
        own, fan_in = self.hashes(found.device), self.fans[1]
        written = written.reshape(len(written), rows.stop - rows.start, fan_in)
        both = found.new_zeros(len(found), 2 * self.dim)  # for each sign: nothing is multiplied
        for piece in slices_of(rows.stop - rows.start, _INDICES_AT_A_TIME // max(1, fan_in)):
            at = slice(rows.start + piece.start, rows.start + piece.stop)
            places = (own.row_place[at, None] + own.column_place) % self.dim
            places += self.dim * (own.row_sign[at, None] != own.column_sign)
            some = written[:, piece].flatten(1)
            both.scatter_add_(1, places.flatten().expand(some.shape), some)
        found.add_(torch.sub(*both.split(self.dim, 1)))

    def takes_factors(self, pair: Pair) -> bool:
        """Whether outer products are projected through their factors, instead of written out."""
        (left, right), positions = pair, pair[1].shape[1]
        if not positions or any(isinstance(factor, Tensor) and factor.is_complex() for factor in pair):
            return False
        return isinstance(left, OneHot) or sketches_factors(right.device, positions, *self.fans, self.dim)

    def memory_of_factors(self, pair: Pair) -> int:
        """Numbers that `of_factors` holds for a sample."""
        each = 4 * self.fans[1] if isinstance(pair[0], OneHot) else 4 * self.dim + sum(self.fans)
        return pair[1].shape[1] * each + 2 * self.dim

    def of_factors(self, left: Tensor | OneHot, right: Tensor, max_bytes: int) -> Tensor:
        """J R, N dim, for rows Σₜ left[n, t] ⊗ right[n, t].  left: N T O    right: N T I"""
        positions, own = right.shape[1], self.hashes(right.device)
        if not len(right) * positions:  # which transforms refuse
            return right.new_zeros(len(right), self.dim)
        pieces = slices_of(positions, max_bytes * positions // (self.memory_of_factors((left, right)) * right.itemsize))
        if isinstance(left, OneHot):  # each position's left factor is a row's number
            both = right.new_zeros(len(right), 2 * self.dim)  # for sums of places, which are folded at the end
            for piece in pieces:
                index = left.index[:, piece, None]
                some = right[:, piece] * own.column_sign.to(right.dtype) * own.row_sign[index].to(right.dtype)
                both.scatter_add_(1, (own.row_place[index] + own.column_place).flatten(1), some.flatten(1))
            return torch.add(*both.split(self.dim, 1))
        total = torch.fft.rfft(right.new_zeros(len(right), self.dim))
        for piece in pieces:
            mine = torch.fft.rfft(_sketched(left[:, piece], own.row_place, own.row_sign, self.dim))
            theirs = torch.fft.rfft(_sketched(right[:, piece], own.column_place, own.column_sign, self.dim))
            total = total + (mine * theirs).sum(1)
        return torch.fft.irfft(total, n=self.dim)


@lru_cache(512)
def _hashes(random: SparseMap, device: torch.device) -> Hashes:
    key, (rows, columns) = key_of("sjlt", random.seed, random.name, tuple(random.shape), random.dim, 1), random.fans
    numbers = torch.arange(rows + columns, device=device)  # columns are numbered after all rows
    place, sign = hashed(numbers, key, random.dim)
    return Hashes(place[:rows], sign[:rows], place[rows:], sign[rows:])


def _sketched(factor: Tensor, place: Tensor, sign: Tensor, size: int) -> Tensor:
    """A factor's numbers at their places, with signs, N T m.  factor: N T F    place, sign: F"""
    sketch = factor.new_zeros(*factor.shape[:-1], size)
    return sketch.scatter_add_(-1, place.expand(factor.shape), factor * sign.to(factor.dtype))


AnyMap = RandomMap | SparseMap
"""The map of a projection."""


def check_is_map(random: object) -> None:
    """Raises TypeError for anything but a random map, for example a number of coordinates."""
    if not isinstance(random, AnyMap):
        raise TypeError(
            f"project was given {random!r}; expected a forms.RandomMap or forms.SparseMap, which is drawn by the "
            "parameter's name, and a form doesn't know that. Take per_sample_grads(model, only=name).project(dim)."
        )


def _kept(draw: Any) -> Any:
    """The function with its cache, or without it where a mode's tensors are its own."""
    return draw if not dispatch_modes() and not torch.is_inference_mode_enabled() else draw.__wrapped__
