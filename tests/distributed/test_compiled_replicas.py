"""A compiled step within DistributedDataParallel: clipped sums of all samples, with no word more."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from processes import Both
from torch.testing import assert_close

import autograd_hacks


@pytest.mark.parametrize("verb", ["clip", "norms"])
def test_sums_over_processes(both: Both, verb: str) -> None:
    both(a_few_steps, verb)


def a_few_steps(verb: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    step = autograd_hacks.compile(model, verb, backend=None, **({"max_norm": 0.5} if verb == "clip" else {}))  # type: ignore[arg-type]
    replica, x = nn.parallel.DistributedDataParallel(step), torch.randn(12, 4).double()
    mine = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    for _ in range(2):
        model.zero_grad()
        replica(x[mine]).square().sum().backward()
    found = [torch.autograd.grad(model(x[n : n + 1]).square().sum(), list(model.parameters())) for n in range(12)]
    rows = [torch.stack(own) for own in zip(*found)]
    norms = torch.stack([own.flatten(1).norm(dim=1) for own in rows]).norm(dim=0)
    assert_close(step.norms, norms[mine])
    weights = (0.5 / norms).clamp(max=1) if verb == "clip" else torch.ones(12).double()
    for p, own in zip(model.parameters(), rows):
        assert_close(2 * p.grad, torch.tensordot(weights, own, 1))  # DDP takes the mean over processes
