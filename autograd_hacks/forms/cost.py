"""What verbs cost, so that they take the cheaper way: the one place for it.

The unit is a multiplication in a matrix product of floats, about 0.02 ns on one core.  ``benchmarks/choices.py`` compares
what is chosen with the clock, over the shapes of common models.
"""

from collections.abc import Sequence
from math import inf, log2, prod

import torch
from torch import Tensor

from autograd_hacks.forms.positions import Factor, OneHot, Pair, Windows

SHORT = 1.3  # a multiplication in products between positions, whose results are small
KERNEL = 0.6  # a multiplication in a convolution's own kernel
WRITE = 20  # to write a number of a row into memory that is held
READ = 5  # to read it some time later, for its norm or a weighted sum
FRESH = 75  # to write it into memory that is new to the process, beside `WRITE`
PAIR = 40  # to multiply and add up the products of two positions
SHIFT = 10  # to add a product of two pixels to another, or to write a number of a window
CALL = 2e6  # the operations of norms by products, beside those of writing; for all samples together
SCATTER = 20  # to add a number of a row at its place in a sketch
PLACE = 35  # to put a number of a factor at its place
FFT = 3.5  # for each of m · log₂ m, a Fourier transform of m real numbers

FULL_RATE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities of cards that multiply at least half as fast in float64 as in float32: P100 to B200."""

MAPPED = 32 * 2**20
"""Bytes above which malloc always asks the system for new memory."""


def by_products(pairs: Sequence[Pair]) -> float:
    """A sample's norm, from products between all positions of all pairs.  Infinite for pairs of several kinds."""
    if len({(left.shape[2], right.shape[2], isinstance(right, Windows)) for left, right in pairs}) > 1:
        return inf
    each = PAIR * _positions(pairs) ** 2 + CALL / max(1, pairs[0][0].shape[0])
    return each + SHORT * products(pairs)


def products(pairs: Sequence[Pair]) -> float:
    """A sample's multiplications between all positions of all pairs."""
    return sum(_multiplications(list(factors)) for factors in zip(*pairs))


def double_costs(device: torch.device) -> float:
    """How many times as long products take in float64, by what makers of GPUs tell of their cards."""
    return 2 if device.type != "cuda" or torch.cuda.get_device_capability(device) in FULL_RATE else 64


def by_writing(pairs: Sequence[Pair]) -> float:
    """A sample's norm, from its row, which is read at once."""
    left, right = pairs[0]
    numbers, cut = left.shape[2] * right.shape[2], 0
    if isinstance(right, Windows):
        cut, others = right.shape[1:].numel(), right.x.shape[1:].numel() + left.shape[1:].numel()
        if not cuts_windows(cut, others, numbers):
            return numbers * (KERNEL * _positions(pairs) + 3 * WRITE)
    return numbers * (_positions(pairs) + WRITE) + SHIFT * cut * len(pairs)


def saving(pairs: Sequence[Pair], fresh: bool) -> float:
    """What is saved for a number by a row that is written once for its norm and a weighted sum, beside each by itself.
    fresh: whether it is written to new memory"""
    (left, right), written = pairs[0], by_writing(pairs)
    numbers = max(1, left.shape[2] * right.shape[2])
    new = FRESH if fresh and 4 * left.shape[0] * numbers > MAPPED else 0
    own_sum = _positions(pairs) * (KERNEL if isinstance(right, Windows) else 1)
    return (min(by_products(pairs), written) - written) / numbers + own_sum - 2 * READ - new


def sketches_factors(positions: int, fan_out: int, fan_in: int, size: int, entries: int) -> bool:
    """Whether a sparse map takes outer products by Fourier transforms of their factors, or else rows that are written out.

    For a sample and a position: two factors put in place and transformed, and their transforms multiplied, in each of
    ``entries`` blocks of ``size`` coordinates; against O · I multiplications, and for a sample O · I numbers that are
    written once and added in each block.  Measured on one core, for 16 samples of 64 positions, transforms against rows:
    512 × 128 to 512 coordinates, 1.2 ms and 1.8; to 4096, 8.3 and 1.9; 128 × 128 to 512, 1.1 and .5; for 64 samples of one
    position, 512 × 512 to 512, .15 and 15.
    """
    transform = FFT * size * log2(size + 1)
    by_factors = entries * (positions * (PLACE * (fan_out + fan_in) + 2 * transform + 8 * size) + transform)
    return by_factors < fan_out * fan_in * (positions + WRITE + entries * SCATTER)


def cache_budget(budget: int, like: Tensor) -> int:
    """So much of a budget that malloc has the memory again at once, which stays in the cache, too."""
    return min(budget, MAPPED // 4) if like.is_cpu else budget


def cuts_windows(windows: int, others: int, row: int) -> bool:
    """Whether a convolution's rows are written through windows and a matrix product, or else by a grouped convolution.

    Both do the same multiplications, so the numbers that they move decide, for a sample: those of its windows against its
    input, its output gradient (others) and three times its row, which the grouped kernel reorders.  Measured on two cores,
    windows against grouped: 256 -> 256 channels at 8×8, 12 ms and 29; 1 -> 32 at 26×26, 0.4 and 1.0; 32 -> 64 at 26×26, 7.4
    and 5.4; 64 -> 64 at 16×16, 1.6 and 1.1.
    """
    return windows <= others + 3 * row


def memory_of_products(pairs: Sequence[Pair]) -> int:
    """Numbers that are held for a sample's products."""
    cut = (max(right.shifts, right.shape[1:].numel()) for _, right in pairs if isinstance(right, Windows))
    return 2 * _positions(pairs) ** 2 + sum(cut)


def _positions(pairs: Sequence[Pair]) -> int:
    return sum(left.shape[1] for left, _ in pairs)


def _multiplications(factors: Sequence[Factor]) -> float:
    """Of the products between all positions of factors of one kind."""
    positions, first = sum(factor.shape[1] for factor in factors), factors[0]
    if isinstance(first, Windows) and first.overlap:
        return len(factors) ** 2 * (prod(first.x.shape[1:]) * prod(first.x.shape[2:]) + SHIFT * first.shifts)
    cut = SHIFT * first.shape[1:].numel() if isinstance(first, Windows) else 0
    return positions**2 * (1 if isinstance(first, OneHot) else first.shape[2]) + cut
