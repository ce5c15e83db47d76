"""Parameters of which processes hold parts."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from processes import WORLD, Both, both
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import ShardedParameters

__all__ = ["both"]  # a fixture


def sharded() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh, x = dist.init_device_mesh("cpu", (WORLD,)), torch.randn(3 + 2 * dist.get_rank(), 3)

    def each(net: nn.Module) -> nn.Module:
        for layer in (net[0], net[2]):
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    ways: dict[str, Callable[[nn.Module], nn.Module]] = {
        "fully_shard": lambda net: fully_shard(net, mesh=mesh),
        "fully_shard, each layer": each,
        "FSDP": lambda net: FullyShardedDataParallel(net, device_id=torch.device("cpu")),
        "FSDP, its own": lambda net: FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu")),
    }
    for way, shard in ways.items():
        for hooks in ("before", "after"):
            for probe in (True, False):
                torch.manual_seed(1)
                net: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
                if hooks == "before":
                    autograd_hacks.add_hooks(net, probe=probe)
                run = shard(net)
                hooked = net if hooks == "before" else run
                autograd_hacks.add_hooks(hooked, probe=probe)
                with pytest.raises(ShardedParameters, match=r"processes hold parts of .*fully_shard") as error:
                    run(x)
                assert ("FSDP1" in str(error.value)) == way.startswith("FSDP")
                with pytest.raises(ShardedParameters), autograd_hacks.streaming(hooked):
                    pass
                for read in (autograd_hacks.compute_grad1, autograd_hacks.per_sample_grads):
                    with pytest.raises(ShardedParameters):
                        read(hooked)
                with pytest.raises(ShardedParameters):
                    autograd_hacks.clip_grad1_norm_(hooked, 1.0)
                with autograd_hacks.pause_hooks():
                    run(x).square().mean().backward()
                assert any(p.grad is not None for p in run.parameters())
    # A part that is called by itself, past the model's own forward.
    net = nn.Sequential(fully_shard(nn.Linear(3, 2), mesh=mesh))
    autograd_hacks.add_hooks(net)
    net[0](x).square().mean().backward()
    with pytest.raises(ShardedParameters, match=r"0\.weight, 0\.bias"):
        autograd_hacks.compute_grad1(net)
    assert "0.weight" in str(autograd_hacks.describe(net))
    # Frozen ones have no rows.
    trunk, head = nn.Linear(3, 4), nn.Linear(4, 2)
    net = nn.Sequential(fully_shard(trunk.requires_grad_(False), mesh=mesh), nn.Tanh(), head)
    autograd_hacks.add_hooks(net, probe=False)
    net(x).square().sum(1).mean().backward()
    autograd_hacks.compute_grad1(net)
    assert_close(head.weight.grad1.mean(0), head.weight.grad)


def test_sharded_parameters_are_refused(both: Both) -> None:
    both(sharded)
