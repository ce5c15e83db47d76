"""Laws 1, 2 and 6 over random layers in every configuration that their classes accept: that rows are those of each sample
alone (1) contains what permuted, split and changed batches would show."""

import copy
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from hypothesis import example, given
from hypothesis import strategies as st
from mixing import check_refused
from nets import Scale, within
from oracle import assert_same, flat, one_loss_at_a_time, squares, targets
from quantities import assert_quantities, assert_rows_of_passes
from rarely import rarely
from steps import assert_right, batch, check, mlp, step
from strategies import Case, layers
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import (
    BatchSizeError,
    ProbeFailed,
    SamplesMixed,
    UnseenGradient,
    UnsupportedLayer,
    VerificationFailed,
)
from autograd_hacks.forms import Dense, convolution, scale
from autograd_hacks.formulas import RULES, Call, Rule, single_input
from autograd_hacks.support.trees import map_tensors, tensors_of

loss_types = st.sampled_from(["mean", "sum"])


@given(layers, loss_types, st.booleans(), st.sampled_from([1, 2**20]))
@example(Case(nn.Conv2d(2, 4, (2, 4), padding="same", groups=2).double(), torch.randn(3, 2, 5, 6).double()), "mean", True, 1)
@example(  # channels last, where strides of axes of length one are arbitrary
    Case(nn.Conv2d(3, 1, 2, padding=1).double(), torch.randn(3, 3, 1, 1).double().to(memory_format=torch.channels_last)),
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


# Every class of torch.nn with parameters, in the configurations of PyTorch's own module database, alone and inside a model:


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db


def configurations(info: Any, training: bool, count: int) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Drawn from all that there are, the same in each run."""
    found = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=training)
    for one in random.Random(0).sample(found, min(count, len(found))):
        if one.forward_input is None:
            continue
        torch.manual_seed(0)
        layer = info.module_cls(*one.constructor_input.args, **one.constructor_input.kwargs).double().train(training)
        args, kwargs = map_tensors(Tensor.detach, (tuple(one.forward_input.args), dict(one.forward_input.kwargs)))
        with torch.no_grad():
            layer(*copy.deepcopy(args), **copy.deepcopy(kwargs))  # materialises the lazy ones
        if list(layer.parameters()):
            yield layer, args, kwargs


INFOS = {info.module_cls.__name__: info for info in module_db if "NonDynamically" not in info.module_cls.__name__}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of losses, which have no parameters
    PARAMETRISED = [(name, info) for name, info in sorted(INFOS.items()) if next(configurations(info, True, 24), None)]


def axes_of(layer: nn.Module, outputs: list[Tensor]) -> list[int]:
    """Where each output of a layer has its samples."""
    inner = next((m for m in layer.modules() if isinstance(m, nn.MultiheadAttention)), layer)
    first = 0 if getattr(inner, "batch_first", True) else 1
    if isinstance(layer, nn.RNNBase):
        return [first, 1, 1]
    return [first, 0] if isinstance(layer, nn.MultiheadAttention) else [first] * len(outputs)


def assert_right_in(layer: nn.Module, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(1)
        return [x for x in tensors_of(model(*copy.deepcopy(args), **copy.deepcopy(kwargs))) if x.requires_grad]

    model.zero_grad()
    with autograd_hacks.add_hooks(model):
        outputs = run()
        grads = [torch.randn_like(x) for x in outputs]
        torch.autograd.backward(outputs, grads)
        autograd_hacks.compute_grad1(model, "sum")
        rows = {name: p.grad1 for name, p in model.named_parameters()}
        assert_quantities(model, rows, "sum")  # which are compared with autograd's below
        samples = next(len(own) for own in rows.values() if own is not None)
        again, axes = run(), axes_of(layer, outputs)
        if samples and all(x.is_floating_point() and x.ndim and x.shape[axis] == samples for x, axis in zip(again, axes)):
            assert_rows_of_passes(
                model, torch.cat([x.movedim(axis, 0).reshape(samples, -1) for x, axis in zip(again, axes)], dim=1)
            )
    with autograd_hacks.add_hooks(model, param_grad=False):
        kept = [p.grad for p in model.parameters()]
        for step in range(2):  # the second without ordinary gradients
            again = run()
            torch.autograd.backward(again, grads)
            autograd_hacks.compute_grad1(model, "sum", set_grad=step == 1)
            for one, other in zip(again, outputs):
                torch.testing.assert_close(one, other, equal_nan=True)  # other kernels may run without gradients
            for p, g, (name, own) in zip(model.parameters(), kept, rows.items()):
                if step == 0:
                    assert p.grad is g
                elif own is not None:
                    torch.testing.assert_close(p.grad, own.sum(0))
                torch.testing.assert_close(p.grad1, own, msg=lambda m, name=name: f"{name}: {m}")
    if all(x.ndim == 0 for x in outputs):  # a loss
        for name, p in model.named_parameters():
            torch.testing.assert_close(rows[name].sum(0), p.grad)
        return

    def losses() -> Tensor:
        parts = [(x * g).movedim(axis, 0) for x, g, axis in zip(run(), grads, axes)]
        return sum(flat(part).sum(1) for part in parts if len(part) == samples)

    assert_same(rows, one_loss_at_a_time(model, losses))


def has_no_batch(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    x = tensors_of((args, kwargs))[0]
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention | nn.Transformer) or "Transformer" in type(layer).__name__:
        return x.ndim < 3
    if isinstance(layer, nn.modules.conv._ConvNd):
        return x.ndim < 2 + len(layer.kernel_size)
    return x.ndim < (1 if isinstance(layer, nn.Embedding | nn.PReLU) else 2)


def test_there_are_many() -> None:
    assert len(PARAMETRISED) > 30


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("training", "count"), [(True, 3), *rarely((True, 24), (False, 24))])
@pytest.mark.parametrize(("name", "info"), PARAMETRISED, ids=[name for name, _ in PARAMETRISED])
def test_every_module(name: str, info: Any, training: bool, count: int) -> None:
    for layer, args, kwargs in configurations(info, training, count):
        mixes = isinstance(layer, nn.modules.batchnorm._BatchNorm) and (training or not layer.track_running_stats)
        for model in (layer, within(layer)):
            # Its chunks compute the weight's gradient in the forward, for all samples.
            is_chunked = isinstance(layer, nn.LinearCrossEntropyLoss) and layer.reduction != "none"
            if is_chunked:
                try:
                    assert_right_in(layer, model, args, kwargs)
                except UnseenGradient:
                    continue
            elif mixes or has_no_batch(layer, args, kwargs):
                # Positions taken for samples mix; but what is saturated doesn't show it, and its rows don't add up.
                with pytest.raises((BatchSizeError, ProbeFailed, SamplesMixed, UnseenGradient)):
                    assert_right_in(layer, model, args, kwargs)
            else:
                assert_right_in(layer, model, args, kwargs)
