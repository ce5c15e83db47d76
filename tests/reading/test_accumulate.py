"""Micro-batches: one backward pass after another, whose rows are appended."""

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from steps import assert_right, batch, mlp, raises, step
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded


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


def test_accumulate_fills_in_zeros_for_parts_that_were_not_reached(model: nn.Sequential) -> None:
    x, y = batch(3)
    with autograd_hacks.accumulate(model):
        step(model, x, y)
        squares(model[2](torch.ones(2, 4, dtype=torch.float64)), y[:2]).mean().backward()
    autograd_hacks.compute_grad1(model)
    assert model[0].weight.grad1.shape == (5, 4, 3)
    assert not model[0].weight.grad1[3:].any()
    assert model[2].weight.grad1[3:].any()


def test_micro_batches_of_one_whose_gradient_a_parameter_takes_as_its_own() -> None:
    """A class token gets a view of the gradient at its use for its .grad, and the next pass adds to that memory."""
    model = Bare(
        lambda m, x: m.layer(torch.cat([m.token.expand(len(x), -1, -1), x], 1).tanh()),
        token=torch.randn(1, 1, 3),
        layer=nn.Linear(3, 2),
    ).double()
    x = torch.randn(4, 5, 3).double()
    expected = one_backward_per_sample(model, squares, x)
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.accumulate(model):
            for part in x.split(1):
                squares(model(part)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert_rows(model, expected)


def test_micro_batches_with_two_losses_each_in_any_order(model: nn.Module) -> None:
    (x, y), (z, t) = batch(4), batch(3, 1)
    with autograd_hacks.accumulate(model):
        one, other = squares(model(x), y), squares(model(z), t)
        autograd_hacks.backward(one, retain_graph=True)
        autograd_hacks.backward(other)
        autograd_hacks.backward(one)
    autograd_hacks.compute_grad1(model)
    twice = torch.cat([torch.full((4, 1), 2.0), torch.ones(3, 1)]).double()
    with autograd_hacks.pause_hooks():
        expected = one_backward_per_sample(
            model,
            lambda out, y: squares(out, y[:, :2]) * y[:, 2],
            torch.cat([x, z]),
            torch.cat([torch.cat([y, t]), twice], 1),
        )
    assert_rows(model, expected)


def test_started_twice_stopped_without_a_start_or_without_hooks(model: nn.Module) -> None:
    rows = autograd_hacks.accumulate(model)
    with pytest.raises(RuntimeError, match=r"not accumulating.*start\(\)"):
        rows.stop()
    rows.start()
    step(model, *batch())
    for other in (rows, autograd_hacks.accumulate(model)):
        with pytest.raises(RuntimeError, match=r"accumulating already.*stop\(\)"):
            other.start()
        with pytest.raises(RuntimeError, match="accumulating already"), other:
            pass
    rows.stop()
    assert_right(model, *batch())
    with pytest.raises(RuntimeError, match="not accumulating"):
        rows.stop()
    for act in ("start", "stop"):
        with pytest.raises(NothingRecorded, match="has no hooks"):
            getattr(autograd_hacks.accumulate(mlp()), act)()


def test_stopped_inside_its_block_and_left_by_an_error(model: nn.Module) -> None:
    with autograd_hacks.accumulate(model) as rows:
        step(model, *batch())
        rows.stop()
        assert_right(model, *batch())
    with pytest.raises(KeyError), autograd_hacks.accumulate(model):
        raise KeyError(step(model, *batch()))
    with raises(model, NothingRecorded, "accumulate(model): KeyError left the context"):
        autograd_hacks.compute_grad1(model)
    with autograd_hacks.accumulate(model):  # the one that failed is over
        step(model, *batch())
    model.zero_grad()
    assert_right(model, *batch())
