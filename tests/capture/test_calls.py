"""How a layer may be called: by keyword, at two paths, among the users' hooks, scripted, in a wrapper; and its output."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn as nn
from nets import Doubled
from oracle import assert_rows, joined, one_backward_per_sample, squares, targets
from rarely import crossed
from steps import batch, check, check_batches, mlp, step
from torch import Tensor
from torch.nn.parallel import DataParallel
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.forms import Dense
from autograd_hacks.formulas import RULES, Rule, single_input


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


# What a layer is may change between steps: nothing that is remembered of it may be older than the step


class Renamed(nn.Linear):
    pass


@pytest.fixture
def taken() -> Iterator[nn.Sequential]:
    """One that has taken some steps."""
    model = mlp()
    with autograd_hacks.add_hooks(model):
        for seed in range(3):
            step(model, *batch(seed=seed))
            autograd_hacks.compute_grad1(model)
        yield model


CHANGES: dict[str, Callable[[nn.Linear], object]] = {
    "another weight": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn_like(layer.weight))),
    "no bias": lambda layer: setattr(layer, "bias", None),
    "a frozen weight": lambda layer: layer.weight.requires_grad_(False),
    "other data": lambda layer: setattr(layer.weight, "data", torch.randn_like(layer.weight)),
    "another class": lambda layer: setattr(layer, "__class__", Renamed),
    "another forward": lambda layer: setattr(layer, "__class__", Doubled),  # read off the graph
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_was_changed_gives_its_new_rows(taken: nn.Sequential, change: str) -> None:
    CHANGES[change](taken[0])
    for seed in range(3):
        check(taken, batch(seed=seed)[0])


def test_a_layer_that_was_frozen_and_trains_again_gives_its_rows(taken: nn.Sequential) -> None:
    for trains in (False, True):
        taken[0].weight.requires_grad_(trains)
        check(taken, batch()[0])


def test_a_layer_put_in_after_add_hooks(taken: nn.Sequential) -> None:
    x, y = batch()
    taken[2] = nn.Linear(4, 2).double()
    step(taken, x, y)
    with pytest.raises(NothingRecorded, match=r"after add_hooks: layer '2' \(Linear\)"):
        autograd_hacks.compute_grad1(taken)
    autograd_hacks.add_hooks(taken)
    check(taken, x)


def turned(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A layer with positions first, between two with samples first."""
    for part in (m.first, *m.inner):
        x = part(x).tanh()
    return m.last(m.turned(x.transpose(0, 1)).transpose(0, 1))


def low_rank(base: nn.Module) -> nn.Module:
    return Bare(
        lambda m, x: m.base(x) + m.up(m.down(x)), base=base, down=nn.Linear(3, 1, bias=False), up=nn.Linear(1, 3, bias=False)
    )


def swap(model: nn.Module) -> None:
    model.first, model.turned = model.turned, model.first


SHAPES: dict[str, Callable[[nn.Module], object]] = {
    "wrap": lambda model: setattr(model, "turned", low_rank(model.turned)),
    "insert": lambda model: model.inner.insert(0, nn.Linear(3, 3)),
    "delete": lambda model: model.inner.__delitem__(0),
    "swap": swap,
    "untie": lambda model: setattr(model.first, "weight", nn.Parameter(torch.randn(3, 3))),
    "untie later": lambda model: setattr(model.last, "weight", nn.Parameter(torch.randn(3, 3))),
}


@crossed(change=SHAPES, param_grad=[True, False])
def test_a_model_of_another_shape_once_hooks_are_added_again(change: str, param_grad: bool) -> None:
    """Streamed norms take no layer for another one, nor miss a part of a parameter's gradient."""
    layers = {name: nn.Linear(3, 3) for name in ("first", "turned", "last")}
    model = Bare(turned, **layers, inner=nn.ModuleList([nn.Identity(), nn.Linear(3, 3)])).double()
    model.last.weight = model.first.weight
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        check(model, torch.randn(4, 4, 3).double())
        SHAPES[change](model)
        model.double()
        autograd_hacks.add_hooks(model, param_grad=param_grad)
        for _ in range(2):
            x = torch.randn(4, 4, 3).double()
            with autograd_hacks.during_backward(model, "norms", loss_type="sum") as streamed:
                squares(model(x), targets(4)).sum().backward()
            assert all(p.grad is None for p in model.parameters()) or param_grad
            check(model, x, "sum")
            rows = joined({name: p.grad1 for name, p in model.named_parameters()})
            torch.testing.assert_close(streamed.norms, rows.norm(dim=1))


class Twice(nn.Module):
    """One layer with settings that the model changes from call to call, and that are others again when rows are read."""

    def __init__(self, layer: nn.Module, **settings: Sequence[object]) -> None:
        super().__init__()
        self.layer, self.settings = layer, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = []
        for number in range(2):
            self.set(number)
            out.append((y[0] if isinstance(y := self.layer(x), tuple) else y).flatten(1))
        self.set(2)
        return torch.cat(out, 1)

    def set(self, number: int) -> None:
        for name, values in self.settings.items():
            setattr(self.layer, name, values[number])


class Powered(nn.Module):
    """A layer with a rule of the user's, whose type declares no constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.power = nn.Parameter(torch.ones(5)), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x**self.power


TWICE: dict[str, Callable[[], tuple[Twice, torch.Tensor]]] = {
    "dilation": lambda: (
        Twice(nn.Conv1d(2, 3, 3), dilation=[(1,), (2,), (3,)], padding=[(1,), (2,), (0,)]), torch.randn(4, 2, 7)),
    "stride": lambda: (Twice(nn.Conv2d(2, 3, 2), stride=[(1, 1), (2, 2), (1, 1)]), torch.randn(4, 2, 5, 5)),
    "padding mode": lambda: (
        Twice(nn.Conv1d(2, 3, 3, padding=1), padding_mode=["zeros", "circular", "reflect"]), torch.randn(4, 2, 7)),
    "eps": lambda: (Twice(nn.LayerNorm(5), eps=[0.5, 1e-5, 1.0]), torch.randn(4, 3, 5)),
    "eps of running statistics": lambda: (Twice(nn.BatchNorm1d(5).eval(), eps=[0.5, 1e-5, 1.0]), torch.randn(4, 5)),
    "groups": lambda: (Twice(nn.GroupNorm(2, 6), num_groups=[2, 3, 6]), torch.randn(4, 6, 3)),
    "padding index": lambda: (Twice(nn.Embedding(5, 3), padding_idx=[None, 1, 2]), torch.randint(5, (4, 3))),
    "bags": lambda: (Twice(nn.EmbeddingBag(5, 3), mode=["sum", "mean", "max"]), torch.randint(5, (4, 3))),
    "dropout": lambda: (
        Twice(nn.LSTM(3, 3, 2, batch_first=True, dropout=0.5), dropout=[0.0, 0.0, 0.5]), torch.randn(4, 2, 3)),
    "a registered rule's": lambda: (Twice(Powered(), power=[1, 2, 3]), torch.randn(4, 5)),
}  # fmt: skip


@crossed(kind=TWICE, param_grad=[True, False])
def test_a_layer_has_the_settings_of_each_call(kind: str, param_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ordinary gradients only the first steps are compared with the gradient that arrived."""
    monkeypatch.setitem(RULES, Powered, Rule(single_input(lambda own, x, g: {"weight": Dense(g * x**own.power)})))
    model, x = TWICE[kind]()
    model, x = model.double(), x.double() if x.is_floating_point() else x
    check_batches(model, *[x] * 4, param_grad=param_grad)
