"""Graphs deeper than Python's stack: cells unrolled over many steps, deep residual stacks, and derivatives of them."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
from rarely import rarely
from steps import check_batches
from torch import Tensor
from twin import Bare

CELLS = {"gru": nn.GRUCell, "lstm": nn.LSTMCell, "rnn": nn.RNNCell}


def unrolled(kind: str, chosen: bool = False) -> nn.Module:
    """A cell, or a Linear, in a loop.  N T 2 -> N 2    chosen: takes the samples in an order that values decide"""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        order = x[:, 0, 0].argsort()
        x = x[order] if chosen else x
        h = c = torch.zeros_like(x[:, 0])
        for xt in x.unbind(1):
            if kind == "lstm":
                h, c = m.cell(xt, (h, c))
            else:
                h = m.cell(xt, h) if kind in CELLS else torch.tanh(m.cell(h) + xt)
        return m.out(h)[order.argsort()] if chosen else m.out(h)

    return Bare(run, cell=CELLS.get(kind, nn.Linear)(2, 2), out=nn.Linear(2, 2))


def residual(depth: int) -> nn.Module:
    """A Linear and a bare scale in each block.  N T 2 -> N 2, of the first position"""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        x = x[:, 0]
        for layer, scale in zip(m.layers, m.scales):
            x = x + scale * torch.tanh(layer(x))
        return x

    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(depth)])
    return Bare(run, layers=layers, scales=nn.ParameterList([torch.full((2,), 0.1) for _ in range(depth)]))


@pytest.mark.parametrize(
    ("kind", "chosen", "steps"),
    [
        *(("gru", False, 130), ("linear", False, 420)),
        *rarely(("linear", True, 420), *((kind, False, 2000) for kind in (*CELLS, "linear", "residual"))),
    ],
)
def test_unrolled_cells(kind: str, chosen: bool, steps: int) -> None:
    torch.manual_seed(0)
    model = residual(steps) if kind == "residual" else unrolled(kind, chosen)
    check_batches(model.double(), torch.randn(3, steps, 2, dtype=torch.float64))
