"""Batches of no samples, as Poisson sampling draws them, first and later, on any axis."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from steps import check_losses
from twin import Bare

import autograd_hacks


def recurrent() -> nn.Module:
    return Bare(lambda m, x: m.out(m.layer(x)[0]), layer=nn.LSTM(3, 4), out=nn.Linear(4, 2))


def attention() -> nn.Module:
    return Bare(lambda m, x: m.layer(m.into(x)), into=nn.Linear(3, 4), layer=nn.TransformerEncoderLayer(4, 2, 8, 0.0))


def bare() -> nn.Module:
    """Nothing in it takes axis 1 for the batch."""
    return Bare(
        lambda m, x: m.out((m.into(x) * m.scale).tanh()), into=nn.Linear(3, 4), scale=torch.randn(4), out=nn.Linear(4, 2)
    )


KINDS = [(recurrent, {}), (attention, {}), *((kind, {"batch_dim": 1}) for kind in (recurrent, attention, bare))]


@crossed(made=KINDS, sizes=[[0], [0, 5], [5, 0, 3], [0, 6, 0], [6, 0]], param_grad=[False, True])
def test_time_first(made: tuple[Callable[[], nn.Module], dict[str, Any]], sizes: list[int], param_grad: bool) -> None:
    """Six positions, with and without as many samples."""
    model, options = made[0]().double(), made[1]
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
                autograd_hacks.compute_grad1(model, "sum")
                assert all(p.grad1.shape == (0, *p.shape) for p in model.parameters())


def test_a_mask_beside_no_samples() -> None:
    model = Bare(lambda m, x, mask: m.layer(x, mask), layer=nn.TransformerEncoderLayer(4, 2, 8, 0.0)).double()
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    with autograd_hacks.add_hooks(model):
        model(torch.randn(6, 0, 4).double(), mask).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert all(p.grad1.shape == (0, *p.shape) for p in model.parameters())
