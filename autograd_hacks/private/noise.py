"""Sources of noise: the operating system's random bits, and noise that is correlated from step to step."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING, ON_PRIVATE
from autograd_hacks.extending import check_state
from autograd_hacks.support.draws import drawn
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


class BandedNoise:
    """Noise that is correlated from step to step, so that most of it cancels in the sum of steps.

    The noise of step t is Σⱼ rⱼ z_{t-j} for independent normal z: (C⁻¹ Z)_t for a banded triangular Toeplitz matrix C⁻¹.
    It is scaled by ``sensitivity``, the sensitivity of C, so ``noise_multiplier`` is that of *one* Gaussian mechanism for
    the whole training, ``dp_accounting.GaussianDpEvent(noise_multiplier)``, composed once.  There is no amplification by
    sampling: visit the data in a fixed order, so that each sample is in at most ``participations`` steps, at least
    ``separation`` steps apart.  ``state_dict()`` holds what a checkpoint needs, beside a generator's state.

    steps: the number of steps of the whole training
    bands: the number of coefficients of (1 - x)^(1/2) (BISR), and of past draws that are kept
    participations: in how many steps a sample may be
    separation: the smallest distance of two of these steps, for example the steps of an epoch; by default ``steps``
    coefficients: your own coefficients r, the first of them 1
    generator: the source of z, for noise that can be repeated; see ``noise`` of `clip_and_noise_` for what it gives away. By
    default 128 bits of the operating system's for each parameter and step

    Raises ValueError for coefficients whose inverse isn't positive and falling, because the sensitivity is then unknown.  A
    call raises RuntimeError after ``steps`` steps.

    Source: Kalinin, McKenna, Upadhyay and Lampert 2025, "Back to square roots" (arXiv:2505.12128); the sensitivity Kalinin
    and Lampert 2024 (arXiv:2405.13763), theorem 2.
    """

    @checked(ON_CLIPPING)
    def __init__(
        self,
        steps: int,
        bands: int = 4,
        participations: int = 1,
        separation: int | None = None,
        coefficients: Sequence[float] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        separation = steps if separation is None else separation
        self.steps, self.generator = steps, generator
        # The first coefficients of (1 - x)^(1/2): 1, -1/2, -1/8, ...
        roots = accumulate(range(1, bands), lambda last, k: last * (k - 1.5) / k, initial=1.0)
        self.coefficients = list(roots if coefficients is None else coefficients)
        column = [1.0]  # the first one of C, from the coefficients, which are that of C⁻¹
        for k in range(1, steps):
            column.append(-sum(r * column[k - j] for j, r in enumerate(self.coefficients) if 1 <= j <= k))
        if self.coefficients[0] != 1 or any(a < b for a, b in zip(column, [*column[1:], 0.0])):
            inverse = [round(c, 3) for c in column[:4]]
            raise ValueError(
                f"BandedNoise was given coefficients={self.coefficients} with the inverse {inverse} ...; expected 1 first, "
                "and an inverse that is positive and falling: otherwise the sensitivity is unknown" + ON_CLIPPING
            )
        visits = [i * separation for i in range(participations) if i * separation < steps]
        shifted = [sum(column[t - start] for start in visits if start <= t) for t in range(steps)]
        self.sensitivity = sqrt(sum(c * c for c in shifted))
        self._past: dict[str, list[Tensor]] = {}
        self._count: dict[str, int] = {}
        self._deviation: float | None = None

    def __call__(self, name: str, shape: torch.Size, deviation: float) -> Tensor:
        """The noise of a parameter's next step.  deviation: of independent noise with the same guarantee"""
        count = self._count.get(name, 0)
        if count >= self.steps:
            why = f"BandedNoise was made for {self.steps} steps, and {name!r} has had them all"
            raise RuntimeError(f"{why}. Make it for more steps: BandedNoise(steps=...)" + ON_CLIPPING)
        if self._deviation not in (None, deviation):
            given = f"BandedNoise was given a deviation of {deviation}, after {self._deviation} before"
            raise ValueError(f"{given}; expected the same in each step, so that noise cancels" + ON_CLIPPING)
        (z,) = drawn(self.generator, [(name, torch.empty(shape, device="cpu"))], deviation * self.sensitivity)
        past = [z, *self._past.get(name, [])][: len(self.coefficients)]
        self._deviation, self._count[name], self._past[name] = deviation, count + 1, past
        return sum((r * old for r, old in zip(self.coefficients, past)), torch.zeros_like(z))

    def state_dict(self) -> dict[str, Any]:
        past = {name: [z.clone() for z in kept] for name, kept in self._past.items()}
        return {"past": past, "count": dict(self._count), "deviation": self._deviation}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state("BandedNoise", state, self.state_dict(), ON_CLIPPING)
        self._past = {name: list(kept) for name, kept in state["past"].items()}
        self._count, self._deviation = dict(state["count"]), state["deviation"]
