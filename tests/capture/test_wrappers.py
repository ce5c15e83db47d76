"""Wrappers that run other modules than those that have hooks."""

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample
from torch import Tensor
from torch.nn.parallel import DataParallel

import autograd_hacks


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().flatten(1).sum(1)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Sequential(nn.Linear(3, 4), nn.Tanh()), nn.Linear(4, 2)).double()


def batch(n: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3).double(), torch.randn(n, 2).double()


def test_data_parallel_is_refused_by_name() -> None:
    net, (x, y) = two_layers(), batch()
    alone = DataParallel(net, device_ids=[])
    autograd_hacks.add_hooks(alone)
    squares(alone(x), y).mean().backward()
    autograd_hacks.compute_grad1(alone)
    assert_rows(net, one_backward_per_sample(net, squares, x, y))
    autograd_hacks.remove_hooks(alone)
    alone.device_ids = [0, 1]
    for way in (alone, nn.Sequential(alone)):
        with pytest.raises(TypeError, match=r"DataParallel.*DistributedDataParallel"):
            autograd_hacks.add_hooks(way)
    autograd_hacks.add_hooks(net)
    replica = net._replicate_for_data_parallel()  # what DataParallel runs, on each device
    with pytest.raises(TypeError, match=r"DataParallel.*DistributedDataParallel"):
        replica(x)
