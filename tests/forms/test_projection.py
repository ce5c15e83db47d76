"""Projections: one for all forms and ways to a model, which keeps inner products."""

from math import prod

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from oracle import one_backward_per_sample
from quantities import map_of
from rarely import crossed
from steps import stepped
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.forms import (
    Bags,
    Concatenation,
    Convolution,
    Dense,
    Form,
    Grouping,
    Lookup,
    Outer,
    Placed,
    RandomMap,
    Scaled,
    SparseMap,
    Zero,
    add,
    group,
    projection,
    scale,
)


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


# Sparse projections: each form's way equals rows times the map written out, and lengths are kept as far as is said


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
        "passes": Concatenation.of([outer, outer.varied(0, normal(n, 3, 4))]),
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


@crossed(rank=[1, 12], entries=[1, 4])
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


def test_maps_that_there_are_not_are_refused() -> None:
    model = net()
    grads = stepped(model, torch.randn(2, 1, 6, 6, dtype=torch.float64))
    for options, words in [
        ({"dim": 0}, "dim=0; expected a whole number"),
        ({"dim": 8, "kind": "gauss"}, "expected one of 'signs', 'sjlt'"),
    ]:
        with pytest.raises(ValueError, match=words):
            grads.project(**options)
