"""A verb over loaders that several processes share: rows are a process's own, sums everyone's."""

import copy
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
    first, later = rows_of(twin, x, y), copy.deepcopy(twin)
    with torch.no_grad():
        for p in later.parameters():
            p *= 1.1
    second = rows_of(later, x, y)
    model = spread_out(net, way)
    autograd_hacks.add_hooks(model)
    states: list[Any] = [copy.deepcopy(model.state_dict())]
    with torch.no_grad():
        for p in model.parameters():
            p *= 1.1
    states.append(copy.deepcopy(model.state_dict()))
    model.load_state_dict(states[0])
    mine = own((6, 6))
    loader = list(zip(x[mine].split(3), y[mine].split(3)))
    assert_close(autograd_hacks.over(model, loader, loss, PerSampleGrads.norms), first[mine].norm(dim=1))
    found = autograd_hacks.over(model, loader, loss, PerSampleGrads.second_moment, total=True)
    assert_close(torch.cat([whole(part).flatten() for part in found.values()]), first.square().sum(0))
    given = [(states[0], 0.1), (states[1], 0.3)]
    influence = autograd_hacks.over(model, loader, loss, PerSampleGrads.gram, against=loader, checkpoints=given)
    expected = 0.1 * first[mine] @ first[mine].mT + 0.3 * second[mine] @ second[mine].mT
    assert_close(influence, expected)
    dist.barrier()


@pytest.mark.parametrize("way", ["replicas", "shards"])
def test_over_processes(both: Both, way: str) -> None:
    both(over_processes, way)
