"""Parameters that are read where no layer and no function of torch's is seen; nothing is run again for their rows."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import MODELS, Multiply, Product
from oracle import assert_rows, one_loss_at_a_time, squares
from rarely import crossed
from steps import assert_right, check, check_batches, check_losses
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError, UnseenGradient

How = Callable[[nn.Module, Tensor], Tensor]


def multiply(m: nn.Module, x: Tensor) -> Tensor:
    """A scale that an autograd.Function reads."""
    return Multiply.apply(x, m.scale)


def whole(how: How = multiply, **own: Any) -> nn.Module:
    """A part with a scale, between layers.  own: what it has besides"""
    part = Bare(how, scale=torch.randn(3), **own)
    return nn.Sequential(nn.Tanh(), nn.Linear(3, 3), part, nn.Linear(3, 2)).double()


def written(m: nn.Module, x: Tensor) -> Tensor:
    """A parameter that is written by index."""
    h = x.clone()
    h[..., 0] = m.first
    return multiply(m, h) * x.sum(-1, keepdim=True)


def iterating(m: nn.Module, x: Tensor) -> Tensor:
    """A buffer that each forward changes, and that the output depends on, as in spectral norm."""
    m.u.mul_(0.9)
    return multiply(m, x) * m.u * torch.rand((), generator=m.generator)


def scripted() -> nn.Module:
    inner = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    return whole(lambda m, x: m.inner(x) * m.scale, inner=inner)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "scaled": whole,
    "scripted": scripted,
    "written": lambda: whole(written, first=torch.randn(())),
    "checkpointed": lambda: whole(lambda m, x: checkpoint(multiply, m, x, use_reentrant=False)),
    "noisy": lambda: whole(lambda m, x: multiply(m, torch.dropout(x, 0.5, m.training)) + torch.rand(len(x), 1).to(x)),
    "overwriting": lambda: whole(lambda m, x: multiply(m, x.mul_(2))),
    # Which way depends on the numbers of the batch, and is the same for all of it.
    "choosy": lambda: whole(lambda m, x: torch.stack([multiply(m, row) if row[0] > 0 else row for row in x])),
    "iterating": lambda: whole(iterating, u=nn.Buffer(torch.ones(3)), generator=torch.Generator().manual_seed(2)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@crossed(kind=KINDS, param_grad=[True, False])
def test_rows(kind: str, param_grad: bool) -> None:
    model = KINDS[kind]()
    kept = [b for _, b in model.named_buffers()], [model[2].generator] if kind == "iterating" else []
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in (4, 3, 1, 5):
            x = torch.randn(n, 3).double()
            before = [b.clone() for b in kept[0]], [g.get_state() for g in kept[1]]

            def losses(x: Tensor = x, before: Any = before) -> Tensor:
                for g, state in zip(kept[1], before[1]):
                    g.set_state(state)
                for b, own in zip(kept[0], before[0]):
                    b.data = own.clone()
                return squares(model(x))

            check_losses(model, losses)
        how = [row.how for row in autograd_hacks.describe(model).rows if row.parameter.startswith("2.")]
        assert {each.startswith("graph: ") for each in how} == {True}


def counting(m: nn.Module, x: Tensor) -> Tensor:
    """A state of its own that is no buffer."""
    m.calls += 1
    return multiply(m, x) * m.calls


@pytest.mark.parametrize("how", [counting, multiply])
def test_rows_are_those_of_the_forward_whatever_has_changed_since(how: How) -> None:
    model, x = whole(how, calls=0), torch.randn(4, 3).double()

    def losses() -> Tensor:
        model[2].calls = 4
        return squares(model(x))

    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, losses)
            losses().mean().backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
            autograd_hacks.compute_grad1(model)
            assert_rows(model, expected)


# Functions that run modules and passes in their backward, and return the parameters' gradients: solvers with an adjoint


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


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_gate_that_is_closed_in_some_steps(param_grad: bool) -> None:
    """As branches begin.  What is behind it gets zeros, and not nothing."""
    model = Bare(
        lambda m, x: m.last(Multiply.apply((x * m.scale) @ m.weight, m.gate)),
        scale=torch.randn(3), weight=torch.randn(3, 5), gate=torch.zeros(5), last=nn.Linear(5, 2),
    ).double()  # fmt: skip
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for is_closed in (True, True, False, False, True, False):
            nn.init.zeros_(model.gate) if is_closed else nn.init.normal_(model.gate)
            check(model, _batch())


# Checkpointing runs layers again within a backward pass, and backward passes within one


def in_the_middle(**layers: nn.Module) -> nn.Module:
    return Bare(lambda m, x: m.last(checkpoint(m.middle, m.first(x), use_reentrant=True)), **layers).double()


def test_checkpoints_whose_backward_comes_after_another() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    autograd_hacks.add_hooks(model, param_grad=False)
    x, y = torch.randn(4, 3), torch.randn(4, 3)
    for _ in range(3):
        loss = checkpoint(model, x, use_reentrant=False).square().sum()
        model(y).square().sum().backward()
        loss.backward()
        autograd_hacks.compute_grad1(model, "sum")
        with autograd_hacks.pause_hooks():
            (expected,) = torch.autograd.grad(model(x[:1]).square().sum(), model[0].weight)
        assert_close(model[0].weight.grad1[0], expected)


@crossed(shape=[(2, 4, 8), (1, 8, 8), (3, 8)], probe=[True, False])
def test_reentrant_checkpoints_are_refused(shape: tuple[int, ...], probe: bool) -> None:
    inside = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model, x = in_the_middle(first=nn.Linear(8, 8), middle=inside, last=nn.Linear(8, 3)), torch.randn(shape).double()
    with autograd_hacks.add_hooks(model, probe=probe):
        for _ in range(2):
            with pytest.raises(UnseenGradient, match="use_reentrant=False"):
                check(model, x, "sum")
        with pytest.raises(PerSampleGradientError, match="reentrant"):
            autograd_hacks.verify(model)


@crossed(name=["mlp", "lstm", "checkpointed", "replayed"], use_reentrant=[True, False], param_grad=[True, False])
def test_a_whole_model_in_a_checkpoint_and_checkpoints_inside(name: str, use_reentrant: bool, param_grad: bool) -> None:
    build, made = MODELS[name]
    model = build().double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for is_reentrant in (False, use_reentrant, use_reentrant, False):
            x = made().requires_grad_()
            squares(checkpoint(model, x, use_reentrant=is_reentrant)).mean().backward()
            if is_reentrant:
                with pytest.raises(UnseenGradient, match="use_reentrant=False"):
                    autograd_hacks.compute_grad1(model)
            else:
                assert_right(model, x.detach())
            model.zero_grad()


PICKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an index": lambda table, which: table[which, 0],
    "an index of two axes": lambda table, which: table[which, which],
    "an index of the last axis": lambda table, which: table[0, :, which].t(),
    "a part times a parameter": lambda table, which: (y := table[which, 0] * 1, y[:, :2].mul_(table[1, 0, :2]))[0],
}


@crossed(kind=PICKED, param_grad=[True, False])
def test_rows_of_a_parameter_that_an_index_picks_in_a_checkpoint(kind: str, param_grad: bool) -> None:
    """A node that saves several tensors is asked for them as often as one with a single one."""

    def picked(m: Bare, h: Tensor) -> Tensor:
        return h * PICKED[kind](m.table, (h[:, 0] > 0).long())

    model = Bare(
        lambda m, x: checkpoint(partial(picked, m), m.first(x), use_reentrant=False),
        first=nn.Linear(3, 3),
        table=torch.randn(2, 3, 3),
    ).double()
    check_batches(model, *(torch.randn(samples, 3, dtype=torch.float64) for samples in (4, 4, 1)), param_grad=param_grad)
