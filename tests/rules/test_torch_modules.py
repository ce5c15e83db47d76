"""Every class of torch.nn with parameters, in the configurations of PyTorch's own module database, alone and inside a model:
right, or refused where there is no batch or samples mix."""

import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Inside
from oracle import assert_same, flat, one_loss_at_a_time
from quantities import assert_quantities, assert_rows_of_passes
from rarely import rarely
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, ProbeFailed, SamplesMixed, UnseenGradient
from autograd_hacks.support.trees import map_tensors, tensors_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_modules import module_db


def configurations(info: Any, training: bool, count: int) -> Iterator[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]:
    """Drawn from all that there are, the same in each run."""
    found = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=training)
    for given in random.Random(0).sample(found, min(count, len(found))):
        if given.forward_input is None:
            continue
        torch.manual_seed(0)
        layer = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs).double().train(training)
        args, kwargs = map_tensors(Tensor.detach, (tuple(given.forward_input.args), dict(given.forward_input.kwargs)))
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
        for model in (layer, Inside(layer)):
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
