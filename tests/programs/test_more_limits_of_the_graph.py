"""Programs whose graph is out of the ordinary: other precisions, kinds of nodes, functions of the user's own, and what the
user's own backward pass needs of them afterwards."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import Multiply
from oracle import squares
from rarely import crossed, rarely
from steps import check_batches
from torch import Tensor
from twin import Bare, check_refused, check_right

import autograd_hacks

Function: Any = torch.autograd.Function


@pytest.fixture(autouse=True)
def _double(request: pytest.FixtureRequest) -> None:
    if "dtype" not in request.fixturenames:
        request.getfixturevalue("double")


# Few digits, small numbers


def shrinking(m: Bare, x: Tensor) -> Tensor:
    return (((x @ m.a).tanh() * m.scale).cumsum(1) @ (m.w + m.b @ m.c)) * m.factor


def of_shrinking(factor: float = 1.0) -> Bare:
    shapes = {"a": (3, 4), "scale": (4,), "w": (4, 2), "b": (4, 1), "c": (1, 2)}
    return Bare(shrinking, **{name: torch.randn(shape) for name, shape in shapes.items()}, factor=factor)


@crossed(dtype=[torch.float16, torch.bfloat16, torch.float32], factor=[1.0, 0.1, 0.01, 0.001])
def test_outputs_that_shrink(dtype: torch.dtype, factor: float) -> None:
    model = of_shrinking(factor).to(dtype)
    batches = [(torch.randn(5, 3).to(dtype),) for _ in range(2)]
    check_right(model, *batches, run=lambda m, x: squares(m(x).float()), inside=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_and_a_scaled_loss(dtype: torch.dtype) -> None:
    model, batches = of_shrinking(), [(torch.randn(5, 3),) for _ in range(2)]
    context = lambda: torch.autocast("cpu", dtype)  # noqa: E731
    check_right(model, *batches, run=lambda m, x: squares(m(x).float()) * 1024, context=context, inside=dtype)


@pytest.mark.parametrize(("dtype", "gain"), [(torch.float32, 0.3), (torch.float32, 1.0)])
def test_eighty_layers(dtype: torch.dtype, gain: float) -> None:
    """At the first of them gradients are of the size of denormals."""

    model = nn.Sequential(
        *[
            Bare(lambda m, x: (x @ m.w).tanh() * m.scale, w=gain * torch.randn(3, 3) / 3**0.5, scale=torch.ones(3))
            for _ in range(80)
        ]
    )
    check_right(model, *[(torch.randn(4, 3),) for _ in range(2)])


# Backward passes that aren't linear in the gradient


class Normed(Function):
    """Hands on a gradient that is as long as one, for all samples together or for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, each: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.each = each
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        g = g / (g.norm(dim=1, keepdim=True) if ctx.each else g.norm()).clamp(min=1e-30)
        return g * w, (g * x).sum(0), None


@pytest.mark.parametrize("each", [True, False])
def test_a_function_that_normalises_gradients(each: bool) -> None:
    """Its rows don't add up to the gradient, and each loss alone has others still."""
    model = Bare(
        lambda m, x: Normed.apply(x @ m.a, m.scale, each) @ m.w,
        a=torch.randn(3, 4), scale=torch.randn(4), w=torch.randn(4, 2)
    )  # fmt: skip
    check_refused(model, *[(torch.randn(5, 3),) for _ in range(2)])


