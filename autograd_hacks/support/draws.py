"""Noise for parameters' gradients: by counter, from a generator, or from the user's own mechanism."""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, groupby
from typing import TypeAlias

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING
from autograd_hacks.support.philox import Stream, normal

Mechanism: TypeAlias = Callable[[str, torch.Size, float], Tensor]
"""A function of a parameter's name, the sum's shape and the standard deviation, which returns noise.  It is called once a
step for each trainable parameter, in their order.  Complex numbers have a last axis of size 2."""
Noise: TypeAlias = "Stream | torch.Generator | Mechanism | None"
"""The source of noise: a stream of numbers (a secret one for None), a generator of normal numbers, or a mechanism."""

_TOGETHER = 2**18
"""How many numbers are drawn at once for small parameters: for each alone, most of the time would go into launches."""


def check_noise(verb: str, noise: object) -> None:
    if noise is not None and not isinstance(noise, Stream | torch.Generator) and not callable(noise):
        raise TypeError(
            f"{verb}: noise is {noise!r}; expected a torch.Generator, or a function (name, shape, deviation) that returns "
            "noise." + ON_CLIPPING
        )


def drawn(noise: Noise, named: Sequence[tuple[str, Tensor]], deviation: float) -> Iterator[Tensor]:
    """Noise of each parameter's shape, dtype and device.  Small tensors may share memory.

    named: parameters, or shards, whose shapes are those of the wholes
    """
    if noise is None or isinstance(noise, Stream):
        yield from _by_counter(noise or Stream.secret(), [p for _, p in named], deviation)
        return
    for name, p in named:
        if isinstance(noise, torch.Generator):
            found = torch.normal(0.0, deviation, _shape(p), generator=noise, dtype=_kind(p), device=noise.device)
        else:
            found = _of_mechanism(noise, name, _shape(p), deviation).to(_kind(p))
        yield _like(found, p)


def _by_counter(noise: Stream, parameters: Sequence[Tensor], deviation: float) -> Iterator[Tensor]:
    """Each parameter has its own part of the stream, by its place.  Small ones are drawn together."""
    shapes = [_shape(p) for p in parameters]
    ends = accumulate(shape.numel() for shape in shapes)
    devices = [torch.device("cpu") if p.device.type == "mps" else p.device for p in parameters]  # MPS has no float64
    places = [(device, _kind(p), end // _TOGETHER) for device, p, end in zip(devices, parameters, ends)]
    for (device, kind, _), own in groupby(range(len(parameters)), lambda i: places[i]):
        numbers = list(own)
        streams, counts = [noise.part(i) for i in numbers], [shapes[i].numel() for i in numbers]
        for i, found in zip(numbers, normal(streams, counts, deviation, device, kind)):
            yield _like(found.view(shapes[i]), parameters[i])


def _of_mechanism(noise: Mechanism, name: str, shape: torch.Size, deviation: float) -> Tensor:
    found = noise(name, shape, deviation)
    if not isinstance(found, Tensor) or found.shape != shape or not found.is_floating_point():
        given = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"noise({name!r}, {tuple(shape)}, {deviation:.6g}) returned {given}; expected floating-point numbers of "
            "that shape. If one number were used for several entries, it would cancel in their differences, which "
            "would then be released without noise." + ON_CLIPPING
        )
    return found


def _shape(p: Tensor) -> torch.Size:
    """Each part of a complex number gets the full deviation, because norms include both.  torch.normal would split it."""
    return torch.Size((*p.shape, 2)) if p.is_complex() else torch.Size(p.shape)


def _kind(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32).to_real()


def _like(found: Tensor, p: Tensor) -> Tensor:
    return (torch.view_as_complex(found.contiguous()) if p.is_complex() else found).to(p.device, p.dtype)
