"""The privacy spent by private steps, by the accountants of Opacus or dp-accounting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from math import inf
from typing import Any, TypeAlias

from autograd_hacks.errors import ON_PRIVATE, needed
from autograd_hacks.support.ranges import checked

History: TypeAlias = "list[tuple[float, float, int]]"
"""(noise multiplier, sampling rate, steps), in the order of the steps.  Equal steps in a row share one entry."""
Accountant: TypeAlias = "Callable[[], Any] | None"
"""A class of accountants: ``opacus.accountants.RDPAccountant``, which is the default, or ``PRVAccountant``,
``dp_accounting.rdp.RdpAccountant`` or ``dp_accounting.pld.PLDAccountant``."""


@checked(ON_PRIVATE)
def spent(history: Sequence[tuple[float, float, int]], delta: float, accountant: Accountant = None) -> float:
    """ε of (ε, δ)-differential privacy after some steps of Poisson-sampled batches, for adding or removing one sample.

    history, accountant: see `History`, `Accountant`    delta: δ, in (0, 1)
    Raises TypeError if ``accountant()`` is not an accountant, ImportError if none is given and Opacus is not installed.
    """
    if not history:
        return 0.0
    if any(multiplier == 0 for multiplier, _, _ in history):
        return inf
    if accountant is None:
        with needed("opacus"):
            accountant = import_module("opacus.accountants").RDPAccountant
    made = accountant()
    if hasattr(made, "compose"):
        with needed("dp_accounting"):
            dp = import_module("dp_accounting")
        for multiplier, rate, steps in history:
            made.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)), steps)
    elif hasattr(made, "history"):
        made.history = list(history)
    else:
        name = type(made).__name__
        raise TypeError(f"accountant() returned {name}; expected one of Opacus' or dp-accounting's accountants" + ON_PRIVATE)
    return float(made.get_epsilon(delta))


@checked(ON_PRIVATE)
def noise_for(
    epsilon: float, delta: float, rate: float, steps: int, accountant: Accountant = None, before: Sequence[Any] = ()
) -> float:
    """The smallest noise multiplier, to a thousandth, with which steps and those ``before`` spend ≤ ``epsilon``."""
    low, high = 0.0, 1.0
    while spent([*before, (high, rate, steps)], delta, accountant) > epsilon:
        low, high = high, 2 * high
        if high > 1e4:
            after = f"after {sum(done for _, _, done in before)} steps that are done"
            raise ValueError(
                f"epsilon={epsilon} can't be kept by {steps} steps at a sampling rate of {rate:.4g}, {after}, with any "
                "noise. Give a larger epsilon, or fewer steps" + ON_PRIVATE
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent([*before, (middle, rate, steps)], delta, accountant) > epsilon else (low, middle)
    return high
