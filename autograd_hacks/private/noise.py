"""Sources of noise: the operating system's random bits, and seeds."""

from __future__ import annotations

import os
import secrets
import warnings
from math import sqrt

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING, ON_PRIVATE
from autograd_hacks.support.draws import box_muller, of_bytes
from autograd_hacks.support.ranges import checked

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
        found = torch.zeros(shape.numel(), dtype=torch.float64, device="cpu")
        for _ in range(self.draws):
            found += box_muller(
                lambda count: of_bytes(os.urandom(8 * count)), len(found), deviation / sqrt(self.draws), found.dtype
            )
        return found.view(shape)
