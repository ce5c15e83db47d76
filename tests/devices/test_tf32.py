"""Products whose factors are rounded to TF32: proofs don't take that for wrong rows, and still see what is wrong.

By default cuDNN rounds so in convolutions and recurrent layers, and all do after ``set_float32_matmul_precision("high")``.
A GPU does it itself; on a CPU a mode rounds the factors of each product, forward, backward and in reading.
"""

import dataclasses
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
from by_device import FAMILIES, TF32, double_rows, errors, grad1_of, products, step

import autograd_hacks
from autograd_hacks.errors import UnseenGradient, VerificationFailed
from autograd_hacks.formulas import RULES
from autograd_hacks.support.contexts import CONV, MATMUL, RNN, unit_of_products


@pytest.fixture
def high() -> Iterator[None]:
    """Whatever may use TF32 may."""
    cpu = torch.backends.mkldnn
    with products("tf32", cpu.matmul, cpu.conv, cpu.rnn, torch.backends.cuda.matmul):
        yield


@pytest.mark.usefixtures("high")
@pytest.mark.parametrize(("name", "convolutions_alone"), [*((name, False) for name in FAMILIES), ("cnn", True)])
def test_steps_in_tf32_are_proven(device: torch.device, name: str, convolutions_alone: bool) -> None:
    """convolutions_alone: as cuDNN has it by default"""
    model, x = FAMILIES[name].on(device, torch.float32)
    exact, mode = double_rows(model, x), TF32(TF32.CONVOLUTIONS if convolutions_alone else TF32.PRODUCTS)
    if convolutions_alone:
        torch.backends.mkldnn.matmul.fp32_precision = torch.backends.cuda.matmul.fp32_precision = "ieee"
    for param_grad in (True, False):
        with autograd_hacks.add_hooks(model, param_grad=param_grad), mode if device.type == "cpu" else nullcontext():
            for _ in range(3):
                step(model, x)
                autograd_hacks.per_sample_grads(model).norms()
                model.zero_grad()
            found = grad1_of(model)
        assert max(errors(found, exact).values()) < 1e-2
    assert mode.rounded or device.type != "cpu"
    assert max(errors(found, exact).values()) > 1e-6  # it has rounded


def test_rounding_unasked_for_is_no_rounding() -> None:
    """Where torch isn't told that factors may be rounded, what differs so much is wrong."""
    model, x = FAMILIES["mlp"].on("cpu", torch.float32)
    with autograd_hacks.add_hooks(model), TF32(), pytest.raises(UnseenGradient, match="don't add up"):
        step(model, x)


@pytest.mark.usefixtures("high")
def test_a_rule_that_is_wrong_is_still_seen(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = FAMILIES["mlp"].on(device, torch.float32)
    sound = RULES[nn.Linear]

    def off(layer: nn.Linear, call: object) -> object:
        return {name: autograd_hacks.forms.scale(form, 1.02) for name, form in sound.formula(layer, call).items()}

    monkeypatch.setitem(RULES, nn.Linear, dataclasses.replace(sound, formula=off))
    with autograd_hacks.add_hooks(model), pytest.raises(VerificationFailed):
        step(model, x)


def test_what_torch_is_told_is_known(high: None) -> None:
    x = torch.ones(1)
    assert unit_of_products(x, [MATMUL]) == 2.0**-10
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert unit_of_products(x, [MATMUL]) == 2.0**-7
    assert unit_of_products(x, [CONV, RNN]) == 2.0**-10
    torch.set_float32_matmul_precision("highest")
    assert unit_of_products(x, [MATMUL]) == 0
    assert unit_of_products(x.double()) == 0
    assert unit_of_products(x.to("meta")) == 0
