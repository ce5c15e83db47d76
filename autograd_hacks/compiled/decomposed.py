"""Decompositions of operations into pointwise ones, or a product and a sum, before labelling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """x[mask] = a value that is the same wherever the mask is true, as an operation entry by entry."""
    mask = indices[0]
    if len(indices) > 1 or mask is None or mask.dtype != torch.bool or accumulate:
        return NotImplemented
    rest = x.ndim - mask.ndim
    if values.ndim > rest and any(s != 1 for s in values.shape[: values.ndim - rest]):
        return NotImplemented
    own = values.reshape(values.shape[max(0, values.ndim - rest) :])
    return torch.where(mask.view(*mask.shape, *[1] * rest), own.to(x.dtype), x)


def trilinear(a: Tensor, b: Tensor, c: Tensor, *given: Any, unroll_dim: int = 1) -> Tensor:
    """The operation of Bilinear: the sum of a product of three tensors with new axes.

    given: the new axes of each tensor, the axes of the sum, and how torch computes it
    """
    product: Any = 1
    for x, axes in zip((a, b, c), given):
        for axis in axes:
            x = x.unsqueeze(axis)
        product = product * x
    return product.sum(given[3]) if given[3] else product


DECOMPOSED: dict[Any, Callable[..., Any]] = {
    aten.index_put.default: index_put,
    aten._trilinear.default: trilinear,
}
