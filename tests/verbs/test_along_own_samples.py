"""Directions that are made of the pass's own samples, and sums of rows in ``.grad``, while a backward pass runs."""

import pytest
import torch
import torch.nn as nn
from nets import MODELS
from oracle import one_backward_per_sample, squares
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks


def rows_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    with autograd_hacks.pause_hooks():
        found = one_backward_per_sample(model, squares, x)
    return {name: own for name, own in found.items() if own is not None}


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_held_out_samples_of_the_same_pass(name: str, param_grad: bool) -> None:
    build, batch = MODELS[name]
    model, x = build().double(), batch()
    flat = torch.cat([own.flatten(1) for own in rows_of(model, x).values()], 1)
    is_held = torch.arange(len(x)) >= len(x) - 2
    h, w = is_held.double() / 2, (~is_held).double() * torch.rand(len(x)).double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for loss_type in ("mean", "sum"):
            model.zero_grad()
            with autograd_hacks.during_backward(model, "norms", dot=h, weights=w, loss_type=loss_type) as found:
                getattr(squares(model(x)), loss_type)().backward()
            assert_close(found.dot, flat @ (h @ flat))
            assert_close(found.norms, flat.norm(dim=1))
            for name, own in rows_of(model, x).items():
                assert_close(model.get_parameter(name).grad, torch.tensordot(w, own, 1))


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("name", MODELS)
def test_a_direction_that_is_given_and_weights(name: str) -> None:
    """Sums and inner products come from one call of each form."""
    build, batch = MODELS[name]
    model, x = build().double(), batch()
    rows = rows_of(model, x)
    v, w = {n: torch.randn_like(p) for n, p in model.named_parameters()}, torch.rand(len(x)).double()
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.during_backward(model, dot=v, weights=w, loss_type="sum") as found:
            squares(model(x)).sum().backward()
        assert_close(found.dot, sum(own.flatten(1) @ v[n].flatten() for n, own in rows.items()))
        for name, own in rows.items():
            assert_close(model.get_parameter(name).grad, torch.tensordot(w, own, 1))


@pytest.mark.parametrize(("positions", "width"), [(1, 40), (1, 2), (3, 60), (3, 2)])
def test_both_ways_to_a_direction_are_the_same(positions: int, width: int) -> None:
    """By products with the samples, and by the direction, whichever is cheaper."""
    torch.manual_seed(0)
    model, x = nn.Linear(width, width).double(), torch.randn(6, positions, width).double()
    flat = torch.cat([own.flatten(1) for own in rows_of(model, x).values()], 1)
    h = torch.tensor([0, 0, 0.5, 0, 0, -2]).double()
    with autograd_hacks.add_hooks(model), autograd_hacks.during_backward(model, dot=h, loss_type="sum") as found:
        squares(model(x)).sum().backward()
    assert_close(found.dot, flat @ (h @ flat))


def test_an_optimizer_steps_by_the_training_samples_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(), torch.randn(6, 4).double()
    model.register_parameter("spare", nn.Parameter(torch.ones(2).double()))
    model.spare.grad = torch.ones(2).double()
    expected = {n: model.get_parameter(n).detach() - 0.1 * own[:4].sum(0) for n, own in rows_of(model, x).items()}
    optimizer, w = torch.optim.SGD(model.parameters(), lr=0.1), torch.tensor([1.0, 1, 1, 1, 0, 0])
    with autograd_hacks.add_hooks(model, param_grad=False):
        with autograd_hacks.during_backward(model, weights=w):
            autograd_hacks.backward(squares(model(x)), "sum")
        optimizer.step()
    assert model.spare.grad is None
    for name, after in expected.items():
        assert_close(model.get_parameter(name).detach(), after)
