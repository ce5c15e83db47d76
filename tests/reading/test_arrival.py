"""Sums of rows are compared as gradients arrive, and none is kept for that; what is wrong is told when rows are read."""

import dataclasses
from typing import Any

import pytest
import torch
import torch.nn as nn
from mixing import check_refused
from oracle import squares
from steps import at_most, batch, check, check_batches, mlp
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare

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


class Penalty(torch.autograd.Function):
    """Brings a parameter gradient that belongs to no sample."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.ones(4, 4, dtype=grad.dtype)


@pytest.mark.parametrize("penalised", [None, 0, 1, 2])
def test_gradient_that_arrives_more_than_once_in_a_pass_is_compared(penalised: int | None) -> None:
    first, shared, last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def part(h: Tensor, number: int) -> Tensor:
        h = shared(h).tanh()
        return Penalty.apply(h, shared.weight) if number == penalised else h

    def run(m: nn.Module, x: Tensor) -> Tensor:
        h = first(x)
        for number in range(3):
            h = checkpoint(part, h, number, use_reentrant=False)
        return last(h)

    model, x = Bare(run, first=first, shared=shared, last=last).double(), batch()[0]
    if penalised is not None:
        says = r"shared\.weight: the rows don't add up"
        check_refused(model, (x,), error=UnseenGradient, match=says, probe=False)
        return
    check_batches(model, x, probe=False)


@pytest.mark.parametrize("param_grad", [True, False])
def test_what_a_rule_raises_is_raised_at_reading(param_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layer: nn.Module, call: Call) -> dict[str, Form]:
        raise ZeroDivisionError("no such form")

    monkeypatch.setitem(RULES, nn.Linear, dataclasses.replace(RULES[nn.Linear], formula=fails))
    model, (x, _) = mlp(), batch()
    check_refused(model, (x,), error=ZeroDivisionError, match="no such form", param_grad=param_grad)
