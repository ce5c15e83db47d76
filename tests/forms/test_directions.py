"""Sums of rows along random directions are those of the rows written out."""

import pytest
import torch
from strategies import pull_along
from torch import Tensor

from autograd_hacks.forms import (
    Bags,
    Chained,
    Concatenation,
    Convolution,
    Dense,
    Form,
    Grouping,
    Lookup,
    Outer,
    Placed,
    Scaled,
    Sum,
)
from autograd_hacks.forms.directions import PAIRS, _numbers, along, directions

N = 5


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.double)


def convolution(groups: int, channels: int, out: int, stride: int) -> Form:
    shape = torch.Size((out, channels // groups, 3, 2))
    x = draw(N, channels, 9, 8)
    g = torch.conv2d(x, draw(*shape), None, stride, 1, 1, groups)
    return Convolution(x, torch.randn_like(g), shape, (stride, stride), (1, 1), (1, 1), groups)


def forms() -> dict[str, Form]:
    outer, theta, right = Outer(draw(N, 3, 4), draw(N, 3, 6)), draw(2, 1).requires_grad_(), draw(N, 6)
    inner = Outer(draw(N, 1, 2), draw(N, 1, 3))
    return {
        "outer": outer,
        "outer, one position": Outer(draw(N, 4), draw(N, 6)),
        "outer, viewed": outer.viewed(torch.Size((4, 2, 3))),
        "outer, cut elsewhere": outer.viewed(torch.Size((8, 3))),
        "outer, transposed": outer.transposed(torch.Size((6, 4))),
        "a number": Dense(draw(N)),
        "a vector": Dense(draw(N, 7)),
        "dense": Dense(draw(N, 4, 2, 3)),
        "lookup": Lookup(torch.randint(9, (N, 3)), draw(N, 3, 4), 9),
        "bags": Bags(draw(N, 4), draw(7), torch.randint(9, (7,)), torch.tensor([0, 0, 1, 2, 3, 4, 4]), 9),
        **{
            f"convolution {groups} {stride}": convolution(groups, 4, out, stride)
            for groups, out in ((1, 6), (2, 6), (4, 8))
            for stride in (1, 2)
        },
        "scaled": Scaled(outer, 3.0),
        "weighted": Scaled(outer, draw(N)),
        "sum": Sum([outer, Dense(draw(N, 4, 6))]),
        "grouping": Grouping(outer, torch.tensor([0, 1, 1, 0, 1]), 2),
        "placed": Placed({(0, 2): Dense(draw(N, 2, 6)), (3, 4): Outer(draw(N, 1), draw(N, 6))}, torch.Size((5, 6))),
        "passes": Concatenation.of([Outer(draw(N, 4), right), Outer(draw(N, 4), right)]),
        "chained": Chained(inner, pull_along(theta @ draw(1, 3), theta), theta.shape, theta),
    }


@pytest.mark.parametrize("what", forms())
def test_terms_add_up_to_the_rows(what: str) -> None:
    form = forms()[what]
    u, v = at = directions("a.weight", 3, form.shape, torch.double, torch.device("cpu"))
    with torch.no_grad():
        rows = form.dense().sum(0)
        expected = torch.einsum("ko,oi,ki->k", u, rows.reshape(u.shape[1], v.shape[1]), v)
        terms = form.terms(u, v)
    assert len(terms) == PAIRS
    torch.testing.assert_close(terms.sum(1), expected)
    torch.testing.assert_close((along(rows, at) * v).sum(1), expected)


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
