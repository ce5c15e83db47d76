"""Parameters of which processes hold parts in other ways than by ``fully_shard`` on the model that is hooked."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from processes import WORLD, Both
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import ShardedParameters


def sharded() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh, x = dist.init_device_mesh("cpu", (WORLD,)), torch.randn(3 + 2 * dist.get_rank(), 3)

    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "FSDP": lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        "FSDP, its own": lambda net: FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu")),
    }
    for shard in ways.values():
        for hooks in ("before", "after"):
            for probe in (True, False):
                torch.manual_seed(1)
                net: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
                if hooks == "before":
                    autograd_hacks.add_hooks(net, probe=probe)
                run = shard(net)
                hooked = net if hooks == "before" else run
                autograd_hacks.add_hooks(hooked, probe=probe)
                with pytest.raises(
                    ShardedParameters, match=r"split over processes.*FSDP1.*Use torch.distributed.fsdp.fully_shard"
                ):
                    run(x)
                with pytest.raises(ShardedParameters), autograd_hacks.during_backward(hooked, "norms"):
                    pass
                for read in (autograd_hacks.compute_grad1, autograd_hacks.per_sample_grads):
                    with pytest.raises(ShardedParameters):
                        read(hooked)
                with pytest.raises(ShardedParameters):
                    autograd_hacks.clip_grad1_norm_(hooked, 1.0)
                with autograd_hacks.pause_hooks():
                    run(x).square().mean().backward()
                assert any(p.grad is not None for p in run.parameters())
    # A part of a model that was cut as a whole.
    net = fully_shard(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), mesh=mesh)
    autograd_hacks.add_hooks(net[0])
    with pytest.raises(ShardedParameters, match=r"weight, bias.*hook the model that it was called on last"):
        net(x)
    autograd_hacks.remove_hooks(net[0])
    net.reset_iter_state()
    # Frozen ones have no rows.
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 2)
    net = nn.Sequential(fully_shard(trunk.requires_grad_(False), mesh=mesh), nn.Tanh(), head)
    autograd_hacks.add_hooks(net, probe=False)
    net(x).square().sum(1).mean().backward()
    autograd_hacks.compute_grad1(net)
    assert_close(head.weight.grad1.mean(0), head.weight.grad)


def test_sharded_parameters_are_refused(both: Both) -> None:
    both(sharded)
