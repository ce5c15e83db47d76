"""Checkpointing runs layers again within a backward pass, and backward passes within one."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn as nn
from nets import MODELS
from oracle import squares
from rarely import crossed
from steps import assert_right, check, check_batches
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError, UnseenGradient


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
