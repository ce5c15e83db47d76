"""Random directions u vᵀ of parameters, along which sums of rows are compared with gradients."""

from functools import lru_cache
from math import prod
from zlib import crc32

import torch
from torch import Tensor

PAIRS = 4
"""How many directions a parameter has, K."""
_SPARE, _MOST = 4096, 2**20

Directions = tuple[Tensor, Tensor]


@lru_cache(maxsize=16)
def _numbers(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Fixed random numbers, (2 K, size), from a generator of their own, so that no user's numbers change.

    Their magnitudes lie in [1/2, 3/2], so that none hides an entry and products of them have no long tails."""
    draws = torch.Generator("cpu").manual_seed(size)
    found = torch.rand(2 * PAIRS, size, generator=draws, dtype=torch.float, device="cpu").mul_(2).sub_(1)
    return (found + found.sign() / 2).bfloat16().to(device, dtype)  # the same numbers in each dtype


@lru_cache(maxsize=2**14)
def directions(name: str, number: int, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Directions:
    """Directions of a parameter seen as a matrix, O of its first axis and I of the rest: u (K, O) and v (K, I).

    With more than two axes, v is a product again, of its second axis and the rest, whose first entries are 1.

    name, number: of the parameter, and one for each backward pass; others have other directions
    """
    seed, axes, kind = 7919 * number + crc32(name.encode()), list(shape[:2]) + [1] * (2 - len(shape)), (dtype, device)
    u, v = _piece(axes[0], seed, 0, *kind), _piece(axes[1], seed + 1, PAIRS, *kind)
    if len(shape) < 2:
        return u, torch.ones_like(v)
    if len(shape) > 2:
        second, rest = v.clone(), _piece(prod(shape[2:]), seed + 2, PAIRS, *kind).clone()
        second[:, :1], rest[:, :1] = 1, 1
        v = (second[:, :, None] * rest[:, None]).flatten(1)
    return u, v


def _piece(size: int, seed: int, first: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    own = min(size, _MOST)  # larger ones repeat
    most = 1 << (own + _SPARE).bit_length()
    start = seed * 31 % (most - own)
    found = _numbers(most, dtype, device).as_strided((PAIRS, own), (most, 1), first * most + start)
    return found if own == size else found.repeat(1, -(-size // own))[:, :size]


def along(grad: Tensor, at: Directions) -> Tensor:
    """uᵀ G, (K, I), for a gradient G.  grad: shape, may be sparse"""
    u, v = at
    if grad.layout != torch.strided:
        grad = grad.coalesce()
        grad, u = (grad.values(), u[:, grad.indices()[0]]) if grad.sparse_dim() == 1 else (grad.to_dense(), u)
    if grad.element_size() < 4:  # half precision
        u, grad = u.float(), grad.float()
    return u @ (grad if grad.ndim == 2 else grad.reshape(u.shape[1], v.shape[1]))
