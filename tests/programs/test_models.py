"""Whole networks, rows against one backward pass for each sample."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows, one_backward_per_sample
from quantities import assert_quantities
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks


class Reused(nn.Module):
    """An MLP that goes through its middle layer twice, once with positions and once without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(784, 12), nn.Linear(12, 12), nn.Linear(12, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.middle(self.first(x.flatten(1))))
        positions = self.middle(torch.stack([h, h.flip(1), -h], 1))
        return F.log_softmax(self.last(self.middle(positions.mean(1))), 1)


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, and a convolution that shares its kernel too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.again = nn.Conv2d(1, 1, 3, padding=1), nn.Conv2d(1, 1, 3, padding=1, dilation=1, bias=False)
        self.again.weight = self.conv.weight
        self.embed, self.unembed, self.out = nn.Linear(784, 5), nn.Linear(784, 5, bias=False), nn.Linear(5, 10)
        self.unembed.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.tanh(self.conv(x))).flatten(1)
        return F.log_softmax(self.out(self.embed(x) + torch.tanh(self.unembed(x.flip(1)))), 1)


class Strange(nn.Module):
    """Every kind of convolution there is, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(4, 8, 3, groups=4, padding="same", padding_mode="reflect")
        self.strided = nn.Conv2d(8, 4, (3, 2), stride=(2, 3), dilation=(1, 2), padding=(1, 0), groups=2)
        self.lines, self.volume = nn.Conv1d(4, 3, 4, padding="same"), nn.Conv3d(1, 2, 2, padding_mode="circular")
        self.out, self.unused = nn.LazyLinear(10), nn.Conv2d(1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.strided(torch.tanh(self.depthwise(x.unflatten(3, (4, 7)).transpose(1, 3).flatten(3))))
        x = self.volume(self.lines(x.flatten(2)).unsqueeze(1).unsqueeze(1).expand(-1, -1, 2, -1, -1))
        return F.log_softmax(self.out(x.flatten(1)), 1)


@pytest.mark.parametrize("loss_type", ["mean", "sum"])
@pytest.mark.parametrize("build", [Reused, Tied, Strange])
def test_network(build: type[nn.Module], loss_type: str) -> None:
    model, x, y = build(), torch.randn(6, 1, 28, 28), torch.randint(10, (6,))
    model(x)
    model, x = model.double(), x.double()

    def losses(out: Tensor, y: Tensor) -> Tensor:
        return F.nll_loss(out, y, reduction="none")

    with autograd_hacks.add_hooks(model):
        F.nll_loss(model(x), y, reduction=loss_type).backward()
        autograd_hacks.compute_grad1(model, loss_type)
        with autograd_hacks.pause_hooks():
            rows = one_backward_per_sample(model, losses, x, y)
        assert_rows(model, rows)
        assert_quantities(model, rows, loss_type)
        assert_quantities(model, rows, loss_type, budget=2000)
        for p in model.parameters():
            if p.grad is not None:
                assert_close(p.grad1.mean(0) if loss_type == "mean" else p.grad1.sum(0), p.grad)
