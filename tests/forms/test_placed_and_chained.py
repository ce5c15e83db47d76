"""Forms of slices of a parameter, and of values that follow from one, beside the laws that hold for all."""

import pytest
import torch
from strategies import pull_along
from torch import Tensor
from torch.testing import assert_close

from autograd_hacks.forms import (
    Bags,
    Chained,
    Convolution,
    Dense,
    Form,
    Outer,
    Placed,
    add,
    magnitudes,
    scale,
)


def outer(*shape: int) -> Outer:
    """Of 3 samples and 2 positions."""
    fan_out = int(torch.Size(shape[:-1]).numel())
    return Outer(torch.randn(3, 2, fan_out).double(), torch.randn(3, 2, shape[-1]).double(), torch.Size(shape))


def embedded(start: int, form: Form, entries: int) -> Tensor:
    rows = torch.zeros(form.samples, entries, *form.shape[1:], dtype=torch.float64)
    rows[:, start : start + form.shape[0]] = form.dense()
    return rows


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
    form = Placed({(0, 1): Dense(torch.full((1, 1), 3e30)), (2, 3): Dense(torch.full((1, 1), 4e30))}, torch.Size((4,)))
    assert_close(form.norms(), torch.tensor([5e30]))


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
    assert form.writes_in_place
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
