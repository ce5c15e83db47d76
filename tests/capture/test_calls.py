"""How a layer may be called: by keyword, at two paths, among the users' hooks, scripted, in a wrapper; and its output."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from steps import batch, check_batches, mlp
from torch import Tensor
from torch.nn.parallel import DataParallel
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.forms import Dense
from autograd_hacks.formulas import RULES, Rule


def at_two_paths() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: Bare(lambda m, x: m.layer(input=x), layer=nn.Linear(3, 2)), (5, 3)),
        (lambda: nn.Sequential(nn.LazyConv1d(2, 2), nn.Flatten(), nn.LazyLinear(2)), (4, 3, 5)),
        (at_two_paths, (5, 3)),
    ],
    ids=["by keyword", "lazy layers", "at two paths"],
)
def test_ways_to_call_layers(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    check_batches(build().double(), torch.randn(shape, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_a_scripted_child() -> None:
    model = nn.Sequential(nn.Linear(3, 4), torch.jit.script(nn.Linear(4, 2))).double()
    check_batches(model, batch()[0])
    with pytest.raises(TypeError, match="scripted"):
        autograd_hacks.add_hooks(model[1])


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_tracing_a_hooked_model(model: nn.Module) -> None:
    traced = torch.jit.trace(model, batch()[0])
    assert torch.equal(traced(batch()[0]), model(batch()[0]))


def test_data_parallel_is_refused_by_name() -> None:
    """But for one that runs the model itself, as it does without a GPU."""
    net, (x, y) = mlp(), batch()
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


# What users do to a layer's output, and tensors of unusual kinds


class Offset(Bare):
    """A bare parameter, handed out as a view of some kind."""


class Reverse(torch.autograd.Function):
    """A view whose backward is not a view's."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, g: Tensor) -> Tensor:
        return -3 * g


@pytest.mark.parametrize(
    ("view", "slope"),
    [
        (lambda y, n: y.expand(n, 3), lambda g: 2 * g),
        (lambda y, n: y.repeat(n, 1).T.contiguous().T, lambda g: 2 * g),
        (lambda y, n: Reverse.apply(y.repeat(n, 1)), lambda g: -6 * g),
        (lambda y, n: y.repeat(n, 2)[:, :3], lambda g: 2 * g),
    ],
    ids=["expand", "transpose", "a Function's", "a slice"],
)
def test_views_of_every_kind_from_a_layer_of_ones_own(
    view: Callable[[Tensor, int], Tensor], slope: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Offset(lambda m, x: view(m.offset * 2, len(x)), offset=torch.randn(3).double()), torch.randn(4, 3).double()
    monkeypatch.setitem(RULES, Offset, Rule(lambda layer, call: {"offset": Dense(slope(call.grad))}))
    with autograd_hacks.add_hooks(model):
        out = model(x)
        ((out * x).sum(1) + out.pow(2).sum(1)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert_close(model.offset.grad1.mean(0), model.offset.grad)
        assert_close(model.offset.grad1, slope(x + 2 * out.detach()))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.InstanceNorm2d(4, affine=True), (3, 4, 5, 5)),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(), (3, 4, 5)),
        (nn.Conv2d(4, 2, 3), (3, 4, 5, 5)),
        (nn.Linear(4, 2), (3, 2, 2, 4)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_in_place_activations_after_any_layer(layer: nn.Module, shape: tuple[int, ...]) -> None:
    model, x = nn.Sequential(layer, nn.ReLU(inplace=True)).double(), torch.randn(shape, dtype=torch.float64)

    for memory_format in (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,):
        x = x.to(memory_format=memory_format)
        check_batches(model, x)


@pytest.mark.parametrize("which", ["out", "state", "both"])
def test_in_place_operations_on_one_of_several_outputs(which: str) -> None:
    layer, x = nn.LSTM(2, 3, batch_first=True).double(), torch.randn(4, 5, 2).double()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        out, (h, _) = layer(x)
        if which != "out":
            h.mul_(2)
        if which != "state":
            out += 1
        return out, h[0]

    check_batches(layer, x, run=run)
