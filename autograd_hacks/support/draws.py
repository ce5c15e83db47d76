"""Noise for a parameter's gradient, from a generator or from the user's own mechanism."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING

Mechanism: TypeAlias = Callable[[str, torch.Size, float], Tensor]
"""A function of a parameter's name, the sum's shape and the standard deviation, which returns noise.  It is called once a
step for each trainable parameter, in their order.  Complex numbers have a last axis of size 2."""
Noise: TypeAlias = "torch.Generator | Mechanism | None"
"""The source of noise: a generator of normal numbers (torch's default one for None), or a mechanism."""


def check_noise(verb: str, noise: object) -> None:
    if noise is not None and not isinstance(noise, torch.Generator) and not callable(noise):
        raise TypeError(
            f"{verb}: noise is {noise!r}; expected a torch.Generator, or a function (name, shape, deviation) that returns "
            "noise." + ON_CLIPPING
        )


def drawn(noise: Noise, name: str, p: Tensor, deviation: float) -> Tensor:
    """Noise of a parameter's shape, dtype and device.  p: a parameter, or a shard, whose shape is that of the whole"""
    # Each part of a complex number gets the full deviation, because norms include both parts.  torch.normal would split it.
    shape = torch.Size((*p.shape, 2)) if p.is_complex() else torch.Size(p.shape)
    kind = torch.promote_types(p.dtype, torch.float32).to_real()
    if noise is None or isinstance(noise, torch.Generator):
        device = p.device if noise is None else noise.device
        found = torch.normal(0.0, deviation, shape, generator=noise, dtype=kind, device=device)
    else:
        found = noise(name, shape, deviation)
        if not isinstance(found, Tensor) or found.shape != shape or not found.is_floating_point():
            given = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"noise({name!r}, {tuple(shape)}, {deviation:.6g}) returned {given}; expected floating-point numbers of "
                "that shape. If one number were used for several entries, it would cancel in their differences, which "
                "would then be released without noise." + ON_CLIPPING
            )
        found = found.to(kind)
    found = torch.view_as_complex(found.contiguous()) if p.is_complex() else found
    return found.to(p.device, p.dtype)
