"""Sums of functions of rows against a loop over samples, and what is refused as no elementwise function."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import perceptron
from rarely import crossed
from steps import rows_of, stepped
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks

Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "sign": torch.sign,
    "abs": torch.abs,
    "clamp": lambda g: g.clamp(-0.1, 0.2),
    "square": torch.square,
    "itself": lambda g: g,
    "a constant": torch.ones_like,
    "tanh": lambda g: torch.tanh(3 * g),
    "how many": lambda g: g > 0.05,
    "numbers that aren't finite": torch.log,
}


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 3, 2), nn.Flatten(), nn.Linear(9, 2))


def looped(model: nn.Module, x: Tensor, f: Function, ids: Tensor | None = None) -> dict[str, Tensor]:
    """f of each row, or of the sum of each group's, one after the other."""
    total = {}
    for name, rows in rows_of(model, x).items():
        parts = rows if ids is None else [rows[ids == own].sum(0) for own in ids.unique()]
        total[name] = sum(f(part).double() for part in parts)
    return total


@pytest.mark.usefixtures("double")
@crossed(max_bytes=[1, 2**26], what=FUNCTIONS)
def test_sums_are_those_of_a_loop(what: str, max_bytes: int) -> None:
    model, x, f = convolutions(), torch.randn(7, 2, 5), FUNCTIONS[what]
    expected = looped(model, x, f)
    found = stepped(model, x).reduce(f, max_bytes)
    assert list(found) == list(expected)
    assert_close(found, expected, equal_nan=True)  # double


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("max_bytes", [1, 2**26])
def test_groups_are_added_up_first(max_bytes: int) -> None:
    model, x, ids = convolutions(), torch.randn(7, 2, 5), torch.tensor([4, 1, 1, 4, 9, 1, 4])
    expected = looped(model, x, torch.sign, ids)
    grads = stepped(model, x)
    assert_close(grads.group(ids).reduce(torch.sign, max_bytes), expected)
    each = grads.reduce(torch.sign)
    assert any(not torch.equal(each[name], expected[name]) for name in expected)


def test_of_no_samples_the_sum_is_zero() -> None:
    none = stepped(perceptron(), torch.randn(6, 4)).select(slice(0))
    for name, total in none.reduce(torch.cos).items():
        assert total.shape == none[name].shape
        assert not total.any()
    (empty,) = none.group(torch.zeros(0, dtype=torch.long), 2).select(slice(1)).reduce(torch.cos)["0.bias"].unique()
    assert empty == 1  # a group without samples has a row of zeros


@pytest.mark.usefixtures("double")
def test_complex_parameters() -> None:
    model, x = nn.Linear(3, 2, dtype=torch.complex128), torch.randn(5, 3, dtype=torch.complex128)
    rows, grads = rows_of(model, x), stepped(model, x)
    for f in (torch.abs, torch.sgn):
        assert_close(grads.reduce(f), {name: f(own).sum(0) for name, own in rows.items()})


def test_half_precision_is_added_up_in_single() -> None:
    model, x = nn.Linear(3, 2).bfloat16(), torch.rand(300, 3).bfloat16() + 1
    autograd_hacks.add_hooks(model)
    model(x).sum(1).mean().backward()
    found = autograd_hacks.per_sample_grads(model).reduce(torch.sign)
    assert_close(
        found, {"weight": torch.full((2, 3), 300.0), "bias": torch.full((2,), 300.0)}
    )  # which bfloat16 doesn't have


def test_sums_can_be_differentiated() -> None:
    torch.manual_seed(0)
    grads = stepped(perceptron(), torch.randn(6, 4))
    w = torch.rand(6, requires_grad=True)
    sum(total.sum() for total in grads.scaled(w).reduce(torch.abs).values()).backward()
    assert_close(w.grad, sum(own.flatten(1).abs().sum(1) for own in grads.dense().values()))


MIXING: dict[str, Function] = {
    "rows of length one": lambda g: g / g.norm(dim=1, keepdim=True),
    "about the mean": lambda g: g - g.mean(0),
    "over the largest": lambda g: g / g.abs().max(),
    "ranks": lambda g: g.flatten().argsort().argsort().view_as(g).to(g.dtype),
    "softmax": lambda g: g.softmax(1),
    "the largest of each row": lambda g: g == g.amax(1, keepdim=True),
    "noise": lambda g: g + torch.randn_like(g),
}


@crossed(max_bytes=[1, 2**26], what=MIXING)
def test_what_mixes_numbers_is_refused(what: str, max_bytes: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"changes with the other numbers .* elementwise one"):
        stepped(convolutions(), torch.randn(7, 2, 5)).reduce(MIXING[what], max_bytes)


def test_a_function_that_overwrites_rows_is_refused_and_changes_none() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    kept = grads.dense()
    with pytest.raises(ValueError, match="overwrote"):
        grads.reduce(lambda g: g.clamp_(-1, 1))
    assert_close(grads.dense(), kept, rtol=0, atol=0)
