"""Rows that are differentiated themselves: penalties on their norms, sums with weights that learn, a step within a step."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
from derivatives import step
from oracle import assert_same, one_loss_at_a_time, squares
from rarely import rarely
from test_derivatives import found, made
from torch import Tensor
from torch.func import functional_call

import autograd_hacks
from autograd_hacks.errors import HigherOrderError, SamplesMixed

SLOW = ("norms", "norms by channel", "attention", "tied", "recurrent")
"""What only tox -e full differentiates."""

Rows = dict[str, Tensor]


def by_autograd(model: nn.Module, x: Tensor) -> list[Rows]:
    """Each sample's gradient, in a graph."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    each = [torch.autograd.grad(squares(model(x[n : n + 1])).sum(), list(parameters.values()), create_graph=True,
                                allow_unused=True) for n in range(len(x))]  # fmt: skip
    return [{n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(parameters.items(), own)} for own in each]


def penalty_of(rows: list[Rows]) -> Tensor:
    """The mean square of the rows' norms, less what they should be."""
    norms = torch.stack([sum(g.square().sum() for g in own.values()) for own in rows])  # type: ignore[misc]  # of tensors
    return (norms.sqrt() - 1).square()


@pytest.mark.parametrize("name", ["mlp", "convolutions", "routed", "normed", "scale", *rarely(*SLOW)])
def test_a_penalty_on_the_norms(name: str) -> None:
    """Its gradients, and its own rows."""
    model, x = made(name)
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            parameters = [p for p in model.parameters() if p.requires_grad]
            torch.autograd.grad(squares(model(x)).sum(), parameters, create_graph=True, allow_unused=True)
            norms = autograd_hacks.per_sample_grads(model, "sum").norms()
            penalty = (norms - 1).square().sum()
            penalty.backward()
            mine = {key: p.grad for key, p in model.named_parameters() if p.requires_grad}
            # Of what is made of a weight before it meets the batch, the penalty's own rows aren't known.
            with pytest.raises(HigherOrderError, match="original0") if name == "normed" else nullcontext():
                autograd_hacks.compute_grad1(model, "sum")
            with autograd_hacks.pause_hooks():
                rows = one_loss_at_a_time(model, lambda: penalty_of(by_autograd(model, x)))
            assert_same(mine, {key: None if own is None else own.sum(0) for key, own in rows.items()})
            if name != "normed":
                assert_same(found(model), rows)


def test_weights_that_learn_through_several_steps() -> None:
    """As in learning to reweight: the weights' gradients come through the updates."""
    model, x = made("mlp")
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    w = torch.linspace(0.5, 1, len(x), dtype=torch.float64, requires_grad=True)

    def outer(update: Callable[[Tensor], Rows]) -> Tensor:
        values = {name: p - 0.1 * g for (name, p), g in zip(start.items(), update(w).values())}
        return squares(functional_call(model, values, (x + 1,))).sum()

    def ours(w: Tensor) -> Rows:
        torch.autograd.grad(squares(model(x)).sum(), list(model.parameters()), create_graph=True)
        return autograd_hacks.per_sample_grads(model, "sum").weighted_sum(w)

    def theirs(w: Tensor) -> Rows:
        rows = by_autograd(model, x)
        return {name: sum(w[n] * own[name] for n, own in enumerate(rows)) for name in rows[0]}  # type: ignore[misc]  # of tensors

    with autograd_hacks.add_hooks(model):
        (mine,) = torch.autograd.grad(outer(ours), w)
    (expected,) = torch.autograd.grad(outer(theirs), w)
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("name", ["mlp", "convolutions", "norms"])
def test_a_step_within_a_step(name: str) -> None:
    """MAML: the loss after a step of gradient descent, by the parameters before it."""
    model, x = made(name)
    with autograd_hacks.add_hooks(model):
        torch.autograd.grad(squares(model(x)).sum(), list(model.parameters()), create_graph=True)
        grads = autograd_hacks.per_sample_grads(model, "sum").weighted_sum(torch.ones(len(x)).double())
        values = {key: p - 0.05 * grads[key] for key, p in model.named_parameters()}
        with autograd_hacks.pause_hooks():
            loss = squares(functional_call(model, values, (x - 1,))).sum()
            mine = torch.autograd.grad(loss, list(model.parameters()))
    parameters = dict(model.named_parameters())
    inner = torch.autograd.grad(squares(model(x)).sum(), list(parameters.values()), create_graph=True)
    values = {key: p - 0.05 * g for (key, p), g in zip(parameters.items(), inner)}
    expected = torch.autograd.grad(squares(functional_call(model, values, (x - 1,))).sum(), list(parameters.values()))
    torch.testing.assert_close(mine, expected)


def test_what_is_written_out_has_no_graph() -> None:
    model, x = made("mlp")
    with autograd_hacks.add_hooks(model):
        torch.autograd.grad(squares(model(x)).sum(), list(model.parameters()), create_graph=True)
        autograd_hacks.compute_grad1(model, "sum")
        assert not any(p.grad1.requires_grad for p in model.parameters())
        assert autograd_hacks.per_sample_grads(model, "sum").norms().requires_grad


@pytest.mark.parametrize("name", ["mlp", "norms", "attention"])
def test_a_loss_of_the_batchs_own_gradient_is_refused(name: str) -> None:
    """It is a sum over the samples, of which none has a part of its own, though rows would add up."""
    model, x = made(name)
    with autograd_hacks.add_hooks(model):
        grads = torch.autograd.grad(squares(model(x)).sum(), list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in grads).backward()  # type: ignore[union-attr]  # of tensors
        with pytest.raises(SamplesMixed, match="of the whole batch"):
            autograd_hacks.compute_grad1(model, "sum")
        step(model, lambda net, x: squares(net(x)), x)
        autograd_hacks.compute_grad1(model, "sum")
