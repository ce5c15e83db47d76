"""Sums of rows along random directions are those of the rows written out."""

import pytest
import torch
from torch import Tensor

from autograd_hacks.forms import Convolution
from autograd_hacks.forms.directions import PAIRS, _numbers, along, directions


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(("groups", "out"), [(1, 6), (2, 6), (4, 8)])
def test_terms_of_grouped_convolutions_add_up_to_the_rows(groups: int, out: int, stride: int) -> None:
    shape, x = torch.Size((out, 4 // groups, 3, 2)), draw(5, 4, 9, 8)
    g = torch.randn_like(torch.conv2d(x, draw(*shape), None, stride, 1, 1, groups))
    form = Convolution(x, g, shape, (stride, stride), (1, 1), (1, 1), groups)
    u, v = directions("a.weight", 3, form.shape, torch.double, torch.device("cpu"))
    expected = torch.einsum("ko,oi,ki->k", u, form.dense().sum(0).flatten(1), v)
    terms = form.terms(u, v)
    assert len(terms) == PAIRS
    torch.testing.assert_close(terms.sum(1), expected)


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
    index = torch.tensor([[1, 4, 1]])
    sparse = torch.sparse_coo_tensor(index, draw(3, 4), (9, 4), check_invariants=True)
    at = directions("a", 3, sparse.shape, torch.double, torch.device("cpu"))
    torch.testing.assert_close(along(sparse, at), along(sparse.to_dense(), at))
