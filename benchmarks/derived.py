"""Losses with derivatives by the input: an equation of physics, and gradient penalties.

Other ways take each loss as ``torch.func`` has it: ``alone``, of one sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import grad
from workloads import Batch, Model, Workload, multilayer

Function = Callable[[Tensor], Tensor]


def critic(width: int, pixels: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(width * pixels**2 // 2, 1),
    )  # fmt: skip


def slope(of: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), x, create_graph=True)[0]


def laplacian(model: Model, batch: Batch) -> Tensor:
    """(Δu - 1)²"""
    x = batch["x"].detach().requires_grad_()
    first = slope(model(x), x)
    second = torch.stack([slope(first[:, n], x)[:, n] for n in range(x.shape[1])])
    return (second.sum(0) - 1).square()


def laplacian_alone(f: Function, sample: Batch) -> Tensor:
    x = sample["x"]
    second = [grad(lambda x, n=n: grad(f)(x)[n])(x)[n] for n in range(len(x))]
    return (torch.stack(second).sum() - 1).square()


def penalty(model: Model, batch: Batch) -> Tensor:
    """y + 10 (‖∂y/∂x‖ - 1)², of a critic"""
    x = batch["x"].detach().requires_grad_()
    y = model(x)[:, 0]
    return y + 10 * (slope(y, x).flatten(1).norm(dim=1) - 1).square()


def penalty_alone(f: Function, sample: Batch) -> Tensor:
    return f(sample["x"]) + 10 * (grad(f)(sample["x"]).norm() - 1).square()


def points(samples: int, *shape: int) -> Callable[[int], Batch]:
    return lambda step: {"x": torch.randn(samples, *shape)}


_critic = Workload(multilayer(64, 512, 512, 512, 1, between=nn.SiLU), points(64, 64), penalty, alone=penalty_alone)
DERIVED = {
    "Laplacian, MLP 3-128x3, N 256": Workload(
        multilayer(3, 128, 128, 128, 1, between=nn.Tanh), points(256, 3), laplacian, alone=laplacian_alone
    ),
    "gradient penalty, MLP 64-512x3, N 64": _critic,
    "gradient penalty, CNN 3-32-64, N 32": replace(_critic, model=critic(32, 16), batch=points(32, 3, 16, 16)),
}
