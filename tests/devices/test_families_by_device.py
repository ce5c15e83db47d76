"""One model of each family on each device: every verb in double precision, rows in those people train in; random bits."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn as nn
from by_device import FAMILIES, TF32, double_rows, errors, grad1_of, losses, products, recurrent, rows_of, step
from quantities import assert_quantities
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import UnseenGradient, VerificationFailed
from autograd_hacks.forms import SparseMap
from autograd_hacks.formulas import RULES
from autograd_hacks.support.contexts import CONV, MATMUL, RNN, unit_of_products
from autograd_hacks.support.philox import key_of, noise, packed_signs

SUMS_BY_INDEX = ("causal language model", "embedding bag", "routed experts")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_verb_of_a_family(device: torch.device, name: str) -> None:
    """In the second step, of the samples in another order and one replaced.  Outputs and gradients keep their bits, unless
    torch's own sums by index come in any order, as on a GPU."""
    model, x = FAMILIES[name].on(device)
    first, x = x, x[[3, 0, 5, 1, 4, 3]]
    expected = rows_of(model, x)
    losses(plain := model(x)).mean().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    exact = {} if device.type == "cuda" and name in SUMS_BY_INDEX else {"rtol": 0, "atol": 0}
    with autograd_hacks.add_hooks(model):
        step(model, first)
        model.zero_grad()
        assert_close(step(model, x), plain, **exact)
        assert_close([p.grad for p in model.parameters()], grads, **exact)
        assert_close(grad1_of(model), expected)
        assert {p.grad1.device.type for p in model.parameters()} == {device.type}
        assert_quantities(model, expected)


def autocast(dtype: torch.dtype) -> Callable[[torch.device], AbstractContextManager[object]]:
    return lambda device: torch.autocast(device.type, dtype)


PRECISIONS: dict[str, Callable[[torch.device], AbstractContextManager[object]]] = {
    "single": lambda device: products("ieee"),
    "as torch has it": lambda device: nullcontext(),
    "TF32": lambda device: products("tf32"),
    "bfloat16": autocast(torch.bfloat16),
    "float16": autocast(torch.float16),
}
UNITS = {"single": 2.0**-23, "as torch has it": 2.0**-10, "TF32": 2.0**-10, "bfloat16": 2.0**-7, "float16": 2.0**-10}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_proofs_and_rows_in_a_precision(device: torch.device, name: str, precision: str) -> None:
    """Three steps, two of which are proven.  Rows may be as far off as plain passes of one sample are, and a few units."""
    if precision in ("TF32", "as torch has it") and device.type == "cpu":
        pytest.skip("a CPU has no TF32, and torch no other default; steps with rounded factors, below, are as on a GPU")
    if name in ("lstm", "gru") and device.type == "cpu":
        model, x = FAMILIES[name].on(device, torch.float32)
        try:
            with PRECISIONS[precision](device):
                model(x)
        except RuntimeError as error:  # in half precision, on CPUs whose kernels have no recurrent layers in it
            pytest.skip(f"torch itself can't run it: {error}")
    for param_grad in (True, False):
        model, x = FAMILIES[name].on(device, torch.float32)
        with autograd_hacks.add_hooks(model, param_grad=param_grad):
            for _ in range(3):
                with PRECISIONS[precision](device):
                    step(model, x)
                model.zero_grad()
            found = grad1_of(model)
        exact = double_rows(model, x)
        with PRECISIONS[precision](device):
            plain = errors(rows_of(model, x), exact)
        for parameter, error in errors(found, exact).items():
            allowed = 3 * plain[parameter] + 16 * UNITS[precision]
            assert error <= allowed, f"{parameter} is off by {error:.1e}, where a plain pass is by {plain[parameter]:.1e}"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_of_a_backend(device: torch.device, kind: type[nn.RNNBase]) -> None:
    """Of cuDNN's own kernels on a GPU, with the weights in one piece of memory; without them the same rows."""
    if device.type == "cpu":
        pytest.skip("a CPU has one kind of kernels; tests/rules has these layers")
    torch.manual_seed(0)
    model = recurrent(kind, 32).to(device)
    x = torch.randn(6, 7, 3, device=device)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    exact = double_rows(model, x)
    for enabled in (True, False):
        with torch.backends.cudnn.flags(enabled=enabled), autograd_hacks.add_hooks(model):
            step(model, x)
            assert max(errors(grad1_of(model), exact).values()) < 2e-2


def test_random_bits_are_those_of_the_cpu(device: torch.device) -> None:
    """Written down, so that no version and no device has others.  Normal numbers are those of each kind of device."""
    key, cpu = key_of("bits", 1), torch.device("cpu")
    signs = packed_signs(key, slice(0, 300), slice(0, 1000), device)
    assert signs.device.type == device.type
    assert torch.equal(signs.cpu(), packed_signs(key, slice(0, 300), slice(0, 1000), cpu))
    assert signs[0, :4].tolist() == [167, 233, 0, 67]
    assert torch.equal(noise((70, 999), key, device), noise((70, 999), key, device))
    found, right = (SparseMap("p", torch.Size((70, 999)), 64, 1).hashes(where) for where in (device, cpu))
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, right))


# Products whose factors are rounded to TF32: proofs don't take that for wrong rows, and still see what is wrong


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
