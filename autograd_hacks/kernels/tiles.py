"""Triton kernels for CUDA, each of which replaces several of torch's.

Sums of outer products, one tile of each row at a time: its norm, its product with a direction and the weighted sum of all
rows in one pass over the factors.  No row is written.  Rows of norm layers, and norms of a table's rows, where positions
read it by index, in one pass over what they are made of.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from autograd_hacks.support.contexts import MATMUL, unit_of_products

BLOCK = 64
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter multiplies the bits of bfloat16 as integers, so it gets single precision."""
PROGRAMS = 1024
"""About how many programs keep a card busy."""


def row_norms(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """The norms of the rows Jₛ = Σ left[m] ⊗ right[m], over the positions m of segment s, S in single precision.

    left: M O    right: M I    ends: S integers, where each segment ends
    """
    tiles, segments = _tiles_of(left, right), len(ends)
    found = left.new_empty(tiles, segments, dtype=torch.float32)
    _run(left, right, ends, None, None, found, None, None, segments)
    return torch.linalg.vector_norm(found, dim=0, dtype=torch.float64).float()


def sum_and_dot(left: Tensor, right: Tensor, ends: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Σ wₛ Jₛ and ⟨Jₛ, v⟩ of the same rows, O I and S in single precision.  w: S    v: O I"""
    tiles, segments = _tiles_of(left, right), len(ends)
    parts = min(segments, triton.cdiv(PROGRAMS, tiles))
    total = left.new_empty(parts, *v.shape, dtype=torch.float32)
    along = left.new_empty(tiles, segments, dtype=torch.float32)
    _run(left, right, ends, v.contiguous(), w, None, along, total, parts)
    return total.sum(0), along.sum(0)


def _tiles_of(left: Tensor, right: Tensor) -> int:
    return triton.cdiv(left.shape[1], BLOCK) * triton.cdiv(right.shape[1], BLOCK)


def _run(
    left: Tensor, right: Tensor, ends: Tensor, v: Tensor | None, w: Tensor | None, norms: Tensor | None,
    along: Tensor | None, total: Tensor | None, parts: int,
) -> None:  # fmt: skip
    """parts: how many programs share the segments of a tile"""
    fan_out, fan_in, segments = left.shape[1], right.shape[1], len(ends)
    if left.dtype != right.dtype:
        left, right = left.float(), right.float()
    with torch.cuda.device_of(left):  # which need not be the current one
        _tiles[_tiles_of(left, right), parts](
            left.contiguous(), right.contiguous(), ends.contiguous(), v, w, norms, along, total,
            fan_out, fan_in, segments, triton.cdiv(segments, parts), triton.cdiv(fan_in, BLOCK),
            exact=unit_of_products(left, [MATMUL]) == 0, WIDEN=INTERPRETED, BLOCK=BLOCK, POSITIONS=32,
        )  # fmt: skip


@triton.jit
def _tiles(
    left, right, ends, v, w, norms, along, total,
    fan_out, fan_in, segments, each, across,
    exact: tl.constexpr, WIDEN: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    tile, part = tl.program_id(0), tl.program_id(1)
    o = (tile // across) * BLOCK + tl.arange(0, BLOCK)
    i = (tile % across) * BLOCK + tl.arange(0, BLOCK)
    place = o.to(tl.int64)[:, None] * fan_in + i[None, :]
    is_entry = (o < fan_out)[:, None] & (i < fan_in)[None, :]
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    if v is not None:
        direction = tl.load(v + place, mask=is_entry, other=0.0).to(tl.float32)
    for segment in range(part * each, min(segments, (part + 1) * each)):
        begin = tl.load(ends + segment - 1, mask=segment > 0, other=0)
        end = tl.load(ends + segment)
        row = tl.zeros((BLOCK, BLOCK), tl.float32)
        for first in range(begin, end, POSITIONS):
            m = (first + tl.arange(0, POSITIONS)).to(tl.int64)
            is_position = m < end
            of_left = tl.load(left + m[None, :] * fan_out + o[:, None], is_position[None, :] & (o < fan_out)[:, None], 0.0)
            of_right = tl.load(right + m[:, None] * fan_in + i[None, :], is_position[:, None] & (i < fan_in)[None, :], 0.0)
            if WIDEN:
                of_left, of_right = of_left.to(tl.float32), of_right.to(tl.float32)
            row = tl.dot(of_left, of_right, row, input_precision="ieee" if exact else "tf32")
        at = tile.to(tl.int64) * segments + segment
        if norms is not None:  # divided by the largest entry, so that no square leaves the range
            largest = tl.max(tl.abs(row))
            scale = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
            tl.store(norms + at, tl.sqrt(tl.sum((row / scale) * (row / scale))) * scale)
        if v is not None:
            tl.store(along + at, tl.sum(row * direction))
        if w is not None:
            sums += row * tl.load(w + segment)
    if w is not None:
        tl.store(total + part.to(tl.int64) * fan_out * fan_in + place, sums, mask=is_entry)


def affine_rows(x: Tensor, g: Tensor, eps: float, is_rms: bool) -> tuple[Tensor, Tensor]:
    """Σₜ g x̂ and Σₜ g for each sample, N D each, where x̂ is x normalised over D: the rows of weight and bias.

    x, g: N T D    is_rms: whether x is divided by its root mean square alone
    """
    x, g = x.contiguous(), g.contiguous()
    samples, positions, width = x.shape
    parts = max(1, min(positions, triton.cdiv(PROGRAMS, max(1, samples))))
    weight, bias = x.new_empty(2, samples, parts, width, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _affine[samples, parts](
            x, g, weight, bias, positions, width, eps, triton.cdiv(positions, parts),
            IS_RMS=is_rms, BLOCK=triton.next_power_of_2(width),
        )  # fmt: skip
    return weight.sum(1).to(g.dtype), bias.sum(1).to(g.dtype)


@triton.jit
def _affine(x, g, weight, bias, positions, width, eps, each, IS_RMS: tl.constexpr, BLOCK: tl.constexpr):
    sample, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    is_feature = d < width
    products = tl.zeros((BLOCK,), tl.float32)
    sums = tl.zeros((BLOCK,), tl.float32)
    for t in range(part * each, min(positions, (part + 1) * each)):
        at = (sample * positions + t) * width + d
        features = tl.load(x + at, mask=is_feature, other=0.0).to(tl.float32)
        grads = tl.load(g + at, mask=is_feature, other=0.0).to(tl.float32)
        if not IS_RMS:
            features = tl.where(is_feature, features - tl.sum(features) / width, 0.0)
        products += grads * features / tl.sqrt(tl.sum(features * features) / width + eps)
        sums += grads
    at = (sample * tl.num_programs(1) + part) * width + d
    tl.store(weight + at, products, mask=is_feature)
    tl.store(bias + at, sums, mask=is_feature)


def norms_by_key(keys: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """‖Σ g[m]‖ over the m of each key.  keys: M integers, at least 0    g: M D

    Returns the keys in order, M, and M norms in single precision: a key's own at its first place, and 0 at its others, so
    that the host need not know how many keys there are.
    """
    keys, order = keys.sort()
    ends, found = torch.searchsorted(keys, keys, right=True), g.new_empty(len(g), dtype=torch.float32)
    with torch.cuda.device_of(g):
        _norms[(len(g),)](keys, order, ends, g.contiguous(), found, g.shape[1], BLOCK=triton.next_power_of_2(g.shape[1]))
    return keys, found


@triton.jit
def _norms(keys, order, ends, g, found, width, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if tl.load(keys + first - 1, mask=first > 0, other=-1) != tl.load(keys + first):
        for m in range(first, tl.load(ends + first)):
            total += tl.load(g + tl.load(order + m) * width + d, mask=d < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(total))
    scale = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
    tl.store(found + first, tl.sqrt(tl.sum((total / scale) * (total / scale))) * scale)
