"""Losses that a model makes itself, and gates that are zero at first."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mixing import MIXING, SIZES, AsLoss, How, check_derivatives, check_refused, check_right, data, steps_of, zeroed
from nets import Between
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

# Losses made inside the model


def contrast(z: Tensor) -> Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T - 1e9 * torch.eye(len(z), dtype=z.dtype), torch.arange(len(z)).roll(1))


def balance(z: Tensor) -> Tensor:
    """Experts' load, as Switch has it."""
    p = z.softmax(1)
    return (F.one_hot(p.argmax(1), p.shape[1]).to(p).mean(0) * p.mean(0)).sum()


LOSSES: dict[str, How] = {
    "SimCLR": contrast,
    "CLIP": lambda z: F.cross_entropy(z @ z.sin().T, torch.arange(len(z))),
    "VICReg": lambda z: z.var(0).sqrt().mean() + z.square().mean(),
    "the mean's square": lambda z: z.mean(0).square().sum(),
    "a set's distance": lambda z: torch.cdist(z, z).square().mean(),
    "normed": lambda z: (z / z.norm()).sum(),
}
WITHOUT_GRADIENT: dict[str, How] = {
    "load balancing": balance,
    "the largest alone": lambda z: z.square().sum(1).max(),
    "centred": lambda z: (z - z.mean(0).detach()).square().sum(),
}


@pytest.mark.parametrize("what", [*LOSSES, *WITHOUT_GRADIENT])
def test_losses_made_inside_that_mix(what: str) -> None:
    for samples in SIZES:
        model = AsLoss({**LOSSES, **WITHOUT_GRADIENT}[what]).double()
        nn.init.zeros_(model.first.bias)  # or all samples may choose one expert
        nn.init.zeros_(model.last.bias)
        check_refused(model, *[(data(samples),)] * 2, independent=what in WITHOUT_GRADIENT)


def test_a_loss_made_inside_as_a_mean() -> None:
    """Over the samples, or over valid tokens, whose number belongs to the whole batch."""
    for samples in SIZES:
        check_right(AsLoss(lambda z: z.square().sum(1).mean()).double(), *[(data(samples),)] * 2)

    def over_valid(z: Tensor, mask: Tensor) -> Tensor:
        return (z.square().sum(-1) * mask).sum() / mask.sum()

    for samples in SIZES:
        model, x = AsLoss(over_valid).double(), data(samples, 5, 3)
        for _ in range(2):
            mask = (torch.rand(samples, 5) < 0.7).double()
            mask[:, 0] = 1
            with autograd_hacks.add_hooks(model):
                model.zero_grad()
                model(x, mask).backward()
                autograd_hacks.compute_grad1(model)
                with autograd_hacks.pause_hooks():
                    share = samples / mask.sum()
                    own = [(squares_of(model, x[n : n + 1]) * mask[n]).sum() * share for n in range(samples)]
                    rows = [torch.autograd.grad(loss, model.first.weight)[0] for loss in own]
                torch.testing.assert_close(model.first.weight.grad1, torch.stack(rows))


def squares_of(model: Between, x: Tensor) -> Tensor:
    return model.last(model.first(x).tanh()).square().sum(-1)[0]


# Gates that are zero at first


class Gated(Between):
    def __init__(self, how: How, gate: nn.Parameter | nn.Module) -> None:
        super().__init__(how)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        inner = self.how(h)
        return self.last(h + (self.gate(inner) if isinstance(self.gate, nn.Module) else self.gate * inner))


class Modulated(Between):
    """adaLN-zero: gate, scale and shift come from the input, by a layer that is zero."""

    def __init__(self, how: How) -> None:
        super().__init__(how)
        self.ada = zeroed(nn.Linear(3, 9))

    def forward(self, x: Tensor) -> Tensor:
        h, (shift, slope, gate) = self.first(x).tanh(), self.ada(x).chunk(3, 1)
        return self.last(h + gate * (self.how(h) * (1 + slope) + shift))


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2, bias=False), zeroed(nn.Linear(2, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


GATES: dict[str, Callable[[How], nn.Module]] = {
    "one number": lambda how: Gated(how, nn.Parameter(torch.zeros(()))),
    "by channel": lambda how: Gated(how, nn.Parameter(torch.zeros(3))),
    "a layer": lambda how: Gated(how, zeroed(nn.Linear(3, 3))),
    "LoRA": lambda how: Gated(how, LoRA()),
    "a norm": lambda how: Gated(how, zeroed(nn.LayerNorm(3))),
    "adaLN": Modulated,
}


@pytest.mark.parametrize("gate", GATES)
def test_gates_of_zero_hide_no_mixing(gate: str) -> None:
    """Behind a gate of zero rows are derivatives, or refused already; as it opens, what mixes is refused."""
    for samples in SIZES:
        for what in ("swapped halves", "attention"):
            model = GATES[gate](MIXING[what]).double()
            with contextlib.suppress(SamplesMixed):
                check_derivatives(model, (data(samples),))
            for n, _ in enumerate(steps_of(model, [(data(samples),)] * 4)):
                if n:
                    with pytest.raises(SamplesMixed):
                        autograd_hacks.compute_grad1(model)
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
        check_right(GATES[gate](torch.sin).double(), *[(data(samples),)] * 2)


class Balanced(torch.autograd.Function):
    """Hands its input on, and has a loss's gradient come along, as mixtures of experts do it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return g, torch.ones((), dtype=g.dtype)


@pytest.mark.parametrize("samples", [3, 8, 32])
def test_a_loss_that_comes_along_in_the_backward_pass(samples: int) -> None:
    class Experts(nn.Module):
        def __init__(self, mixes: bool) -> None:
            super().__init__()
            self.gate, self.out, self.mixes = nn.Linear(3, 4), nn.Linear(4, 2), mixes

        def forward(self, x: Tensor) -> Tensor:
            p = self.gate(x).softmax(1)
            loss = (p.mean(0) ** 2).sum() if self.mixes else (p**2).sum()
            return self.out(Balanced.apply(p, loss))

    for mixes in (True, False):  # it comes once a pass, whatever the losses are: it belongs to no sample's
        model, x = Experts(mixes).double(), torch.randn(samples, 3).double()
        with autograd_hacks.add_hooks(model):
            for _ in range(3):
                model.zero_grad()
                autograd_hacks.backward(model(x).square().sum(1), "sum")
                with pytest.raises(SamplesMixed):
                    autograd_hacks.compute_grad1(model)
