"""Nets to compile, a compiler that counts, and a step's check."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from oracle import assert_same, one_backward_per_sample
from torch import Tensor

import autograd_hacks

Run = Callable[[Tensor], Tensor]


class Graphs:
    """A compiler's backend that counts how often what it has compiled runs."""

    def __init__(self) -> None:
        self.ran = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.ran += 1
            return graph(*args)

        return run


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).tanh()


class Net(nn.Module):
    """A table, two blocks and a head; the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.first = Block(nn.Linear(3, 4))
        self.second = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.table(tokens)))).mean(1)


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum(1)


def batch(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (n, 3)), torch.randn(n, 2).double()


def check(hooked: nn.Module, model: nn.Module, plain: nn.Module, run: Run, param_grad: bool) -> None:
    """A step's rows, read from what was hooked, and its ordinary gradients."""
    x, y = batch()
    rows = list(one_backward_per_sample(plain, squares, x, y).values())
    model.zero_grad()
    squares(run(x), y).mean().backward()
    autograd_hacks.compute_grad1(hooked, "mean", set_grad=not param_grad)
    assert_same(dict(enumerate(p.grad1 for p in model.parameters())), dict(enumerate(rows)))
    for p, own in zip(model.parameters(), rows):
        torch.testing.assert_close(p.grad, own.mean(0))


def ran(graphs: Graphs, run: Run) -> int:
    """How many graphs of compiled code a forward runs."""
    before = graphs.ran
    run(batch()[0])
    return graphs.ran - before
