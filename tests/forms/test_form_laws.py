"""Laws 3 and 4: every verb equals its definition, whatever way it takes."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quantities import map_of
from strategies import forms
from torch import Tensor
from torch.testing import assert_close

from autograd_hacks.forms import Concatenation, Dense, Form, Outer, RandomMap, SparseMap, add, group, projection, scale
from autograd_hacks.forms.directions import along, directions

shapes = st.lists(st.integers(1, 3), min_size=2, max_size=3).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Form, Form]:
    """Two forms of one shape."""
    torch.manual_seed(draw(st.integers(0, 999)))
    shape = draw(shapes)
    return draw(forms(draw(st.integers(0, 4)), shape)), draw(forms(draw(st.integers(0, 4)), shape))


one = cases().map(lambda pair: pair[0])


def rows_of(form: Form) -> Tensor:
    return form.dense().reshape(form.samples, form.shape.numel())


def written_out(random: RandomMap) -> Tensor:
    """R, (P, dim)."""
    like = torch.zeros(0, dtype=torch.float64)
    columns = [(left[:, :, None] * right[:, None, :]).flatten(1).mT for _, left, right in random.columns(like)]
    return torch.cat(columns, dim=1)


@given(cases(), st.booleans())
def test_every_verb_equals_its_definition(case: tuple[Form, Form], sketches: bool) -> None:
    form, other = case
    v, w = torch.randn(form.shape, dtype=torch.float64), torch.randn(form.samples, dtype=torch.float64)
    many, random = torch.randn(2, form.samples, dtype=torch.float64), RandomMap("p", form.shape, 40, 3)
    sparse = SparseMap("p", form.shape, 12, 3)
    written, others = rows_of(form), rows_of(other)
    with patch.object(projection, "sketches_factors", return_value=sketches):
        sketch = form.project(sparse)
    for got, definition, by_hand in [
        (form.dot(v), Form.dot(form, v), written @ v.flatten()),
        (form.weighted_sum(w), Form.weighted_sum(form, w), (w @ written).view(form.shape)),
        (form.gram(other), Form.gram(form, Dense(other.dense())), written @ others.mT),
        (form.weighted_sum(many), Form.weighted_sum(form, many), (many @ written).view(2, *form.shape)),
        (form.second_moment(w), Form.second_moment(form, w), (w @ written**2).view(form.shape)),
        (form.second_moment(w, v), Form.second_moment(form, w, v), (w @ (written - v.flatten()) ** 2).view(form.shape)),
        (form.reduce(torch.tanh), Form.reduce(form, torch.tanh), written.tanh().sum(0).view(form.shape)),
        (form.project(random), Form.project(form, random), written @ written_out(random)),
        (sketch, Form.project(form, sparse), written @ map_of(sparse)),
        (form.norms(), Form.norms(form), torch.linalg.vector_norm(written, dim=1)),
        (form.matrix(), written, written),
    ]:
        assert_close(got, definition)
        assert_close(got, by_hand)


@given(one)
def test_terms_along_directions_add_up_to_the_rows(form: Form) -> None:
    u, v = at = directions("a.weight", 3, form.shape, torch.double, torch.device("cpu"))
    rows = form.dense().sum(0).detach()
    expected = torch.einsum("ko,oi,ki->k", u, rows.reshape(u.shape[1], v.shape[1]), v)
    with torch.no_grad():
        assert_close(form.terms(u, v).sum(1), expected)
    assert_close((along(rows, at) * v).sum(1), expected)


@pytest.mark.parametrize("max_bytes", [1, 2**26])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (0, 0)])
def test_sums_of_parameters_without_entries(shape: tuple[int, ...], max_bytes: int) -> None:
    torch.manual_seed(0)
    dense = Dense(torch.randn(4, *shape).double())
    outer = [] if len(shape) < 2 else [Outer(torch.randn(4, 2, shape[0]).double(), torch.randn(4, 2, shape[1]).double())]
    for form in (dense, *outer):
        zero = torch.zeros(shape).double()
        for part in (form, Concatenation.of([form, form]), group(form, torch.tensor([0, 1, 1, 3]), 4), form[:0]):
            w = torch.rand(part.samples).double()
            assert_close(part.weighted_sum(w, max_bytes), zero)
            assert_close(part.second_moment(w, None, max_bytes), zero)
            assert_close(part.second_moment(w, zero, max_bytes), zero)
            assert_close(part.reduce(torch.cos, max_bytes), zero)
            assert_close(part.norms(max_bytes), torch.zeros(part.samples).double())
            assert_close(part.gram(part, max_bytes), torch.zeros(part.samples, part.samples).double())
            assert_close(part.dot(zero, max_bytes), torch.zeros(part.samples).double())


@given(one, st.data())
def test_indexing_takes_rows(form: Form, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, form.samples))
    stop = data.draw(st.integers(start, form.samples))
    picked = data.draw(st.lists(st.integers(0, max(0, form.samples - 1)), max_size=4 if form.samples else 0))
    for index in (slice(start, stop), torch.tensor(picked, dtype=torch.long)):
        part = form[index]
        assert_close(rows_of(part), rows_of(form)[index])
        assert_close(part.norms(), form.norms()[index])


@given(one)
def test_dense_fills_the_memory_it_is_given(form: Form) -> None:
    memory = torch.full((form.samples, *form.shape), torch.nan, dtype=torch.float64)
    around = torch.full((form.samples, form.shape[0] + 2, *form.shape[1:]), torch.nan, dtype=torch.float64)
    assert form.dense(memory) is memory
    form.dense(around[:, 1:-1])
    assert_close(memory, form.dense())
    assert_close(around[:, 1:-1], memory)
    assert around[:, [0, -1]].isnan().all()
    form.dense().zero_()
    assert_close(memory, form.dense())  # dense() handed out memory of its own


@given(one)
def test_adding_and_grouping_act_on_rows(form: Form) -> None:
    assert_close(rows_of(add([form, form[:]])), 2 * rows_of(form))
    labels = torch.arange(form.samples) % 2
    expected = torch.zeros(2, form.shape.numel(), dtype=torch.float64).index_add(0, labels, rows_of(form))
    assert_close(rows_of(group(form, labels, 2)), expected)


@given(one)
def test_verbs_can_be_differentiated(form: Form) -> None:
    s = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    scaled = scale(form, s)
    v, w = torch.randn(form.shape, dtype=torch.float64), torch.randn(form.samples, dtype=torch.float64)
    random, sparse = RandomMap("p", form.shape, 5, 0), SparseMap("p", form.shape, 6, 0)
    for quantity, power in [
        (scaled.project(random).sum(), 1),
        (scaled.project(sparse).sum(), 1),
        (scaled.dense().sum(), 1),
        (scaled.dot(v).sum(), 1),
        (scaled.weighted_sum(w).sum(), 1),
        (scaled.gram(scaled).sum(), 2),
    ]:
        if not quantity.requires_grad:  # nothing in it depends on s
            assert quantity == 0
            continue
        (slope,) = torch.autograd.grad(quantity, s, allow_unused=True, materialize_grads=True, retain_graph=True)
        assert_close(slope, power * quantity.detach() / 2)


@given(one, st.floats(-3, 3))
def test_scaling_scales_rows(form: Form, factor: float) -> None:
    assert_close(rows_of(scale(form, factor)), factor * rows_of(form))
    given = form.dense().new_empty(form.samples, *form.shape)
    assert_close(scale(form, factor).dense(given).flatten(1), factor * rows_of(form))
    assert_close(given.flatten(1), factor * rows_of(form))


@given(cases(), st.sampled_from([1, 100, 1000]))
def test_a_small_budget_changes_nothing(case: tuple[Form, Form], max_bytes: int) -> None:
    form, other = case
    v, w = torch.randn(form.shape, dtype=torch.float64), torch.randn(2, form.samples, dtype=torch.float64)
    random, sparse = RandomMap("p", form.shape, 5, 0), SparseMap("p", form.shape, 6, 0)
    assert_close(form.norms(max_bytes), form.norms())
    assert_close(form.gram(other, max_bytes), form.gram(other))
    assert_close(form.dot(v, max_bytes), form.dot(v))
    assert_close(form.weighted_sum(w, max_bytes), form.weighted_sum(w))
    assert_close(form.second_moment(w[0], v, max_bytes), form.second_moment(w[0], v))
    assert_close(form.reduce(torch.tanh, max_bytes), form.reduce(torch.tanh))
    assert_close(form.project(random, max_bytes), form.project(random))
    assert_close(form.project(sparse, max_bytes), form.project(sparse))


@given(cases())
def test_half_precision_is_added_up_in_single(case: tuple[Form, Form]) -> None:
    form, other = case
    half, v, w = form.to(torch.bfloat16), torch.randn(form.shape), torch.randn(form.samples)
    exact, others = (f.to(torch.bfloat16).to(torch.float64) for f in (form, other))
    for got, expected in [
        (half.norms(), exact.norms()),
        (half.dot(v), exact.dot(v.double())),
        (half.weighted_sum(w), exact.weighted_sum(w.double())),
        (half.second_moment(w), exact.second_moment(w.double())),
        (half.gram(other.to(torch.bfloat16)), exact.gram(others)),
    ]:
        assert got.dtype == torch.float32
        assert_close(got, expected.float(), rtol=1e-4, atol=1e-4)


def test_a_sum_of_outer_products_stays_one() -> None:
    one, other = (Outer(torch.randn(3, t, 4), torch.randn(3, t, 5)) for t in (1, 2))
    total = add([one, other, one])
    assert isinstance(total, Outer)
    assert_close(total.dense(), 2 * one.dense() + other.dense())


def test_passes_of_complex_rows_are_not_conjugated_and_factors_have_their_size() -> None:
    left, right, v = (torch.randn(*shape, dtype=torch.complex128) for shape in ((3, 2, 4), (3, 2, 5), (4, 5)))
    form = Concatenation.of([Outer(left, right), Outer(2 * left, right)])
    assert getattr(form, "varying", None) == 0
    assert_close(form.dot(v), rows_of(form) @ v.flatten())
    for own in (scale(form, torch.tensor(2j)), scale(form, torch.tensor([2j, 2, -2j, 2j, -2, 2j]))):
        assert_close(
            (own.norms(), own.second_moment(torch.ones(6))), (2 * form.norms(), 4 * form.second_moment(torch.ones(6)))
        )


def test_norms_overflow_only_where_the_true_norm_does() -> None:
    for factor in (1e30, 1e-30):
        written = Dense(torch.tensor([[3.0, 4.0], [0.0, 0.0]]) * factor)
        assert_close(written.norms(), torch.tensor([5.0, 0.0]) * factor, rtol=1e-6, atol=0)
        outer = Outer(torch.tensor([[[3.0, 4.0]] * 2]) * factor, torch.ones(1, 2, 10))
        assert_close(outer.norms(), torch.tensor([10.0 * 10**0.5]) * factor, rtol=1e-6, atol=0)
    assert Dense(torch.tensor([[3e38, 3e38]])).norms().isinf().all()


def test_a_nan_stays_in_its_row() -> None:
    left = torch.randn(3, 2, 8)
    left[1, 0, 0] = torch.nan
    for form in (Outer(left, torch.randn(3, 2, 8)), Dense(left), Outer(left[:, :1], torch.randn(3, 1, 8))):
        assert form.norms().isnan().tolist() == [False, True, False]
        # Of unequal numbers of rows: sample 0 has the first, sample 1 the others, sample 2 none.
        assert group(form, torch.tensor([0, 1, 1]), 3).norms().isnan().tolist() == [False, True, False]


@given(st.integers(0, 999), st.integers(1, 6))
def test_cancelling_positions_keep_their_digits_in_float32(seed: int, decades: int) -> None:
    """Products over positions would be 100 % off here."""
    torch.manual_seed(seed)
    left, right = torch.randn(4, 1, 64), torch.randn(4, 1, 64)
    nearly = right * (1 + torch.randn(4, 1, 64) * 10.0**-decades)
    form = Outer(torch.cat([left, -left], 1), torch.cat([right, nearly], 1))
    exact = Outer(form.left.double(), form.right.double())
    expected = exact.dense().flatten(1).norm(dim=1)
    # What writing out in float32 can lose, a few times eps of the terms that cancel; the products lose its square root.
    rounding = 4 * torch.finfo(torch.float32).eps * (exact.left.norm(dim=2) * exact.right.norm(dim=2)).sum(1)
    assert ((form.norms() - expected).abs() <= 1e-4 * expected + rounding).all()
    # The same of two samples of one user.
    users = group(Outer(form.left.flatten(0, 1), form.right.flatten(0, 1)), torch.arange(4).repeat_interleave(2), 4)
    lengths = users.gram(users).diagonal().clamp(min=0).sqrt()
    assert ((lengths - expected).abs() <= 1e-4 * expected + rounding).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_times_nothing_are_zeros(dtype: torch.dtype) -> None:
    form = scale(Outer(torch.randn(8, 5, 64), torch.randn(8, 5, 32)).to(dtype), 0.0)
    for out in (torch.full((8, 64, 32), torch.nan, dtype=dtype), None):
        assert not form.dense(out).any()


def test_a_form_is_defined_by_three_methods() -> None:
    """The laws above hold for such a form too, which is drawn among the others."""
    assert Form.__abstractmethods__ == {"dense", "__getitem__", "like"}


def test_outer_refuses_factors_that_do_not_match() -> None:
    with pytest.raises(ValueError, match=r"\(3, 2, 4\).*\(3, 5, 4\)"):
        Outer(torch.zeros(3, 2, 4), torch.zeros(3, 5, 4))


def test_grouping_refuses_labels_that_are_no_samples() -> None:
    with pytest.raises(ValueError, match="one label for each of 3 rows"):
        group(Dense(torch.zeros(3, 1)), torch.tensor([0, 1]), 2)
    with pytest.raises(ValueError, match=r"\[0, 2\]; expected in \[0, 2\)"):
        group(Dense(torch.zeros(3, 1)), torch.tensor([0, 1, 2]), 2)
