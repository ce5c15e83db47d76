"""Projections: one for all forms and ways to a model, which keeps inner products."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import one_backward_per_sample
from quantities import map_of
from rarely import crossed
from steps import stepped
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.forms import Dense, Lookup, Outer, RandomMap, SparseMap, projection, scale


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

    layer, x = nn.Linear(6, 5).double(), torch.randn(4, 6).double()
    wrapped = nn.Module()
    wrapped.module, wrapped.forward = layer, lambda x: layer(x)  # type: ignore[method-assign]  # as DataParallel names it
    expected = stepped(layer, x).project(16, seed=3)
    autograd_hacks.remove_hooks(layer)
    bare = Bare(lambda m, x: F.linear(x, m.weight, m.bias), weight=layer.weight, bias=layer.bias)
    assert_close(stepped(bare, x).project(16, seed=3), expected)
    assert_close(stepped(wrapped, x).project(16, seed=3), expected)
    assert_close(stepped(wrapped, x[1:3]).project(16, seed=3), expected[1:3] / 1)
    assert not torch.allclose(stepped(wrapped, x).project(16, seed=4), expected)


@pytest.mark.parametrize("kind", [RandomMap, SparseMap])
def test_maps_that_are_kept_are_none_of_a_modes(kind: type[RandomMap | SparseMap]) -> None:
    random, form = kind("w", torch.Size((3, 4)), 8, 5), Dense(torch.randn(9, 3, 4))
    for mode in (FakeTensorMode(), torch.inference_mode()):
        with mode:
            Dense(torch.randn(9, 3, 4)).project(random)
    Dense(torch.randn(9, 3, 4, requires_grad=True)).project(random).sum().backward()
    assert_close(form.project(random), torch.cat([form[n : n + 1].project(random) for n in range(9)]))


def test_how_many_signs_are_drawn_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    form, random = Outer(torch.randn(3, 4, 50), torch.randn(3, 4, 60)), RandomMap("p", torch.Size((50, 60)), 200, 1)
    expected = form.project(random)
    monkeypatch.setattr(projection, "_BYTES_KEPT", 0)
    monkeypatch.setattr(projection, "_BYTES_AT_A_TIME", 1)
    assert torch.equal(form.project(random), expected)


def test_a_form_has_no_name_to_draw_a_map_by() -> None:
    form = Outer(torch.randn(2, 3), torch.randn(2, 4))
    for own in (form, Dense(form.dense()), scale(form, 2.0), Lookup(torch.zeros(2, 1).long(), torch.randn(2, 1, 3), 5)):
        with pytest.raises(TypeError, match=r"project was given 8; .*per_sample_grads\(model, only=name\)\.project\(dim\)"):
            own.project(8)  # type: ignore[arg-type]


# Sparse projections.


def test_hashes_are_what_they_were() -> None:
    """Rows that were stored once are compared with rows of later versions, and of other devices."""
    own = SparseMap("0.weight", torch.Size((3, 4)), 16, 7).hashes(torch.device("cpu"))
    assert (own.row_place.tolist(), own.column_place.tolist()) == ([4, 1, 15], [7, 12, 12, 2])
    assert (own.row_sign.tolist(), own.column_sign.tolist()) == ([-1, -1, -1], [1, 1, 1, -1])


def test_other_names_seeds_shapes_and_dimensions_have_other_maps() -> None:
    shape = torch.Size((6, 5))
    one = SparseMap("p", shape, 8, 0)
    others = SparseMap("q", shape, 8, 0), SparseMap("p", shape, 8, 1), SparseMap("p", torch.Size((5, 6)), 8, 0)
    for other in others:
        assert not torch.equal(map_of(one), map_of(other))


@crossed(rank=[1, 12])
def test_lengths_and_products_are_kept_as_far_as_is_said(rank: int) -> None:
    """The standard deviation of a unit gradient's squared length: √6 / √dim for rank one, √2 / √dim for orthogonal ones."""
    torch.manual_seed(0)
    dim, seeds, both = 256, 400, torch.randn(2, 12, 12, dtype=torch.float64)
    u, v = both[:, 0].sign(), both[:, 1].sign()
    both = torch.linalg.qr(both).Q / 12**0.5 if rank == 12 else torch.einsum("no,ni->noi", u, v) / 12
    rows = torch.stack([Dense(both).project(SparseMap("p", both.shape[1:], dim, seed)) for seed in range(seeds)])
    products = torch.einsum("snk,smk->snm", rows, rows)
    spread = ((6 if rank == 1 else 2 + 4 / 12) / dim) ** 0.5
    assert_close(products.mean(0), torch.einsum("noi,moi->nm", both, both), rtol=0, atol=4 * spread / seeds**0.5)
    assert 0.75 * spread < products[:, 0, 0].std() < 1.25 * spread


def test_a_nan_stays_in_its_row_and_half_precision_is_added_up_in_single() -> None:
    left, right = torch.randn(3, 40), torch.randn(3, 50)
    random = SparseMap("p", torch.Size((40, 50)), 16, 0)
    assert random.takes_factors((left[:, None], right[:, None]))
    expected = Outer(left, right).project(random)
    assert Outer(left.half(), right.half()).project(random).dtype == torch.float32
    left[1, 2] = torch.nan
    found = Outer(left, right).project(random)
    assert found[1].isnan().any()
    assert_close(found[::2], expected[::2])


# Whole models.


def net() -> nn.Module:
    torch.manual_seed(1)
    convolution = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 10), nn.LayerNorm(10))
    return convolution.double()


def test_a_models_rows_are_projected_as_autograds_are() -> None:
    model, x, y = net(), torch.randn(5, 1, 6, 6, dtype=torch.float64), torch.randint(10, (5,))
    losses = lambda out, y: F.cross_entropy(out, y, reduction="none")  # noqa: E731
    rows = one_backward_per_sample(model, losses, x, y)
    expected = sum(own.flatten(1) @ map_of(SparseMap(name, own.shape[1:], 32, 7)) for name, own in rows.items())
    autograd_hacks.add_hooks(model)
    F.cross_entropy(model(x), y).backward()
    grads = autograd_hacks.per_sample_grads(model)
    assert_close(grads.project(32, seed=7, kind="sjlt"), expected)
    assert_close(grads.select(slice(1, 3)).project(32, seed=7, kind="sjlt"), expected[1:3])
    assert not torch.allclose(grads.project(32, seed=7), expected)
    with autograd_hacks.during_backward(model, "norms", project=32, seed=7, kind="sjlt") as streamed:
        F.cross_entropy(model(x), y).backward()
    assert_close(streamed.projection, expected)
