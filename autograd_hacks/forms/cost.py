"""The costs of verbs, by which they choose the cheaper way.  All estimates are in this module.

The unit is a multiplication in a large matrix product in single precision, on the device at hand: about 0.02 ns on one core.
The numbers are in ``costs.json``: a CPU's were measured; a GPU's follow from an H100's 33.5 · 10¹² multiplications and
3.35 · 10¹² bytes a second.  ``python benchmarks/device_costs.py`` measures a device again.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, wraps
from math import inf, log2, prod
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.forms.positions import Factor, OneHot, Pair, Windows, is_written, multiplications

TABLE = Path(__file__).with_name("costs.json")
MAPPED = 32 * 2**20
"""Bytes above which malloc always asks the system for new memory."""
DOUBLE = {(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)}
"""Compute capabilities of cards with units for float64: P100 to B200."""


@dataclass(frozen=True)
class Costs:
    """The costs of single steps on a device, in multiplications."""

    short: float  # a multiplication in products between positions, whose results are small
    kernel: float  # a multiplication in a convolution's own kernel
    cut: float  # to write a number of a window
    run: float  # to begin a row of numbers of windows, beside `cut` for each of them
    write: float  # to write a number of a row into memory that is held
    read: float  # to read it some time later, for its norm or a weighted sum
    fresh: float  # to write it into memory that is new to the process, beside `write`
    pair: float  # to multiply and add up the products of two positions
    shift: float  # to add a product of two pixels to another, or to reorder a number for a convolution's kernel
    call: float  # the operations of norms by products, beside those of writing; for all samples together
    matrix: float  # to begin a product of small matrices, of a batch of them
    scatter: float  # to add a number of a row at its place in a sketch
    place: float  # to put a number of a factor at its place
    fft: float  # for each of m · log₂ m, a Fourier transform of m real numbers
    double: float  # a product in float64


def costs_of(device: torch.device) -> Costs:
    return _costs_of(device)


@lru_cache
def _costs_of(device: torch.device) -> Costs:
    table = json.loads(TABLE.read_text())
    costs = Costs(**table.get(device.type, table["cpu"]))
    has_double = device.type != "cuda" or torch.cuda.get_device_capability(device.index) in DOUBLE
    return costs if has_double else replace(costs, double=64)


def _once(cost: Callable[..., float]) -> Callable[..., float]:
    """The cost for pairs, which is computed once for those of the same sizes: each step has them again."""
    known = dict[Any, float]()

    @wraps(cost)
    def kept(pairs: Sequence[Pair], *more: bool) -> float:
        sizes = [_SIZES(x) if type(x) is Windows else (type(x), x.shape) for own in pairs for x in own]
        key = *more, pairs[0][0].device, *sizes
        if len(known) > 2**12:
            known.clear()
        return known.get(key) or known.setdefault(key, cost(pairs, *more))

    return kept


_SIZES = attrgetter("x.shape", "kernel", "stride", "padding", "dilation", "counts")


@_once
def by_products(pairs: Sequence[Pair], in_double: bool = False) -> float:
    """A sample's norm, from products between all positions of all pairs.  Infinite for pairs of several kinds.
    in_double: whether these are taken in float64"""
    if len({(left.shape[2], right.shape[2], isinstance(right, Windows)) for left, right in pairs}) > 1:
        return inf
    costs = costs_of(pairs[0][0].device)
    each = costs.pair * _positions(pairs) ** 2 + costs.matrix + costs.call / max(1, pairs[0][0].shape[0])
    return (each + costs.short * products(pairs)) * (costs.double if in_double else 1)


def products(pairs: Sequence[Pair]) -> float:
    """A sample's multiplications between all positions of all pairs."""
    total, positions, costs = 0.0, _positions(pairs), costs_of(pairs[0][0].device)
    for factors in zip(*pairs):
        first: Factor = factors[0]
        if isinstance(first, Windows) and first.overlap:
            total += len(factors) ** 2 * (prod(first.x.shape[1:]) * prod(first.x.shape[2:]) + costs.shift * first.shifts)
            continue
        cut = _of_windows(first) if isinstance(first, Windows) else 0
        total += positions**2 * (1 if isinstance(first, OneHot) else first.shape[2]) + cut
    return total


@_once
def by_writing(pairs: Sequence[Pair]) -> float:
    """A sample's norm, from its row, which is read at once."""
    (left, right), costs = pairs[0], costs_of(pairs[0][0].device)
    if isinstance(right, Windows):
        return len(pairs) * way_of_convolution(right, left.shape[2])[1]
    return left.shape[2] * right.shape[2] * (_positions(pairs) + costs.write)


