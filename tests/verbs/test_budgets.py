"""Projections, and the memory that the verbs of a whole model take."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from leaks import at_most
from nets import Language
from steps import stepped
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Dense, Outer, RandomMap


@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 40), st.integers(0, 2))
def test_one_projection_for_every_form(seed: int, samples: int, dim: int, number: int) -> None:
    torch.manual_seed(seed)
    outer = Outer(torch.randn(samples, 2, 5).double(), torch.randn(samples, 2, 6).double())
    random = RandomMap("p", outer.shape, dim, number)
    expected = Dense(outer.dense()).project(random)
    for form in (outer, outer.group(torch.arange(samples), samples), outer[:] + outer.scaled(0.0), outer.scaled(1.0)):
        assert_close(form.project(random), expected)


def test_one_projection_for_every_way_to_the_same_model() -> None:
    """By rule, by replay, tied, wrapped, in batches of any size."""

    class Bare(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = layer.weight, layer.bias

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight, self.bias)

    layer, x = nn.Linear(6, 5).double(), torch.randn(4, 6).double()
    wrapped = nn.Module()
    wrapped.module, wrapped.forward = layer, lambda x: layer(x)  # type: ignore[method-assign]  # as DataParallel names it
    expected = stepped(layer, x).project(16, seed=3)
    autograd_hacks.remove_hooks(layer)
    assert_close(stepped(Bare(layer), x).project(16, seed=3), expected)
    assert_close(stepped(wrapped, x).project(16, seed=3), expected)
    assert_close(stepped(wrapped, x[1:3]).project(16, seed=3), expected[1:3] / 1)
    assert not torch.allclose(stepped(wrapped, x).project(16, seed=4), expected)


@pytest.mark.parametrize("dim", [64, 1024])
def test_projections_keep_inner_products(dim: int) -> None:
    torch.manual_seed(0)
    lengths, products = [], []
    for seed in range(60):
        left, right = F.normalize(torch.randn(2, 7).double(), dim=1), F.normalize(torch.randn(2, 9).double(), dim=1)
        outer = Outer(left, right)
        rows = outer.project(RandomMap("p", outer.shape, dim, seed))
        lengths.append(rows[0] @ rows[0])
        products.append(rows[0] @ rows[1] - outer.gram(outer)[0, 1])
    spread = (8 / dim) ** 0.5
    assert abs(torch.stack(lengths).mean() - 1) < 4 * spread / 60**0.5
    assert torch.stack(lengths).std() < 1.3 * spread  # of 60 draws; the bound is for the true one
    assert abs(torch.stack(products).mean()) < 4 * spread / 60**0.5


# Memory


def test_a_tied_embedding_of_fifty_thousand_words_in_a_few_bytes() -> None:
    model, x, budget = Language(50_000, 64), torch.randint(50_000, (4, 3)), 2**26
    row = 50_000 * 64 * 4  # 12.8 MB, and 51 for all
    grads = stepped(model, x)
    w = torch.rand(4)
    with at_most(budget):
        norms = grads.norms()
    with at_most(budget):
        gram = grads.gram()
    with at_most(row + 2**20):
        total = grads.weighted_sum(w)["embed.weight"]
    with at_most(2**20):
        along = grads.dot({"embed.weight": total})
    assert_close(gram.diagonal().sqrt(), norms)
    assert_close(gram @ w, along)
    with at_most(2 * row + 3 * budget):
        autograd_hacks.clip_grad1_norm_(model, 1.0)


def test_groups_of_many_samples_keep_to_the_budget() -> None:
    grads = stepped(nn.Linear(256, 256), torch.randn(200, 4, 256)).group(torch.zeros(200, dtype=torch.long))
    activations, budget = 2 * 200 * 4 * 256 * 4, 2**18
    for verb in (grads.norms, grads.second_moment):
        with at_most(2 * activations + 4 * budget + 256 * 257 * 4):
            verb(budget=budget)


def wide() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 100)), torch.randn(128, 20, 200)


def images() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(8, 32, 3), nn.Tanh(), nn.Conv2d(32, 16, 3)), torch.randn(800, 8, 12, 12)


@pytest.mark.parametrize("build", [wide, images])
@pytest.mark.parametrize("budget", [2**23, 2**24])
def test_no_verb_takes_more_than_its_budget(build: Callable[[], tuple[nn.Module, Tensor]], budget: int) -> None:
    model, x = build()
    grads = stepped(model, x)
    numbers, samples = sum(4 * form.shape.numel() for form in grads.values()), len(x)
    small = 2**19 + 2**22  # vectors of N, norms of each parameter; and the windows that a convolution cuts at a time
    assert samples * numbers > budget + small  # which J written out would take
    v, w = {name: torch.randn(form.shape) for name, form in grads.items()}, torch.rand(3, samples)
    for what, result, verb in [
        ("norms", 0, lambda: grads.norms(budget=budget)),
        ("dot", 0, lambda: grads.dot(v, budget)),
        ("gram", 4 * samples**2, lambda: grads.gram(budget=budget)),
        ("weighted_sum", numbers, lambda: grads.weighted_sum(w[0], budget)),
        ("weighted_sum", 3 * numbers, lambda: grads.weighted_sum(w, budget)),
        ("second_moment", numbers, lambda: grads.second_moment(budget=budget)),
        ("variance", 2 * numbers, lambda: grads.variance(budget)),
        ("project", 0, lambda: grads.project(8, budget=budget)),
    ]:
        with at_most(budget + result + small, what):
            verb()
