"""What raises: where, what was given, what was expected, how to mend it; and the model is usable afterwards."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Scale
from oracle import squares
from steps import assert_right, batch, mlp, raises, step
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import (
    BatchSizeError,
    NothingRecorded,
    SamplesMixed,
    StaleRecord,
    UnsupportedLayer,
)
from autograd_hacks.forms import Dense
from autograd_hacks.rules import RULES, Call, single_input


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


@pytest.mark.parametrize("loss_type", ["average", "", 1])
def test_a_loss_type_that_is_neither(model: nn.Module, loss_type: object) -> None:
    step(model, *batch())
    with raises(model, ValueError, repr(loss_type), "'mean' or 'sum'"):
        autograd_hacks.compute_grad1(model, loss_type)
    with raises(model, ValueError, repr(loss_type)):
        autograd_hacks.backward(squares(model(batch()[0]), batch()[1]), loss_type)


def test_a_loss_type_that_contradicts_backward(model: nn.Module) -> None:
    autograd_hacks.backward(squares(model(batch()[0]), batch()[1]), "mean")
    with raises(model, ValueError, "'sum'", "'mean'"):
        autograd_hacks.compute_grad1(model, "sum")


@pytest.mark.parametrize("length", [1, 4, 10])
def test_a_loss_vector_of_the_wrong_length(model: nn.Module, length: int) -> None:
    x, y = batch()
    losses = squares(model(x), y).mean().expand(length)
    with raises(model, BatchSizeError, f"backward(losses): {length}", "layer '0' (Linear), input (5, 3): 5"):
        autograd_hacks.backward(losses)
    step(model, x, y)
    with raises(model, BatchSizeError, "backward(losses)"):
        autograd_hacks.backward(squares(model(x), y)[:3])


@pytest.mark.parametrize("reduce", [Tensor.sum, lambda losses: losses[:, None]], ids=["scalar", "matrix"])
def test_losses_that_are_no_vector(model: nn.Module, reduce: Callable[[Tensor], Tensor]) -> None:
    losses = reduce(squares(model(batch()[0]), batch()[1]))
    with raises(model, ValueError, str(tuple(losses.shape)), "reduction='none'"):
        autograd_hacks.backward(losses)


def test_losses_that_are_no_tensor(model: nn.Module) -> None:
    with raises(model, TypeError, "list"):
        autograd_hacks.backward([1.0])


def test_losses_without_a_graph(model: nn.Module) -> None:
    with raises(model, RuntimeError, "does not require grad"):
        autograd_hacks.backward(torch.ones(5))


def test_batch_sizes_that_disagree(model: nn.Sequential) -> None:
    x, _ = batch()
    (model[0](x).sum() + model[2](torch.ones(3, 4, dtype=torch.float64)).sum()).backward()
    with raises(model, BatchSizeError, "layer '0' (Linear), input (5, 3): 5", "layer '2' (Linear), input (3, 4): 3"):
        autograd_hacks.compute_grad1(model)


def test_an_unbatched_input_to_linear(model: nn.Module) -> None:
    model(batch()[0][0]).sum().backward()
    with raises(model, SamplesMixed, "layer '0' (Linear)", "batch is not on axis 0"):
        autograd_hacks.compute_grad1(model)
    autograd_hacks.remove_hooks(model)
    autograd_hacks.add_hooks(model, probe=False)
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
    with pytest.raises(StaleRecord, match=r"input of layer '0' \(Linear\), of shape \(5, 3\)"):
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
    with raises(model, StaleRecord, "gradient at the output of layer '2'"):
        autograd_hacks.compute_grad1(model)


def test_accumulate_left_by_an_exception(model: nn.Module) -> None:
    def fail() -> None:
        with autograd_hacks.accumulate(model):
            step(model, *batch())
            raise KeyError("loader")

    with pytest.raises(KeyError, match="loader"):
        fail()
    with raises(model, NothingRecorded, "accumulate(model) was left by KeyError"):
        autograd_hacks.compute_grad1(model)


def test_accumulate_within_itself_and_without_hooks(model: nn.Module) -> None:
    with autograd_hacks.accumulate(model):
        with pytest.raises(RuntimeError, match="accumulating already"), autograd_hacks.accumulate(model):
            pass
        step(model, *batch())
    assert_right(model, *batch())
    with pytest.raises(NothingRecorded, match="has no hooks"), autograd_hacks.accumulate(mlp()):
        pass


def scaled() -> nn.Sequential:
    return nn.Sequential(mlp(), Scale(2))


def test_a_registered_rule_covers_the_layer() -> None:
    model = scaled()
    with autograd_hacks.add_hooks(model):
        step(model, *batch())
        autograd_hacks.register_rule(Scale, lambda layer, call: {"scale": Dense(call.grads[0] * call.args[0])})
        try:
            assert autograd_hacks.is_supported(model[1])
            assert_right(model, *batch())
        finally:
            del RULES[Scale]


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (lambda layer, call: {}, UnsupportedLayer, "returned forms for nothing, but 'scale' trains too"),
        (lambda layer, call: {"scale": Dense(call.grads[0][:, :1])}, BatchSizeError, r"\(5, 1\).*expected \(5, 2\)"),
        (lambda layer, call: {"scale": Dense(call.grads[0][:3])}, BatchSizeError, r"\(3, 2\).*expected \(5, 2\)"),
    ],
)
def test_a_registered_rule_that_is_wrong(
    rule: Callable[[Scale, Call], dict[str, Dense]], error: type[Exception], words: str
) -> None:
    model = scaled()
    autograd_hacks.register_rule(Scale, rule)
    try:
        with autograd_hacks.add_hooks(model):
            step(model, *batch())
            with pytest.raises(error, match=words):
                autograd_hacks.compute_grad1(model)
    finally:
        del RULES[Scale]


def test_register_rule_with_what_is_no_layer_or_no_rule() -> None:
    with pytest.raises(TypeError, match="subclass"):
        autograd_hacks.register_rule("Linear", lambda layer, call: {})
    with pytest.raises(TypeError, match="function"):
        autograd_hacks.register_rule(Scale, None)


def test_a_subclass_that_changes_nothing_is_supported() -> None:
    class Named(nn.Linear):
        pass

    assert autograd_hacks.is_supported(Named(3, 2))
    assert not autograd_hacks.is_supported(nn.ReLU())


def test_a_single_input_rule_for_a_layer_of_several() -> None:
    class Shifted(Scale):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x) + y

    model = Shifted(2)
    autograd_hacks.register_rule(Shifted, single_input(lambda layer, x, g: {"scale": Dense(x * g)}))
    try:
        with autograd_hacks.add_hooks(model):
            model(torch.ones(3, 2), y=torch.ones(3, 2)).sum().backward()
            with pytest.raises(TypeError, match=r"the model itself \(Shifted\) .* given 2 arguments.* without single_input"):
                autograd_hacks.compute_grad1(model)
    finally:
        del RULES[Shifted]


def test_an_input_overwritten_before_a_backward_that_needs_it(model: nn.Module) -> None:
    x, y = batch()
    loss = squares(model(x), y).mean()
    x.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with raises(model, StaleRecord, "input of layer '0' (Linear), of shape (5, 3)"):
        autograd_hacks.compute_grad1(model)
