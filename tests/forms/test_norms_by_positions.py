"""Norms from products between positions, whatever they would cost: right, or written out; and of several parameters."""

from math import inf, isfinite
from unittest import mock

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from rarely import crossed
from strategies import forms
from test_form_laws import shapes
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Convolution, Dense, Form, Lookup, Outer, add, factored
from autograd_hacks.forms.cost import by_products
from autograd_hacks.forms.numerics import SMALL
from autograd_hacks.forms.positions import norms_of_pairs
from autograd_hacks.verbs import matrix

EPS = torch.finfo(torch.float32).eps
for_nothing = mock.patch.object(factored, "by_products", lambda pairs, *_: 0.0 if isfinite(by_products(pairs)) else inf)
small = st.integers(1, 3)


@st.composite
def windowed(draw: st.DrawFn, samples: int, shape: tuple[int, ...]) -> Convolution:
    """A convolution with a weight of some shape."""
    numbers = st.tuples(*[small] * len(shape[2:]))
    stride, dilation, counts, kernel = draw(numbers), draw(numbers), draw(numbers), shape[2:]
    padding = tuple(draw(st.integers(0, k - 1)) for k in kernel)
    sizes = [
        max(1, (c - 1) * s + (k - 1) * d + 1 - 2 * p) for c, s, k, d, p in zip(counts, stride, kernel, dilation, padding)
    ]
    x = torch.randn(samples, shape[1], *sizes, dtype=torch.float64)
    forward = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
    out = forward(x, torch.zeros(shape, dtype=torch.float64), None, stride, padding, dilation)
    return Convolution(x, torch.randn_like(out), torch.Size(shape), stride, padding, dilation, 1)


def pointwise(left: Tensor, right: Tensor) -> Convolution:
    return Convolution(right.mT, left.mT, torch.Size((left.shape[2], right.shape[2], 1)), (1,), (0,), (1,), 1)


def written(form: Form) -> Tensor:
    return torch.linalg.vector_norm(form.dense().flatten(1), dim=1)


@given(st.data(), st.integers(0, 999), st.integers(0, 3))
def test_products_of_windows_are_those_of_pixels(data: st.DataObject, seed: int, samples: int) -> None:
    """A weight used once, and twice with other strides, padding, dilation and sizes."""
    torch.manual_seed(seed)
    shape = (data.draw(small), data.draw(small), *data.draw(st.lists(small, min_size=1, max_size=3)))
    one, other = (data.draw(windowed(samples, shape)) for _ in range(2))
    with for_nothing:
        for form in (one, add([one, other]), add([one, other, one])):
            for max_bytes in (2**20, 4000, 1):
                assert_close(form.norms(max_bytes), written(form))
            single = form.to(torch.float32)
            with mock.patch.object(factored, "looks_free", return_value=False):  # as on a GPU
                for max_bytes in (2**20, 4000, 1):
                    assert_close(single.norms(max_bytes), written(form).float(), rtol=1e-4, atol=1e-5)
    found, exact = norms_of_pairs([one.pair, other.pair], 2**20)
    assert_close(found[exact], written(add([one, other]))[exact])


@given(st.data(), st.integers(0, 4), shapes)
def test_any_form_has_its_norms_by_positions(data: st.DataObject, samples: int, shape: tuple[int, ...]) -> None:
    form = data.draw(forms(samples, shape))
    with for_nothing:
        for max_bytes in (2**20, 100, 1):
            assert_close(form.norms(max_bytes), written(form))


