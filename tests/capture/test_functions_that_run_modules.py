"""Functions that are given parameters, run modules and passes in their backward, and return the parameters' gradients:
solvers with an adjoint, reversible blocks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from steps import check, check_batches, check_losses
from torch import Tensor
from twin import Bare

import autograd_hacks

STEPS = 3


class Solve(torch.autograd.Function):
    """Euler's steps along a field, taken back one by one."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, field: nn.Module, fails: list[bool], *parameters: Tensor) -> Tensor:
        path = [z]
        with torch.no_grad():
            for _ in range(STEPS):
                path.append(path[-1] + field(path[-1]) / STEPS)
        ctx.field, ctx.fails = field, fails
        ctx.save_for_backward(*path)
        return path[-1]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        if any(ctx.fails):
            raise ArithmeticError("underflow in dt")
        parameters = list(ctx.field.parameters())
        total = [torch.zeros_like(p) for p in parameters]
        for z in reversed(ctx.saved_tensors[:-1]):
            with torch.enable_grad():
                at = z.detach().requires_grad_()
                g, *own = torch.autograd.grad(at + ctx.field(at) / STEPS, [at, *parameters], g)
            total = [a + b for a, b in zip(total, own)]
        return g, None, None, *total


def flow() -> nn.Module:
    torch.manual_seed(0)
    return Bare(
        lambda m, x: m.last(Solve.apply(m.first(x), m.field, m.fails, *m.field.parameters())),
        field=nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)), first=nn.Linear(3, 3), last=nn.Linear(3, 2),
        fails=[False],
    ).double()  # fmt: skip


def _batch(n: int = 4) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64)


@pytest.mark.parametrize("param_grad", [True, False])
def test_rows_are_those_of_each_sample(param_grad: bool) -> None:
    check_batches(flow(), *[_batch(n) for n in (4, 4, 3, 1, 5)], param_grad=param_grad)


def test_the_field_is_called_by_itself_too() -> None:
    model = flow()
    with autograd_hacks.add_hooks(model):
        for n in (4, 3, 1):
            x = _batch(n)
            check_losses(model, lambda x=x: squares(model(x)))


def test_after_a_backward_that_failed() -> None:
    model, x = flow(), _batch()
    with autograd_hacks.add_hooks(model):
        for fails in (False, True, False):
            model.fails[0] = fails
            if fails:
                with pytest.raises(ArithmeticError):
                    autograd_hacks.backward(squares(model(x)))
            else:
                check_losses(model, lambda: squares(model(x)))


class Product(torch.autograd.Function):
    """x wᵀ, as kernels of others have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


def _in_a_buffer(w: Tensor) -> Tensor:
    """The weight, copied into memory that no graph knows, as autocast has the weights of cuDNN's recurrent layers."""
    return torch.empty_like(w, requires_grad=False).copy_(w)


@pytest.mark.parametrize("made", [_in_a_buffer, lambda w: F.dropout(w, 0.5), lambda w: w + torch.randn_like(w)])
@pytest.mark.parametrize("samples", [5, 2])
def test_what_is_made_of_weights_and_of_tensors_without_a_graph(made: Callable[[Tensor], Tensor], samples: int) -> None:
    """It meets the batch in a node that has no law.  With two samples an axis could be theirs."""

    def net(m: nn.Module, x: Tensor) -> Tensor:
        torch.manual_seed(0)  # each sample alone has the batch's numbers
        return Product.apply(m.first(x), made(m.weight))

    model = Bare(net, first=nn.Linear(3, 3), weight=torch.randn(7, 3)).double()
    check_batches(model, *(_batch(samples) for _ in range(3)))


class Gate(torch.autograd.Function):
    """x times a gate, as kernels of others have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        return g * gate, (g * x).sum(0)


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_gate_that_is_closed_in_some_steps(param_grad: bool) -> None:
    """As branches begin.  What is behind it gets zeros, and not nothing."""
    model = Bare(
        lambda m, x: m.last(Gate.apply((x * m.scale) @ m.weight, m.gate)),
        scale=torch.randn(3), weight=torch.randn(3, 5), gate=torch.zeros(5), last=nn.Linear(5, 2),
    ).double()  # fmt: skip
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for is_closed in (True, True, False, False, True, False):
            nn.init.zeros_(model.gate) if is_closed else nn.init.normal_(model.gate)
            check(model, _batch())
