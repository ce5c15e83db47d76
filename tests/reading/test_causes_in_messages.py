"""What messages say of a cause that is known: packed samples, shared arguments, methods that aren't forward."""

import pytest
import torch
import torch.nn as nn
from steps import check_hooked, check_losses
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, SamplesMixed, UnseenGradient


def test_packed_samples() -> None:
    def graphs(m: nn.Module, x: Tensor, graph: Tensor) -> Tensor:
        """Adds up nodes by graph."""
        h = m.nodes(x).tanh()
        return m.out(h.new_zeros(int(graph.max()) + 1, 4).index_add(0, graph, h))

    model, x = Bare(graphs, nodes=nn.Linear(3, 4), out=nn.Linear(4, 2)).double(), torch.randn(7, 3).double()
    graph = torch.tensor([0, 0, 0, 1, 1, 2, 2])
    with autograd_hacks.add_hooks(model), pytest.raises(BatchSizeError, match=r"pack samples.*batch_dim=None"):
        autograd_hacks.backward(model(x, graph).square().sum(1))
    check_hooked(model, lambda: model(x, graph).square().sum(1), batch_dim=None)


class Operator(nn.Module):
    """A function of each sample at points that all share."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, u: Tensor, points: Tensor) -> Tensor:
        return self.branch(u) @ self.trunk(points).T


@pytest.mark.parametrize("points", [5, 6])
def test_an_argument_that_all_samples_share(points: int) -> None:
    model, u, y = Operator().double(), torch.randn(5, 3).double(), torch.randn(points, 2).double()
    if points == len(u):
        with autograd_hacks.add_hooks(model):
            autograd_hacks.backward(model(u, y).square().sum(1))
            with pytest.raises(SamplesMixed, match=r"None for an argument that all samples share"):
                autograd_hacks.compute_grad1(model)
    for axes in ((0, None), {"u": 0, "points": None}):
        with autograd_hacks.add_hooks(model, batch_dim=axes):
            check_losses(model, lambda: model(u, y).square().sum(1))
            if isinstance(axes, dict):
                check_losses(model, lambda: model(u, points=y).square().sum(1))


class Density(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))

    def log_prob(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() * self.scale).sum(1)


def test_a_method_that_is_not_forward() -> None:
    model = Density()
    with autograd_hacks.add_hooks(model):
        check_losses(model, lambda: model.log_prob(torch.ones(5, 3)))  # the losses' graph shows it
        model.log_prob(torch.randn(5, 3)).mean().backward()
        with pytest.raises(UnseenGradient, match=r"scale: used by a method that isn't forward.*'layer'"):
            autograd_hacks.compute_grad1(model)
