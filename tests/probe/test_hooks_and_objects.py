"""Users' own hooks, and objects that hold something, are as if no trace and no second run had been."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import BareVector
from oracle import squares
from steps import assert_right, check_batches
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import autograd_hacks


def run_again() -> nn.Sequential:
    """A part of it is run again for its rows."""
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(BareVector(), nn.Tanh()), nn.Linear(4, 2))


HOOKS: dict[str, Callable[[nn.Module], object]] = {
    "output": lambda inner: inner.register_forward_hook(lambda layer, args, out: 3 * out),
    "input": lambda inner: inner.register_forward_pre_hook(lambda layer, args: (args[0] + 1,)),
    "in place": lambda inner: inner.register_forward_hook(lambda layer, args, out: [None, out.mul_(2)][0]),
    "gradient": lambda inner: inner.register_forward_hook(
        lambda layer, args, out: out.register_hook(lambda g: 2 * g) and None
    ),
    "pruned": lambda inner: prune.l1_unstructured(inner, "weight", 3),
    "spectral": lambda inner: spectral_norm(inner).eval(),
}


@pytest.mark.parametrize("how", HOOKS)
def test_hooks_that_change_something_are_a_part_of_the_model(how: str) -> None:
    model = run_again().double()
    HOOKS[how](model[1][0].inside)
    check_batches(model, *(torch.randn(3, 4).double() for _ in range(2)))


@pytest.mark.parametrize("make", [
    lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), nn.Tanh()),
])  # fmt: skip
def test_parametrize_cached_around_the_step(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2)).double()
    x = torch.randn(3, 4).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            with parametrize.cached():
                squares(model(x)).mean().backward()
                plain = dict(parametrize._cache)
                autograd_hacks.compute_grad1(model)
                autograd_hacks.verify(model)
                assert plain.keys() == parametrize._cache.keys()
                assert all(parametrize._cache[key] is value for key, value in plain.items())
            assert all(p.grad is not None for p in model.parameters())
            assert_right(model, x)
            for p in model.parameters():
                p.data.sub_(0.1 * p.grad)
