"""Sums of rows along random directions are those of the rows written out."""

import pytest
import torch
from torch import Tensor

from autograd_hacks.forms import Convolution, Form
from autograd_hacks.forms.directions import _numbers, along, directions
from autograd_hacks.forms.terms import of_experts


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double)


def convolution(groups: int, out: int, stride: int) -> Form:
    shape, x = torch.Size((out, 4 // groups, 3, 2)), draw(5, 4, 9, 8)
    g = torch.randn_like(torch.conv2d(x, draw(*shape), None, stride, 1, 1, groups))
    return Convolution(x, g, shape, (stride, stride), (1, 1), (1, 1), groups)


FORMS = {f"{k} groups, stride {s}": convolution(k, out, s) for k, out in ((1, 6), (2, 6), (4, 8)) for s in (1, 2)} | {
    "experts": of_experts(
        draw(8, 3), draw(8, 4), torch.tensor([2, 2, 7, 8]), torch.tensor([0, 1, 2, 0, 0, 1, 2, 2]), samples=3
    )
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_terms_add_up_to_the_rows(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    u, v = directions("a.weight", 3, form.shape, torch.double, torch.device("cpu"))
    expected = torch.einsum("ko,oi,ki->k", u, form.dense().sum(0).flatten(1), v)
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
