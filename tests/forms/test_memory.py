"""Rows that are written piece by piece go into the same memory."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from autograd_hacks.forms import Dense, Form, Outer, add, scale


def factors(lead_back: bool = False) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(6, 3, size, dtype=torch.float64, requires_grad=lead_back) for size in (4, 5)]


def test_pieces_share_memory_and_rows_that_a_form_owns_are_left_alone() -> None:
    own = torch.randn(6, 4, 5, dtype=torch.float64)
    before = own.clone()
    places = {written.data_ptr() for *_, written in Outer(*factors())._written(8 * 2 * 3 * 20)}
    assert len(places) == 1
    for form in (Dense(own), add([Dense(own), Outer(*factors())]), scale(Outer(*factors()), 3.0)):
        expected = form.dense().flatten(1)
        for budget in (100, 700, 2000, 2**20):
            assert_close(Form.norms(form, budget), expected.norm(dim=1))
            assert_close(
                Form.second_moment(form, expected[:, 0], own[0], budget).flatten(),
                expected[:, 0] @ (expected - own[0].flatten()) ** 2,
            )
    assert torch.equal(own, before)


@pytest.mark.parametrize("verb", ["dot", "weighted_sum", "second_moment", "norms"])
@pytest.mark.parametrize("lead_back", [False, True])
def test_verbs_in_pieces_lead_back_to_factors_weights_and_directions(verb: str, lead_back: bool) -> None:
    held = factors(lead_back)
    v, w = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 5), (6,)))

    def slopes(budget: int) -> tuple[Tensor, ...]:
        form: Form = Outer(*held)
        got = {
            "dot": lambda: Form.dot(form, v, budget),
            "weighted_sum": lambda: Form.weighted_sum(form, w, budget),
            "second_moment": lambda: Form.second_moment(form, w, v, budget),
            "norms": lambda: Form.norms(form, budget) * w,
        }[verb]()
        leaves = [x for x in (*held, v, w) if x.requires_grad]
        return torch.autograd.grad(got.pow(3).sum(), leaves, allow_unused=True, materialize_grads=True)

    for small, large in zip(slopes(700), slopes(2**20)):
        assert_close(small, large)
