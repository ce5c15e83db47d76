"""Axes that zeros, large numbers and unused positions would hide."""

import pytest
import torch
import torch.nn as nn
from mixing import zeroed
from oracle import squares
from steps import check, check_batches, check_losses
from torch import Tensor
from twin import Bare

import autograd_hacks


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("steps", [4, 6])
def test_weights_of_zero_hide_no_axis(folded: bool, steps: int) -> None:
    """W x + B A x, with B zero at first, on T N F or on rows T·N."""

    def adapted(m: nn.Module, x: Tensor) -> Tensor:
        rows = x.transpose(0, 1).flatten(0, 1) if folded else x.transpose(0, 1)
        rows = m.layer(rows) + m.up(m.down(rows))
        return (rows.unflatten(0, (x.shape[1], x.shape[0])) if folded else rows).transpose(0, 1)

    down, up = nn.Linear(3, 2, bias=False), zeroed(nn.Linear(2, 3, bias=False))
    model, x = Bare(adapted, layer=nn.Linear(3, 3), down=down, up=up).double(), torch.randn(4, steps, 3).double()
    check_batches(model, x, verify=1)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        nn.init.normal_(model.up.weight)
        check(model, x)


def test_positions_of_which_only_the_first_counts() -> None:
    model = Bare(
        lambda m, x: m.layer(x + m.positions(torch.arange(3)))[:, 0], layer=nn.Linear(3, 3), positions=nn.Embedding(3, 3)
    ).double()
    check_batches(model, torch.randn(3, 3, 3).double(), verify=1)


@pytest.mark.parametrize("steps", [3, 4])
def test_a_gate_of_zero_hides_no_axis(steps: int) -> None:
    model = Bare(
        lambda m, x: x + m.gate * m.attend(x, x, x)[0], attend=nn.MultiheadAttention(4, 2), gate=torch.zeros(())
    ).double()
    x = torch.randn(steps, 4, 4).double()
    with autograd_hacks.add_hooks(model):
        for gate in (0.0, 0.5):
            nn.init.constant_(model.gate, gate)
            check_losses(model, lambda: squares(model(x).transpose(0, 1)))
