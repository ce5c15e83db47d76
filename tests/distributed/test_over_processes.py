"""A verb over loaders that several processes share: rows are a process's own, sums everyone's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from processes import Both
from spread import batch, made, own, rows_of, spread_out, squares, whole
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import PerSampleGrads


def loss(model: nn.Module, given: Any) -> Tensor:
    return squares(model(given[0]), given[1])


def over_processes(way: str) -> None:
    net, twin = made("mlp"), made("mlp")
    x, y = batch(0, 12)
    first = rows_of(twin, x, y)
    model = spread_out(net, way)
    autograd_hacks.add_hooks(model)
    mine = own((6, 6))
    loader = list(zip(x[mine].split(3), y[mine].split(3)))
    assert_close(autograd_hacks.over(model, loader, loss, PerSampleGrads.norms), first[mine].norm(dim=1))
    found = autograd_hacks.over(model, loader, loss, PerSampleGrads.second_moment, total=True)
    assert_close(torch.cat([whole(part).flatten() for part in found.values()]), first.square().sum(0))
    influence = autograd_hacks.over(model, loader, loss, PerSampleGrads.gram, against=loader)
    assert_close(influence, first[mine] @ first[mine].mT)
    dist.barrier()


@pytest.mark.parametrize("way", ["replicas", "shards"])
def test_over_processes(both: Both, way: str) -> None:
    both(over_processes, way)
