"""Calls of operations that the table leaves to others, or refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from autograd_hacks.errors import SamplesMixed
from autograd_hacks.rules.operations import ELEMENTWISE, OPERATIONS


def r(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


STATS = (r(4), r(4).exp())


@pytest.mark.parametrize(
    ("name", "wanted", "g", "args", "kwargs"),
    [
        ("matmul", (1,), r(3, 2, 4), (r(3, 2, 5), r(3, 5, 4)), {}),  # a matrix for each entry
        ("matmul", (0,), r(3, 2, 2), (r(2, 2, 4), r(3, 4, 2)), {}),
        ("matmul", (0,), r(3, 5, 2), (r(2, 4), r(3, 5, 4)), {}),  # samples came from the last axis
        ("linear", (0,), r(3, 2), (r(2, 4), r(3, 4)), {}),
        ("linear", (2,), r(3, 2), (r(3, 4), r(2, 4), r(1)), {}),
        ("addmm", (0,), r(3, 2), (r(1, 2), r(3, 4), r(4, 2)), {}),
        ("getitem", (0,), r(3, 2), (r(5, 2), (slice(None), torch.tensor([0, 1, 1]))), {}),
        ("getitem", (0,), r(2, 2), (r(3, 2), torch.tensor([True, False, True])), {}),
        ("index_select", (0,), r(3, 5), (r(5, 4), 1, torch.tensor([0, 1, 1])), {}),
        ("embedding", (0,), r(3, 2), (r(5, 2), torch.tensor([0, 1, 1])), {}),  # torch.embedding's order
        ("conv1d", (1,), r(2, 4), (r(2, 5), r(2, 2, 2)), {}),  # without a batch
        ("batch_norm", (1, 2), r(3, 4), (r(3, 4), r(4), r(4), *STATS, False, 0.1, 1e-5, True), {}),  # torch.batch_norm's
        ("instance_norm", (1, 2), r(3, 4, 5), (r(3, 4, 5), r(4), r(4), *STATS, True, 0.1, 1e-5, True), {}),
        ("mul", (0,), r(3, 3, 2), (r(3, 1, 1), r(3, 2)), {}),  # of x the samples are no longer where they were in g
        ("add", (0,), r(3, 2), (r(2), r(3, 2)), {"out": r(3, 2)}),
    ],
)
def test_calls_that_are_not_covered(name: str, wanted: Any, g: Tensor, args: Any, kwargs: Any) -> None:
    assert (OPERATIONS | ELEMENTWISE)[name](wanted, g, *args, **kwargs) is None


def test_operations_that_mix_samples_are_refused() -> None:
    with pytest.raises(SamplesMixed, match="scale_grad_by_freq=False"):
        OPERATIONS["embedding"]((1,), r(3, 2), torch.tensor([0, 1, 1]), r(5, 2), scale_grad_by_freq=True)
    with pytest.raises(SamplesMixed, match="training=False"):
        OPERATIONS["batch_norm"]((3,), r(3, 4), r(3, 4), *STATS, r(4), training=True)


def test_running_statistics_are_left_as_they_are() -> None:
    mean, var = STATS
    before = mean.clone(), var.clone()
    OPERATIONS["instance_norm"]((3,), r(3, 4, 5), r(3, 4, 5), mean, var, r(4))
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
