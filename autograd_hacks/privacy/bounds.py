"""How much of a sample's gradient goes into a private sum: weights by norms, and which parameters are bounded together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING
from autograd_hacks.support.draws import Noise, drawn
from autograd_hacks.support.kinds import is_number
from autograd_hacks.verbs.arguments import kind_of, names_matching

Weigh = Callable[[Tensor, float], Tensor]
"""Weights, N, by norms, N, such that no weight · norm is above the bound."""


def flat(norms: Tensor, bound: float) -> Tensor:
    """min(1, C / ‖g‖): Abadi et al. 2016, arXiv:1607.00133."""
    return (bound / norms).clamp(max=1)


def automatic(norms: Tensor, bound: float, stability: float = 0.01) -> Tensor:
    """C / (‖g‖ + γ), AUTO-S: Bu et al. 2023, arXiv:2206.07136."""
    return bound / (norms + stability)


def psac(norms: Tensor, bound: float, r: float = 0.1) -> Tensor:
    """C / (‖g‖ + r / (‖g‖ + r)), which weighs small gradients less than AUTO-S: Xia et al. 2023, arXiv:2212.00328."""
    return bound / (norms + r / (norms + r))


RULES: dict[str, Weigh] = {"flat": flat, "per_parameter": flat, "automatic": automatic, "psac": psac}
"""{what ``clip`` may be: its weights}"""


class QuantileClip:
    """A bound that follows a quantile of the norms, by a count to which noise is added.

    The first step clips to its ``max_norm``; each step then multiplies the bound by exp(-rate · (share - quantile)), of
    the noisy share of samples that were not clipped.

    quantile: the share of samples that are not to be clipped    rate: of learning the bound
    deviation: σ_b, of the noise added to the count; √(expected_batch_size) / 20 or so. It takes a part of the guarantee: the
    gradients' noise is (z⁻² - (2 σ_b)⁻²)^(-1/2) times the bound, so that a step as a whole has the noise multiplier z
    least, most: the bound stays between

    bound: of the next step, None before the first. It is released with the noise in it, and belongs into a checkpoint.
    Source: Andrew et al. 2021, "Differentially private learning with adaptive clipping" (arXiv:1905.03871), algorithm 1.
    """

    def __init__(
        self, quantile: float = 0.5, rate: float = 0.2, deviation: float = 1.0, least: float = 0.0, most: float = inf
    ) -> None:
        numbers = {"quantile": quantile, "rate": rate, "deviation": deviation, "least": least, "most": most}
        for name, number in numbers.items():
            if not is_number(number) or number < 0 or (name in ("rate", "deviation") and not 0 < number < inf):
                raise ValueError(f"QuantileClip was given {name}={number!r}; expected a number above 0" + ON_CLIPPING)
        if quantile > 1 or least > most:
            raise ValueError(
                f"QuantileClip was given quantile={quantile}, least={least} and most={most}; expected a share, "
                "and least ≤ most" + ON_CLIPPING
            )
        self.quantile, self.rate, self.deviation, self.least, self.most = quantile, rate, deviation, least, most
        self.bound: float | None = None

    def state_dict(self) -> dict[str, float | None]:
        return {"bound": self.bound}

    def load_state_dict(self, state: Mapping[str, float | None]) -> None:
        self.bound = state["bound"]

    def multiplier(self, noise_multiplier: float) -> float:
        """Of the gradients' noise, where a step as a whole has another."""
        if not noise_multiplier:
            return 0.0
        left = noise_multiplier**-2 - (2 * self.deviation) ** -2
        if left <= 0:
            raise ValueError(
                f"QuantileClip has deviation={self.deviation}, and the step noise_multiplier={noise_multiplier}; expected a "
                f"deviation above {noise_multiplier / 2}: the count alone tells more than that noise allows" + ON_CLIPPING
            )
        return float(left**-0.5)

    def _follow(self, norms: Tensor, bound: float, expected: float, multiplier: float, noise: Noise) -> None:
        """Takes the bound of the next step from a step's norms.  multiplier: of the step's noise; 0 without noise"""
        # Each sample counts 1/2 or -1/2, so that it moves the count by 1/2, as `multiplier` has it; of 0 or 1 it would be 1.
        count = float((norms <= bound).sum()) - float(norms.isfinite().sum()) / 2
        if multiplier:
            count += float(drawn(noise, "the count of QuantileClip", torch.zeros(1, device="cpu"), self.deviation))
        found = bound * exp(-self.rate * (count / expected + 0.5 - self.quantile))
        self.bound = min(max(found, self.least), self.most)


@dataclass(frozen=True)
class Part:
    """Parameters whose gradients are bounded together.  pattern: how they were given; nothing for all"""

    pattern: str
    names: Sequence[str]
    bound: float


def parts_of(model: nn.Module, names: Sequence[str], max_norm: float | Mapping[str, float], clip: Any) -> list[Part]:
    """What is bounded together, and to what.  names: of all parameters that train

    Raises ValueError where bounds don't cover each parameter once.
    """
    if isinstance(max_norm, Mapping):
        parts = [Part(pattern, names_matching(pattern, model, names), float(c)) for pattern, c in max_norm.items()]
        given = [name for part in parts for name in part.names]
        missing, twice = sorted(set(names).difference(given)), sorted({name for name in given if given.count(name) > 1})
        if missing or twice:
            raise ValueError(
                f"max_norm was given bounds that leave out {missing[:5]} and have {twice[:5]} twice; expected one bound for "
                "each parameter that trains, or a step would promise nothing for the others" + ON_CLIPPING
            )
        return parts
    if clip == "per_parameter":
        return [Part(name, [name], float(max_norm) / len(names) ** 0.5) for name in names]
    return [Part("", list(names), float(max_norm))]


def weights_of(clip: Any, norms: Tensor, bound: float) -> Tensor:
    """N, such that no sample's weighted gradient is longer than the bound.  Raises ValueError where it would be."""
    if isinstance(clip, str):
        return RULES[clip](norms, bound)
    if isinstance(clip, QuantileClip):
        return flat(norms, bound)
    w = clip(norms)
    if not isinstance(w, Tensor) or w.shape != norms.shape:
        raise ValueError(f"clip returned {kind_of(w)}; expected {len(norms)} weights, one for each norm" + ON_CLIPPING)
    single = [clip(norm) for norm in norms.split(1)] if len(norms) < 3 else [clip(part) for part in norms.tensor_split(2)]
    if single and not torch.allclose(torch.cat(single).to(w), w, rtol=1e-4, atol=0):
        raise ValueError(
            "clip returned other weights for a part of the norms than for all; expected each weight to follow from its own "
            "norm alone: one sample would change all others' parts of the sum, by more than the noise is drawn for"
            + ON_CLIPPING
        )
    longest = float((w * norms).abs().max()) if len(norms) else 0.0
    if not longest <= bound * (1 + 1e-6):
        raise ValueError(
            f"clip returned weights by which a sample has a length of {longest:.6g}, above max_norm={bound:.6g}, for which "
            "the noise is drawn: the step would promise more than it keeps" + ON_CLIPPING
        )
    return w
