"""Batches of no samples, as Poisson sampling draws them, first and later, on any axis."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from steps import check_losses
from torch import Tensor

import autograd_hacks


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.layer = nn.Linear(3, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.into(x))


class Bare(nn.Module):
    """Nothing in it takes axis 1 for the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.scale, self.out = nn.Linear(3, 4), nn.Parameter(torch.randn(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.into(x) * self.scale).tanh())


@pytest.mark.parametrize("param_grad", [False, True])
@pytest.mark.parametrize("sizes", [[0], [0, 5], [5, 0, 3], [0, 6, 0], [6, 0]], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    [(Recurrent, {}), (Attention, {}), *((kind, {"batch_dim": 1}) for kind in (Recurrent, Attention, Bare))],
)
def test_time_first(kind: Callable[[], nn.Module], options: dict[str, Any], sizes: list[int], param_grad: bool) -> None:
    """Six positions, with and without as many samples."""
    model = kind().double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad, **options):
        for n in sizes:
            x = torch.randn(6, n, 3).double()
            if n:
                check_losses(model, lambda x=x: squares(model(x).transpose(0, 1)))
                continue
            for reduce in (lambda losses: autograd_hacks.backward(losses, "sum"), lambda losses: losses.sum().backward()):
                model.zero_grad()
                reduce(squares(model(x).transpose(0, 1)))
                grads = autograd_hacks.per_sample_grads(model)
                assert grads.norms().shape == (0,)
                autograd_hacks.compute_grad1(model, "sum" if reduce is not None else None)
                assert all(p.grad1.shape == (0, *p.shape) for p in model.parameters())


def test_a_mask_beside_no_samples() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.layer(x, mask)

    model, mask = Masked().double(), nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    with autograd_hacks.add_hooks(model):
        model(torch.randn(6, 0, 4).double(), mask).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert all(p.grad1.shape == (0, *p.shape) for p in model.parameters())
        x = torch.randn(6, 5, 4).double()
        check_losses(model, lambda: squares(model(x, mask).transpose(0, 1)))
