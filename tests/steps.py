"""A small regression model, its batches, a step of it, and the check that its rows are right."""

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
