"""Sparse projections: each form's way equals rows times the map written out, and lengths are kept as far as is said."""

from math import prod

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from quantities import map_of
from steps import stepped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import (
    Bags,
    Convolution,
    Dense,
    Form,
    Grouping,
    Lookup,
    Outer,
    Passes,
    Placed,
    Scaled,
    SparseMap,
    Zero,
    add,
    projection,
    scale,
)


def forms(n: int) -> dict[str, Form]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    outer = Outer(normal(n, 3, 4), normal(n, 3, 6))
    index, bags = torch.randint(7, (n, 3)), torch.arange(n).repeat_interleave(2)
    rest = (1, 1), (1, 0), (1, 1)
    convolution = Convolution(normal(n, 2, 5, 5), normal(n, 4, 5, 3), torch.Size((4, 2, 3, 3)), *rest, 1)
    grouped = Convolution(normal(n, 4, 5, 5), normal(n, 4, 5, 3), torch.Size((4, 2, 3, 3)), *rest, 2)
    return {
        "vector": Dense(normal(n, 5)),
        "number": Dense(normal(n)),
        "dense": Dense(normal(n, 3, 2, 4)),
        "outer": outer,
        "one position": Outer(normal(n, 4), normal(n, 6), torch.Size((4, 2, 3))),
        "another shape": Outer(normal(n, 3, 4), normal(n, 3, 6), torch.Size((2, 2, 6))),
        "lookup": Lookup(index, normal(n, 3, 2), 7),
        "bags": Bags(normal(n, 3), normal(2 * n), torch.randint(5, (2 * n,)), bags, 5),
        "convolution": convolution,
        "grouped": grouped,
        "sum": add([Scaled(outer, 2.0), Lookup(index % 4, normal(n, 3, 6), 4)]),
        "weighted": scale(outer, normal(n)),
        "grouping": Grouping(outer, torch.arange(n) // 2, n),
        "passes": Passes.of([outer, outer.varied(0, normal(n, 3, 4))]),
        "placed": Placed({(1, 5): outer, (6, 7): Dense(normal(n, 1, 6))}, torch.Size((8, 6))),
        "zero": Zero(n, torch.Size((2, 3)), normal(1)),
        "many samples": outer[torch.zeros(9, dtype=torch.long)],
    }


@pytest.mark.parametrize("by_factors", [True, False, None])
@pytest.mark.parametrize(("dim", "entries"), [(1, 1), (8, 1), (9, 3), (10, 2)])
def test_each_form_is_projected_as_its_rows_times_the_map(
    dim: int, entries: int, by_factors: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_factors is not None:
        monkeypatch.setattr(projection, "sketches_factors", lambda *_: by_factors)
    torch.manual_seed(dim)
    for name, form in forms(4).items():
        for budget in (2**20, 300):
            random = SparseMap("p", form.shape, dim, 3, entries)
            expected = form.dense().reshape(form.samples, prod(form.shape)) @ map_of(random)
            assert_close(form.project(random, budget), expected, msg=lambda text, name=name: f"{name}: {text}")


@given(st.integers(0, 99), st.integers(1, 5), st.integers(1, 4))
def test_the_map_of_a_part_is_a_part_of_the_map(seed: int, rows: int, entries: int) -> None:
    whole = SparseMap("p", torch.Size((6, 5)), 4 * entries, seed, entries)
    part = SparseMap("p", torch.Size((rows, 5)), 4 * entries, seed, entries, (whole.shape, 6 - rows))
    assert_close(map_of(part), map_of(whole).view(6, 5, -1)[6 - rows :].flatten(0, 1))
    assert_close(map_of(whole.part(slice(2, 4))), map_of(whole).view(6, 5, -1)[2:4].flatten(0, 1))
    assert_close(map_of(whole.part(slice(1, 6)).part(slice(2, 4))), map_of(whole).view(6, 5, -1)[3:5].flatten(0, 1))


def test_hashes_are_what_they_were() -> None:
    """Rows that were stored once are compared with rows of later versions, and of other devices."""
    first, second = SparseMap("0.weight", torch.Size((3, 4)), 16, 7, 2).hashes(torch.device("cpu"))
    assert (first.row_place.tolist(), first.column_place.tolist()) == ([6, 0, 5], [7, 5, 0, 7])
    assert (first.row_sign.tolist(), first.column_sign.tolist()) == ([1, -1, -1], [1, -1, 1, -1])
    assert (second.row_place.tolist(), second.column_place.tolist()) == ([5, 6, 4], [2, 0, 3, 0])
    assert (second.row_sign.tolist(), second.column_sign.tolist()) == ([-1, -1, 1], [1, 1, 1, -1])


def test_other_names_seeds_shapes_and_dimensions_have_other_maps() -> None:
    shape = torch.Size((6, 5))
    one = SparseMap("p", shape, 8, 0)
    others = SparseMap("q", shape, 8, 0), SparseMap("p", shape, 8, 1), SparseMap("p", torch.Size((5, 6)), 8, 0)
    for other in (*others, SparseMap("p", shape, 8, 0, 2)):
        assert not torch.equal(map_of(one), map_of(other))


@pytest.mark.parametrize("entries", [1, 4])
@pytest.mark.parametrize("rank", [1, 12])
def test_lengths_and_products_are_kept_as_far_as_is_said(rank: int, entries: int) -> None:
    """The standard deviation of a unit gradient's squared length: √6 / √dim for rank one, √2 / √dim for orthogonal ones."""
    torch.manual_seed(0)
    dim, seeds, both = 256, 400, torch.randn(2, 12, 12, dtype=torch.float64)
    if rank == 12:
        both = torch.linalg.qr(both).Q / 12**0.5
    else:
        both = torch.einsum("no,ni->noi", both[:, 0].sign(), both[:, 1].sign()) / 12
    rows = torch.stack([Dense(both).project(SparseMap("p", both.shape[1:], dim, seed, entries)) for seed in range(seeds)])
    products = torch.einsum("snk,smk->snm", rows, rows)
    spread = ((6 if rank == 1 else 2 + 4 / 12) / dim) ** 0.5
    assert_close(products.mean(0), torch.einsum("noi,moi->nm", both, both), rtol=0, atol=4 * spread / seeds**0.5)
    assert 0.75 * spread < products[:, 0, 0].std() < 1.25 * spread


def test_projections_can_be_differentiated(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = (torch.randn(3, 2, size, dtype=torch.float64, requires_grad=True) for size in (4, 5))
    random, w = SparseMap("p", torch.Size((4, 5)), 6, 0, 2), torch.randn(3, 6, dtype=torch.float64)
    expected = ((left.mT @ right).flatten(1) @ map_of(random) * w).sum()
    for by_factors in (True, False):
        monkeypatch.setattr(projection, "sketches_factors", lambda *_, by=by_factors: by)
        found = (Outer(left, right).project(random) * w).sum()
        assert_close(
            torch.autograd.grad(found, (left, right)), torch.autograd.grad(expected, (left, right), retain_graph=True)
        )


def test_maps_that_are_kept_are_none_of_a_modes() -> None:
    random, values = SparseMap("mode", torch.Size((3, 4)), 8, 5), torch.randn(2, 3, 4, dtype=torch.float64)
    for mode in (FakeTensorMode(), torch.inference_mode()):
        with mode:
            Dense(torch.randn(9, 3, 4)).project(random)
    Dense(values.clone().requires_grad_()).project(random).sum().backward()
    assert_close(Dense(values).project(random), values.flatten(1) @ map_of(random))


def test_a_nan_stays_in_its_row_and_half_precision_is_added_up_in_single() -> None:
    left, right = torch.randn(3, 40), torch.randn(3, 50)
    random = SparseMap("p", torch.Size((40, 50)), 16, 0)
    assert random.takes_factors(torch.device("cpu"), 1)
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


@pytest.mark.parametrize("entries", [1, 4])
def test_a_models_rows_are_projected_as_autograds_are(entries: int) -> None:
    model, x, y = net(), torch.randn(5, 1, 6, 6, dtype=torch.float64), torch.randint(10, (5,))
    expected = torch.zeros(5, 32, dtype=torch.float64)
    for n in range(5):
        each = torch.autograd.grad(F.cross_entropy(model(x[n : n + 1]), y[n : n + 1]), list(model.parameters()))
        for (name, p), g in zip(model.named_parameters(), each):
            expected[n] += g.flatten() @ map_of(SparseMap(name, p.shape, 32, 7, entries))
    autograd_hacks.add_hooks(model)
    F.cross_entropy(model(x), y).backward()
    grads = autograd_hacks.per_sample_grads(model)
    assert_close(grads.project(32, seed=7, kind="sjlt", entries=entries), expected)
    assert_close(grads.select(slice(1, 3)).project(32, seed=7, kind="sjlt", entries=entries), expected[1:3])
    assert not torch.allclose(grads.project(32, seed=7), expected)
    with autograd_hacks.during_backward(model, "norms", project=32, seed=7, kind="sjlt", entries=entries) as streamed:
        F.cross_entropy(model(x), y).backward()
    assert_close(streamed.projection, expected)


def test_maps_that_there_are_not_are_refused() -> None:
    model = net()
    grads = stepped(model, torch.randn(2, 1, 6, 6, dtype=torch.float64))
    for options, words in [
        ({"dim": 0}, "dim=0; expected a whole number"),
        ({"dim": 8, "kind": "gauss"}, "expected one of 'signs', 'sjlt'"),
        ({"dim": 8, "kind": "sjlt", "entries": 0}, "entries=0"),
        ({"dim": 8, "kind": "sjlt", "entries": 3}, "expected a multiple of entries, for example 9"),
        ({"dim": 8, "entries": 2}, "entries is for kind='sjlt'"),
    ]:
        with pytest.raises(ValueError, match=words):
            grads.project(**options)
    with pytest.raises(TypeError, match=r"entries=1\.5"):
        grads.project(8, kind="sjlt", entries=1.5)
    inside = autograd_hacks.during_backward(model, "norms", project=8, kind="sjlt", entries=3)
    with pytest.raises(ValueError, match="during_backward: project=8 with entries=3"), inside:
        pass
