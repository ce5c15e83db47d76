"""With ``param_grad=False``: who gets ordinary gradients all the same, and which ways to them are refused."""

import pytest
import torch
import torch.nn as nn
from derivatives import gradient_penalty, rows_of, step
from oracle import assert_rows, squares
from steps import assert_right
from torch import Tensor
from torch.func import functional_call
from torch.testing import assert_close
from twin import of_squares

import autograd_hacks
from autograd_hacks.errors import ParamGradSkipped, UnseenGradient


def test_gradient_past_the_owner_is_noticed_in_every_step() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for step in range(5):
            loss = squares(model(x)).mean()
            (loss + model[0].weight.square().sum() if step % 2 else loss).backward()
            if step % 2:
                with pytest.raises(UnseenGradient, match=r"0\.weight"):
                    autograd_hacks.compute_grad1(model)
            else:
                autograd_hacks.compute_grad1(model)


def test_gradients_of_parameters_by_autograd_grad_are_refused() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4, requires_grad=True)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            with pytest.raises(ParamGradSkipped, match=r"weighted_sum"):
                torch.autograd.grad(squares(model(x)).mean(), list(model.parameters()))
            (by_input,) = torch.autograd.grad(model(x).square().sum(), x)
            assert_close(by_input, 2 * model(x) @ model[1].weight @ model[0].weight)
            squares(model(x)).mean().backward()
            assert_right(model, x.detach())


def test_functional_call_with_other_tensors() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            others = {name: p * 2 for name, p in model.named_parameters()}
            squares(functional_call(model, others, (x,))).mean().backward()
            assert all(p.grad is not None for p in model.parameters())
            with pytest.raises(UnseenGradient):
                autograd_hacks.compute_grad1(model)
            model.zero_grad()
            squares(functional_call(model, dict(model.named_parameters()), (x,))).mean().backward()
            assert_right(model, x)


@pytest.mark.parametrize("begins", [False, True])
def test_a_penalty_on_input_gradients_in_every_second_step(begins: bool) -> None:
    """Of the first, nothing is known of the passes to come; of the third, plain ones alone came before."""
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double(), torch.randn(3, 4).double()
    with autograd_hacks.add_hooks(model, param_grad=False):
        for number in range(5):
            loss = gradient_penalty if (number % 2 == 0 if begins else number in (2, 4)) else of_squares
            step(model, loss, x)
            assert all(p.grad is None for p in model.parameters())
            autograd_hacks.compute_grad1(model, "sum")
            with autograd_hacks.pause_hooks():
                assert_rows(model, rows_of(model, loss, x))


def test_functional_call_with_leaves_fills_theirs() -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            squares(model(x)).mean().backward()
            others = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
            squares(functional_call(model, others, (x,))).mean().backward()
            assert all(p.grad is not None for p in others.values())
            own = torch.autograd.grad(squares(functional_call(model, others, (x,))).mean(), list(others.values()))
            assert all(torch.equal(p.grad, g) for p, g in zip(others.values(), own))


def test_hooks_of_the_users_on_parameters_see_gradients() -> None:
    model, x, seen = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), torch.randn(3, 4), list[Tensor]()
    model[0].weight.register_hook(seen.append)
    model[1].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            assert_close(model[0].weight.grad1.mean(0), seen[-1] if seen[-1].shape == (5, 4) else seen[-2])
            assert model[0].weight.grad is None
    assert len(seen) == 6


@pytest.mark.parametrize("other_hooked", [False, True])
def test_a_layer_that_another_model_trains_keeps_its_gradient(other_hooked: bool) -> None:
    shared = nn.Linear(3, 3)
    skipped, other = nn.Sequential(shared, nn.Linear(3, 2)), nn.Sequential(shared, nn.Linear(3, 2))
    autograd_hacks.add_hooks(skipped, param_grad=False)
    if other_hooked:
        autograd_hacks.add_hooks(other)
    x = torch.randn(4, 3)
    for _ in range(2):
        for run, has_gradient in ((other, True), (shared, True), (skipped, False)):
            shared.weight.grad = None
            run(x).sum().backward()
            assert (shared.weight.grad is not None) == has_gradient
        autograd_hacks.compute_grad1(skipped, "sum")
