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
from hypothesis import given
from hypothesis import strategies as st
from private_steps import BOUND, EXPECTED, NOISE, SEED, SIZE, STEPS, net, normals, secret, train, training, uniforms
from private_steps import words as by_definition
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import TensorDataset
from twin import Bare

import autograd_hacks
from autograd_hacks.private import PrivateTraining
from autograd_hacks.support import draws, philox
from autograd_hacks.support.draws import Secret, box_muller, normal, uniform
from autograd_hacks.support.philox import by_byte, key_of, noise, packed_signs, unpacked


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


def noise_of(private: PrivateTraining, step: int, size: int = 500) -> list[Tensor]:
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
    one, other = (noise_of(training(seed=123456789), step) for step in (23914, 81239))
    assert not any((a == b).any() for a, b in zip(one, other))


def test_seeds_parameters_and_steps_have_noise_of_their_own() -> None:
    found = [
        *noise_of(training(), 0),
        *noise_of(training(), 1),
        *noise_of(training(seed=SEED + 1), 0),
        *noise_of(training(seed=None), 0),
    ]
    for copied in (copy.deepcopy, copy.copy, lambda own: pickle.loads(pickle.dumps(own))):
        found += noise_of(copied(training()), 0)
    with pytest.MonkeyPatch.context() as patched:
        forked, _ = training(), patched.setattr(os, "getpid", lambda: 1)
        found += noise_of(forked, 0)
    correlations = torch.stack(found).double().corrcoef().fill_diagonal_(0)
    assert correlations.abs().max() < 4.5 / 500**0.5
    assert all(map(torch.equal, noise_of(training(), 3), noise_of(training(), 3)))
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


# Normal and uniform numbers of a secret are those of their definition in Python's own numbers, by Philox


CPU = torch.device("cpu")
FIRST = [-1.645634564044147, 0.6644600679104723, 1.3960595044871138, -0.06103430670043852]
"""The numbers 0, 1, 128 and 255 of `Secret.of("written down")`, so that no version has others."""


def alone(of: Secret, count: int, deviation: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return normal(of, count, deviation, CPU, dtype)


@pytest.mark.parametrize("count", [0, 1, 2, 127, 1000])
@pytest.mark.parametrize(("dtype", "width", "error"), [(torch.float64, 64, 5e-15), (torch.float32, 32, 3e-6)])
def test_numbers_are_those_of_the_definition(count: int, dtype: torch.dtype, width: int, error: float) -> None:
    own = Secret.of(5, "noise", 7)
    assert own == secret(5, "noise", 7)
    expected = torch.tensor(normals(own, count, width), dtype=dtype)
    assert_close(alone(own, count, 0.7, dtype), 0.7 * expected, rtol=0, atol=error)
    assert uniform(own, count).tolist() == uniforms(own, count)


def test_numbers_are_written_down() -> None:
    assert alone(Secret.of("written down"), 256)[[0, 1, 128, 255]].tolist() == pytest.approx(FIRST, rel=1e-14)


def test_first_and_last_numbers_of_box_and_muller() -> None:
    """Where the logarithm is largest or least.  √ of a number below 0 would be NaN, and a number 0 no noise."""
    ends = {32: (torch.int32, torch.float32, 6.67), 64: (torch.int64, torch.float64, 9.43)}
    for width, (kind, dtype, most) in ends.items():
        u, largest = torch.tensor([0, -1, 1, 2 ** (width - 1) - 1, -(2 ** (width - 1))], dtype=kind), 2 ** (width - 1) - 1
        for v in (0, 1, largest // 2, largest, -largest - 1):
            bits = torch.cat([u, torch.full_like(u, v), torch.zeros(2, dtype=kind)])  # whole words
            words = bits[: len(bits) // 2 * 2].view(torch.int64)
            found = box_muller(lambda count, own=words: own[:count], 10, 1.0, dtype).view(2, 5).double().norm(dim=0)  # type: ignore[misc]
            assert float(found.min()) > 1e-8
            assert most - 0.02 < float(found.max()) < most


# Philox against the vectors that its authors publish, and its own definition in Python's integers


WORD = st.integers(0, 2**32 - 1)

VECTORS = [  # counter, key, words; of philox4x32 with 10 rounds, in tests/kat_vectors of Random123
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def drawn(counter: list[int], key: int) -> list[int]:
    return [int(word) for word in philox.philox_(torch.tensor(counter)[:, None], key)]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_published_vectors(counter: str, key: str, expected: str) -> None:
    numbers, (low, high), wanted = ([int(word, 16) for word in text.split()] for text in (counter, key, expected))
    assert drawn(numbers, low + (high << 32)) == by_definition(numbers, low, high) == wanted


@given(st.lists(WORD, min_size=4, max_size=4), WORD, WORD)
def test_any_counter_and_key(counter: list[int], low: int, high: int) -> None:
    assert drawn(counter, low + (high << 32)) == by_definition(counter, low, high)


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = packed_signs(7, slice(3, 40), slice(150, 300), CPU)
    monkeypatch.setattr(philox, "_AT_ONCE", {"cpu": 8})
    assert torch.equal(whole, packed_signs(7, slice(3, 40), slice(150, 300), CPU))


@given(st.integers(0, 400), st.integers(1, 300), st.integers(0, 5))
def test_some_signs_are_those_of_all(start: int, count: int, line: int) -> None:
    values, own = by_byte(torch.empty(0, dtype=torch.float64), 0.5), slice(start, start + count)
    all_bits, bits = packed_signs(11, slice(0, 6), slice(0, 700), CPU), packed_signs(11, slice(line, 6), own, CPU)
    whole, some = unpacked(all_bits, slice(0, 700), values), unpacked(bits, slice(start % 128, start % 128 + count), values)
    assert torch.equal(some, whole[line:, own])
    assert set(whole.flatten().tolist()) == {-0.5, 0.5}
    for entry in (0, 31, 32, 130, 699):  # a counter has 128 bits, the lowest of its first word first
        word = by_definition([entry // 128, line, 0, 0], 11, 0)[entry % 128 // 32]
        assert whole[line, entry] == (word >> entry % 32 & 1) - 0.5


def test_noise() -> None:
    x = noise((100, 999), key_of(1), CPU)
    assert x.shape == (100, 999)
    assert x.dtype == torch.float32
    assert float(x.mean()) == pytest.approx(0, abs=0.015)
    assert float(x.square().mean()) == pytest.approx(1, abs=0.015)
    assert torch.equal(noise((100, 999), key_of(1), CPU), x)
    assert torch.equal(noise((100, 999), key_of(1), CPU, torch.float64), x.double())
    assert not torch.equal(noise((100, 999), key_of(2), CPU), x)
    assert noise((3, 5), 1, CPU, torch.complex64).shape == (3, 5)
    assert noise((), 1, CPU).shape == ()
    assert noise((4, 0), 1, CPU).shape == (4, 0)


@pytest.mark.parametrize("fields", [("a", 1), ("a", torch.Size((1, 2)), None)])
def test_keys(fields: tuple[object, ...]) -> None:
    assert 0 <= key_of(*fields) < 2**64
    assert key_of(*fields) == key_of(*fields) != key_of(*fields, 0)
