"""`verify`: what it finds wrong, and what it must not."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Noisy
from oracle import squares
from steps import batch, step
from torch import Tensor

import autograd_hacks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.forms import Form
from autograd_hacks.reading import gate
from autograd_hacks.rules import RULES, Call


def test_verify_after_clipping(model: nn.Sequential) -> None:
    """Which has put something else into ``.grad``."""
    x, y = batch()
    step(model, x, y)
    autograd_hacks.clip_grad1_norm_(model, 1e-3)
    autograd_hacks.verify(model)


def swapped(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x[[1, 0, *range(2, len(x))]], g[[1, 0, *range(2, len(g))]]


def permuted_fold(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Positions as T·N where they are N·T, in input and gradient alike: the sum of the rows stays right."""
    return tuple(t.flatten(0, 1).unflatten(0, t.shape[1::-1]).transpose(0, 1).reshape(t.shape) for t in (x, g))


def mixed_pair(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.cat([g[:2].mean(0, keepdim=True).expand_as(g[:2]), g[2:]]) if x.ndim == 2 else swapped(x, g)[1]


@pytest.mark.parametrize("mistake", [swapped, permuted_fold, mixed_pair])
def test_verify_fails_what_is_wrong(
    mistake: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(4, 5, 3).double()
    rule = RULES[nn.Linear]

    def wrong(layer: nn.Module, call: Call) -> dict[str, Form]:
        inner, g = mistake(call.args[0], call.grads[0])
        return rule.formula(layer, dataclasses.replace(call, args=(inner,), grads=(g,)))

    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        autograd_hacks.compute_grad1(model)
        rows = [p.grad1.clone() for p in model.parameters()]
        autograd_hacks.verify(model, samples=4)
        monkeypatch.setitem(RULES, nn.Linear, dataclasses.replace(rule, formula=wrong))
        monkeypatch.setattr(gate, "check_sum", lambda *_: None)  # which comes first
        monkeypatch.setattr(recorder_of(model), "prove", None)
        with pytest.raises(autograd_hacks.errors.VerificationFailed, match=r"0\.weight +weighted sum of rows"):
            autograd_hacks.verify(model)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))  # as they were
        assert all(torch.equal(p.grad1, own) for p, own in zip(model.parameters(), rows))


def test_verify_of_dropout_and_of_what_was_never_run() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), Noisy(4)).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        with pytest.raises(autograd_hacks.errors.NothingRecorded, match="needs the arguments"):
            autograd_hacks.verify(model)
        squares(model(x)).mean().backward()
        autograd_hacks.verify(model, samples=4)


def test_verify_knows_how_coarse_autocast_is() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    with autograd_hacks.add_hooks(model):
        for _ in range(5):
            model.zero_grad()
            x = torch.randn(5, 8)
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x)
            out.float().square().mean().backward()
            with torch.autocast("cpu", torch.bfloat16):
                autograd_hacks.verify(model)


class Dropped(nn.Module):
    """Layers that are skipped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                continue
            x = x + layer(x).relu()
        return self.out(x)


def test_verify_runs_the_step_that_was() -> None:
    torch.manual_seed(1)
    model = Dropped().double()
    with autograd_hacks.add_hooks(model):
        for _ in range(8):
            model.zero_grad()
            x = torch.randn(16, 5, 8).double()
            model(x).square().sum().backward()
            state = torch.get_rng_state()
            autograd_hacks.verify(model)
            assert torch.equal(torch.get_rng_state(), state)


def test_verify_keeps_no_batch_and_takes_another(model: nn.Sequential) -> None:
    step(model, *batch())
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match=r"nobody has kept.*verify\(model, args=\(x,\)\)"):
        autograd_hacks.verify(model)
    x, _ = batch(seed=1)
    autograd_hacks.verify(model, samples=2, args=(x,))
    autograd_hacks.verify(model, samples=2, kwargs={"input": x})
