"""Seeds and secrets: what is drawn from which, nothing twice, and what can be guessed."""

import copy
import json
import os
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn
from private_steps import BOUND, EXPECTED, NOISE, SEED, SIZE, STEPS, net, train, training
from rarely import crossed
from torch import Tensor
from torch.utils.data import TensorDataset
from twin import Bare

import autograd_hacks
from autograd_hacks.private import PrivateTraining
from autograd_hacks.support import draws
from autograd_hacks.support.draws import Secret


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Secret]:
    """All secrets that are drawn from."""
    found, words = list[Secret](), draws._words
    monkeypatch.setattr(draws, "_words", lambda secret: found.append(secret) or words(secret))
    return found


def of_step(t: int, counts: bool = False, seed: int = SEED) -> Iterator[Secret]:
    yield Secret.of(seed, "batch", t)
    for purpose in ("noise", "count") if counts else ("noise",):
        yield Secret.of(Secret.of(seed, purpose, t), 0)  # all parameters together, since they are small


@crossed(options=[{}, {"parts": 3}, {"micro_batch_size": 2}], counts=[False, True])
def test_steps_micro_batches_and_resumes_draw_from_no_secret_twice(
    options: dict[str, Any], counts: bool, used: list[Secret]
) -> None:
    def made(seed: int) -> PrivateTraining:
        return training(seed=seed, clip="a quantile" if counts else "flat")

    before, after = made(SEED), made(SEED + 1)
    train(before, net(), upto=2, **options)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    train(after, net(), upto=STEPS - 2, **options)
    assert len(used) == len(set(used))
    assert set(used) == {own for t in range(STEPS) for own in of_step(t, counts)}


def test_no_two_draws_of_a_training_share_a_key() -> None:
    """10⁴ steps, all purposes, and two seeds that differ by 1."""
    found = {own for seed in (SEED, SEED + 1) for t in range(5_000) for own in of_step(t, counts=True, seed=seed)}
    assert len(found) == len({own[:16] for own in found}) == 2 * 5_000 * 3


def test_groups_of_parameters_have_secrets_of_their_own(used: list[Secret]) -> None:
    """Some 2¹⁸ numbers at a time, other dtypes apart."""
    sizes = [5, 2**18, 7, 2**19 + 3, 9, 1]
    named = [(f"{n}", torch.zeros(size)) for n, size in enumerate(sizes)] + [("double", torch.zeros(4, dtype=torch.float64))]
    found = list(draws.drawn(Secret.of(1), named, 2.0))
    assert len(used) == len(set(used)) == 4
    assert [(x.shape, x.dtype) for x in found] == [(p.shape, p.dtype) for _, p in named]
    numbers = torch.cat([x.double() for x in found])
    assert len(numbers.unique()) > 0.9 * len(numbers)  # of float32, some are equal
    assert float(numbers.std()) == pytest.approx(2.0, rel=0.01)
    assert all(map(torch.equal, found, draws.drawn(Secret.of(1), named, 2.0)))


def two_net(size: int = 500) -> nn.Module:
    """Whose parameters have one shape, and whose gradients are zero."""
    return Bare(lambda m, x: x @ m.first + x @ m.other, first=torch.zeros(size), other=torch.zeros(size))


def noise(private: PrivateTraining, step: int, size: int = 500) -> list[Tensor]:
    """Both parameters' noise in some step."""
    private.history = [(NOISE, EXPECTED / SIZE, step)] if step else []
    model = two_net(size)
    with private.attach(model):
        for (x,) in private.loader(TensorDataset(torch.zeros(SIZE, size))):
            private.backward(model(x))
            private.step()
            break
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:.*which can be guessed")
def test_steps_whose_hashes_agree_in_32_bits_have_other_noise() -> None:
    """The two steps have one hash by SHA-256 in the 32 bits that torch's generator for the CPU keeps of a seed."""
    one, other = (noise(training(seed=123456789), step) for step in (23914, 81239))
    assert not any((a == b).any() for a, b in zip(one, other))


def test_seeds_parameters_and_steps_have_noise_of_their_own() -> None:
    found = [
        *noise(training(), 0),
        *noise(training(), 1),
        *noise(training(seed=SEED + 1), 0),
        *noise(training(seed=None), 0),
    ]
    for copied in (copy.deepcopy, copy.copy, lambda own: pickle.loads(pickle.dumps(own))):
        found += noise(copied(training()), 0)
    with pytest.MonkeyPatch.context() as patched:
        forked = training()
        patched.setattr(os, "getpid", lambda: 1)
        found += noise(forked, 0)
    correlations = torch.stack(found).double().corrcoef().fill_diagonal_(0)
    assert correlations.abs().max() < 4.5 / 500**0.5
    assert all(map(torch.equal, noise(training(), 3), noise(training(), 3)))
    assert float(torch.cat(found).std()) == pytest.approx(NOISE * BOUND / EXPECTED, rel=0.06)


def test_noise_without_a_source_is_secret_and_leaves_torchs_generator_alone() -> None:
    found, state = [], torch.get_rng_state()
    model = nn.Linear(20, 10)
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)
    for _ in range(2):
        torch.set_rng_state(state)
        autograd_hacks.backward(model(torch.zeros(0, 20)).sum(1))
        autograd_hacks.private.clip_and_noise_(model, 1.0, 1.0, 1)
        assert torch.equal(torch.get_rng_state(), state)
        found.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    assert not (found[0] == found[1]).any()


@pytest.mark.parametrize("seed", [0, 3, -3, 123456789, 2**64 - 1, np.int64(7)])
def test_a_seed_that_can_be_guessed_warns(seed: int) -> None:
    with pytest.warns(UserWarning, match=rf"seed={seed}, which can be guessed.*secrets\.randbits\(128\)") as warned:
        PrivateTraining(BOUND, NOISE, EXPECTED, 1e-3, seed=seed)
    assert warned[0].filename == __file__.replace(".pyc", ".py")


def test_seeds_that_dont_warn() -> None:
    seeds = {training(seed=None).state_dict()["seed"] for _ in range(100)}
    assert len(seeds) == 100
    assert 2**120 < max(seeds) < 2**128
    for seed in (2**64, SEED, -SEED):
        assert json.loads(json.dumps(training(seed=seed).state_dict()))["seed"] == seed
