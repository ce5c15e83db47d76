"""Losses and micro-batches: what the scale of a row is, and which rows there are."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows, one_backward_per_sample, squares
from steps import assert_right, batch, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks


@pytest.mark.parametrize("sizes", [(2, 3), (3, 1, 0)])
def test_accumulate_appends_rows(model: nn.Module, sizes: tuple[int, ...]) -> None:
    x, y = batch(sum(sizes))
    step(model, *batch(7, 1))  # an earlier record is no part of it
    with autograd_hacks.accumulate(model):
        for part_x, part_y in zip(x.split(sizes), y.split(sizes)):
            step(model, part_x, part_y)
    assert_right(model, x, y)
    step(model, *batch(7, 1))
    assert_right(model, *batch(7, 1))


def test_accumulate_with_a_retained_graph_adds_within_its_rows(model: nn.Module) -> None:
    x, y = batch(4)
    with autograd_hacks.accumulate(model):
        step(model, x[:2], y[:2])
        loss = squares(model(x[2:]), y[2:]).mean()
        loss.backward(retain_graph=True)
        loss.backward()
    autograd_hacks.compute_grad1(model)
    twice = torch.tensor([1.0, 1.0, 2.0, 2.0], dtype=torch.float64)[:, None]
    with autograd_hacks.pause_hooks():
        expected = one_backward_per_sample(
            model, lambda out, y: squares(out, y[:, :2]) * y[:, 2], x, torch.cat([y, twice], 1)
        )
    assert_rows(model, expected)


def test_accumulate_fills_in_zeros_for_parts_that_were_not_reached(model: nn.Sequential) -> None:
    x, y = batch(3)
    with autograd_hacks.accumulate(model):
        step(model, x, y)
        squares(model[2](torch.ones(2, 4, dtype=torch.float64)), y[:2]).mean().backward()
    autograd_hacks.compute_grad1(model)
    assert model[0].weight.grad1.shape == (5, 4, 3)
    assert not model[0].weight.grad1[3:].any()
    assert model[2].weight.grad1[3:].any()


def test_a_loss_that_is_zero_at_some_positions_and_samples() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    mask = (torch.arange(5) < torch.tensor([[5], [2], [0], [1]])).double()

    def masked(out: Tensor, mask: Tensor) -> Tensor:
        return (out.pow(2).sum(2) * mask).sum(1) / 8  # the batch's own denominator, held fixed

    with autograd_hacks.add_hooks(model):
        masked(model(x), mask).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, one_backward_per_sample(model, masked, x, mask))


def test_backward_with_a_vector_of_losses(model: nn.Module) -> None:
    x, y = batch()
    for loss_type in ("mean", "sum"):
        model.zero_grad()
        autograd_hacks.backward(squares(model(x), y), loss_type)
        assert_right(model, x, y)
        for p in model.parameters():
            total = p.grad1.mean(0) if loss_type == "mean" else p.grad1.sum(0)
            assert_close(total, p.grad)


def test_backward_with_ignored_targets() -> None:
    model, x = nn.Linear(3, 4).double(), torch.randn(5, 3, dtype=torch.float64)
    y = torch.tensor([0, -100, 2, 3, -100])

    def entropy(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out, y, reduction="none")

    with autograd_hacks.add_hooks(model):
        autograd_hacks.backward(entropy(model(x), y))
        autograd_hacks.compute_grad1(model)
        assert_rows(model, one_backward_per_sample(model, entropy, x, y))


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
