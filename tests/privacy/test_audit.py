"""An audit from outside: what many runs with and without one sample say of epsilon, and whether planted mistakes are found.

Two trainings differ in one sample.  From how well a threshold tells their results apart follows a lower bound of epsilon
(Nasr et al. 2021, arXiv:2101.04535; Steinke et al. 2023, arXiv:2305.08846), with its confidence by Clopper and Pearson.
"""

from math import log
from typing import Any

import pytest
import torch
import torch.nn as nn
from scipy.stats import beta
from torch import Tensor
from torch.utils.data import TensorDataset

import autograd_hacks
from autograd_hacks import PrivateTraining
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.privacy import training as of_training
from autograd_hacks.privacy.accounting import spent

SIZE, EXPECTED, BOUND, NOISE, DELTA, STEPS = 4, 4.0, 1.0, 1.2, 1e-2, 2
RUNS, CONFIDENCE = 400, 0.99
CANARY = 100.0
"""Its gradient, before clipping."""


class Weights(nn.Module):
    """Of which a sample's gradient is the sample itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weights


def statistics(with_canary: bool) -> tuple[list[float], float]:
    ""
    ""
    ""
    ""
    ""
    ""
    ""
    ""
    ""
    ""
    ""
    ""
    """How far each of many trainings of some steps has gone along the canary, and their epsilon.

    The other samples' gradients are zero.  One sample more or less, so that the rate of sampling is the same.
    """
    expected = EXPECTED * (SIZE + with_canary) / SIZE
    private, model = PrivateTraining(BOUND, NOISE, expected, DELTA, seed=int(with_canary)), Weights()
    x, found = torch.zeros(SIZE + with_canary, 3), list[float]()
    if with_canary:
        x[-1, 0] = CANARY
    with private.attach(model):
        for (part,) in private.loader(TensorDataset(x), steps=RUNS * STEPS):
            private.backward(model(part))
            private.step()
            assert model.weights.grad is not None
            found.append(float(model.weights.grad[0]) * expected)
    epsilon = spent([(NOISE, private.rate, STEPS)], DELTA)
    return torch.tensor(found).view(RUNS, STEPS).sum(1).tolist(), epsilon


def lower_bound(runs: dict[bool, list[float]], delta: float) -> float:
    """Of epsilon, by the best of some thresholds, which half of the runs have chosen."""
    half = {own: torch.tensor(found)[: RUNS // 2] for own, found in runs.items()}
    rest = {own: torch.tensor(found)[RUNS // 2 :] for own, found in runs.items()}

    def epsilon(of: dict[bool, Tensor], threshold: float, confidence: float) -> float:
        hits, misses = int((of[True] > threshold).sum()), int((of[False] > threshold).sum())
        n = len(of[True])
        found = beta.ppf(1 - confidence, hits, n - hits + 1) if hits else 0.0
        wrong = beta.ppf(confidence, misses + 1, n - misses) if misses < n else 1.0
        return log(max((found - delta) / wrong, 1.0))

    best = max(torch.linspace(-3, 12, 61).tolist(), key=lambda threshold: epsilon(half, threshold, 0.9))
    return epsilon(rest, best, CONFIDENCE)


def audited() -> tuple[float, float]:
    """What runs say of epsilon at least, and what the accountant says."""
    (without, stated), (with_canary, _) = statistics(False), statistics(True)
    return lower_bound({False: without, True: with_canary}, DELTA), stated


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks without proofs: thousands of models that are the same."""

    def without_proofs(model: nn.Module, **options: Any) -> Any:
        return autograd_hacks.add_hooks(model, **{**options, "independent": False, "probe": False})

    monkeypatch.setattr(of_training, "add_hooks", without_proofs)
    from autograd_hacks.privacy import private

    monkeypatch.setattr(private, "ask_independent", lambda *_: None)


@pytest.mark.slow
def test_many_runs_don_t_contradict_epsilon() -> None:
    found, stated = audited()
    assert 0.1 < found < stated  # it is no idle audit


def planted(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    from autograd_hacks.privacy import bounds, private

    if mistake == "noise without clipping":
        monkeypatch.setitem(bounds.RULES, "flat", lambda norms, bound: torch.ones_like(norms))
    elif mistake == "too little noise":
        drawn = private.drawn
        monkeypatch.setattr(private, "drawn", lambda *given: drawn(*given) / 8)
    else:  # the same noise in each step
        own = of_training.seeded
        monkeypatch.setattr(
            of_training,
            "seeded",
            lambda seed, what, t: torch.Generator().manual_seed(1) if what == "noise" else own(seed, what, t),
        )


@pytest.mark.parametrize("mistake", ["noise without clipping", "too little noise", "the same noise in all steps and runs"])
def test_a_planted_mistake_is_found(monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    planted(monkeypatch, mistake)
    found, stated = audited()
    assert found > stated


class CentredLater(Weights):
    """Centres its input over the batch, without a gradient, from some step on."""

    begins, forwards = 3, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return super().forward(x - x.mean(0) if self.forwards > self.begins else x)


def test_samples_that_begin_to_mix_are_found_in_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample then moves the others' gradients, by up to the bound each, and the accountant knows of one alone."""
    monkeypatch.undo()
    private, model = PrivateTraining(BOUND, NOISE, EXPECTED, DELTA, seed=0), CentredLater()

    def trained() -> None:
        for (part,) in private.loader(TensorDataset(torch.randn(8, 3)), steps=10):
            private.backward(model(part))
            private.step()

    with private.attach(model), pytest.raises(SamplesMixed):
        trained()
    assert private.steps == CentredLater.begins
