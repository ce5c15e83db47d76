"""What may not be read: where, what was given, what was expected, how to mend it; and the model is usable afterwards."""

import re

import pytest
import torch
import torch.nn as nn
from oracle import squares
from steps import batch, mlp, raises, step

import autograd_hacks
from autograd_hacks.errors import (
    BatchSizeError,
    NothingRecorded,
    StaleRecord,
)


def test_compute_before_hooks() -> None:
    with pytest.raises(NothingRecorded, match="add_hooks"):
        autograd_hacks.compute_grad1(mlp())


def test_compute_before_any_forward(model: nn.Module) -> None:
    with raises(model, NothingRecorded, "has not run", "forward and a backward"):
        autograd_hacks.compute_grad1(model)


def test_compute_before_any_backward(model: nn.Module) -> None:
    model(batch()[0])
    with raises(model, NothingRecorded, "no backward pass", "loss.backward()"):
        autograd_hacks.compute_grad1(model)


def test_compute_after_a_backward_that_reached_only_the_input(model: nn.Module) -> None:
    x = batch()[0].requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    with raises(model, NothingRecorded, "no backward pass"):
        autograd_hacks.compute_grad1(model)


def test_compute_after_disable_hooks(model: nn.Module) -> None:
    step(model, *batch())
    autograd_hacks.disable_hooks()
    with raises(model, NothingRecorded, "disabled", "enable_hooks()"):
        autograd_hacks.compute_grad1(model)


def test_compute_after_steps_while_disabled(model: nn.Module) -> None:
    autograd_hacks.disable_hooks()
    step(model, *batch())
    autograd_hacks.enable_hooks()
    with raises(model, NothingRecorded):
        autograd_hacks.compute_grad1(model)


def test_compute_after_clearing(model: nn.Module) -> None:
    step(model, *batch())
    autograd_hacks.clear_backprops(model)
    with raises(model, NothingRecorded, "clear_backprops"):
        autograd_hacks.compute_grad1(model)


def test_batch_sizes_that_disagree(model: nn.Sequential) -> None:
    x, _ = batch()
    (model[0](x).sum() + model[2](torch.ones(3, 4, dtype=torch.float64)).sum()).backward()
    with raises(model, BatchSizeError, "layer '0' (Linear), input (5, 3): 5", "layer '2' (Linear), input (3, 4): 3"):
        autograd_hacks.compute_grad1(model)


def test_an_unbatched_input_to_linear(model: nn.Module) -> None:
    for probe in (True, False):
        autograd_hacks.remove_hooks(model)
        autograd_hacks.add_hooks(model, probe=probe)
        model(batch()[0][0]).sum().backward()
        with raises(model, BatchSizeError, "layer '0' (Linear)", "(3,)", "(N, ..., in_features)", "unsqueeze(0)"):
            autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_an_unbatched_input_to_a_convolution(dims: int) -> None:
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](2, 3, 2)
    with autograd_hacks.add_hooks(layer):
        layer(torch.zeros(2, *[4] * dims)).sum().backward()
        with pytest.raises(BatchSizeError, match=re.escape("the model itself (Conv")) as info:
            autograd_hacks.compute_grad1(layer)
        assert str((2, *[4] * dims)) in str(info.value)


def test_an_input_overwritten_before_the_backward(model: nn.Sequential) -> None:
    x, y = batch()
    for p in model[0].parameters():
        p.requires_grad_(p is model[0].bias)  # autograd itself has no use for x then, and says nothing
    loss = squares(model(x), y).mean()
    x.zero_()
    loss.backward()
    with pytest.raises(StaleRecord, match=r"layer '0' \(Linear\): its input, of shape \(5, 3\)"):
        autograd_hacks.compute_grad1(model)


def test_an_input_overwritten_after_the_backward(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    x[0] = 0
    with raises(model, StaleRecord, "layer '0' (Linear)", "overwritten in place", "x.clone()"):
        autograd_hacks.compute_grad1(model)


def test_an_input_that_the_optimizer_moved(model: nn.Module) -> None:
    prompt, y = nn.Parameter(batch()[0]), batch()[1]
    step(model, prompt, y)
    torch.optim.SGD([prompt], 0.1).step()
    with raises(model, StaleRecord, "layer '0'"):
        autograd_hacks.compute_grad1(model)


def test_a_gradient_overwritten_after_the_backward(model: nn.Module) -> None:
    gradient = torch.ones(5, 2, dtype=torch.float64)
    model(batch()[0]).backward(gradient)
    gradient.mul_(2)
    with raises(model, StaleRecord, "layer '2' (Linear): its gradient at the output"):
        autograd_hacks.compute_grad1(model)


def test_an_input_overwritten_before_a_backward_that_needs_it(model: nn.Module) -> None:
    x, y = batch()
    loss = squares(model(x), y).mean()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with raises(model, StaleRecord, "layer '0' (Linear): its input, of shape (5, 3)"):
        autograd_hacks.compute_grad1(model)
