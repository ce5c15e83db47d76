"""Factors of rows: the best of their rank, by singular values of each row written out."""

import pytest
import torch
from torch.testing import assert_close

from autograd_hacks.forms import Bags, Convolution, Dense, Form, Lookup, Outer, Zero, scale
from autograd_hacks.forms.low_rank import low_rank


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


FORMS = {
    "number": lambda: Dense(normal(3)),
    "vector": lambda: Dense(normal(3, 5)),
    "dense": lambda: Dense(normal(3, 4, 2, 3)),
    "few positions": lambda: Outer(normal(3, 2, 5), normal(3, 2, 6)),
    "many positions": lambda: Outer(normal(3, 9, 5), normal(3, 9, 4)),
    "one position": lambda: Outer(normal(3, 5), normal(3, 6), torch.Size((5, 2, 3))),
    "another shape": lambda: Outer(normal(3, 2, 4), normal(3, 2, 6), torch.Size((2, 12))),
    "complex": lambda: Outer(
        torch.complex(normal(3, 2, 5), normal(3, 2, 5)), torch.complex(normal(3, 2, 4), normal(3, 2, 4))
    ),
    "none": lambda: Zero(3, torch.Size((4, 3)), normal(1)),
    "scaled": lambda: scale(Outer(normal(3, 2, 5), normal(3, 2, 6)), -0.5),
    "weighted": lambda: scale(Outer(normal(3, 2, 5), normal(3, 2, 6)), normal(3)),
    "lookup": lambda: Lookup(torch.randint(6, (3, 2)), normal(3, 2, 4), 6),
    "bags": lambda: Bags(normal(3, 4), normal(6), torch.randint(5, (6,)), torch.arange(3).repeat_interleave(2), 5),
    "convolution": lambda: Convolution(
        normal(3, 2, 4, 4), normal(3, 3, 2, 2), torch.Size((3, 2, 3, 3)), (1, 1), (0, 0), (1, 1), 1
    ),
}


@pytest.mark.parametrize("budget", [1, 2**20])
@pytest.mark.parametrize("rank", [1, 2, 9])
@pytest.mark.parametrize("kind", FORMS)
def test_factors_are_the_best_of_their_rank(kind: str, rank: int, budget: int) -> None:
    torch.manual_seed(0)
    form: Form = FORMS[kind]()
    fan_out = form.shape[0] if form.shape else 1
    rows = form.dense().reshape(form.samples, fan_out, form.shape.numel() // fan_out)
    left, right = low_rank(form, rank, budget)
    r = min(rank, *rows.shape[1:])
    assert left.shape == (3, rows.shape[1], r)
    assert right.shape == (3, rows.shape[2], r)
    for n in range(3):
        u, s, vh = torch.linalg.svd(rows[n], full_matrices=False)
        assert_close(left[n] @ right[n].mT, (u[:, :r] * s[:r]) @ vh[:r])


def test_a_nan_stays_in_its_row() -> None:
    for form in (Outer(torch.randn(3, 2, 5), torch.randn(3, 2, 6)), Dense(torch.randn(3, 5, 6))):
        expected = low_rank(form, 2)
        form.held[0][1, 0, 0] = torch.nan
        found = low_rank(form, 2)
        assert found.left[1].isnan().all()
        assert_close(found.left[::2] @ found.right[::2].mT, expected.left[::2] @ expected.right[::2].mT)
