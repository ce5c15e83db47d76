"""Laws 1, 2 and 6 over random layers in every configuration that their classes accept: that rows are those of each sample
alone (1) contains what permuted, split and changed batches would show."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from hypothesis import example, given
from hypothesis import strategies as st
from mixing import check_refused
from nets import Scale
from oracle import squares, targets
from steps import assert_right, batch, check, mlp, step
from strategies import Case, layers
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, UnsupportedLayer, VerificationFailed
from autograd_hacks.forms import Dense, convolution, scale
from autograd_hacks.formulas import RULES, Call, Rule, single_input

loss_types = st.sampled_from(["mean", "sum"])


@given(layers, loss_types, st.booleans(), st.sampled_from([1, 2**20]))
@example(Case(nn.Conv2d(2, 4, (2, 4), padding="same", groups=2).double(), torch.randn(3, 2, 5, 6).double()), "mean", True, 1)
@example(  # channels last, where strides of axes of length one are arbitrary
    Case(
        nn.Conv2d(3, 1, 2, padding=1).double(),
        torch.randn(3, 3, 1, 1).double().to(memory_format=torch.channels_last),
    ),
    "sum",
    False,
    2**20,
)
@example(
    Case(
        Bare(lambda m, x: m.layer(x, output_size=(6, 5)), layer=nn.ConvTranspose2d(2, 3, 3, 2, padding=1)).double(),
        torch.randn(3, 2, 3, 3).double(),
    ),
    "mean",
    False,
    1,
)
def test_rule_equals_one_backward_per_sample(case: Case, loss_type: str, is_cut: bool, most: int) -> None:
    # By both ways to write rows of convolutions, of which costs choose one; all at once, or sample by sample.
    with (
        autograd_hacks.add_hooks(case.layer),
        patch.multiple(convolution, way_of_convolution=lambda *_: (is_cut, 1.0), _WINDOWS=most, _ROWS=most),
    ):
        for _ in range(2):  # the record of an earlier step is there to be replaced
            check(case.layer, case.x, loss_type)
        for p in case.layer.parameters():
            assert not p.grad1.requires_grad
            if len(case.x):
                assert_close(p.grad1.mean(0) if loss_type == "mean" else p.grad1.sum(0), p.grad)


@given(layers)
def test_hooks_change_neither_outputs_nor_gradients(case: Case) -> None:
    def step() -> list[Tensor]:
        case.layer.zero_grad()
        out = case.layer(case.x)
        squares(out, targets(len(case.x))).sum().backward()
        return [out.detach(), *[p.grad for p in case.layer.parameters()]]

    before = step()
    with autograd_hacks.add_hooks(case.layer):
        hooked = step()
    for one, other in zip(before, hooked):
        assert torch.equal(one, other)
    assert not case.layer._forward_hooks
    assert not case.layer._forward_pre_hooks


@pytest.mark.parametrize("expand", [lambda g: g.expand(3, 4, 5), lambda g: g.expand(3, 5, 4).mT], ids=["stride 0", "mT"])
def test_gradients_that_are_expanded_or_permuted(expand: Callable[[Tensor], Tensor]) -> None:
    layer, x = nn.Linear(2, 5).double(), torch.randn(3, 4, 2, dtype=torch.float64)
    gradient = expand(torch.ones((), dtype=torch.float64))
    with autograd_hacks.add_hooks(layer):
        layer(x).backward(gradient)
        autograd_hacks.compute_grad1(layer, "sum")
        assert_close(layer.weight.grad1, torch.einsum("nto,nti->noi", gradient, x))
        assert_close(layer.bias.grad1, gradient.sum(1))


# The table of rules: registered ones, wrong ones, and layers that it covers or not


def scaled() -> nn.Sequential:
    return nn.Sequential(mlp(), Scale(2))


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[nn.Module], Any], None]:
    def registered(kind: type[nn.Module], rule: Any) -> None:
        monkeypatch.setitem(RULES, kind, None)  # to be taken out at the end
        autograd_hacks.register_rule(kind, rule)

    return registered


def test_a_registered_rule_covers_the_layer(register: Any) -> None:
    model = scaled()
    with autograd_hacks.add_hooks(model):
        step(model, *batch())
        register(Scale, lambda layer, call: {"scale": Dense(call.grads[0] * call.args[0])})
        assert autograd_hacks.is_supported(model[1])
        assert_right(model, *batch())


@pytest.mark.parametrize(
    ("rule", "error", "words"),
    [
        (lambda layer, call: {}, UnsupportedLayer, "returned forms for nothing, but 'scale' trains too"),
        (lambda layer, call: {"scale": Dense(call.grads[0][:, :1])}, BatchSizeError, r"\(5, 1\).*expected \(5, 2\)"),
        (lambda layer, call: {"scale": Dense(call.grads[0][:3])}, BatchSizeError, r"\(3, 2\).*expected \(5, 2\)"),
    ],
)
def test_a_registered_rule_that_is_wrong(
    rule: Callable[[Scale, Call], dict[str, Dense]], error: type[Exception], words: str, register: Any
) -> None:
    register(Scale, rule)
    check_refused(scaled(), batch()[:1], error=error, match=words)


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


def test_a_single_input_rule_for_a_layer_of_several(register: Any) -> None:
    class Shifted(Scale):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x) + y

    model = Shifted(2)
    register(Shifted, single_input(lambda layer, x, g: {"scale": Dense(x * g)}))
    with autograd_hacks.add_hooks(model):
        model(torch.ones(3, 2), y=torch.ones(3, 2)).sum().backward()
        with pytest.raises(TypeError, match=r"the model itself \(Shifted\) got 2 arguments.* without single_input"):
            autograd_hacks.compute_grad1(model)


def test_a_rule_registered_between_steps_holds_from_then_on(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    before, asked, linear = model[0].bias.grad1.clone(), [], RULES[nn.Linear].formula
    same = Rule(lambda layer, call: asked.append(layer) or linear(layer, call))
    monkeypatch.setitem(RULES, nn.Linear, same)
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    assert_close(model[0].bias.grad1, before)
    assert model[0] in asked
    monkeypatch.setitem(RULES, nn.Linear, Rule(lambda layer, call: {n: scale(f, 2) for n, f in linear(layer, call).items()}))
    step(model, *batch())
    with pytest.raises(VerificationFailed, match=r"the rows of 0\.weight don't add up .* Its rule is wrong"):
        autograd_hacks.compute_grad1(model)
