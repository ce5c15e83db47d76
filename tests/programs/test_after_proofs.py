"""What a proof leaves behind: nothing of a bad batch, nothing in ``.grad``, and plans of the batch that it has seen."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_loss_at_a_time, squares
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError


def rows_of(model: nn.Module, x: Tensor, axis: int = 0) -> Any:
    return one_loss_at_a_time(model, lambda: squares(model(x).transpose(0, axis)))


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_a_batch_without_gradients(factor: float) -> None:
    """As many positions as samples, positions first: an earlier batch has told which axis is which."""
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    with autograd_hacks.add_hooks(model):
        for step in range(4):
            x = torch.randn(5, 5, 8)
            model.zero_grad()
            losses = squares(model(x).transpose(0, 1))
            (losses * (factor if step == 1 else 1.0)).mean().backward()
            if step != 1:
                autograd_hacks.compute_grad1(model)
                with autograd_hacks.pause_hooks():
                    assert_rows(model, rows_of(model, x, 1))
            elif factor != factor:
                model(x * factor)  # and a batch of no numbers


class Recomputed(torch.autograd.Function):
    """A checkpoint by hand, which runs a backward pass of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.given = layer, parameters
        with torch.no_grad():
            y: Tensor = layer(x)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        if not ctx.given:
            torch.autograd.backward(y, grad)
            return x.grad, None
        found = torch.autograd.grad(y, [x, *ctx.given], grad)
        return found[0], None, *found[1:]


@pytest.mark.parametrize("gives", [True, False])
def test_a_function_that_runs_a_layer_in_its_backward(gives: bool) -> None:
    def recomputed(m: Any, x: Tensor) -> Tensor:
        given = list(m.inner.parameters()) if gives else []
        y: Tensor = m.last(Recomputed.apply(m.first(x), m.inner, *given).tanh())
        return y

    model = Bare(recomputed, first=nn.Linear(3, 4), inner=nn.Linear(4, 4), last=nn.Linear(4, 2))
    with autograd_hacks.add_hooks(model):
        for _ in range(4):
            x = torch.randn(5, 3)
            model.zero_grad()
            squares(model(x)).mean().backward()
            grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            with autograd_hacks.pause_hooks():
                model.zero_grad()
                squares(model(x)).mean().backward()
                torch.testing.assert_close(grads, {name: p.grad for name, p in model.named_parameters()})
            try:
                autograd_hacks.compute_grad1(model)
            except PerSampleGradientError:
                continue  # refused, in each step
            for p in model.parameters():
                assert p.grad is not None
                torch.testing.assert_close(p.grad1.mean(0), p.grad)  # type: ignore[attr-defined]
