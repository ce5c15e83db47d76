"""Models whose forward takes a derivative itself: Hamiltonian networks, forces, continuous flows, Laplacians."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from steps import check, check_batches
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

D = 4
Kind = Callable[[Any, Tensor], Any]


def _slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def energy(m: Any, x: Tensor) -> Tensor:
    """Of N D numbers, N."""
    return m.body(x).flatten(1).sum(1)


def hamiltonian(m: Any, x: Tensor, energy: Callable[[Any, Tensor], Tensor] = energy) -> Tensor:
    dq, dp = _slope(energy(m, x), x).chunk(2, 1)
    return torch.cat([dp, -dq], 1)


def forces(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Energy and forces."""
    own = energy(m, x)
    return own, -_slope(own, x)


def bare(m: Any, x: Tensor) -> Tensor:
    """With a parameter of its own, inside the derivative and outside."""
    return _slope(energy(m, x * m.scale), x) * m.scale.exp()


def laplacian(m: Any, x: Tensor) -> Tensor:
    first = _slope(energy(m, x).sin(), x)
    return sum((_slope(first[:, n], x)[:, n] for n in range(D)), torch.zeros_like(x[:, 0])) + first.square().sum(1)


def flow(m: Any, x: Tensor) -> Tensor:
    """Four steps along a field, with the divergence by Hutchinson's estimate."""
    v, at, divergence = torch.linspace(-1, 1, D, dtype=x.dtype), x, torch.zeros_like(x[:, 0])
    for _ in range(3):
        field = m.scale * torch.tanh(_slope(energy(m, at).sin(), at))
        divergence = divergence + _slope(field @ v, at) @ v
        at = at + field / 4
    return torch.cat([at, divergence[:, None]], 1)


KINDS = (hamiltonian, forces, bare, laplacian, flow)
"""What a model returns of an energy's derivatives."""


def attending(m: Any, x: Tensor) -> Tensor:
    """Self-attention between the numbers of a sample."""
    x = m.up(x[..., None])
    return m.attend(x, x, x)[0]


def recurrent(m: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(len(x), 3)
    for n in range(D):
        h = m.cell(x[:, n : n + 1], h)
    return h


def tied(m: Any, x: Tensor) -> Tensor:
    """A layer called twice, and its weight used without it."""
    return torch.tanh(m.layer(torch.tanh(m.layer(x)))) @ m.layer.weight


BODIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3), nn.Softplus(), nn.Linear(3, 1)),
    "positions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 5), nn.SiLU(), nn.LayerNorm(5), nn.Linear(5, 2, bias=False), nn.Tanh()
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 2), nn.Tanh()
    ),
    "attention": lambda: nn.Sequential(
        Bare(attending, up=nn.Linear(1, 4), attend=nn.MultiheadAttention(4, 2, batch_first=True)), nn.Tanh()
    ),
    "recurrent": lambda: nn.Sequential(Bare(recurrent, cell=nn.GRUCell(1, 3)), nn.Linear(3, 2), nn.Tanh()),
    "tied": lambda: Bare(tied, layer=nn.Linear(D, D)),
    "one apart": lambda: Bare(lambda m, x: torch.cat([m.layer(x[:1]), m.layer(x[1:])]).tanh(), layer=nn.Linear(D, D)),
    "each": lambda: Bare(lambda m, x: torch.stack([m.layer(own) for own in x]).tanh(), layer=nn.Linear(D, D)),
}


def _made(kind: Kind, body: str) -> nn.Module:
    model = Bare(lambda m, x: kind(m, x.detach().requires_grad_()), body=BODIES[body](), scale=torch.ones(D))
    return model.double()


@pytest.fixture(autouse=True)
def twice_differentiable_attention() -> object:
    with sdpa_kernel(SDPBackend.MATH):
        yield


QUICK = [(kind, "mlp") for kind in KINDS] + [(forces, body) for body in BODIES if body != "mlp"]
OTHERS = [(kind, body) for kind in KINDS for body in BODIES if (kind, body) not in QUICK]


@pytest.mark.parametrize(("kind", "body"), [*QUICK, *[pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]])
def test_rows_are_those_of_each_sample(kind: Kind, body: str) -> None:
    model = _made(kind, body)
    xs = [torch.randn(n, D, dtype=torch.float64) for n in (3, 3, D, 1, 6)]
    check_batches(model, *xs)


@pytest.mark.parametrize("kind", KINDS)
def test_without_param_grad(kind: Kind) -> None:
    check_batches(_made(kind, "attention"), *[torch.randn(n, D, dtype=torch.float64) for n in (3, 3, 4)], param_grad=False)


def test_samples_that_mix_in_the_derivative() -> None:
    """Of the batch's mean energy, from some step on: the same for each sample."""

    def mean(m: Any, x: Tensor) -> Tensor:
        own = energy(m, x)
        return own * own.mean() if m.mixes else own

    model, x = _made(lambda m, x: hamiltonian(m, x, mean), "mlp"), torch.randn(3, D, dtype=torch.float64)
    with autograd_hacks.add_hooks(model):
        model.mixes = False
        check(model, x)
        model.mixes = True
        autograd_hacks.backward(squares(model(x)))
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)
