"""What torch.compile makes of hooked models and of their parts: rows as ever, and compiled code wherever none are noted."""

import copy
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import assert_same, one_backward_per_sample
from torch import Tensor
from torch.utils.checkpoint import checkpoint

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


class Net(nn.Module):
    """A table, two blocks and a head; the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 3)
        self.first = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
        self.second = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.GELU())
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.table(tokens)))).mean(1)


class Scaled(Net):
    """With a parameter that is read in the model's own code."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.scale * self.table(tokens)))).mean(1)


class Checkpointed(Net):
    reentrant = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = checkpoint(self.first, self.table(tokens), use_reentrant=self.reentrant)
        return self.head(checkpoint(self.second, x, use_reentrant=self.reentrant)).mean(1)


class CheckpointedReentrantly(Checkpointed):
    reentrant = True


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum(1)


def batch(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (n, 3)), torch.randn(n, 2).double()


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def outside(model: Net, backend: Graphs) -> nn.Module:
    return torch.compile(model, backend=backend)


def itself(model: Net, backend: Graphs) -> nn.Module:
    model.compile(backend=backend)
    return model


def function(model: Net, backend: Graphs) -> Run:
    return torch.compile(lambda x: model(x) * 1.0, backend=backend)


def block_itself(model: Net, backend: Graphs) -> nn.Module:
    model.first.compile(backend=backend)
    return model


def blocks_replaced(model: Net, backend: Graphs) -> nn.Module:
    model.first, model.second = (torch.compile(part, backend=backend) for part in (model.first, model.second))
    return model


def layers_themselves(model: Net, backend: Graphs) -> nn.Module:
    for layer in (model.table, model.first[0], model.head):
        layer.compile(backend=backend)
    return model


def forward_of_block(model: Net, backend: Graphs) -> nn.Module:
    model.first.forward = torch.compile(model.first.forward, backend=backend)
    return model


WAYS: list[Callable[[Any, Graphs], Run]] = [
    outside,
    itself,
    function,
    block_itself,
    blocks_replaced,
    layers_themselves,
    forward_of_block,
]


def check(hooked: nn.Module, model: nn.Module, plain: nn.Module, run: Run, param_grad: bool) -> None:
    """A step's rows, read from what was hooked, and its ordinary gradients."""
    x, y = batch()
    rows = list(one_backward_per_sample(plain, squares, x, y).values())
    model.zero_grad()
    squares(run(x), y).mean().backward()
    autograd_hacks.compute_grad1(hooked, set_grad=not param_grad)
    assert_same(dict(enumerate(p.grad1 for p in model.parameters())), dict(enumerate(rows)))
    for p, own in zip(model.parameters(), rows):
        torch.testing.assert_close(p.grad, own.mean(0))


def ran(graphs: Graphs, run: Run) -> int:
    """How many graphs of compiled code a forward runs."""
    before = graphs.ran
    run(batch()[0])
    return graphs.ran - before


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("hooks_first", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_compiled_model(
    way: Callable[[Net, Graphs], Run], hooks_first: bool, probe: bool, param_grad: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    model, graphs = Net().double(), Graphs()
    plain = copy.deepcopy(model)
    if hooks_first:
        autograd_hacks.add_hooks(model, probe=probe, param_grad=param_grad)
        run = way(model, graphs)
        hooked: nn.Module = model
    else:
        run = way(model, graphs)
        hooked = run if isinstance(run, nn.Module) else model
        autograd_hacks.add_hooks(hooked, probe=probe, param_grad=param_grad)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            check(hooked, model, plain, run, param_grad)
    assert [str(w.message) for w in said if "is compiled" in str(w.message)] == [str(w.message) for w in said]
    assert len(said) == 1
    assert graphs.ran == 0
    with torch.no_grad():
        assert ran(graphs, run)
    with autograd_hacks.pause_hooks():
        assert ran(graphs, run)
    check(hooked, model, plain, run, param_grad)
    autograd_hacks.remove_hooks(hooked)
    assert ran(graphs, run)
    assert not any("compile" in vars(part) for part in model.modules())
    captured = capfd.readouterr()
    assert not captured.out + captured.err
