"""Tensor and sequence parallel: parameters that are cut over processes which have the same batch."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from cut_nets import NEAR, WAYS, Mlp, Unlike, joint, losses, made, mlp, one_backward_per_sample, whole
from processes import WORLD, Both
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import SamplesMixed, ShardedParameters, UnseenGradient


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
    for name, total in grads.reduce(torch.tanh).items():
        assert_close(whole(total), rows[name].tanh().sum(0), **NEAR)
    for name, total in grads.variance().items():
        assert_close(whole(total), rows[name].var(0), **NEAR)
    noise = grads.noise_scale()
    assert_close(noise.noise.float(), flat.var(0).sum(), **NEAR)
    assert_close(noise.signal.float(), flat.mean(0).square().sum() - flat.var(0).sum() / len(x), **NEAR)
    for name, products in grads.gram(per_parameter=True).items():
        assert_close(products, rows[name].flatten(1) @ rows[name].flatten(1).mT, **NEAR)
    for name, products in grads.dot(v, per_parameter=True).items():
        assert_close(products, rows[name].flatten(1) @ v[name].flatten(), **NEAR)
    assert_close(grads.cosine(kept), flat @ flat.mean(0) / flat.norm(dim=1) / flat.mean(0).norm(), **NEAR)
    some = grads.select(slice(1, 3))
    assert_close(some.norms(), joint(rows)[1:3], **NEAR)
    with pytest.raises(ShardedParameters, match="curvature"):
        grads.fisher_matvec(v)
    # As one process projects the same rows.
    one = made(kind)
    autograd_hacks.add_hooks(one)
    autograd_hacks.backward(losses(one(x), y))
    alone = autograd_hacks.per_sample_grads(one)
    assert_close(grads.project(5), alone.project(5), **NEAR)
    sparse = grads.project(6, kind="sjlt", entries=2)
    assert_close(sparse, alone.project(6, kind="sjlt", entries=2), **NEAR)
    autograd_hacks.compute_grad1(net)
    for name, p in net.named_parameters():
        assert isinstance(p.grad1, DTensor) == isinstance(p, DTensor)
        assert_close(whole(p.grad1), rows[name], **NEAR)
        assert_close(whole(p.grad1.mean(0)), whole(p.grad), **NEAR)
    autograd_hacks.verify(net, args=(x,))
    assert len(autograd_hacks.describe(net).rows) == len(rows)
    with autograd_hacks.during_backward(net, "norms", "gram", dot=v, project=5) as streamed:
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


def counted(way: str) -> None:
    """Norms take one sum over processes, and clipping no other; sequence parallel one more for each norm."""
    kind, cut, batch = WAYS[way]
    (x, y), mesh = batch(), dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
    net = cut(made(kind), mesh)
    autograd_hacks.add_hooks(net)
    sums, reduce = [], dist.all_reduce
    for _ in range(2):
        net.zero_grad()
        losses(net(x), y).mean().backward()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dist, "all_reduce", lambda total, **at: sums.append(total.numel()) or reduce(total, **at))
            autograd_hacks.clip_grad1_norm_(net, 1.0)
        of_norms = [len(x) * 16, len(x) * 8, len(x) * 16] if way == "along sequences" else []
        assert sorted(sums) == sorted([*of_norms, len(x)])
        sums.clear()


@pytest.mark.parametrize("way", ["by heads", "along sequences"])
def test_norms_take_one_sum_over_processes(both: Both, way: str) -> None:
    both(counted, way)


def hooked_before(param_grad: bool) -> None:
    (x, y), mesh = WAYS["mlp"][2](), dist.init_device_mesh("cpu", (WORLD,))
    net, rows = made(Mlp), one_backward_per_sample(made(Mlp), x, y)
    autograd_hacks.add_hooks(net, param_grad=param_grad)
    mlp(net, mesh)
    for _ in range(3):
        net.zero_grad()
        losses(net(x), y).mean().backward()
        autograd_hacks.compute_grad1(net, set_grad=True)
        for name, p in net.named_parameters():
            assert_close(whole(p.grad1), rows[name], **NEAR)
            assert_close(whole(p.grad), rows[name].mean(0), **NEAR)
        assert_close(autograd_hacks.clip_grad1_norm_(net, 1e9), joint(rows), **NEAR)
        for name, p in net.named_parameters():
            assert_close(whole(p.grad), rows[name].mean(0), **NEAR)


@pytest.mark.parametrize("param_grad", [True, False])
def test_hooks_from_before(both: Both, param_grad: bool) -> None:
    both(hooked_before, param_grad)


def jacobians() -> None:
    (x, _), mesh = WAYS["mlp"][2](), dist.init_device_mesh("cpu", (WORLD,))
    one, net = made(Mlp), mlp(made(Mlp), mesh)
    with autograd_hacks.add_hooks(net):
        rows = autograd_hacks.per_sample_jacobian(net, net(x))
    for n in range(2):
        for entry in range(3):
            one.zero_grad()
            one(x[n : n + 1])[0, entry].backward()
            length = torch.cat([p.grad.flatten() for p in one.parameters()]).norm()
            assert_close(rows.norms()[n, entry], length, **NEAR)
            for name, p in one.named_parameters():
                assert_close(whole(rows.dense()[name])[n, entry], p.grad, **NEAR)


def test_rows_of_a_jacobian(both: Both) -> None:
    both(jacobians)


class Scaled(nn.Module):
    """A parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * (self.scale.sum() if not isinstance(self.scale, DTensor) else self.scale.to_local().sum())


