"""Rows that are written piece by piece go into the same memory; and what steps cost."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock
from unittest.mock import patch

import device_costs
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autograd_hacks.forms import Concatenation, Convolution, Dense, Form, Outer, add, convolution, cost, scale


def factors(lead_back: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, 3, size, dtype=torch.float64, requires_grad=lead_back) for size in (4, 5)]


def test_rows_that_a_form_owns_are_left_alone() -> None:
    own = torch.randn(6, 4, 5, dtype=torch.float64)
    before = own.clone()
    for form in (Dense(own), add([Dense(own), Outer(*factors())]), scale(Outer(*factors()), 3.0)):
        expected = form.dense().flatten(1)
        for max_bytes in (100, 700, 2000, 2**20):
            assert_close(Form.norms(form, max_bytes), expected.norm(dim=1))
            assert_close(
                Form.second_moment(form, expected[:, 0], own[0], max_bytes).flatten(),
                expected[:, 0] @ (expected - own[0].flatten()) ** 2,
            )
    assert torch.equal(own, before)


@pytest.mark.parametrize("verb", ["dot", "weighted_sum", "second_moment", "norms"])
@pytest.mark.parametrize("lead_back", [False, True])
def test_verbs_in_pieces_lead_back_to_factors_weights_and_directions(verb: str, lead_back: bool) -> None:
    held = factors(lead_back)
    v, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 5), (6,)))

    def slopes(max_bytes: int) -> tuple[Tensor, ...]:
        form: Form = Outer(*held)
        got = {
            "dot": lambda: Form.dot(form, v, max_bytes),
            "weighted_sum": lambda: Form.weighted_sum(form, w, max_bytes),
            "second_moment": lambda: Form.second_moment(form, w, v, max_bytes),
            "norms": lambda: Form.norms(form, max_bytes) * w,
        }[verb]()
        leaves = [x for x in (*held, v, w) if x.requires_grad]
        return torch.autograd.grad(got.pow(3).sum(), leaves, allow_unused=True, materialize_grads=True)

    for small, large in zip(slopes(700), slopes(2**20)):
        assert_close(small, large)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made inside."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(found):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, x.numel())
        return found


def convolutions(lead_back: bool = False) -> list[Convolution]:
    """Two calls of one layer, whose rows take 13 MB."""
    torch.manual_seed(0)
    shape, rest = torch.Size((64, 64, 3, 3)), ((1, 1), (1, 1), (1, 1), 1)
    made = [torch.randn(90, 64, 4, 4, requires_grad=lead_back) for _ in range(4)]
    return [Convolution(x, g, shape, *rest) for x, g in zip(made[::2], made[1::2])]


@patch.object(convolution, "_WINDOWS", 2**18)  # for 28 samples
def test_rows_of_a_weight_used_twice_are_added_up_some_at_a_time() -> None:
    one, two = convolutions()
    expected, rows = (one.dense() + two.dense()) * 3, torch.empty(90, 64, 64, 3, 3)
    with Largest() as made:
        add([one, two]).dense(rows, 3.0)
    assert made.numbers <= rows.numel() / 2
    assert_close(rows, expected, rtol=1e-4, atol=1e-4)


@patch.object(convolution, "_WINDOWS", 2**18)  # for 28 samples
def test_such_rows_lead_back_to_factors() -> None:
    pairs = convolutions(lead_back=True), convolutions(lead_back=True)
    sums = add(pairs[0]).dense(), pairs[1][0].dense() + pairs[1][1].dense()
    for found, forms in zip(sums, pairs):
        found.square().sum().backward()
        assert all(x.grad is not None for form in forms for x in form.held)
    for one, other in zip(*pairs):
        for x, y in zip(one.held, other.held):
            assert_close(x.grad, y.grad, rtol=1e-3, atol=1e-2)


def test_inner_products_of_passes_write_each_row_once() -> None:
    x, shape, rest = torch.randn(8, 1, 12, 12).double(), torch.Size((4, 1, 3, 3)), ((1, 1), (1, 1), (1, 1), 1)
    form = Concatenation.of([Convolution(x, torch.randn(8, 4, 12, 12).double(), shape, *rest) for _ in range(5)])
    expected = form.matrix() @ form.matrix().mT
    with patch.object(Convolution, "dense", autospec=True, side_effect=Convolution.dense) as dense:
        # A budget for rows, but not for all windows at once.
        assert_close(form.gram(form, 8 * form.samples * form.shape.numel() * 8), expected)
    assert sum(call.args[0].samples for call in dense.call_args_list) == form.samples


# What steps cost, by device


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A copy of the table."""
    path = tmp_path / "costs.json"
    path.write_text(cost.TABLE.read_text())
    for module in (cost, device_costs):
        monkeypatch.setattr(module, "TABLE", path)
    cost._costs_of.cache_clear()
    yield path
    cost._costs_of.cache_clear()


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(("capability", "double"), [((9, 0), 2), ((8, 9), 64)])
def test_cards_without_units_for_float64(capability: tuple[int, int], double: float) -> None:
    with mock.patch.object(torch.cuda, "get_device_capability", return_value=capability):
        assert cost.costs_of(torch.device("cuda", 0)).double == double


@pytest.mark.usefixtures("table")
def test_other_devices_cost_what_a_cpu_does() -> None:
    cpu = cost.costs_of(torch.device("cpu"))
    assert cost.costs_of(torch.device("meta")) == cost.costs_of(torch.device("mps", 0)) == cpu


def test_all_costs_are_measured_and_written(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_costs, "ROUNDS", 1)
    device_costs.main(["--size", "256"])
    written = json.loads(table.read_text())["cpu"]
    assert written != json.loads(Path(cost.__file__).with_name("costs.json").read_text())["cpu"]
    assert all(value >= 0 for value in vars(cost.Costs(**written)).values())
