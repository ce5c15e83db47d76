"""Models whose forward takes a derivative itself: Hamiltonian networks, forces, continuous flows, Laplacians."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from oracle import one_backward_per_sample, squares
from steps import check, check_batches
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

D = 4


def _slope(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


class OfDerivatives(nn.Module):
    """A model that returns something of an energy's derivatives.  body: N D -> N, in a Sequential"""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.scale = body, nn.Parameter(torch.ones(D))
        self.flag = True

    def energy(self, x: Tensor) -> Tensor:
        return self.body(x).flatten(1).sum(1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.of(x.detach().requires_grad_())

    def of(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        raise NotImplementedError


class Hamiltonian(OfDerivatives):
    def of(self, x: Tensor) -> Tensor:
        dq, dp = _slope(self.energy(x), x).chunk(2, 1)
        return torch.cat([dp, -dq], 1)


class Forces(OfDerivatives):
    """Energy and forces."""

    def of(self, x: Tensor) -> tuple[Tensor, Tensor]:
        energy = self.energy(x)
        return energy, -_slope(energy, x)


class Bare(OfDerivatives):
    """With a parameter of its own, inside the derivative and outside."""

    def of(self, x: Tensor) -> Tensor:
        return _slope(self.energy(x * self.scale), x) * self.scale.exp()


class Laplacian(OfDerivatives):
    def of(self, x: Tensor) -> Tensor:
        first = _slope(self.energy(x).sin(), x)
        return sum((_slope(first[:, n], x)[:, n] for n in range(D)), torch.zeros_like(x[:, 0])) + first.square().sum(1)


class Flow(OfDerivatives):
    """Four steps along a field, with the divergence by Hutchinson's estimate."""

    def of(self, x: Tensor) -> Tensor:
        v, at, divergence = torch.linspace(-1, 1, D, dtype=x.dtype), x, torch.zeros_like(x[:, 0])
        for _ in range(3):
            field = self.scale * torch.tanh(_slope(self.energy(at).sin(), at))
            divergence = divergence + _slope(field @ v, at) @ v
            at = at + field / 4
        return torch.cat([at, divergence[:, None]], 1)


KINDS = (Hamiltonian, Forces, Bare, Laplacian, Flow)


class Attending(nn.Module):
    """Self-attention between the numbers of a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.attend = nn.Linear(1, 4), nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x[..., None])
        return self.attend(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(1, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 3)
        for n in range(D):
            h = self.cell(x[:, n : n + 1], h)
        return h


class Tied(nn.Module):
    """A layer called twice, and its weight used without it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(x)))) @ self.layer.weight


BODIES: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 3), nn.Softplus(), nn.Linear(3, 1)),
    "positions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Linear(2, 5), nn.SiLU(), nn.LayerNorm(5), nn.Linear(5, 2, bias=False), nn.Tanh()
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, D)), nn.Conv1d(1, 4, 3, padding=1), nn.Tanh(), nn.GroupNorm(2, 4), nn.Conv1d(4, 2, 2), nn.Tanh()
    ),
    "attention": lambda: nn.Sequential(Attending(), nn.Tanh()),
    "recurrent": lambda: nn.Sequential(Recurrent(), nn.Linear(3, 2), nn.Tanh()),
    "tied": Tied,
}


def _made(kind: type[OfDerivatives], body: str) -> OfDerivatives:
    torch.manual_seed(0)
    return kind(BODIES[body]()).double()


@pytest.fixture(autouse=True)
def twice_differentiable_attention() -> object:
    with sdpa_kernel(SDPBackend.MATH):
        yield


QUICK = [(kind, "mlp") for kind in KINDS] + [(Forces, body) for body in BODIES if body != "mlp"]
OTHERS = [(kind, body) for kind in KINDS for body in BODIES if (kind, body) not in QUICK]


@pytest.mark.parametrize(
    ("kind", "body"), [*QUICK, *[pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS]], ids=str
)
def test_rows_are_those_of_each_sample(kind: type[OfDerivatives], body: str) -> None:
    model = _made(kind, body)
    xs = [torch.randn(n, D, dtype=torch.float64) for n in (3, 3, 4, 1, 6, 2, D, 3)]
    check_batches(model, *xs)


@pytest.mark.parametrize("kind", KINDS)
def test_without_param_grad(kind: type[OfDerivatives]) -> None:
    check_batches(_made(kind, "attention"), *[torch.randn(n, D, dtype=torch.float64) for n in (3, 3, 4)], param_grad=False)


def test_samples_are_shown_to_be_independent() -> None:
    model, x = _made(Hamiltonian, "mlp"), torch.randn(3, D, dtype=torch.float64)
    check_batches(model, x, x, independent=True)


@pytest.mark.parametrize("part", ["", "body", "body.2"])
def test_hooks_on_a_part(part: str) -> None:
    model, x = _made(Bare, "mlp"), torch.randn(3, D, dtype=torch.float64)
    expected = one_backward_per_sample(model, squares, x)
    autograd_hacks.add_hooks(model.get_submodule(part))
    for _ in range(3):
        autograd_hacks.backward(squares(model(x)))
        grads = autograd_hacks.per_sample_grads(model.get_submodule(part))
        for name, rows in grads.dense().items():
            own = expected[f"{part}.{name}".lstrip(".")]
            torch.testing.assert_close(rows, torch.zeros_like(rows) if own is None else own)


@pytest.mark.parametrize("kind", KINDS)
def test_verbs(kind: type[OfDerivatives]) -> None:
    model, x = _made(kind, "mlp"), torch.randn(4, D, dtype=torch.float64)
    rows = one_backward_per_sample(model, squares, x)
    joined = torch.cat([own.flatten(1) for own in rows.values() if own is not None], 1)
    norms = joined.norm(dim=1)
    autograd_hacks.add_hooks(model)
    for _ in range(2):
        autograd_hacks.backward(squares(model(x)))
        grads = autograd_hacks.per_sample_grads(model)
        torch.testing.assert_close(grads.norms(), norms)
        torch.testing.assert_close(grads.gram_of_all(), joined @ joined.T)
        autograd_hacks.clip_grad1_norm_(model, 1.0, loss_type="mean")
        clipped = torch.cat([p.grad.flatten() for n, p in model.named_parameters() if rows[n] is not None])
        torch.testing.assert_close(clipped, (joined / norms[:, None].clamp(min=1.0)).mean(0))
        model.zero_grad()
        with autograd_hacks.during_backward(model, "norms") as seen:
            autograd_hacks.backward(squares(model(x)))
        torch.testing.assert_close(seen.norms, norms)


class Begins(Hamiltonian):
    """Takes the derivative of the batch's mean energy from some step on: the same for each sample, so samples mix."""

    def energy(self, x: Tensor) -> Tensor:
        own = super().energy(x)
        return own if self.flag else own * own.mean()


def test_samples_that_mix_in_the_derivative() -> None:
    model, x = _made(Begins, "mlp"), torch.randn(3, D, dtype=torch.float64)
    with autograd_hacks.add_hooks(model):
        check(model, x)
        model.flag = False
        autograd_hacks.backward(squares(model(x)))
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)
