"""Layers that tensor parallel cuts, and fully_shard again: a mesh of two axes, of which two processes fill one."""

import pytest
import torch
import torch.distributed as dist
from cut_nets import NEAR, WAYS, joint, losses, made, one_backward_per_sample, whole
from processes import WORLD, Both
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close

import autograd_hacks


def steps(way: str, shape: tuple[int, int], param_grad: bool) -> None:
    kind, cut, batch = WAYS[way]
    (x, y), mesh = batch(), dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    here = slice(None) if shape[0] == 1 else (slice(0, 4), slice(4, 6))[dist.get_rank()]
    one, net = made(kind), fully_shard(cut(made(kind), mesh["tp"]), mesh=mesh["dp"])
    autograd_hacks.add_hooks(net, param_grad=param_grad)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, one))
    for _ in range(4):
        rows = one_backward_per_sample(one, x, y)
        norms = joint(rows)
        bound = float(norms.median())
        net.zero_grad()
        losses(net(x[here]), y[here]).mean().backward()
        assert_close(autograd_hacks.clip_grad1_norm_(net, bound), norms[here], **NEAR)
        weights = (bound / norms).clamp(max=1) / len(norms)
        for (name, p), own in zip(net.named_parameters(), one.parameters()):
            own.grad = torch.tensordot(weights, rows[name], 1)
            assert_close(whole(p.grad), own.grad, msg=lambda told, name=name: f"{name}: {told}", **NEAR)
        ours.step()
        theirs.step()
        for p, own in zip(net.parameters(), one.parameters()):
            assert_close(whole(p).detach(), own.detach(), **NEAR)


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("shape", [(1, WORLD), (WORLD, 1)])
@pytest.mark.parametrize("way", ["mlp", "along sequences"])
def test_clipped_steps(both: Both, way: str, shape: tuple[int, int], param_grad: bool) -> None:
    both(steps, way, shape, param_grad)
