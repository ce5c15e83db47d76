"""Noise for a parameter's gradient, by a generator or by a mechanism of the user's."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING

Mechanism: TypeAlias = Callable[[str, torch.Size, float], Tensor]
"""Noise of a step by a parameter's name, the sum's shape and the standard deviation.  It is called once a step for each
parameter that trains, in their order; complex numbers have a last axis of 2."""
Noise: TypeAlias = "torch.Generator | Mechanism | None"
"""What draws noise: a generator, torch's own for None, of normal numbers; or a mechanism."""


def check_noise(verb: str, noise: object) -> None:
    if noise is not None and not isinstance(noise, torch.Generator) and not callable(noise):
        raise TypeError(
            f"{verb} was given noise={noise!r}; expected a torch.Generator, or a function (name, shape, deviation) that "
            "returns noise" + ON_CLIPPING
        )


def drawn(noise: Noise, name: str, p: Tensor, deviation: float) -> Tensor:
    """Noise of a parameter's shape, dtype and device.  p: a parameter, or a shard of one, whose shape is the whole's"""
    # Of a complex number each part has the whole deviation, since norms are over both: torch.normal shares it out.
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
                "that shape. Noise that is spread over several entries cancels in their differences, which would be "
                "released without noise." + ON_CLIPPING
            )
        found = found.to(kind)
    found = torch.view_as_complex(found.contiguous()) if p.is_complex() else found
    return found.to(p.device, p.dtype)