def refusals() -> None:
    (x, y), mesh = WAYS["mlp"][2](), dist.init_device_mesh("cpu", (WORLD,))
    net = mlp(made(Mlp), mesh)
    with autograd_hacks.add_hooks(net):
        with pytest.raises(TypeError, match="to_local"):
            net(DTensor.from_local(x, mesh, [Replicate()]))
        with pytest.raises(ShardedParameters, match="curvature"):
            autograd_hacks.backprop_hess(net(x))
        losses(net(x), y).mean().backward()
        with pytest.raises(ShardedParameters, match="curvature"):
            autograd_hacks.compute_hess(net)
        per_sample = losses(net(x.requires_grad_()), y)
        (slope,) = torch.autograd.grad(per_sample.sum(), x, create_graph=True)
        autograd_hacks.backward(per_sample + slope.square().sum(1))
        with pytest.raises(ShardedParameters, match="losses with derivatives"):
            autograd_hacks.per_sample_grads(net)
        x.requires_grad_(False)
    # Read past rules.
    for probe in (True, False):
        net = distribute_module(Scaled(), mesh)
        net.head = nn.Linear(4, 2)
        with autograd_hacks.add_hooks(net, probe=probe), pytest.raises(ShardedParameters, match="scale: split over"):
            net(torch.randn(3, 4))
    # Cut along the samples.
    net = distribute_module(nn.Sequential(nn.Linear(5, 3)), mesh, input_fn=_along_samples)
    for probe in (True, False):
        with autograd_hacks.add_hooks(net, probe=probe), pytest.raises(ShardedParameters, match="which is the batch"):
            net(x)
    # A layer whose rule is not right for parts.
    net = distribute_module(nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4)), mesh, _cut, _enter)
    for probe in (True, False):
        with autograd_hacks.add_hooks(net, probe=probe), pytest.raises(ShardedParameters, match="LayerNorm"):
            net(x)


def _along_samples(_: nn.Module, args: tuple[torch.Tensor, ...], mesh: object) -> tuple[torch.Tensor, ...]:
    return (DTensor.from_local(args[0], mesh, [Shard(0)]),)


def _enter(_: nn.Module, args: tuple[torch.Tensor, ...], mesh: object) -> tuple[torch.Tensor, ...]:
    return (DTensor.from_local(args[0], mesh, [Replicate()]),)


def _cut(_: str, module: nn.Module, mesh: object) -> None:
    for name, p in module.named_parameters(recurse=False):
        place = Shard(0) if isinstance(module, nn.LayerNorm) else Replicate()
        module.register_parameter(name, nn.Parameter(distribute_tensor(p.detach(), mesh, [place])))


def test_what_parts_give_no_rows_of_is_refused_by_name(both: Both) -> None:
    both(refusals)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.layer(x)[:, None]
        return nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]


def around_a_ring() -> None:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _disable_context_parallel_dispatcher as leave
    from torch.distributed.tensor.experimental._attention import _enable_context_parallel_dispatcher as enter

    net, x, mesh = Attends(), torch.randn(2, 8, 4), dist.init_device_mesh("cpu", (WORLD,))
    for probe in (True, False):
        autograd_hacks.add_hooks(net, probe=probe)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            with pytest.raises(UnseenGradient, match="context_parallel is on"):
                net(x)
            with torch.no_grad(), autograd_hacks.pause_hooks():
                assert x.shape[1] == 8 // WORLD
        enter()
        with pytest.raises(UnseenGradient, match="context_parallel is on"):
            net(x)
        leave()
        net(x).square().sum((1, 2)).mean().backward()
        assert len(autograd_hacks.per_sample_grads(net).norms()) == 2
        net.zero_grad()


def test_context_parallel_is_refused_by_name(both: Both) -> None:
    both(around_a_ring)


def unlike() -> None:
    (x, y), mesh = WAYS["mlp"][2](), dist.init_device_mesh("cpu", (WORLD,))
    for share in (1.0, 1e-7):
        net = mlp(Unlike(share), mesh)
        autograd_hacks.add_hooks(net)
        for _ in range(3):
            net.zero_grad()
            losses(net(x), y % 5).mean().backward()
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(net)


def test_what_one_process_finds_all_know(both: Both) -> None:
    both(unlike)
