"""Clipping rules for private sums: weights from norms, and the parts of the parameters that are bounded separately."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_CLIPPING
from autograd_hacks.extending import check_state, clip_weights, kind_of
from autograd_hacks.support.draws import Noise, drawn
from autograd_hacks.support.patterns import names_matching
from autograd_hacks.support.ranges import checked

Weigh = Callable[[Tensor, float], Tensor]
"""A function from N norms and a bound to N weights, with weight · norm ≤ bound."""


RULES: dict[str, Weigh] = {
    "flat": clip_weights,
    "per_parameter": clip_weights,
    "automatic": lambda norms, bound: bound / (norms + 0.01),
    "psac": lambda norms, bound: bound / (norms + 0.1 / (norms + 0.1)),  # smaller weights for small gradients
}
"""{a value of ``clip``: the function for its weights}"""


class QuantileClip:
    """A clipping bound that follows a quantile of the norms, estimated from a noisy count.

    The first step clips to ``max_norm``.  After each step the bound is multiplied by exp(-rate · (share - quantile)), where
    ``share`` is the noisy share of samples that were not clipped.  The next step's bound is ``bound``, None before the
    first step.  It is already noisy, so it may be published.  Save ``state_dict()`` in checkpoints.

    quantile: the target share of samples that are not clipped    rate: the learning rate of the bound
    deviation: σ_b, the standard deviation of the noise in the count, about √(expected_batch_size) / 20. The count uses a
    part of the guarantee, so the gradients' noise is (z⁻² - (2 σ_b)⁻²)^(-1/2) times the bound for a step with noise
    multiplier z

    Source: Andrew et al. 2021, "Differentially private learning with adaptive clipping" (arXiv:1905.03871), algorithm 1.
    """

    @checked(ON_CLIPPING)
    def __init__(self, quantile: float = 0.5, rate: float = 0.2, deviation: float = 1.0) -> None:
        self.quantile, self.rate, self.deviation = quantile, rate, deviation
        self.bound: float | None = None

    def state_dict(self) -> dict[str, float | None]:
        return {"bound": self.bound}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state("QuantileClip", state, self.state_dict(), ON_CLIPPING)
        self.bound = state["bound"]

    @checked(ON_CLIPPING)
    def multiplier(self, noise_multiplier: float) -> float:
        """The multiplier of the gradients' noise in a step whose overall noise multiplier is given."""
        if not noise_multiplier:
            return 0.0
        left = noise_multiplier**-2 - (2 * self.deviation) ** -2
        if left <= 0:
            raise ValueError(
                f"QuantileClip has deviation={self.deviation}, and the step noise_multiplier={noise_multiplier}; expected a "
                f"deviation above {noise_multiplier / 2}: otherwise the count alone spends more than the step" + ON_CLIPPING
            )
        return float(left**-0.5)

    def _follow(self, norms: Tensor, bound: float, expected: float, multiplier: float, noise: Noise) -> None:
        """Sets the next step's bound from a step's norms.  multiplier: the step's noise multiplier; 0 for no noise"""
        # A sample counts 1/2 or -1/2, so it changes the count by 1/2, as `multiplier` assumes; with 0 or 1 it would be 1.
        count = float((norms <= bound).sum()) - float(norms.isfinite().sum()) / 2
        if multiplier:
            (own,) = drawn(noise, [("the count of QuantileClip", torch.zeros(1, device="cpu"))], self.deviation)
            count += float(own)
        self.bound = bound * exp(-self.rate * (count / expected + 0.5 - self.quantile))


@dataclass(frozen=True)
class Bounded:
    """Parameters whose gradients are bounded together.  ``pattern`` is the one that they were given by, '' for all."""

    pattern: str
    names: Sequence[str]
    bound: float


def bounded_apart(model: nn.Module, names: Sequence[str], max_norm: float | Mapping[str, float], clip: Any) -> list[Bounded]:
    """The parts of all trainable parameters that are bounded separately.  Raises ValueError unless each is in one."""
    if isinstance(max_norm, Mapping):
        parts = [Bounded(pattern, names_matching(pattern, model, names), float(c)) for pattern, c in max_norm.items()]
        given = [name for part in parts for name in part.names]
        missing, twice = sorted(set(names).difference(given)), sorted({name for name in given if given.count(name) > 1})
        if missing or twice:
            found = f"max_norm has no bound for {missing[:5]} and two bounds for {twice[:5]}"
            raise ValueError(f"{found}; expected exactly one bound for each trainable parameter" + ON_CLIPPING)
        return parts
    if clip == "per_parameter":
        return [Bounded(name, [name], float(max_norm) / len(names) ** 0.5) for name in names]
    return [Bounded("", list(names), float(max_norm))]


def weights_of(clip: Any, norms: Tensor, bound: float) -> Tensor:
    """N weights with which no sample's gradient is longer than the bound.  Raises ValueError if one would be."""
    if isinstance(clip, str):
        return RULES[clip](norms, bound)
    if isinstance(clip, QuantileClip):
        return clip_weights(norms, bound)
    w = clip(norms)
    if not isinstance(w, Tensor) or w.shape != norms.shape:
        raise ValueError(f"clip returned {kind_of(w)}; expected {len(norms)} weights, one for each norm" + ON_CLIPPING)
    single = [clip(norm) for norm in norms.split(1)] if len(norms) < 3 else [clip(part) for part in norms.tensor_split(2)]
    if single and not torch.allclose(torch.cat(single).to(w), w, rtol=1e-4, atol=0):
        why = "but weights changed when other norms were left out"
        raise ValueError(f"clip: each weight must depend on its own norm only, {why}" + ON_CLIPPING)
    longest = float((w * norms).abs().max()) if len(norms) else 0.0
    if not longest <= bound * (1 + 1e-6):
        found = f"clip returned weights with which a sample's gradient has norm {longest:.6g}"
        raise ValueError(f"{found}; expected at most max_norm={bound:.6g}, the noise's bound" + ON_CLIPPING)
    return w
