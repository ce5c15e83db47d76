"""The table of rules: registered ones, wrong ones, and layers that it covers or not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Scale
from steps import assert_right, batch, mlp, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import (
    BatchSizeError,
    UnsupportedLayer,
    VerificationFailed,
)
from autograd_hacks.forms import Dense, Outer, scale
from autograd_hacks.rules import RULES, Call, Rule, single_input
from autograd_hacks.rules.linear import linear


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


def test_a_registered_rule_may_cover_what_its_layer_reads_of_a_submodule(monkeypatch: pytest.MonkeyPatch) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.inner.weight.T

    formula = single_input(lambda layer, x, g: {"inner.weight": Outer(g, x)})
    monkeypatch.setitem(RULES, Reader, None)  # to be taken out at the end
    autograd_hacks.register_rule(Reader, Rule(formula, covers=lambda layer: ("inner",)))
    model = nn.Sequential(mlp(), Reader())
    with autograd_hacks.add_hooks(model):
        step(model, *batch())
        assert_right(model, *batch())
        assert autograd_hacks.describe(model).rows[-1].how.startswith("rule <lambda>")
        assert autograd_hacks.describe(model).rows[-1].form == "Outer"


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
            with pytest.raises(TypeError, match=r"the model itself \(Shifted\) got 2 arguments.* without single_input"):
                autograd_hacks.compute_grad1(model)
    finally:
        del RULES[Shifted]


def test_a_rule_registered_between_steps_holds_from_then_on(model: nn.Sequential, monkeypatch: pytest.MonkeyPatch) -> None:
    step(model, *batch())
    autograd_hacks.compute_grad1(model)
    before, asked = model[0].bias.grad1.clone(), []
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
