"""Norms of sums of vectors that have the same key: those of a table's rows, where positions read it by index."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
