"""One forward's losses, each by a backward pass through the very graph.  The oracle for programs that can't be run twice."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from oracle import assert_rows
from torch import Tensor

import autograd_hacks

Losses = Callable[[], Tensor]


def check(model: nn.Module, losses: Losses, steps: int = 3, by_losses: bool = False, **options: Any) -> None:
    """Steps of a hooked model.  losses: runs the model, N    by_losses: whether backward is given all of them"""
    with autograd_hacks.add_hooks(model, **options):
        for _ in range(steps):
            model.zero_grad()
            own = losses()
            parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
            with autograd_hacks.pause_hooks():
                rows = [torch.autograd.grad(x, list(parameters.values()), retain_graph=True, allow_unused=True) for x in own]
            autograd_hacks.backward(own) if by_losses else own.mean().backward()
            autograd_hacks.compute_grad1(model)
            expected = {}
            for (name, p), grads in zip(parameters.items(), zip(*rows)):
                reached = any(grad is not None for grad in grads)
                filled = [torch.zeros_like(p) if grad is None else grad for grad in grads]
                expected[name] = torch.stack(filled) if reached else None
            assert_rows(model, expected)
            for name, p in parameters.items():
                if expected[name] is not None:
                    torch.testing.assert_close(p.grad, expected[name].mean(0))


def data(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)