def way_of_convolution(windows: Windows, fan_out: int, groups: int = 1) -> tuple[bool, float]:
    """Whether a convolution's rows are written through windows and a matrix product, or else by a grouped convolution; and
    what that costs for a sample.

    Measured on one core, in single precision, for 1,023 shapes drawn at random (16 to 64 samples, 1 to 256 channels, images
    of 4 to 32): what is chosen took 1.02 times as long as the better way, on average.
    """
    x, costs, (_, positions, each) = windows.x, costs_of(windows.device), windows.shape
    numbers, row = positions * each, fan_out * each // groups
    by_windows, others = row * (positions + costs.write) + _of_windows(windows), x.shape[1:].numel() + fan_out * positions
    if not x.is_cpu:  # the numbers that both move decide; the grouped kernel reorders its row
        return (
            (True, by_windows)
            if numbers <= others + 3 * row
            else (False, row * (costs.kernel * positions + 3 * costs.write))
        )
    # Without blocks of channels there is no fast kernel, and the slow one cuts windows itself.
    is_blocked = torch.backends.mkldnn.is_available() and x.shape[1] // groups % 8 == 0 == fan_out // groups % 8
    moved = costs.write * row + costs.shift * others if is_blocked else 5 * costs.cut * numbers + costs.read * row
    by_kernel = row * (costs.kernel * positions + costs.write) + moved + costs.matrix
    return by_windows <= by_kernel, min(by_windows, by_kernel)


def _of_windows(windows: Windows) -> float:
    """The cost of cutting a sample's windows."""
    if prod(windows.kernel) == 1 == prod(windows.stride) and not any(windows.padding):  # they are the pixels
        return 0
    costs, run = costs_of(windows.device), windows.kernel[-1] if windows.one_by_one else windows.counts[-1]
    return windows.shape[1:].numel() * (costs.cut + costs.run / (run if run > 1 else prod(windows.kernel)))


def gram_by_positions(
    mine: Sequence[Pair | None], theirs: Sequence[Pair | None] | None, samples: tuple[int, int], numbers: int
) -> bool:
    """Whether inner products of N and M rows should come from products between all positions, instead of from written-out
    rows of this many numbers.

    mine, theirs: of all forms that the rows consist of; None for theirs if they are the same rows    samples: N, M"""
    (n, m), others = samples, mine if theirs is None else theirs
    every = [pair for pair in (*mine, *(theirs or ())) if pair is not None and is_written(pair) and not pair[1].is_complex()]
    fans = {(left.shape[2], right.shape[2]) for left, right in every}
    if len(every) < len(mine) + len(theirs or ()) or len(fans) > 1:
        return False
    costs, rows = costs_of(every[0][0].device), n if theirs is None else n + m
    positions = sum(right.shape[:2].numel() for left, right in every if isinstance(left, Tensor))
    at = [sum(pair[1].shape[:2].numel() for pair in own if pair) for own in (mine, others)]
    each = min(max(multiplications(pair) for pair in own if pair) for own in (mine, others))
    spent = at[0] * at[1] * (costs.pair + costs.short * each)
    spent += costs.call * (len(mine) * len(others) - 1)  # rows are multiplied at once
    return spent <= numbers * (positions + costs.write * rows + max(n * m, costs.read * rows))


def saving(pairs: Sequence[Pair], fresh: bool) -> float:
    """The saving per number if a row is written once for both its norm and a weighted sum.  To read it for its norm later,
    and not at once, took no longer.
    fresh: whether it is written to new memory"""
    (left, right), written, costs = pairs[0], by_writing(pairs), costs_of(pairs[0][0].device)
    numbers = max(1, left.shape[2] * right.shape[2])
    new = costs.fresh if fresh and 4 * left.shape[0] * numbers > MAPPED else 0
    own_sum = _positions(pairs) * (costs.kernel if isinstance(right, Windows) else 1)
    return (min(by_products(pairs), written) - written) / numbers + own_sum - costs.read - new


def sketches_factors(device: torch.device, positions: int, fan_out: int, fan_in: int, size: int) -> bool:
    """Whether a sparse map should project outer products by Fourier transforms of their factors, instead of writing out
    rows.

    For a sample and a position: two factors put in place and transformed, and their transforms multiplied, for ``size``
    coordinates; against O · I multiplications, and for a sample O · I numbers that are written once and added.  Measured on
    one core, for 16 samples of 64 positions, transforms against rows: 512 × 128 to 512 coordinates, 1.2 ms and 1.8; to 4096,
    8.3 and 1.9; 128 × 128 to 512, 1.1 and .5; for 64 samples of one position, 512 × 512 to 512, .15 and 15.
    """
    costs = costs_of(device)
    transform = costs.fft * size * log2(size + 1)
    by_factors = positions * (costs.place * (fan_out + fan_in) + 2 * transform + 8 * size) + transform
    return by_factors < fan_out * fan_in * (positions + costs.write + costs.scatter)


def cache_budget(max_bytes: int, like: Tensor) -> int:
    """The part of a budget whose memory malloc can reuse at once, and that stays in the cache."""
    return min(max_bytes, MAPPED // 8) if like.is_cpu else max_bytes


def memory_of_products(pairs: Sequence[Pair]) -> int:
    """Numbers that are held for a sample's products."""
    return 2 * _positions(pairs) ** 2 + sum(
        max(right.shifts, right.shape[1:].numel()) for _, right in pairs if isinstance(right, Windows)
    )


def _positions(pairs: Sequence[Pair]) -> int:
    return sum(left.shape[1] for left, _ in pairs)
