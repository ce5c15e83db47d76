"""Losses with derivatives in them, N of a model and a batch, and what is true of them.  Imports nothing from the library."""

from collections.abc import Callable

import torch
import torch.nn as nn
from oracle import Rows, one_loss_at_a_time
from torch import Tensor

Loss = Callable[[nn.Module, Tensor], Tensor]
"""``loss(model, x)``: N losses; x asks for gradients."""


def _sums(model: nn.Module, x: Tensor) -> Tensor:
    """A number for each sample, N, that isn't linear in the parameters."""
    y = model(x).sin()
    return y.flatten(1).sum(1) if y.ndim > 1 else y


def _slope(of: Tensor, x: Tensor) -> Tensor:
    """N D"""
    (slope,) = torch.autograd.grad(of.sum(), x, create_graph=True)
    return slope.flatten(1) if slope.ndim > 1 else slope[:, None]


def gradient_penalty(model: nn.Module, x: Tensor) -> Tensor:
    y = _sums(model, x)
    return y.square() + (_slope(y, x).square().sum(1) - 1).square()


def laplacian(model: nn.Module, x: Tensor) -> Tensor:
    """Of the first three inputs, as in an equation of physics."""
    y = _sums(model, x)
    slope = _slope(y, x)
    second = [_slope(slope[:, n], x)[:, n] for n in range(min(3, slope.shape[1]))]
    return (sum(second) - y).square()


def third(model: nn.Module, x: Tensor) -> Tensor:
    y = _sums(model, x)
    return _slope(_slope(_slope(y, x).square().sum(1), x).square().sum(1), x).square().sum(1) + y


LOSSES = (gradient_penalty, laplacian, third)


def rows_of(model: nn.Module, loss: Loss, x: Tensor) -> Rows:
    """The whole batch's losses, a backward pass from each."""
    return one_loss_at_a_time(model, lambda: loss(model, x.detach().requires_grad_()))


def step(model: nn.Module, loss: Loss, x: Tensor) -> Tensor:
    """A step of an ordinary program: the sum of the losses, backwards."""
    model.zero_grad()
    total = loss(model, x.detach().requires_grad_()).sum()
    total.backward()
    return total.detach()
