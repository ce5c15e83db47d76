"""Tensor and sequence parallel: parameters that are cut over processes which have the same batch."""

import pytest
import torch
import torch.distributed as dist
from cut_nets import WAYS, losses, made, one_backward_per_sample, whole
from processes import WORLD, Both, both
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import ShardedParameters

__all__ = ["both"]  # a fixture

NEAR = {"rtol": 2e-4, "atol": 2e-5}


def joint(rows: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([own.flatten(1) for own in rows.values()], 1).norm(dim=1)


def verbs(way: str, probe: bool) -> None:
    kind, cut, batch = WAYS[way]
    (x, y), mesh = batch(), dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    rows = one_backward_per_sample(made(kind), x, y)
    flat = torch.cat([own.flatten(1) for own in rows.values()], 1)
    net = cut(made(kind), mesh)
    autograd_hacks.add_hooks(net, probe=probe)
    autograd_hacks.backward(losses(net(x), y))
    grads = autograd_hacks.per_sample_grads(net)
    assert_close(grads.norms(), joint(rows), **NEAR)
    for name, norms in grads.norms(per_parameter=True).items():
        assert_close(norms, rows[name].flatten(1).norm(dim=1), msg=lambda told, name=name: f"{name}: {told}", **NEAR)
    for name, own in grads.dense().items():
        assert_close(whole(own), rows[name], msg=lambda told, name=name: f"{name}: {told}", **NEAR)
    assert_close(grads.gram(), flat @ flat.mT, **NEAR)
    v = {name: torch.randn(p.shape, generator=torch.Generator().manual_seed(2)) for name, p in net.named_parameters()}
    along = flat @ torch.cat([x.flatten() for x in v.values()])
    assert_close(grads.dot(v), along, **NEAR)
    kept = {name: p.grad for name, p in net.named_parameters()}
    mean = {name: own.mean(0) for name, own in rows.items()}
    assert_close(grads.dot(kept), flat @ torch.cat([x.flatten() for x in mean.values()]), **NEAR)
    w = torch.linspace(-1, 1, len(x))
    for name, total in grads.weighted_sum(w).items():
        assert_close(whole(total), torch.tensordot(w, rows[name], 1), **NEAR)
    for name, total in grads.second_moment().items():
        assert_close(whole(total), rows[name].square().sum(0), **NEAR)
    for name, total in grads.variance().items():
        assert_close(whole(total), rows[name].var(0), **NEAR)
    some = grads.select(slice(1, 3))
    assert_close(some.norms(), joint(rows)[1:3], **NEAR)
    with pytest.raises(ShardedParameters, match="curvature"):
        grads.fisher_matvec(v)
    # As one process projects the same rows.
    one = made(kind)
    autograd_hacks.add_hooks(one)
    autograd_hacks.backward(losses(one(x), y))
    assert_close(grads.project(5), autograd_hacks.per_sample_grads(one).project(5), **NEAR)
    autograd_hacks.compute_grad1(net)
    for name, p in net.named_parameters():
        assert isinstance(p.grad1, DTensor) == isinstance(p, DTensor)
        assert_close(whole(p.grad1), rows[name], **NEAR)
        assert_close(whole(p.grad1.mean(0)), whole(p.grad), **NEAR)
    autograd_hacks.verify(net, args=(x,))
    assert len(autograd_hacks.describe(net).rows) == len(rows)
    with autograd_hacks.streaming(net, dot=v, gram=True, project=5) as streamed:
        autograd_hacks.backward(losses(net(x), y))
    assert_close(streamed.norms, joint(rows), **NEAR)
    assert_close(streamed.dot, along, **NEAR)
    assert_close(streamed.gram, flat @ flat.mT, **NEAR)
    assert_close(streamed.projection, grads.project(5), **NEAR)
    with autograd_hacks.accumulate(net):
        for a, b in zip(x.split(2), y.split(2)):
            losses(net(a), b).sum().backward()
    assert_close(autograd_hacks.per_sample_grads(net, "sum").norms(), joint(rows), **NEAR)


@pytest.mark.parametrize("probe", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_verbs_equal_one_backward_per_sample(both: Both, way: str, probe: bool) -> None:
    both(verbs, way, probe)


def steps(way: str, param_grad: bool) -> None:
    kind, cut, batch = WAYS[way]
    (x, y), mesh = batch(), dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    one, net = made(kind), cut(made(kind), mesh)
    autograd_hacks.add_hooks(net, param_grad=param_grad)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (net, one))
    for step in range(4):
        rows = one_backward_per_sample(one, x, y)
        norms = joint(rows)
        bound = float(norms.median())
        net.zero_grad()
        losses(net(x), y).mean().backward()
        if step == 3:
            autograd_hacks.compute_grad1(net, set_grad=True)
            w = torch.full_like(norms, 1 / len(norms))
        else:
            assert_close(autograd_hacks.clip_grad1_norm_(net, bound), norms, **NEAR)
            w = (bound / norms).clamp(max=1) / len(norms)
        for (name, p), own in zip(net.named_parameters(), one.parameters()):
            own.grad = torch.tensordot(w, rows[name], 1)
            assert p.grad is not None
            assert not isinstance(p, DTensor) or (isinstance(p.grad, DTensor) and p.grad.placements == p.placements)
            assert_close(whole(p.grad), own.grad, **NEAR)
        ours.step()
        theirs.step()
        for p, own in zip(net.parameters(), one.parameters()):
            assert_close(whole(p), own.detach(), **NEAR)


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_clipped_steps_equal_those_of_one_process(both: Both, way: str, param_grad: bool) -> None:
    both(steps, way, param_grad)