class Turned(Function):
    """Its second output has the samples in the opposite order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x * w, (x * w).flip(0)

    @staticmethod
    def backward(ctx: Any, g: Tensor, turned: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]  # of one gradient
        return None, ((g + turned.flip(0)) * ctx.saved_tensors[0]).sum(0)


@pytest.mark.parametrize("beside", [0.0, 0.1])
def test_a_function_with_two_outputs_that_have_the_samples_in_two_orders(beside: float) -> None:
    how = lambda m, x: (lambda y, turned: y.tanh() + turned.flip(0).tanh())(*Turned.apply(x, m.w + beside))  # noqa: E731
    check_refused(Bare(how, w=torch.randn(4)), *[(torch.randn(n, 4),) for n in (4, 4, 3)])


# Parameters that open later, shared ones, loops


def test_an_adapter_that_opens() -> None:
    def how(m: Bare, x: Tensor) -> Tensor:
        return (x @ (m.w + m.down @ m.up) + x @ m.first @ m.second).tanh() @ m.head

    model = Bare(
        how, w=torch.randn(3, 4), down=torch.randn(3, 1), up=torch.zeros(1, 4), first=torch.randn(3, 1),
        second=torch.zeros(1, 4), head=torch.zeros(4, 2),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with autograd_hacks.add_hooks(model):
        for _ in range(4):
            check_right(model, (torch.randn(5, 3),))
            optimizer.step()


@pytest.mark.parametrize("how", ["layer", "function", "dense too"])
def test_sparse_gradients_of_a_table(how: str) -> None:
    def run(m: Bare, ids: Tensor) -> Tensor:
        if how == "layer":
            return m.layer(ids).sum(1) * m.scale
        h = F.embedding(ids, m.table, sparse=True).sum(1) * m.scale
        return h if how == "function" else h @ m.table.mT

    own = {"layer": nn.Embedding(6, 4, sparse=True)} if how == "layer" else {"table": torch.randn(6, 4)}
    check_right(Bare(run, **own, scale=torch.randn(4)), *[(torch.randint(6, (4, 3)),) for _ in range(2)])


# The user's own backward pass


class Deleting(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.x, ctx.w = x, w
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        found = g * ctx.w, (g * ctx.x).sum(0)
        del ctx.x, ctx.w
        return found


class Counting(Multiply):
    """Its backward runs once, as it says; what it counts is nowhere in its context."""

    runs: ClassVar[dict[int, int]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.number = len(Counting.runs)
        Counting.runs[ctx.number] = 0
        return Multiply.forward(ctx, x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        Counting.runs[ctx.number] += 1
        if Counting.runs[ctx.number] > 1:
            raise RuntimeError("a second time")
        return Multiply.backward(ctx, g)


class Checking(Multiply):
    """Takes no gradients but those that its loss makes."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        if bool((g.sum(1).abs() > 1e-9).any()):
            raise ValueError("gradients that don't sum to nothing")
        return Multiply.backward(ctx, g)


@crossed(reads=["its own", "behind it", "above it"], function=[Deleting, Counting, Checking])
def test_functions_that_run_as_the_user_runs_them(function: Any, reads: str) -> None:
    """The forward and the backward pass come to their end.  Rows that can't be had are refused."""

    def how(m: Bare, x: Tensor) -> Tensor:
        h = x @ m.a if reads == "behind it" else x
        h = function.apply(h, m.scale if reads == "its own" else torch.full_like(h[0], 2).requires_grad_())
        return h - h.mean(1, keepdim=True) if function is Checking else h @ m.w if reads == "above it" else h

    own = {"its own": {"scale": torch.randn(3)}, "behind it": {"a": torch.randn(3, 3)}, "above it": {"w": torch.randn(3, 3)}}
    if function is Checking and reads == "above it":
        pytest.skip("nothing is above it")
    check_refused(Bare(how, **own[reads]), *[(torch.randn(4, 3),) for _ in range(2)], may_be_right=True)


class Recomputed(Function):
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
    check_refused(model, *[(torch.randn(5, 3),) for _ in range(4)], may_be_right=True)


def test_a_batch_without_gradients() -> None:
    """As many positions as samples, positions first."""
    model, factors = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (1.0, 0.0, 1.0, 1.0)
    batches = [(torch.randn(5, 5, 8), factor) for factor in factors]
    check_right(model, *batches, run=lambda m, x, factor: squares(m(x).transpose(0, 1)) * factor)


# Graphs deeper than Python's stack


CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn": nn.RNNCell}


def unrolled(kind: str, chosen: bool = False) -> nn.Module:
    """A cell, or a Linear, in a loop.  N T 2 -> N 2    chosen: takes the samples in an order that values decide"""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        x = x[order] if chosen else x
        h = c = torch.zeros_like(x[:, 0])
        for xt in x.unbind(1):
            if kind == "lstm":
                h, c = m.cell(xt, (h, c))
            else:
                h = m.cell(xt, h) if kind in CELLS else torch.tanh(m.cell(h) + xt)
        return m.out(h)[order.argsort()] if chosen else m.out(h)

    return Bare(run, cell=CELLS.get(kind, nn.Linear)(2, 2), out=nn.Linear(2, 2))


def residual(depth: int) -> nn.Module:
    """A Linear and a bare scale in each block.  N T 2 -> N 2, of the first position"""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = x[:, 0]
        for layer, scale in zip(m.layers, m.scales):
            x = x + scale * torch.tanh(layer(x))
        return x

    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(depth)])
    return Bare(run, layers=layers, scales=nn.ParameterList([torch.full((2,), 0.1) for _ in range(depth)]))


@pytest.mark.parametrize(
    ("kind", "chosen", "steps"),
    [
        *(("gru", False, 130), ("linear", False, 420)),
        *rarely(("linear", True, 420), *((kind, False, 2000) for kind in (*CELLS, "linear", "residual"))),
    ],
)
def test_unrolled_cells(kind: str, chosen: bool, steps: int) -> None:
    torch.manual_seed(0)
    model = residual(steps) if kind == "residual" else unrolled(kind, chosen)
    check_batches(model.double(), torch.randn(3, steps, 2, dtype=torch.float64))
