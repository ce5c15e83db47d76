"""Forwards whose graph is one that is known, and those whose graph only looks so."""

import pytest
import torch
import torch.nn as nn
from oracle import squares
from steps import check_losses
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

N = 5


class Branching(nn.Module):
    """Bare parameters, read in another place of the graph, or another of them, on each branch; as many nodes on each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.scale, self.other = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.branch = "usual"

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.branch == "used again":
            h = h * self.scale
        elif self.branch == "exchanged":
            h = h * self.other * self.other  # beside one node more
        else:
            h = h * h
        h = h * self.scale * self.other
        if self.branch == "in another order":
            h = h[torch.arange(N - 1, -1, -1)]
        elif self.branch == "in order":
            h = h[torch.arange(N)]
        return self.last(h)


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("branch", ["used again", "exchanged"])
def test_another_graph_is_read_anew(branch: str, param_grad: bool) -> None:
    model = Branching().double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for own in ("usual", "usual", "usual", branch, branch, "usual", branch):
            model.branch = own
            x = torch.randn(N, 4).double()
            check_losses(model, lambda x=x: squares(model(x)))


def test_samples_that_an_index_moves_only_now_are_refused() -> None:
    model = Branching().double()
    with autograd_hacks.add_hooks(model):
        for own in ("in order", "in order", "in order", "in order", "in another order"):
            model.branch = own
            squares(model(torch.randn(N, 4).double())).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


def test_batches_of_other_sizes_are_read_anew() -> None:
    model = Branching().double()
    with autograd_hacks.add_hooks(model):
        for size in (N, N, 3, N, 3, 1, 4, 6, 8, N):
            x = torch.randn(size, 4).double()
            check_losses(model, lambda x=x: squares(model(x)))


def test_a_parameter_that_begins_to_train_is_read() -> None:
    model = Branching().double()
    model.scale.requires_grad_(False)
    with autograd_hacks.add_hooks(model):
        for trains in (False, False, False, True, True):
            model.scale.requires_grad_(trains)
            if trains:
                autograd_hacks.add_hooks(model)
            x = torch.randn(N, 4).double()
            check_losses(model, lambda x=x: squares(model(x)))
