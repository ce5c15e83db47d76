"""An audit from outside: what many runs with and without one sample say of epsilon, and whether planted mistakes are found.

Two trainings differ in one sample.  From how well a threshold tells their results apart follows a lower bound of epsilon
(Nasr et al. 2021, arXiv:2101.04535; Steinke et al. 2023, arXiv:2305.08846), with its confidence by Clopper and Pearson.
"""

from collections.abc import Callable
from math import log
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from rarely import rarely
from scipy.stats import beta
from torch import Tensor
from torch.utils.data import TensorDataset
from twin import Bare

import autograd_hacks
from autograd_hacks.private import PrivateTraining
from autograd_hacks.private import training as of_training
from autograd_hacks.private.accounting import spent
from autograd_hacks.private.poisson import Mark
from autograd_hacks.support.draws import Secret

SIZE, BOUND, NOISE, DELTA, STEPS, SEED = 4, 1.0, 1.2, 1e-2, 2, 2**100
RUNS, CONFIDENCE = 400, 0.99
CANARY = 100.0
"""Its gradient, before clipping."""


class Weights(Bare):
    """Of which a sample's gradient is the sample itself."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: x @ m.weights, weights=torch.zeros(3))


Statistic = Callable[[Tensor], Tensor]
"""Of the steps of many runs, (runs, STEPS), a number for each run."""


def statistics(
    with_canary: bool, of: Statistic, rate: float, noise: float, samples: int, runs: int
) -> tuple[list[float], float]:
    """What each of many trainings of some steps shows of the canary, by their steps along it, and their epsilon.

    The other samples' gradients are zero.  One sample more or less, or one user, so that the rate of sampling is the same.
    samples: of each user
    """
    users = SIZE + with_canary
    expected, groups = rate * users, torch.arange(users).repeat(samples)
    whose = {} if samples == 1 else {"groups": groups}
    private, model = PrivateTraining(BOUND, noise, expected, DELTA, seed=SEED + with_canary, **whose), Weights()
    x, found = torch.zeros(len(groups), 3), list[float]()
    if with_canary:
        x[groups == users - 1, 0] = CANARY
    with private.attach(model):
        for (part,) in private.loader(TensorDataset(x), steps=runs * STEPS):
            private.backward(model(part))
            private.step()
            assert model.weights.grad is not None
            found.append(float(model.weights.grad[0]) * expected)
    return of(torch.tensor(found).view(runs, STEPS)).tolist(), spent([(noise, private.rate, STEPS)], DELTA)


def lower_bound(runs: dict[bool, list[float]], delta: float) -> float:
    """Of epsilon, by the best of some thresholds and one of its sides, which half of the runs have chosen.

    Both sides, since noise that is equal in all runs may as well put the canary below.
    """
    half = {own: torch.tensor(found)[: len(found) // 2] for own, found in runs.items()}
    rest = {own: torch.tensor(found)[len(found) // 2 :] for own, found in runs.items()}

    def epsilon(of: dict[bool, Tensor], threshold: float, side: int, confidence: float) -> float:
        hits, misses = (int((side * of[own] > side * threshold).sum()) for own in (True, False))
        n = len(of[True])
        found = beta.ppf(1 - confidence, hits, n - hits + 1) if hits else 0.0
        wrong = beta.ppf(confidence, misses + 1, n - misses) if misses < n else 1.0
        return log(max((found - delta) / wrong, 1.0))

    both = torch.cat([*half.values()])
    tried = [(at, side) for side in (1, -1) for at in torch.linspace(float(both.min()), float(both.max()), 61).tolist()]
    found = {of: epsilon(half, *of, 0.9) for of in tried}
    best = [of for of, own in found.items() if own == max(found.values())]
    return epsilon(rest, *best[len(best) // 2], CONFIDENCE)


def sums(steps: Tensor) -> Tensor:
    return steps.sum(1)


def differences(steps: Tensor) -> Tensor:
    """In which noise that two steps have in common cancels."""
    return (steps[:, 1] - steps[:, 0]).abs()


OF_TWO_STEPS: dict[str, Any] = {"of": differences, "rate": 0.5, "noise": 4.0}


def audited(
    of: Statistic = sums, rate: float = 1.0, noise: float = NOISE, samples: int = 1, runs: int = RUNS
) -> tuple[float, float]:
    """What runs say of epsilon at least, and what the accountant says.  samples: of each user"""
    (without, stated), (with_canary, _) = (statistics(own, of, rate, noise, samples, runs) for own in (False, True))
    return lower_bound({False: without, True: with_canary}, DELTA), stated


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks without proofs: thousands of models that are the same."""

    def without_proofs(model: nn.Module, **options: Any) -> Any:
        return autograd_hacks.add_hooks(model, **{**options, "independent": False, "probe": False})

    monkeypatch.setattr(of_training, "add_hooks", without_proofs)
    from autograd_hacks.private import clip_and_noise

    monkeypatch.setattr(clip_and_noise, "ask_independent", lambda *_: None)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [1, 8])
def test_many_runs_don_t_contradict_epsilon(samples: int) -> None:
    """Of a sample, and of a user whose samples are all canaries."""
    found, stated = audited(samples=samples)
    assert 0.1 < found < stated  # it is no idle audit
    found, stated = audited(**OF_TWO_STEPS, samples=samples)
    assert found < stated


def planted(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    from autograd_hacks.private import bounds, clip_and_noise

    if mistake == "noise without clipping":
        monkeypatch.setitem(bounds.RULES, "flat", lambda norms, bound: torch.ones_like(norms))
    elif mistake == "too little noise":
        drawn = clip_and_noise.drawn
        monkeypatch.setattr(clip_and_noise, "drawn", lambda *given: (own / 8 for own in drawn(*given)))
    elif mistake == "samples of a user clipped one by one":
        monkeypatch.setattr(Mark, "groups", lambda _: None)
        monkeypatch.setattr(Mark, "units", property(lambda mark: mark.samples))
    else:  # the same noise in steps that differ
        place = {"in all steps and runs": lambda t: 0, "in both steps of a run": lambda t: t // STEPS}[mistake]
        own = Secret.of
        of = SimpleNamespace(of=lambda seed, what, t: own(seed, what, place(t) if what == "noise" else t))
        monkeypatch.setattr(of_training, "Secret", of)


MISTAKES: dict[str, dict[str, Any]] = {
    "noise without clipping": {"noise": 4.0, "runs": 100},  # of a small epsilon, so that few runs contradict it
    "too little noise": {},
    "in all steps and runs": {},
    "in both steps of a run": OF_TWO_STEPS,  # by the steps' difference, where the canary is drawn in one of them
    "samples of a user clipped one by one": {"samples": 8},
}


@pytest.mark.parametrize("mistake", [*list(MISTAKES)[:1], *rarely(*list(MISTAKES)[1:])])
def test_a_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    planted(monkeypatch, mistake)
    found, stated = audited(**MISTAKES[mistake])
    assert found > stated
