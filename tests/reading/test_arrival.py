"""Sums of rows are compared as gradients arrive, and none is kept for that; what is wrong is told when rows are read."""

import dataclasses

import pytest
import torch
import torch.nn as nn
from mixing import check_refused
from oracle import squares
from steps import at_most, batch, check, mlp

import autograd_hacks
from autograd_hacks.errors import UnseenGradient
from autograd_hacks.forms import Form
from autograd_hacks.formulas import RULES, Call


@pytest.mark.parametrize("param_grad", [True, False])
def test_first_steps_hold_no_second_set_of_gradients(param_grad: bool) -> None:
    """Gradients that arrived are compared one parameter at a time, and later ones are what ``.grad`` gets, not copies."""
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())))
    x, size = torch.randn(4, 256), sum(4 * p.numel() for p in model.parameters())
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in range(4):
            with at_most(int(1.5 * size), f"step {n + 1}"):
                squares(model(x)).mean().backward()
                autograd_hacks.per_sample_grads(model).norms()
                model.zero_grad()


@pytest.mark.parametrize("penalised", [0, 1, 2])
@pytest.mark.parametrize("accumulated", [True, False])
def test_a_penalty_in_one_of_several_passes_is_told_at_reading(penalised: int, accumulated: bool) -> None:
    model, (x, _) = mlp(), batch()
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.accumulate(model):
            losses = squares(model(x))
            for n in range(3):
                losses = squares(model(x)) if accumulated else losses
                penalty = model[2].weight.square().sum() if n == penalised else 0.0
                (losses.mean() + penalty).backward(retain_graph=True)
        with pytest.raises(UnseenGradient, match=r"2\.weight: the rows don't add up"):
            autograd_hacks.compute_grad1(model)
        check(model, x)


@pytest.mark.parametrize("param_grad", [True, False])
def test_what_a_rule_raises_is_raised_at_reading(param_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layer: nn.Module, call: Call) -> dict[str, Form]:
        raise ZeroDivisionError("no such form")

    monkeypatch.setitem(RULES, nn.Linear, dataclasses.replace(RULES[nn.Linear], formula=fails))
    model, (x, _) = mlp(), batch()
    check_refused(model, (x,), error=ZeroDivisionError, match="no such form", param_grad=param_grad)
