"""Mechanisms of noise: what they are told and what they return."""

import sys
from math import sqrt
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from refused import check_each
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.private import SecureNoise
from autograd_hacks.support.draws import Secret, normal

BOUND, EXPECTED = 2.0, 10.0


def hooked(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Linear(4, 3, dtype=dtype)
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)
    return model


def step(model: nn.Module, multiplier: float, **options: Any) -> Any:
    """With zeros for a batch, so that .grad is noise alone."""
    autograd_hacks.backward(squares(model(torch.zeros(0, 4, dtype=model.weight.dtype))))  # type: ignore[arg-type]
    return autograd_hacks.private.clip_and_noise_(model, BOUND, multiplier, EXPECTED, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_a_mechanism_is_told_names_shapes_and_the_deviation(dtype: torch.dtype) -> None:
    model, told = hooked(dtype), list[Any]()

    def noise(name: str, shape: torch.Size, deviation: float) -> Tensor:
        told.append((name, tuple(shape), deviation))
        return torch.full(shape, 3.0, dtype=torch.float64)

    step(model, 1.5, noise=noise)
    last = (2,) if dtype.is_complex else ()
    deviation = 1.5 * BOUND / EXPECTED
    assert told == [("weight", (3, 4, *last), deviation), ("bias", (3, *last), deviation)]
    for p in model.parameters():
        assert_close(p.grad, torch.full_like(p, 3 + 3j if dtype.is_complex else 3))


def test_noise_of_another_shape_is_refused() -> None:
    check_each(
        *[(ValueError, "released without noise", lambda wrong=wrong: step(hooked(), 1.0, noise=lambda *_: wrong))
          for wrong in (torch.zeros(()), torch.zeros(3, 4, dtype=torch.long), None, torch.zeros(4))],
        (TypeError, r"expected a torch\.Generator, or a function", lambda: step(hooked(), 1.0, noise=7)),
    )  # fmt: skip


def test_numbers_may_be_tensors_without_axes() -> None:
    model = hooked()
    autograd_hacks.backward(squares(model(torch.randn(3, 4))))
    found = autograd_hacks.private.clip_and_noise_(model, torch.tensor(BOUND), torch.tensor(0), torch.tensor(5))  # type: ignore[arg-type]
    assert (found.bound, found.expected_batch_size, found.deviation) == (BOUND, 5.0, 0.0)
    with pytest.raises(TypeError, match="expected a number"):
        autograd_hacks.private.clip_and_noise_(model, torch.ones(1), 0.0, 5)  # type: ignore[arg-type]


def test_without_numpy_other_bits_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    first, again, other = (normal(Secret.of(n), 2**20, 2.0, torch.device("cpu"), torch.float32) for n in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique().numel() > 0.9 * first.numel()
    assert first.mean().abs() < 5 * 2 / sqrt(first.numel())
    assert (first.std() / 2 - 1).abs() < 5 / sqrt(2 * first.numel())


def test_secure_noise_is_normal_and_never_the_same() -> None:
    first, other = (SecureNoise()("weight", torch.Size((300, 401)), 2.0) for _ in range(2))
    assert first.shape == (300, 401)
    assert first.dtype == torch.float64
    assert not (first == other).any()
    standard = torch.distributions.Normal(0.0, 2.0)
    for x in (first, other):  # Kolmogorov and Smirnov: exceeded once in 10,000 times
        ordered = standard.cdf(x.flatten().sort().values)
        steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
        assert (ordered - steps).abs().max() * sqrt(len(ordered)) < 2.23
    assert torch.stack([first.flatten(), other.flatten()]).corrcoef()[0, 1].abs() < 4 / sqrt(first.numel())
    assert SecureNoise()("bias", torch.Size((3,)), 1.0).shape == (3,)
    assert SecureNoise()("none", torch.Size((0, 2)), 1.0).shape == (0, 2)
    with pytest.raises(ValueError, match="draws=0"):
        SecureNoise(0)
    found = step(hooked(), 1.0, noise=SecureNoise(draws=2))
    assert found.deviation == BOUND / EXPECTED
