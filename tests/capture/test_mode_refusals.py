"""What add_hooks(mode=) refuses, and its way there and back."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from derivatives import gradient_penalty, rows_of, step
from oracle import assert_same
from steps import batch, check, mlp
from test_derivatives import MODES, found, made
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import HigherOrderError, SamplesMixed

BOTH = pytest.mark.parametrize("mode", MODES)


def _read(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    losses().sum().backward()
    autograd_hacks.compute_grad1(model, "sum")


def test_the_default_mode_names_the_others() -> None:
    model, x = made("mlp")
    for param_grad in (True, False):
        with (
            autograd_hacks.add_hooks(model, param_grad=param_grad),
            pytest.raises(HigherOrderError, match='mode="derivatives"'),
        ):
            _read(model, lambda: gradient_penalty(model, x.clone().requires_grad_()))


def test_there_and_back_again() -> None:
    model, x = made("norms")
    before = model(x)
    autograd_hacks.add_hooks(model)
    for mode in ("hooks", "expand", "derivatives", "hooks"):
        autograd_hacks.add_hooks(model, mode=mode)
        assert mode in repr(autograd_hacks.add_hooks(model, mode=mode))
        check(model, x)
        if mode != "hooks":
            step(model, gradient_penalty, x)
            autograd_hacks.compute_grad1(model, "sum")
    assert torch.equal(model(x), before)
    autograd_hacks.remove_hooks(model)
    assert torch.equal(model(x), before)


def test_what_add_hooks_refuses() -> None:
    with pytest.raises(ValueError, match="'hooks', 'derivatives', 'expand'"):
        autograd_hacks.add_hooks(mlp(), mode="higher")
    with pytest.raises(ValueError, match="probe"):
        autograd_hacks.add_hooks(mlp(), mode="expand", probe=False)


def test_without_a_probe() -> None:
    model, x = made("mlp")
    with autograd_hacks.add_hooks(model, mode="derivatives", probe=False):
        step(model, gradient_penalty, x)
        autograd_hacks.compute_grad1(model, "sum")
        with autograd_hacks.pause_hooks():
            assert_same(found(model), rows_of(model, gradient_penalty, x))


@BOTH
def test_samples_that_mix_are_refused(mode: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    with autograd_hacks.add_hooks(model, mode=mode), pytest.raises(SamplesMixed):
        _read(model, lambda: gradient_penalty(model, batch()[0].requires_grad_()))


def test_a_context_gives_hooks_their_settings_back() -> None:
    model, x = made("mlp")
    autograd_hacks.add_hooks(model)
    with autograd_hacks.add_hooks(model, mode="expand", param_grad=False, batch_dim=(0,)):
        step(model, gradient_penalty, x)
        autograd_hacks.compute_grad1(model, "sum")
    assert "batch_dim=0, mode='hooks', param_grad=True" in repr(autograd_hacks.add_hooks(model))
    with autograd_hacks.add_hooks(model, mode="derivatives"):
        pass
    with pytest.raises(HigherOrderError):
        _read(model, lambda: gradient_penalty(model, x.clone().requires_grad_()))