@crossed(decades=[0, 1, 2, 3, 4, 6], positions=[2, 3, 16, 200, 1000], looks=[True, False])
@pytest.mark.parametrize("pattern", ["alternating", "last", "shared", "windows", "two calls"])
def test_positions_that_cancel_keep_their_digits(
    monkeypatch: pytest.MonkeyPatch, positions: int, decades: int, pattern: str, looks: bool
) -> None:
    monkeypatch.setattr(factored, "looks_free", lambda tensor: looks)  # not on a GPU
    torch.manual_seed(positions + decades)
    noise, near = torch.randn(4, positions, 30), 10.0**-decades
    left, right = torch.randn(4, 1, 20).expand(-1, positions, -1), torch.randn(4, 1, 30) + near * noise
    sign = 1 - 2 * (torch.arange(positions)[:, None] % 2)
    if positions % 2:
        sign[-1] = 0
    if pattern == "last":  # one position undoes all others
        left = torch.cat([left[:, :-1], -left[:, :-1].sum(1, keepdim=True)], 1)
    elif pattern == "shared":  # all are of one length, so that errors are alike
        left, right = left * sign, F.normalize(right, dim=2)
    else:
        left = (left + near * torch.randn(4, positions, 20)) * sign
    form: Form = Outer(left, right)
    lengths = (left.norm(dim=2) * right.norm(dim=2)).sum(1)
    if pattern == "windows":
        form = pointwise(left, right)
    elif pattern == "two calls":  # the second undoes the first
        form, lengths = add([pointwise(left, right), pointwise(-left, right * (1 + near * noise))]), 2 * lengths
    expected = written(form.to(torch.float64))
    with for_nothing:
        assert ((form.norms() - expected).abs() <= 1e-4 * expected + 4 * EPS * lengths).all()


def test_many_positions_that_do_not_cancel_are_not_written() -> None:
    torch.manual_seed(0)
    form = Outer(torch.randn(2, 1500, 40), torch.randn(2, 1500, 50))
    with for_nothing, mock.patch.object(Form, "norms", side_effect=AssertionError):
        assert_close(form.norms(), written(form))


@pytest.mark.parametrize("looks", [True, False])
def test_lengths_whose_squares_leave_the_range(monkeypatch: pytest.MonkeyPatch, looks: bool) -> None:
    monkeypatch.setattr(factored, "looks_free", lambda tensor: looks)
    for small_one, large in ((1e-23, 1e18), (1e-21, 1e12), (1e18, 1e-23), (1e25, 1e-20)):
        left, right = torch.ones(1, 2, 8), torch.ones(1, 2, 8)
        left[:, 0], right[:, 0] = small_one, large
        left[:, 1], right[:, 1] = 1.0, small_one * large
        for form in (Outer(left, right), Outer(right, left)):
            with for_nothing:
                assert_close(form.norms(), torch.tensor([16 * small_one * large]), rtol=1e-4, atol=0)


def test_samples_without_gradient_cost_nothing_and_hide_nothing() -> None:
    left, right = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    left[1], left[2], right[2, 0, 0] = 0, 0, torch.inf
    table = Lookup(torch.zeros(3, 4, dtype=torch.long), left, 8)
    with for_nothing:
        assert Outer(left, right).norms().isnan().tolist() == [False, False, True]
        with mock.patch.object(Form, "norms", side_effect=AssertionError):
            assert Outer(left[:2], right[:2]).norms()[1] == add([table, Outer(left, right)])[:2].norms()[1] == 0


# Over several parameters: small rows at once, and each as accurate as by itself


ULPS = 8 * torch.finfo(torch.float32).eps
N = 4


def vector(size: float = 1.0, width: int = 30) -> Dense:
    return Dense(size * torch.randn(N, width))


def product(left: float = 1.0, right: float = 1.0, positions: tuple[int, ...] = ()) -> Outer:
    return Outer(left * torch.randn(N, *positions, 20), right * torch.randn(N, *positions, 30))


def norms_of(found: list[Form], samples: int = N, max_bytes: int = 2**26) -> Tensor:
    return matrix.norms_of({str(number): form for number, form in enumerate(found)}, samples, max_bytes)


def all_written(found: list[Form]) -> Tensor:
    """The norms of rows that are written out in double precision."""
    rows = [form.to(torch.float64).dense().flatten(1) for form in found]
    return torch.linalg.vector_norm(torch.cat(rows, 1), dim=1)


@given(st.data(), st.integers(0, 4), st.sampled_from([1, 1000, 2**26]))
def test_norms_of_any_forms_are_those_of_all_rows_beside_each_other(
    data: st.DataObject, samples: int, max_bytes: int
) -> None:
    found = [data.draw(forms(samples, (2, 3))) for _ in range(data.draw(st.integers(0, 4)))]
    expected = all_written(found) if found else torch.zeros(samples)
    assert_close(norms_of(found, samples, max_bytes), expected)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-20, 1.0, 1e18, 1e25, 1e36])
