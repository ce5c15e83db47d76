"""Rows written while a backward pass runs."""

import pytest
import torch
import torch.nn as nn
from nets import MODELS
from oracle import assert_rows, one_loss_at_a_time, squares
from steps import at_most
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import SamplesMixed


@pytest.mark.filterwarnings("ignore:None of the inputs")
@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("loss_type", ["mean", "sum"])
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_each_loss(name: str, loss_type: str, param_grad: bool) -> None:
    build, batch = MODELS[name]
    model = build().double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(4):
            x = batch()
            model.zero_grad()
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda x=x: squares(model(x)))
                length = torch.stack([rows.flatten(1).norm(dim=1) for rows in expected.values() if rows is not None]).norm(
                    dim=0
                )
            model.zero_grad()
            with autograd_hacks.during_backward(model, "grad1", "norms", loss_type=loss_type) as found:
                getattr(squares(model(x)), loss_type)().backward()
            assert_rows(model, expected)
            assert_close(found.norms, length)
            for p in model.parameters():
                if param_grad and p.grad is not None:
                    assert_close(p.grad, getattr(p.grad1, loss_type)(0))


@pytest.mark.slow
def test_no_more_than_the_rows_and_one_layer_is_held() -> None:
    """Of 20 layers at 64 positions, whose inputs and gradients have as many bytes as the rows do."""
    layers, width, positions, samples = 20, 64, 64, 16
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    x = torch.randn(samples, positions, width)
    rows, one = samples * layers * width**2 * 4, samples * positions * width * 4

    def loss() -> torch.Tensor:
        return squares(model(x)).sum()

    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            loss().backward()
            autograd_hacks.compute_grad1(model, "sum")
        for p in model.parameters():
            del p.grad1
        of_step = loss()
        with at_most(rows + 5 * one), autograd_hacks.during_backward(model, "grad1", loss_type="sum"):
            of_step.backward()
        for p in model.parameters():
            del p.grad1
        of_step = loss()

        def afterwards() -> None:
            with at_most(rows + 5 * one):
                of_step.backward()
                autograd_hacks.compute_grad1(model, "sum")

        with pytest.raises(AssertionError, match="held"):
            afterwards()


def test_memory_of_rows_is_used_again() -> None:
    model, x = nn.Linear(128, 128), torch.randn(8, 128)
    with autograd_hacks.add_hooks(model):
        found = set()
        for _ in range(4):
            with autograd_hacks.during_backward(model, "grad1"):
                squares(model(x)).mean().backward()
            found.add(model.weight.grad1.data_ptr())
    assert len(found) == 1


def test_parameters_that_no_loss_reaches_have_none_and_frozen_ones_nothing() -> None:
    model = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)})
    model["used"].bias.requires_grad_(False)
    model.forward = lambda x: model["used"](x)  # type: ignore[method-assign]
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.during_backward(model, "grad1"):
            squares(model(torch.randn(5, 4))).mean().backward()
        assert model["used"].weight.grad1.shape == (5, 3, 4)
        assert not hasattr(model["used"].bias, "grad1")
        assert model["unused"].weight.grad1 is None


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.mixes = nn.Linear(4, 4), nn.Linear(4, 3), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(h - h.mean(0) if self.mixes else h)


def test_a_pass_that_fails_leaves_no_rows() -> None:
    model, x = Mixes(), torch.randn(5, 4)
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.during_backward(model, "grad1"):
            squares(model(x)).mean().backward()
        assert model.last.weight.grad1 is not None
        model.mixes = True
        with pytest.raises(SamplesMixed), autograd_hacks.during_backward(model, "grad1"):
            squares(model(x)).mean().backward()
        assert not any(hasattr(p, "grad1") for p in model.parameters())
