"""What a layer is may change between steps: nothing that is remembered of it may be older than the step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Between
from oracle import squares, targets
from rarely import crossed
from steps import assert_right, batch, check, mlp, step
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


def replace_weight(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.randn_like(layer.weight))


def drop_bias(layer: nn.Linear) -> None:
    layer.bias = None


def freeze_weight(layer: nn.Linear) -> None:
    layer.weight.requires_grad_(False)


def swap_data(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


def swap_class(layer: nn.Linear) -> None:
    layer.__class__ = Renamed


@pytest.mark.parametrize("change", [replace_weight, drop_bias, freeze_weight, swap_data, swap_class])
def test_a_layer_that_was_changed_gives_its_new_rows(model: nn.Sequential, change: Callable[[nn.Linear], None]) -> None:
    change(model[0])
    for seed in range(2):
        step(model, *batch(seed=seed))
        assert_right(model, *batch(seed=seed))


def test_a_layer_that_was_frozen_and_trains_again_gives_its_rows(model: nn.Sequential) -> None:
    for trains in (False, True):
        model[0].weight.requires_grad_(trains)
        step(model, *batch())
        assert_right(model, *batch())


def test_a_layer_whose_forward_has_become_another_is_read_off_the_graph(model: nn.Sequential) -> None:
    model[0].__class__ = Doubled
    for seed in range(3):
        step(model, *batch(seed=seed))
        assert_right(model, *batch(seed=seed))


def test_a_layer_put_in_after_add_hooks(model: nn.Sequential) -> None:
    x, y = batch()
    model[2] = nn.Linear(4, 2).double()
    step(model, x, y)
    with pytest.raises(NothingRecorded, match=r"after add_hooks: layer '2' \(Linear\)"):
        autograd_hacks.compute_grad1(model)
    autograd_hacks.add_hooks(model)
    step(model, x, y)
    assert_right(model, x, y)


def test_a_parameter_that_was_put_in_later() -> None:
    model, x = Between(lambda h: h), torch.randn(4, 3)
    model.scale = nn.Parameter(torch.ones(3))
    model.how = lambda h: h * model.scale
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        model.scale = nn.Parameter(2 * torch.ones(3))
        check(model, x)
        autograd_hacks.add_hooks(model)
        check(model, x)


def test_a_layer_that_was_put_elsewhere() -> None:
    """Its parameters have other names then."""
    model, x = Between(lambda h: h), torch.randn(4, 3)
    with autograd_hacks.add_hooks(model):
        check(model, x)
        model.last = nn.Sequential(nn.Tanh(), model.last)
        for _ in range(2):
            check(model, x)
        model.last = nn.Sequential(model.last[1], nn.Tanh())
        check(model, x)


class Turned(nn.Module):
    """A layer with positions first, between two with samples first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.turned, self.last = (nn.Linear(3, 3) for _ in range(3))
        self.inner = nn.ModuleList([nn.Identity()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (self.first, *self.inner):
            x = part(x).tanh()
        return self.last(self.turned(x.transpose(0, 1)).transpose(0, 1))


def low_rank(base: nn.Module) -> nn.Module:
    return Bare(
        lambda m, x: m.base(x) + m.up(m.down(x)), base=base, down=nn.Linear(3, 1, bias=False), up=nn.Linear(1, 3, bias=False)
    )


def wrap(model: nn.Module) -> None:
    model.turned = low_rank(model.turned)


def insert(model: nn.Module) -> None:
    model.inner.insert(0, nn.Linear(3, 3))


def delete(model: nn.Module) -> None:
    del model.inner[0]


def swap(model: nn.Module) -> None:
    model.first, model.turned = model.turned, model.first


def untie(model: nn.Module) -> None:
    model.first.weight = nn.Parameter(torch.randn(3, 3))


def untie_later(model: nn.Module) -> None:
    model.last.weight = nn.Parameter(torch.randn(3, 3))


@crossed(change=[wrap, insert, delete, swap, untie, untie_later], param_grad=[True, False])
def test_a_model_of_another_shape_once_hooks_are_added_again(change: Callable[[nn.Module], None], param_grad: bool) -> None:
    """Streamed norms take no layer for another one, nor miss a part of a parameter's gradient."""
    model = Turned()
    model.last.weight = model.first.weight
    model.inner.append(nn.Linear(3, 3))
    model.double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        check(model, torch.randn(4, 4, 3).double())
        change(model)
        model.double()
        autograd_hacks.add_hooks(model, param_grad=param_grad)
        for _ in range(2):
            x = torch.randn(4, 4, 3).double()
            with autograd_hacks.during_backward(model, "norms", loss_type="sum") as streamed:
                squares(model(x), targets(4)).sum().backward()
            assert all(p.grad is None for p in model.parameters()) or param_grad
            check(model, x, "sum")
            rows = [p.grad1.flatten(1) for p in model.parameters()]
            torch.testing.assert_close(streamed.norms, torch.cat(rows, 1).norm(dim=1))


def first_of(out: Any) -> torch.Tensor:
    first: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return first


class Twice(nn.Module):
    """One layer with settings that the model changes from call to call, and that are others again when rows are read."""

    def __init__(self, layer: nn.Module, **settings: Sequence[object]) -> None:
        super().__init__()
        self.layer, self.settings = layer, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = []
        for number in range(2):
            self.set(number)
            out.append(first_of(self.layer(x)).flatten(1))
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
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(4):
            check(model, x)


def test_functional_call_of_a_hooked_model_with_a_parameter_of_its_own() -> None:
    model, x = Between(lambda h: h), torch.randn(4, 3)
    model.scale = nn.Parameter(torch.ones(3))
    model.how = lambda h: h * model.scale
    with autograd_hacks.add_hooks(model):
        check(model, x)
        others = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        squares(torch.func.functional_call(model, others, x)).sum().backward()
        assert all(p.grad is not None for p in others.values())
        check(model, x)
