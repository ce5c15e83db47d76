"""Norms over several parameters: small rows at once, and each as accurate as by itself."""

from unittest import mock

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from strategies import forms
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Dense, Form, Outer, factored
from autograd_hacks.forms.numerics import SMALL
from autograd_hacks.verbs import matrix

ULPS = 8 * torch.finfo(torch.float32).eps
N = 4


def vector(size: float = 1.0, width: int = 30) -> Dense:
    return Dense(size * torch.randn(N, width))


def product(left: float = 1.0, right: float = 1.0, positions: tuple[int, ...] = ()) -> Outer:
    return Outer(left * torch.randn(N, *positions, 20), right * torch.randn(N, *positions, 30))


def norms_of(found: list[Form], samples: int = N, max_bytes: int = 2**26) -> Tensor:
    return matrix.norms_of({str(number): form for number, form in enumerate(found)}, samples, max_bytes)


def written(found: list[Form]) -> Tensor:
    """The norms of rows that are written out in double precision."""
    rows = [form.to(torch.float64).dense().flatten(1) for form in found]
    return torch.linalg.vector_norm(torch.cat(rows, 1), dim=1)


@given(st.data(), st.integers(0, 4), st.sampled_from([1, 1000, 2**26]))
def test_norms_of_any_forms_are_those_of_all_rows_beside_each_other(
    data: st.DataObject, samples: int, max_bytes: int
) -> None:
    found = [data.draw(forms(samples, (2, 3))) for _ in range(data.draw(st.integers(0, 4)))]
    expected = written(found) if found else torch.zeros(samples)
    assert_close(norms_of(found, samples, max_bytes), expected)


@pytest.mark.parametrize("size", [1e-42, 1e-30, 1e-20, 1.0, 1e18, 1e25, 1e36])
@pytest.mark.parametrize("others", [0.0, 1e-30, 1.0, 1e25])
def test_small_rows_near_the_ends_of_the_range(size: float, others: float) -> None:
    torch.manual_seed(0)
    found: list[Form] = [vector(size), vector(others), product(others), product(1e-20 * size, 1e20), vector(size, 2 * SMALL)]
    tiny = 40 * torch.finfo(torch.float32).smallest_normal  # below it, numbers have fewer digits
    for some in (found, found[:3], found[:1], found[3:]):
        assert_close(norms_of(some).double(), written(some), rtol=ULPS, atol=tiny)


def test_one_row_that_overflows_or_is_no_number_spoils_no_other() -> None:
    found = [vector(), product(), vector(), product(1.0, 1.0, (5,))]
    found[0].values[1], found[1].left[2] = 3e38, torch.nan  # type: ignore[union-attr]  # of these forms
    norms = norms_of(found)
    assert norms.isinf().tolist() == [False, True, False, False]
    assert norms.isnan().tolist() == [False, False, True, False]
    assert_close(norms[[0, 3]].double(), written(found)[[0, 3]], rtol=ULPS, atol=0)


@pytest.mark.parametrize("looks", [True, False])
def test_positions_that_cancel_in_one_parameter_of_many(looks: bool) -> None:
    torch.manual_seed(0)
    left, right = torch.randn(N, 1, 60).expand(-1, 2, -1), torch.randn(N, 1, 50) + 1e-5 * torch.randn(N, 2, 50)
    cancels = Outer(left * torch.tensor([1.0, -1.0])[:, None], right)
    found: list[Form] = [product(1e-6, 1.0, (3,)) for _ in range(6)]
    found.insert(3, cancels)
    with mock.patch.multiple(factored, by_products=lambda *_: 0.0, looks_free=lambda _: looks):
        assert_close(norms_of(found).double(), written(found), rtol=1e-3, atol=0)


def test_parameters_of_several_dtypes() -> None:
    found: list[Form] = [vector(), vector().to(torch.float64), product().to(torch.bfloat16), vector().to(torch.float16)]
    norms = norms_of(found)
    assert norms.dtype == torch.float64
    assert_close(norms, written(found), rtol=1e-5, atol=0)


def test_no_more_memory_than_the_budget_is_joined() -> None:
    found, size = {str(number): vector() for number in range(10)}, N * 30 * 4
    for max_bytes, count in ((8 * 4 * size, 4), (8 * size, 0), (2**26, 10)):
        assert sum(map(len, matrix.small_alike(found, max_bytes))) == count
        assert_close(matrix.norms_of(found, N, max_bytes).double(), written([*found.values()]), rtol=ULPS, atol=0)


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
