"""`backward(losses)`, and what the scale of a row is."""

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from steps import assert_means, assert_right, batch
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks


def test_a_loss_that_is_zero_at_some_positions_and_samples() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    mask = (torch.arange(5) < torch.tensor([[5], [2], [0], [1]])).double()

    def masked(out: Tensor, mask: Tensor) -> Tensor:
        return (out.pow(2).sum(2) * mask).sum(1) / 8  # the batch's own denominator, held fixed

    with autograd_hacks.add_hooks(model):
        masked(model(x), mask).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, one_backward_per_sample(model, masked, x, mask))


def test_the_reduction_of_two_kinds_of_passes() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(5, 3)
    autograd_hacks.add_hooks(model)
    with autograd_hacks.accumulate(model):
        model(x).square().sum().backward()
        autograd_hacks.backward(model(x).square().sum(1), "sum")
    with pytest.raises(ValueError, match=r"no loss_type was given, so 'mean' was assumed.*pass loss_type='sum'"):
        autograd_hacks.per_sample_grads(model)
    assert autograd_hacks.per_sample_grads(model, "sum").samples == 10
    model.zero_grad()
    with autograd_hacks.accumulate(model):
        for loss_type in ("sum", "mean"):
            autograd_hacks.backward(model(x).square().sum(1), loss_type)
    with pytest.raises(ValueError, match="some accumulated losses are means and some are sums"):
        autograd_hacks.per_sample_grads(model)


def test_backward_with_a_vector_of_losses(model: nn.Module) -> None:
    x, y = batch()
    for loss_type in ("mean", "sum"):
        model.zero_grad()
        autograd_hacks.backward(squares(model(x), y), loss_type)
        assert_right(model, x, y)
        assert_close([getattr(p.grad1, loss_type)(0) for p in model.parameters()], [p.grad for p in model.parameters()])


def test_backward_in_accumulate_and_through_a_retained_graph(model: nn.Module) -> None:
    x, y = batch(4)
    with autograd_hacks.accumulate(model):
        autograd_hacks.backward(squares(model(x[:3]), y[:3]))
        autograd_hacks.backward(squares(model(x[3:]), y[3:]), "sum")
    assert_right(model, x, y)
    losses = squares(model(x), y) / 2
    autograd_hacks.backward(losses, retain_graph=True)
    autograd_hacks.backward(losses, "sum")
    assert_right(model, x, y)


def test_losses_of_two_models_and_of_their_own_samples() -> None:
    """GANs, say: each is proven for what it returned."""
    first = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    second = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    with autograd_hacks.add_hooks(first), autograd_hacks.add_hooks(second):
        for _ in range(3):
            x = torch.randn(5, 3)
            for model in (first, second):
                model.zero_grad()
            autograd_hacks.backward(second(first(x)).square().sum(1))
            for model in (first, second):
                autograd_hacks.compute_grad1(model)
                assert_means(model)
