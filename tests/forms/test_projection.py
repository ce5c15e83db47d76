"""Projections: one for all forms and ways to a model, which keeps inner products."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from steps import stepped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Dense, Outer, RandomMap, Scaled, add, group, projection, scale


@given(st.integers(0, 99), st.integers(1, 4), st.integers(1, 40), st.integers(0, 2))
def test_one_projection_for_every_form(seed: int, samples: int, dim: int, number: int) -> None:
    torch.manual_seed(seed)
    outer = Outer(torch.randn(samples, 2, 5).double(), torch.randn(samples, 2, 6).double())
    random = RandomMap("p", outer.shape, dim, number)
    expected = Dense(outer.dense()).project(random)
    grouped = group(outer, torch.arange(samples), samples)
    for form in (outer, grouped, add([outer[:], scale(outer, 0.0)]), Scaled(outer, 1.0)):
        assert_close(form.project(random), expected)


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


def test_maps_that_are_kept_are_none_of_a_modes() -> None:
    random, form = RandomMap("w", torch.Size((3, 4)), 8, 5), Dense(torch.randn(9, 3, 4))
    for mode in (FakeTensorMode(), torch.inference_mode()):
        with mode:
            Dense(torch.randn(9, 3, 4)).project(random)
    Dense(torch.randn(9, 3, 4, requires_grad=True)).project(random).sum().backward()
    assert_close(form.project(random), torch.cat([form[n : n + 1].project(random) for n in range(9)]))


@pytest.mark.parametrize("shape", [(3, 4), (4, 3)])
def test_projections_by_signs_can_be_differentiated(shape: tuple[int, int]) -> None:
    rows, random = torch.randn(2, *shape, dtype=torch.float64, requires_grad=True), RandomMap("w", torch.Size(shape), 40, 5)
    (grad,) = torch.autograd.grad(Dense(rows).project(random).sum(), rows)
    eye = torch.eye(12, dtype=torch.float64).view(12, *shape)
    assert_close(grad[0].flatten(), Dense(eye).project(random).sum(1))


def test_how_many_signs_are_drawn_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    form, random = Outer(torch.randn(3, 4, 50), torch.randn(3, 4, 60)), RandomMap("p", torch.Size((50, 60)), 200, 1)
    expected = form.project(random)
    monkeypatch.setattr(projection, "_FEW", 0)
    monkeypatch.setattr(projection, "_BYTES", 1)
    assert torch.equal(form.project(random), expected)


@pytest.mark.parametrize("made", ["Outer", "Dense", "Scaled", "Lookup"])
def test_a_form_has_no_name_to_draw_a_map_by(made: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    with autograd_hacks.add_hooks(model):
        model(torch.tensor([[0, 1], [2, 3]])).sum().backward()
        grads = autograd_hacks.per_sample_grads(model, "sum")
    forms = {"Outer": grads["1.weight"], "Dense": grads["1.bias"], "Lookup": grads["0.weight"]}
    form = forms.get(made, autograd_hacks.forms.scale(grads["1.weight"], 2.0))
    assert made in str(form)
    with pytest.raises(TypeError, match=r"project was given 8; .*grads\.project\(dim, per_parameter=True\)\[name\]"):
        form.project(8)  # type: ignore[arg-type]
