"""Values that follow from parameters alone, and the way back from their rows."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from steps import check_losses
from torch import Tensor

import autograd_hacks


class Conjugated(nn.Module):
    """A view of its weight whose numbers are others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x * self.weight.conj() + x * x * self.weight).flatten(1)


class Counted(nn.Module):
    """A lookup without a batch whose gradient is no sum over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(3, 4).double())

    def forward(self, x: Tensor) -> Tensor:
        return x * F.embedding(torch.tensor([0, 1, 1, 0, 1]), self.table, scale_grad_by_freq=True)


@pytest.mark.parametrize(
    ("model", "x"),
    [(Conjugated(), torch.randn(3, 4, dtype=torch.complex128)), (Counted(), torch.randn(4, 5, 4).double())],
)
def test_what_looks_like_the_parameter_and_is_not(model: nn.Module, x: Tensor) -> None:
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            check_losses(model, lambda: squares(model(x)))
