"""Cases of a parametrised test that tox -e full runs, beside others that every run has."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def rarely(*cases: Any) -> list[Any]:
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in cases]


def crossed(**axes: Iterable[Any]) -> pytest.MarkDecorator:
    """All combinations of the values of several parameters.  Every run has a few, in which each value occurs."""
    values = [list(own) for own in axes.values()]
    longest = max(map(len, values))
    # Each axis is shifted by one after another number of rounds, so that two axes of one length don't go in step.
    few = {tuple((n + n // len(own) ** k) % len(own) for k, own in enumerate(values, 1)) for n in range(longest)}
    cases = []
    for places in product(*(range(len(own)) for own in values)):
        case = [own[n] for own, n in zip(values, places)]
        cases.append(pytest.param(*case, marks=() if places in few else pytest.mark.slow))
    return pytest.mark.parametrize(tuple(axes), cases)
