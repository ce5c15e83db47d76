"""Rows that a linear map has been applied to equal the map of the rows written out, and keep what is cheap about them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import forms, maps
from torch.testing import assert_close

from autograd_hacks.forms import (
    Convolution,
    Elementwise,
    Form,
    InTurn,
    LinearMap,
    Lookup,
    Mapped,
    Outer,
    Sides,
    mapped,
    scale,
)

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
    outer = Outer(torch.randn(3, 4, 6).bfloat16(), torch.randn(3, 4, 7).bfloat16())
    found = mapped(outer, Sides(torch.randn(6, 6), None))
    assert found.like.dtype == torch.float32


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
