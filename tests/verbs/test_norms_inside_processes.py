"""Clipping by two passes, norms from inside, under DistributedDataParallel and fully_shard: steps are one process's."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from oracle import one_backward_per_sample
from processes import WORLD, Both
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks

STEPS, RATE = 3, 0.1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        return self.head(x + checkpoint(self.block, x, use_reentrant=False)).mean(1)


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum(1)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randint(5, (8, 3)), 3 * torch.randn(8, 2).double()


def train(way: str) -> None:
    torch.manual_seed(1)
    net = Net().double()
    plain = Net().double()
    plain.load_state_dict(net.state_dict())
    inside = autograd_hacks.norms_inside(net, batch()[:1])
    run: nn.Module = net
    if way == "ddp":
        run = DistributedDataParallel(net)
    elif way == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for part in (net.block, net.head, net):
            fully_shard(part)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for step in range(STEPS):
        torch.manual_seed(2 + step)
        x, y = batch()
        rows = one_backward_per_sample(plain, squares, x, y)
        norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values() if r is not None]).norm(dim=0)
        bound = float(norms.median())
        weights = (bound / norms).clamp(max=1)
        for name, p in plain.named_parameters():
            p.data -= RATE * torch.tensordot(weights, rows[name], 1) / len(x)
        x, y = (part.chunk(WORLD)[dist.get_rank()] for part in (x, y))
        with inside.batch(len(x)), run.no_sync() if isinstance(run, DistributedDataParallel) else nullcontext():
            squares(run(x), y).mean().backward()
        own = inside.norms()
        assert_close(own, norms.chunk(WORLD)[dist.get_rank()])
        assert all(p.grad is None for p in net.parameters())
        ((bound / own).clamp(max=1) * squares(run(x), y)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for p, expected in zip(net.parameters(), plain.parameters()):
            found = p.full_tensor() if hasattr(p, "full_tensor") else p
            assert_close(found.detach(), expected.detach())


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_steps_are_those_of_one_process(both: Both, way: str) -> None:
    both(train, way)
