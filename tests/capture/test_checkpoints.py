"""Checkpointing runs layers again within a backward pass, and backward passes within one."""

import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn as nn
from nets import MODELS
from oracle import assert_rows, squares
from rarely import crossed
from steps import assert_right, batch, check, mlp, rows_of, step
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, PerSampleGradientError, UnseenGradient


def whole() -> nn.Module:
    """A model that runs in checkpoints and nothing else, one within the other."""

    def inner(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(m.rest, m.first(x), use_reentrant=True)

    return Bare(lambda m, x: checkpoint(inner, m, x, use_reentrant=True), first=nn.Linear(3, 3), rest=mlp()).double()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpoints_within_checkpoints_in_a_loop() -> None:
    model = whole()
    plain = nn.Sequential(model.first, *model.rest)
    with autograd_hacks.add_hooks(model, probe=False):
        for seed in range(3):
            for loss_type in ("mean", "sum"):
                x, y = batch(4, seed)
                model.zero_grad()
                with torch.no_grad():
                    model(x)
                autograd_hacks.backward(squares(model(x.clone().requires_grad_()), y), loss_type)
                autograd_hacks.compute_grad1(model)
                assert_rows(plain, rows_of(plain, x, y))


def in_the_middle(**layers: nn.Module) -> nn.Module:
    return Bare(lambda m, x: m.last(checkpoint(m.middle, m.first(x), use_reentrant=True)), **layers).double()


def behind_another() -> nn.Module:
    return in_the_middle(first=nn.Linear(3, 3), middle=nn.Linear(3, 3), last=nn.Linear(3, 2))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("build", [whole, behind_another])
def test_checkpoints_of_several_forwards_can_not_be_told_apart(build: Callable[[], nn.Module]) -> None:
    model = build()
    plain = nn.Sequential(*(part for part in model.modules() if not isinstance(part, Bare | nn.Sequential)))
    with autograd_hacks.add_hooks(model, probe=False):
        for _ in range(2):
            losses = [squares(model(batch(4, seed)[0].requires_grad_()), batch(4, seed)[1]).mean() for seed in (0, 1)]
            for loss in losses:
                loss.backward()
                with pytest.raises(NothingRecorded, match="use_reentrant=False"):
                    autograd_hacks.compute_grad1(model)
            model.zero_grad()
            x, y = batch(5)
            step(model, x.requires_grad_(), y)
            autograd_hacks.compute_grad1(model)
            assert_rows(plain, rows_of(plain, x.detach(), y))


def test_a_failure_after_a_checkpoint_inside_a_backward() -> None:
    def fails(m: nn.Module, x: Tensor) -> Tensor:
        h = m.first(x)
        h.register_hook(lambda g: 1 / 0)
        return checkpoint(m.last, h, use_reentrant=True)

    model = Bare(fails, first=nn.Linear(3, 3), last=nn.Linear(3, 2))
    with autograd_hacks.add_hooks(model, probe=False):
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(4, 3)).sum().backward()
        with pytest.raises(NothingRecorded, match="did not finish"):
            autograd_hacks.compute_grad1(model)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_checkpointed_steps_free_their_memory_at_once() -> None:
    model, (x, y), counts = whole(), batch(4), []
    with autograd_hacks.add_hooks(model):
        gc.disable()
        try:
            for _ in range(6):
                squares(model(x.clone().requires_grad_()), y).mean().backward()
                counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
        finally:
            gc.enable()
    assert counts[-1] <= counts[2]


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


@pytest.mark.parametrize("shape", [(2, 4, 8), (1, 8, 8), (3, 8)])
def test_reentrant_checkpoints_are_refused(shape: tuple[int, ...]) -> None:
    """No graph shows where the samples are inside.  Without a check they are on axis 0."""
    inside = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model, x = in_the_middle(first=nn.Linear(8, 8), middle=inside, last=nn.Linear(8, 3)), torch.randn(shape).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            with pytest.raises(UnseenGradient, match="use_reentrant=False"):
                check(model, x, "sum")
        with pytest.raises(PerSampleGradientError, match="reentrant"):
            autograd_hacks.verify(model)
    with autograd_hacks.add_hooks(model, probe=False):
        check(model, torch.randn(3, 8).double(), "sum")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@crossed(name=["mlp", "lstm", "checkpointed", "replayed"], use_reentrant=[True, False], param_grad=[True, False])
def test_a_whole_model_in_a_checkpoint_and_checkpoints_inside(name: str, use_reentrant: bool, param_grad: bool) -> None:
    build, made = MODELS[name]
    model = build().double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(3):
            x = made().requires_grad_()
            squares(checkpoint(model, x, use_reentrant=use_reentrant)).mean().backward()
            assert_right(model, x.detach())
            model.zero_grad()


PICKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an index": lambda table, which: table[which, 0],
    "an index of two axes": lambda table, which: table[which, which],
    "an index of the last axis": lambda table, which: table[0, :, which].t(),
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
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for samples in (4, 4, 1):
            check(model, torch.randn(samples, 3, dtype=torch.float64))
