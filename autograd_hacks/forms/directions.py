"""Random directions u vᵀ of parameters, along which sums of rows are compared with gradients."""

from functools import lru_cache
from math import prod
from zlib import crc32

import torch
from torch import Tensor

PAIRS = 4
"""How many directions a parameter has, K."""
_SPARE, _MOST = 4096, 2**20


@lru_cache(maxsize=16)
def _numbers(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fixed random numbers, (2 K, size), from a generator of their own, so that no user's numbers change."""
    draws = torch.Generator("cpu").manual_seed(size)
    found = torch.randn(2 * PAIRS, size, generator=draws, device="cpu")
    return found.bfloat16().to(device, dtype)  # the same numbers in each dtype


def directions(name: str, number: int, shape: torch.Size, like: Tensor) -> tuple[Tensor, Tensor]:
    """Directions of a parameter seen as a matrix, O of its first axis and I of the rest: u (K, O) and v (K, I).

    name, number: of the parameter and of the backward pass; others have other directions
    like: a tensor with their dtype and device
    """
    seed = crc32(name.encode()) + 7919 * number
    sizes = shape[:1].numel(), prod(shape[1:])
    u, v = (_piece(size, seed + n, n * PAIRS, like) for n, size in enumerate(sizes))
    return u, v


def _piece(size: int, seed: int, first: int, like: Tensor) -> Tensor:
    own = min(size, _MOST)  # larger ones repeat
    most = 1 << (own + _SPARE).bit_length()
    start = seed * 31 % (most - own)
    found = _numbers(most, like.dtype, like.device)[first : first + PAIRS, start : start + own]
    return found if own == size else found.repeat(1, -(-size // own))[:, :size]


def along(grad: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The inner products of a gradient with the directions, K, and its 2-norm as the last entry.  grad: shape, may be sparse"""
    if grad.layout != torch.strided:
        grad = grad.coalesce()
        grad, u = (grad.values(), u[:, grad.indices()[0]]) if grad.sparse_dim() == 1 else (grad.to_dense(), u)
    size = torch.linalg.vector_norm(grad)
    rows = u @ grad.reshape(u.shape[1], v.shape[1])
    found = rows.mul(v).sum(1) if v.shape[1] > 1 else rows.squeeze(1) * v.squeeze(1)
    return torch.cat([found, size.to(found.dtype).view(1)])
