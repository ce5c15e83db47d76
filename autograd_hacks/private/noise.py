"""Sources of noise: the operating system's random bits, and seeds."""

from __future__ import annotations

import os
import secrets
import warnings
from math import sqrt

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING, ON_PRIVATE
from autograd_hacks.support.philox import box_muller
from autograd_hacks.support.ranges import checked

PART = 2**20
"""How many numbers are drawn from the operating system at once."""
GUESSABLE = 2**64
"""A seed below it may be found by trying."""


def seed_of(given: int | None) -> int:
    """The seed of a training: 128 bits of the operating system's, or the given one, with a warning if it can be guessed."""
    if given is None:
        return secrets.randbits(128)
    if abs(given) < GUESSABLE:
        warnings.warn(
            f"PrivateTraining was given seed={given}, which can be guessed. Whoever guesses it draws the same noise and "
            "takes it off. Leave it out; or give secrets.randbits(128), at least 2**64, and keep it secret" + ON_PRIVATE,
            stacklevel=4,  # past the check of numbers and the constructor
        )
    return int(given)


class SecureNoise:
    """Normal noise from the operating system's cryptographic generator, safe from the attack on floating-point numbers.

    Each number is the sum of several normal numbers, divided by √draws.  To find values that can't occur from the last bits,
    an attacker would have to search over all draws.  The noise can't be repeated: no two runs have the same noise.

    draws: how many normal numbers are summed, 4 by default

    Source: Holohan and Braghin 2021, "Secure random sampling in differential privacy" (arXiv:2107.10138), section 4.
    """

    @checked(ON_CLIPPING)
    def __init__(self, draws: int = 4) -> None:
        self.draws = draws

    def __call__(self, name: str, shape: torch.Size, deviation: float) -> Tensor:
        """Noise for a parameter of a name and shape, in double precision on the CPU, of this standard deviation."""
        found = torch.empty(shape, dtype=torch.float64, device="cpu").flatten()
        for part in found.split(PART):
            part.copy_(torch.stack([_normal(len(part)) for _ in range(self.draws)]).sum(0))
        return found.mul_(deviation / sqrt(self.draws)).view(shape)


def _normal(count: int) -> Tensor:
    """Normal numbers in double precision from the operating system's random bits."""
    half = (count + 1) // 2
    bits = torch.frombuffer(bytearray(os.urandom(16 * half + 8)), dtype=torch.int64)[: 2 * half]  # never of an empty buffer
    return box_muller(bits.view(2, half) >> 11 & (2**53 - 1)).flatten()[:count]
