"""A small regression model, its batches, a step of it, and the check that its rows are right."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from torch import Tensor

import autograd_hacks


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(n: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    squares(model(x), y).mean().backward()


def assert_right(model: nn.Module, x: Tensor, y: Tensor) -> None:
    autograd_hacks.compute_grad1(model)
    with autograd_hacks.pause_hooks():
        assert_rows(model, one_backward_per_sample(model, squares, x, y))


def stepped(model: nn.Module, x: Tensor) -> autograd_hacks.PerSampleGrads:
    autograd_hacks.add_hooks(model)
    squares(model(x)).mean().backward()
    return autograd_hacks.per_sample_grads(model)


@contextmanager
def raises(model: nn.Module, error: type[Exception], *words: str) -> Iterator[None]:
    """The error with all of the words in its message; and then the next step is right."""
    with pytest.raises(error) as info:
        yield
    for word in words:
        assert word in str(info.value), str(info.value)
    autograd_hacks.enable_hooks()
    model.zero_grad()
    step(model, *batch(6, 9))
    assert_right(model, *batch(6, 9))
