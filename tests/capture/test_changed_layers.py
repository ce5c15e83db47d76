"""What a layer is may change between steps: nothing that is remembered of it may be older than the step."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn
from nets import Between
from oracle import squares
from steps import assert_right, batch, check, mlp, step

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, UnseenGradient


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


def test_a_layer_whose_forward_has_become_another_is_refused(model: nn.Sequential) -> None:
    model[0].__class__ = Doubled
    step(model, *batch())
    with pytest.raises(UnseenGradient, match=r"0\.weight"):
        autograd_hacks.compute_grad1(model)


def test_a_layer_put_in_after_add_hooks(model: nn.Sequential) -> None:
    x, y = batch()
    model[2] = nn.Linear(4, 2).double()
    step(model, x, y)
    with pytest.raises(NothingRecorded, match=r"at add_hooks, .*: layer '2' \(Linear\)"):
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
