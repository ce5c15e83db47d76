"""What a layer is may change between steps: nothing that is remembered of it may be older than the step."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.nn as nn
from oracle import joined, squares, targets
from rarely import crossed
from steps import batch, check, check_batches, mlp, step
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.forms import Dense
from autograd_hacks.formulas import Rule, single_input
from autograd_hacks.formulas.table import RULES


class Renamed(nn.Linear):
    pass


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
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
def test_a_layer_that_was_changed_gives_its_new_rows(model: nn.Sequential, change: str) -> None:
    CHANGES[change](model[0])
    for seed in range(3):
        check(model, batch(seed=seed)[0])


def test_a_layer_that_was_frozen_and_trains_again_gives_its_rows(model: nn.Sequential) -> None:
    for trains in (False, True):
        model[0].weight.requires_grad_(trains)
        check(model, batch()[0])


def test_a_layer_put_in_after_add_hooks(model: nn.Sequential) -> None:
    x, y = batch()
    model[2] = nn.Linear(4, 2).double()
    step(model, x, y)
    with pytest.raises(NothingRecorded, match=r"after add_hooks: layer '2' \(Linear\)"):
        autograd_hacks.compute_grad1(model)
    autograd_hacks.add_hooks(model)
    check(model, x)


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
