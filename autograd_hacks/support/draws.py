"""Random numbers of a secret, and noise for parameters' gradients: of a secret, a generator, or the user's own mechanism.

A secret's numbers are Philox': on the CPU NumPy's, by 256 bits of the secret, and on a GPU torch's, by 64.  It isn't a
cryptographic generator, but no way is known to compute some of its numbers from others.  Without NumPy they are SHAKE-256's,
which take twice the time.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3" (SC '11).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256, shake_256
from itertools import accumulate, groupby
from itertools import count as numbered
from math import pi
from typing import TypeAlias

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING

_TOGETHER = 2**18
"""How many numbers are drawn at once: of less, most of the time would go into calls; more don't stay in the cache."""


class Secret(bytes):
    """What random numbers are computed from."""

    @classmethod
    def of(cls, *fields: object) -> Secret:
        """A hash of some fields' ``repr``."""
        return cls(sha256(repr(fields).encode()).digest())


Mechanism: TypeAlias = Callable[[str, torch.Size, float], Tensor]
"""A function of a parameter's name, the sum's shape and the standard deviation, which returns noise.  It is called once a
step for each trainable parameter, in their order.  Complex numbers have a last axis of size 2."""
Noise: TypeAlias = "Secret | torch.Generator | Mechanism | None"
"""The source of noise: a secret (a new one for None), a generator of normal numbers, or a mechanism."""


def uniform(secret: Secret, count: int) -> Tensor:
    """Numbers in [0, 1), multiples of 2⁻⁵³: float64, on the CPU."""
    return _words(secret)(count).bitwise_right_shift_(11).bitwise_and_(2**53 - 1).double().mul_(2.0**-53)


def normal(secret: Secret, count: int, deviation: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal numbers, float32 or float64."""
    if device.type == "cpu":
        return box_muller(_words(secret), count, deviation, dtype)
    draws = torch.Generator(device).manual_seed(int.from_bytes(secret[:8], "big"))
    return torch.empty(count, dtype=dtype, device=device).normal_(0, deviation, generator=draws)


def box_muller(words: Callable[[int], Tensor], count: int, deviation: float, dtype: torch.dtype) -> Tensor:
    """Normal numbers, float32 or float64, from as many random bits.

    None is 0, and none is beyond 6.67 deviations in float32, as one of 4 · 10¹⁰ normal numbers is, and 9.43 in float64.

    words: returns as many random numbers of 64 bits, int64
    Source: Box and Muller 1958, "A note on the generation of random normal deviates".
    """
    found = torch.empty(count, dtype=dtype, device="cpu")
    width = 8 * found.element_size()
    # |u + ½| · scale is in (0, 1): less than it by one bit, since 1 has the logarithm 0.
    scale = 2.0 ** (1 - width) * (1 - torch.finfo(dtype).eps / 2)
    for part in found.split(_TOGETHER):
        half = (len(part) + 1) // 2
        bits = words(max(1, half * width // 32)).view(torch.int32 if width == 32 else torch.int64)
        u, v = bits[:half], bits[half : 2 * half]
        size = u.to(dtype).add_(0.5).abs_().mul_(scale).log_().mul_(-2).sqrt_().mul_(deviation)
        angle = v.to(dtype).mul_(pi * 2.0 ** (1 - width))
        torch.mul(size, angle.cos(), out=part[:half])
        torch.mul(size[: len(part) - half], angle.sin_()[: len(part) - half], out=part[half:])
    return found


def _words(secret: Secret) -> Callable[[int], Tensor]:
    """Random numbers of 64 bits, int64: as many as are asked for, and then others."""
    try:
        import numpy as np
    except ImportError:
        parts = numbered()
        return lambda count: of_bytes(shake_256(secret + next(parts).to_bytes(8, "big")).digest(8 * count))
    key, counter = (int.from_bytes(half, "big") for half in (secret[:16], secret[16:]))
    draws = np.random.Philox(key=key, counter=counter << 128)
    return lambda count: torch.from_numpy(draws.random_raw(count).view(np.int64))


def of_bytes(given: bytes) -> Tensor:
    return torch.frombuffer(bytearray(given), dtype=torch.int64)


def check_noise(verb: str, noise: object) -> None:
    if noise is not None and not isinstance(noise, Secret | torch.Generator) and not callable(noise):
        raise TypeError(
            f"{verb}: noise is {noise!r}; expected a torch.Generator, or a function (name, shape, deviation) that returns "
            "noise." + ON_CLIPPING
        )


def drawn(
    noise: Noise, named: Sequence[tuple[str, Tensor]], deviation: float, firsts: Callable[[Tensor], Tensor] = lambda x: x
) -> Iterator[Tensor]:
    """Noise of each parameter's shape, dtype and device.  Small tensors may share memory.

    named: parameters, or shards, whose shapes are those of the wholes
    firsts: gives all processes the first one's numbers. A secret's too: devices of other kinds have other ones
    """
    if noise is None or isinstance(noise, Secret):
        yield from _of_secret(noise or Secret(secrets.token_bytes(32)), [p for _, p in named], deviation, firsts)
        return
    for name, p in named:
        if isinstance(noise, torch.Generator):
            found = torch.normal(0.0, deviation, _shape(p), generator=noise, dtype=_kind(p), device=noise.device)
        else:
            found = _of_mechanism(noise, name, _shape(p), deviation).to(_kind(p))
        yield _like(firsts(found.to(p.device)), p)


def _of_secret(
    secret: Secret, parameters: Sequence[Tensor], deviation: float, firsts: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """Small parameters are drawn together, as one sequence."""
    shapes = [_shape(p) for p in parameters]
    ends = accumulate(shape.numel() for shape in shapes)
    devices = [torch.device("cpu") if p.device.type == "mps" else p.device for p in parameters]  # MPS has no float64
    places = [(device, _kind(p), end // _TOGETHER) for device, p, end in zip(devices, parameters, ends)]
    for (device, kind, _), group in groupby(range(len(parameters)), lambda i: places[i]):
        own = list(group)
        sizes = [shapes[i].numel() for i in own]
        found = firsts(normal(Secret.of(secret, own[0]), sum(sizes), deviation, device, kind))
        for i, part in zip(own, found.split(sizes)):
            yield _like(part.view(shapes[i]), parameters[i])


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
