"""Wrappers that run other modules than those that have hooks."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample
from torch import Tensor
from torch.nn.parallel import DataParallel

import autograd_hacks
from autograd_hacks.errors import UnseenGradient

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, which change with its version


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().flatten(1).sum(1)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)).double()


def batch(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3).double(), torch.randn(n, 2).double()


def aot(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="aot_eager")


def check(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> None:
    model.zero_grad()
    squares(run(x), y).mean().backward()
    autograd_hacks.compute_grad1(model)
    with autograd_hacks.pause_hooks():
        assert_rows(model, one_backward_per_sample(model, squares, x, y))


def test_a_compiled_model_is_refused_before_it_runs() -> None:
    part = two_layers()
    part[0] = aot(part[0])
    for model, name in ((aot(two_layers()), "the model itself"), (part, "layer '0'")):
        with pytest.raises(TypeError, match=rf"{name} \(OptimizedModule\) is what torch\.compile.*_orig_mod"):
            autograd_hacks.add_hooks(model)
        model(batch()[0])
        assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("hooks_first", [True, False])
def test_the_model_that_was_compiled_has_rows(hooks_first: bool, probe: bool) -> None:
    model = two_layers()
    if hooks_first:
        autograd_hacks.add_hooks(model, probe=probe)
    compiled = aot(model)
    autograd_hacks.add_hooks(compiled._orig_mod, probe=probe)
    for _ in range(2):
        x, y = batch()
        check(model, compiled._orig_mod, x, y)
        grads = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        squares(compiled(x), y).mean().backward()
        for p, grad in zip(model.parameters(), grads):
            torch.testing.assert_close(p.grad, grad)
        for read in (autograd_hacks.compute_grad1, lambda m: autograd_hacks.clip_grad1_norm_(m, 1.0)):
            with pytest.raises(UnseenGradient, match=r"torch\.compile"):
                read(model)
        with eagerly():
            check(model, compiled, x, y)


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("hooks_first", [True, False])
def test_a_model_that_compiled_itself_has_rows_where_it_runs_eagerly(hooks_first: bool, probe: bool) -> None:
    model = two_layers()
    for begin in (autograd_hacks.add_hooks, compile_itself)[:: 1 if hooks_first else -1]:
        begin(model)
    autograd_hacks.add_hooks(model, probe=probe)
    for _ in range(2):
        x, y = batch()
        squares(model(x), y).mean().backward()
        for read in (autograd_hacks.compute_grad1, lambda m: autograd_hacks.clip_grad1_norm_(m, 1.0)):
            with pytest.raises(UnseenGradient, match=r"torch\.compile"):
                read(model)
        with eagerly():
            check(model, model, x, y)


def compile_itself(model: nn.Module) -> None:
    model.compile(backend="aot_eager")


def eagerly() -> AbstractContextManager[None]:
    return torch.compiler.set_stance("force_eager")


def test_data_parallel_is_refused_by_name() -> None:
    net, (x, y) = two_layers(), batch()
    alone = DataParallel(net, device_ids=[])
    autograd_hacks.add_hooks(alone)
    squares(alone(x), y).mean().backward()
    autograd_hacks.compute_grad1(alone)
    assert_rows(net, one_backward_per_sample(net, squares, x, y))
    autograd_hacks.remove_hooks(alone)
    alone.device_ids = [0, 1]
    for way in (alone, nn.Sequential(alone)):
        with pytest.raises(TypeError, match=r"DataParallel.*DistributedDataParallel"):
            autograd_hacks.add_hooks(way)
    autograd_hacks.add_hooks(net)
    replica = net._replicate_for_data_parallel()  # what DataParallel runs, on each device
    with pytest.raises(TypeError, match=r"DataParallel.*DistributedDataParallel"):
        replica(x)
