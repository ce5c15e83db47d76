"""Forms of slices, of values that follow from a parameter, of maps and directions, beside the laws that hold for all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import forms, maps, pull_along
from torch import Tensor
from torch.testing import assert_close

from autograd_hacks.forms import (
    Bags,
    Chained,
    Convolution,
    Dense,
    Elementwise,
    Form,
    InTurn,
    LinearMap,
    Lookup,
    Mapped,
    Outer,
    Placed,
    Sides,
    add,
    magnitudes,
    mapped,
    scale,
)
from autograd_hacks.forms.directions import _numbers, along, directions
from autograd_hacks.forms.terms import of_experts


def outer(*shape: int) -> Outer:
    """Of 3 samples and 2 positions."""
    fan_out = int(torch.Size(shape[:-1]).numel())
    return Outer(torch.randn(3, 2, fan_out).double(), torch.randn(3, 2, shape[-1]).double(), torch.Size(shape))


def embedded(start: int, form: Form, entries: int) -> Tensor:
    rows = torch.zeros(form.samples, entries, *form.shape[1:], dtype=torch.float64)
    return rows.slice_scatter(form.dense(), 1, start, start + form.shape[0])


def test_slices_that_calls_read_become_one_form() -> None:
    """W[e] of each expert, one of them twice."""
    shape, experts = torch.Size((5, 4, 2)), [0, 3, 1, 3]
    forms = [outer(1, 4, 2) for _ in experts]
    total = add([Placed({(e, e + 1): form}, shape) for e, form in zip(experts, forms)])
    assert isinstance(total, Placed)
    assert list(total.entries) == [(0, 1), (1, 2), (3, 4)]
    assert all(type(part) is Outer for part in total.parts)
    assert_close(total.dense(), sum(embedded(e, form, 5) for e, form in zip(experts, forms)))
    assert total.cuts_well


def test_norms_of_slices_overflow_only_where_the_true_norm_does() -> None:
    parts = {(at, at + 1): Dense(torch.full((1, 1), size)) for at, size in ((0, 3e30), (2, 4e30))}
    assert_close(Placed(parts, torch.Size((4,))).norms(), torch.tensor([5e30]))


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {(0, 2): outer(2, 2), (1, 3): outer(2, 2)},
        {(0, 3): outer(2, 2)},
        {(3, 5): outer(2, 2)},
        {(0, 2): outer(2, 2), (2, 4): outer(2, 2)[:1]},
    ],
)
def test_placed_refuses_slices_that_do_not_fit(entries: dict[tuple[int, int], Form]) -> None:
    with pytest.raises(ValueError, match=r"a parameter of shape \(4, 2\); expected at least one form"):
        Placed(entries, torch.Size((4, 2)))


def test_magnitudes_go_inside() -> None:
    one, w = outer(2, 2), torch.ones(3).double()
    placed = Placed({(1, 3): one}, torch.Size((4, 2)))
    assert_close(magnitudes(placed).weighted_sum(w)[1:3], magnitudes(one).weighted_sum(w))
    theta = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    chained = Chained(outer(4, 2), pull_along(-theta, theta), theta.shape, theta)
    assert_close(magnitudes(chained).weighted_sum(w), chained.dense().abs().sum(0))


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_written_into_slices(groups: int) -> None:
    x, g = torch.randn(3, 4, 3).double(), torch.randn(3, 2, 1).double()  # so short that it goes by windows
    form = Convolution(x, g, torch.Size((2, 4 // groups, 3)), [1], [0], [1], groups)
    memory = torch.full((3, 5, 4 // groups, 3), torch.nan).double()
    Placed({(1, 3): form}, memory.shape[1:]).dense(memory)
    assert_close(memory, embedded(1, form, 5))


def one_by_one(v: Tensor, theta: Tensor, g: Tensor) -> Tensor:
    return torch.stack([torch.autograd.grad(v, theta, own, retain_graph=True)[0] for own in g])


@pytest.mark.parametrize("factor", [2, 2j])
def test_rows_of_values_that_differ_in_being_complex(factor: complex) -> None:
    theta = torch.randn(4, 2, dtype=torch.float32, requires_grad=True)
    v = torch.view_as_complex(theta * 3) * factor
    g = torch.randn(3, 4, dtype=torch.complex64)
    form, w = Chained(Dense(g), pull_along(v, theta), theta.shape, theta), torch.randn(3)
    expected = one_by_one(v, theta, g)
    assert_close(form.dense(), expected)
    assert_close(form.to(torch.float64).dense(), expected.double())
    assert_close(form.weighted_sum(w), torch.tensordot(w, expected, 1))
    theta = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    v, g = torch.view_as_real(theta * factor), torch.randn(3, 4, 2)
    form = Chained(Dense(g), pull_along(v, theta), theta.shape, theta)
    assert_close(form.to(torch.complex128).dense(), one_by_one(v, theta, g).to(torch.complex128))


def test_an_error_of_the_way_back_is_not_hidden() -> None:
    theta = torch.randn(4, 2, requires_grad=True)
    v = theta.sin()
    v.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        Chained(Dense(torch.randn(3, 4, 2)), pull_along(v, theta), theta.shape, theta).dense()


def test_rows_are_memory_of_their_own() -> None:
    theta, values = torch.randn(4, requires_grad=True), torch.randn(3, 2, 2)
    for v in (theta.view(2, 2), theta.sum().expand(2, 2)):
        form = Chained(Dense(values), pull_along(v, theta), theta.shape, theta)
        before = values.clone()
        form.dense().mul_(0)
        assert_close(values, before)


def test_placed_bags_without_samples_can_be_differentiated() -> None:
    none = torch.zeros(0, dtype=torch.long)
    bags = Bags(torch.zeros(0, 1), torch.zeros(0), none, none, 1)
    form = Placed({(0, 1): add([Dense(torch.zeros(0, 1, 1)), bags])}, torch.Size((1, 1)))
    factor = torch.tensor(2.0, requires_grad=True)
    assert scale(form, factor).weighted_sum(torch.zeros(0)) == 0


# Rows that a linear map has been applied to


shapes = st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple)


@given(st.data())
def test_the_rows_are_those_of_the_map(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    inner, by = data.draw(maps(data.draw(shapes)))
    form: Form = data.draw(forms(data.draw(st.integers(0, 3)), inner))
    rows = by(form.dense(), form.shape)
    assert_close(mapped(form, by).dense(), rows)
    assert rows.shape[1:] == by.shape_of(form.shape)
    v = torch.randn(rows.shape[1:], dtype=torch.float64)
    along = (form.dense() * by.transposed(v, form.shape)).flatten(1).sum(1)
    assert_close(along, (rows * v).flatten(1).sum(1))


def test_products_stay_products() -> None:
    outer = Outer(torch.randn(3, 4, 6).double(), torch.randn(3, 4, 7).double())
    lookup = Lookup(torch.randint(6, (3, 4)), torch.randn(3, 4, 7).double(), 6)
    x, g = torch.randn(3, 2, 9, 8).double(), torch.randn(3, 6, 4, 5).double()
    conv = Convolution(x, g, torch.Size((6, 2, 3, 2)), (2, 2), (0, 1), (1, 1), 1)
    for form in (outer, lookup, conv, scale(outer, 3.0)):
        fan_out, fan_in = form.shape[0], form.shape[1:].numel()
        left, right = torch.randn(5, fan_out).double(), torch.randn(fan_in, 2).double()  # of another size than its matrix
        for by in (Sides(left, right), Sides(left), Sides(None, right), Sides(left[0], right), Sides(left[0])):
            found = mapped(form, by)
            assert not any(isinstance(leaf, Mapped) for leaf in found.leaves()), by
            assert_close(found.dense(), by(form.dense(), form.shape))


def test_half_precision_is_mapped_in_single() -> None:
    form = Outer(torch.randn(3, 4, 6).bfloat16(), torch.randn(3, 4, 7).bfloat16())
    assert mapped(form, Sides(torch.randn(6, 6), None)).like.dtype == torch.float32


@pytest.mark.parametrize(
    "by",
    [
        Elementwise(torch.ones(4, 3)),
        Sides(torch.ones(2, 4), None),
        Sides(None, torch.ones(5)),
        Sides(torch.ones(()), None),
        InTurn([Sides(torch.ones(2, 3), None), Sides(torch.ones(2, 3), None)]),
    ],
)
def test_a_map_of_another_shape_is_refused(by: LinearMap) -> None:
    with pytest.raises(ValueError, match="expected"):
        mapped(Outer(torch.ones(2, 1, 3), torch.ones(2, 1, 4)), by)


# Sums of rows along random directions


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double)


def convolution(groups: int, out: int, stride: int) -> Form:
    shape, x = torch.Size((out, 4 // groups, 3, 2)), draw(5, 4, 9, 8)
    g = draw(*torch.conv2d(x, draw(*shape), None, stride, 1, 1, groups).shape)
    return Convolution(x, g, shape, (stride, stride), (1, 1), (1, 1), groups)


FORMS = {f"{k} groups, stride {s}": convolution(k, out, s) for k, out in ((1, 6), (2, 6), (4, 8)) for s in (1, 2)} | {
    "experts": of_experts(
        draw(8, 3), draw(8, 4), torch.tensor([2, 2, 7, 8]), torch.tensor([0, 1, 2, 0, 0, 1, 2, 2]), samples=3
    )
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_terms_add_up_to_the_rows(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    u, v = directions("a.weight", 3, form.shape, torch.double, torch.device("cpu"))
    expected = torch.einsum("ko,oi,ki->k", u, (rows := form.dense()).sum(0).flatten(1), v)
    monkeypatch.setattr("autograd_hacks.forms.outer.CALL", 0)  # positions that pad are left out
    assert_close(form.dense(torch.full_like(rows, torch.nan), 2.0), 2 * rows)
    monkeypatch.delattr(Form, "terms")  # nothing is written out
    torch.testing.assert_close(form.terms(u, v).sum(1), expected)


def test_directions_are_the_same_again_and_others_elsewhere() -> None:
    kind = torch.float, torch.device("cpu")
    (u, v), shape = directions("a", 1, torch.Size((5, 7)), *kind), torch.Size((5, 7))
    directions("b", 1, torch.Size((100_000, 7)), *kind)  # memory of other parameters
    assert all(map(torch.equal, (u, v), directions("a", 1, shape, *kind)))
    assert not torch.equal(u, directions("a", 2, shape, *kind)[0])
    assert not torch.equal(u, directions("b", 1, shape, *kind)[0])
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.double)  # what a user sets changes no number
    try:
        directions.cache_clear()
        _numbers.cache_clear()
        assert torch.equal(u.double(), directions("a", 1, shape, torch.double, kind[1])[0])
    finally:
        torch.set_default_dtype(before)
    state = torch.get_rng_state()
    directions("c", 1, torch.Size((3_000_000,)), *kind)
    assert torch.equal(state, torch.get_rng_state())


def test_a_sparse_gradient_is_that_of_its_entries() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 4, 1]]), draw(3, 4), (9, 4), check_invariants=True)
    at = directions("a", 3, sparse.shape, torch.double, torch.device("cpu"))
    torch.testing.assert_close(along(sparse, at), along(sparse.to_dense(), at))
