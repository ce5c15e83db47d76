"""Rows of a normalisation over the last axis, in one pass over its input and the gradient at its output."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 1024
"""About how many programs keep a card busy."""


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
