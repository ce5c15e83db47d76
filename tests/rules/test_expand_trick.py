"""Rows of products and convolutions equal those of the expand trick: each sample has its own copy of the weight."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis.strategies import integers
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks

N = 3


def rows(layer: nn.Module, x: Tensor) -> Tensor:
    with autograd_hacks.add_hooks(layer):
        autograd_hacks.backward(layer(x).tanh().flatten(1).sum(1), "sum")
        return autograd_hacks.per_sample_grads(layer, "sum")["weight"].dense()


@given(integers(1, 4), integers(1, 4), integers(0, 3))
def test_linear(fan_in: int, fan_out: int, positions: int) -> None:
    layer, x = nn.Linear(fan_in, fan_out, bias=False).double(), torch.randn(N, 1 + positions, fan_in, dtype=torch.float64)
    w = layer.weight.detach().expand(N, -1, -1).clone().requires_grad_()
    torch.einsum("nti,noi->nto", x, w).tanh().sum().backward()
    assert_close(rows(layer, x), w.grad)


@given(integers(1, 2), integers(1, 2), integers(1, 3), integers(1, 2), integers(0, 2))
def test_convolution(groups: int, each: int, kernel: int, stride: int, padding: int) -> None:
    layer = nn.Conv2d(2 * groups, each * groups, kernel, stride, padding, groups=groups, bias=False).double()
    x = torch.randn(N, 2 * groups, 5, 4, dtype=torch.float64)
    w = layer.weight.detach().expand(N, -1, -1, -1, -1).clone().requires_grad_()
    y = F.conv2d(x.flatten(0, 1)[None], w.flatten(0, 1), stride=stride, padding=padding, groups=N * groups)
    y.tanh().sum().backward()
    assert_close(rows(layer, x), w.grad)
