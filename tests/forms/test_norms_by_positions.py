"""Norms from products between positions, whatever they would cost: right, or written out."""

from math import inf, isfinite
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rarely import crossed
from strategies import forms
from test_form_laws import shapes
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from autograd_hacks.forms import Convolution, Form, Lookup, Outer, add, factored
from autograd_hacks.forms.cost import by_products
from autograd_hacks.forms.positions import norms_of_pairs

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