@pytest.mark.parametrize("others", [0.0, 1e-30, 1.0, 1e25])
def test_small_rows_near_the_ends_of_the_range(size: float, others: float) -> None:
    torch.manual_seed(0)
    found: list[Form] = [vector(size), vector(others), product(others), product(1e-20 * size, 1e20), vector(size, 2 * SMALL)]
    tiny = 40 * torch.finfo(torch.float32).smallest_normal  # below it, numbers have fewer digits
    for some in (found, found[:3], found[:1], found[3:]):
        assert_close(norms_of(some).double(), all_written(some), rtol=ULPS, atol=tiny)


def test_one_row_that_overflows_or_is_no_number_spoils_no_other() -> None:
    found = [vector(), product(), vector(), product(1.0, 1.0, (5,))]
    found[0].values[1], found[1].left[2] = 3e38, torch.nan  # type: ignore[union-attr]  # of these forms
    norms = norms_of(found)
    assert norms.isinf().tolist() == [False, True, False, False]
    assert norms.isnan().tolist() == [False, False, True, False]
    assert_close(norms[[0, 3]].double(), all_written(found)[[0, 3]], rtol=ULPS, atol=0)


@pytest.mark.parametrize("looks", [True, False])
def test_positions_that_cancel_in_one_parameter_of_many(looks: bool) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(N, 1, 60).expand(-1, 2, -1), torch.randn(N, 1, 50) + 1e-5 * torch.randn(N, 2, 50)
    cancels = Outer(left * torch.tensor([1.0, -1.0])[:, None], right)
    found: list[Form] = [product(1e-6, 1.0, (3,)) for _ in range(6)]
    found.insert(3, cancels)
    with mock.patch.multiple(factored, by_products=lambda *_: 0.0, looks_free=lambda _: looks):
        assert_close(norms_of(found).double(), all_written(found), rtol=1e-3, atol=0)


def test_parameters_of_several_dtypes() -> None:
    found: list[Form] = [vector(), vector().to(torch.float64), product().to(torch.bfloat16), vector().to(torch.float16)]
    norms = norms_of(found)
    assert norms.dtype == torch.float64
    assert_close(norms, all_written(found), rtol=1e-5, atol=0)


def test_no_more_memory_than_the_budget_is_joined() -> None:
    found, size = {str(number): vector() for number in range(10)}, N * 30 * 4
    for max_bytes, count in ((8 * 4 * size, 4), (8 * size, 1), (2**26, 10)):
        assert sum(map(len, matrix.small_alike(found, max_bytes))) == count
        assert_close(matrix.norms_of(found, N, max_bytes).double(), all_written([*found.values()]), rtol=ULPS, atol=0)


def test_joint_norms_lead_back_to_all_factors() -> None:
    held = [torch.randn(N, 3, requires_grad=True) for _ in range(6)]
    found = [Dense(held[0]), Outer(held[1], held[2]), Outer(held[3], held[4]), Dense(held[5])]
    rows = torch.cat([form.dense().flatten(1) for form in found], 1)
    w = torch.rand(N)
    slopes = [torch.autograd.grad(w @ x, held) for x in (norms_of(found), torch.linalg.vector_norm(rows, dim=1))]
    for own, expected in zip(*slopes):
        assert_close(own, expected)


@pytest.mark.parametrize("shape", [(N,), (3, N)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_small_parameters(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    double = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.LayerNorm((1, 5)), nn.Linear(5, 5), nn.Linear(5, 2)).double()
    model = nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), double.insert(2, nn.Unflatten(1, (1, 5))).insert(4, nn.Flatten())
    )
    with autograd_hacks.add_hooks(model):
        double(model[:2](torch.randn(N, 3)).double()).square().sum().backward()
        grads = autograd_hacks.per_sample_grads(model, "sum")
        rows, w = grads.dense(), torch.rand(*shape, dtype=dtype)
        sums = grads.weighted_sum(w)
    for name, total in sums.items():
        expected = torch.tensordot(w.double(), rows[name].double(), dims=([-1], [0]))
        assert_close(total.double(), expected, rtol=1e-5, atol=1e-6)
        assert total.dtype == rows[name].dtype
        assert total._base is None or total._base.shape == total.shape, "it shares memory with other parameters"
