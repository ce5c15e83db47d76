"""Models that processes divide: by ``fully_shard`` they give what one process does, other ways are refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from oracle import one_loss_at_a_time
from processes import WORLD, Both, in_both
from rarely import crossed
from spread import BOUND, MODELS, Gains, batch, made, own, sharded, squares, train, whole
from steps import check_batches
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import ShardedParameters, UnseenGradient


@in_both
def test_sharded_parameters_are_refused() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

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


def blocks() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def by_columns(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(net, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})


def copied_to_all(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    def enter(_: nn.Module, args: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[torch.Tensor, ...]:
        return (DTensor.from_local(args[0], mesh, [Replicate()]),)

    return distribute_module(net, mesh, input_fn=enter, output_fn=lambda _, output, __: output.to_local())


@in_both
def test_tensor_parallelism_is_refused() -> None:
    mesh, x = dist.init_device_mesh("cpu", (WORLD,)), torch.randn(3, 2, 4)
    for cut in (by_columns, copied_to_all):
        for hooks in ("before", "after"):
            for probe in (True, False):
                for frozen in (True, False):
                    net = blocks()
                    head = nn.Linear(4, 2)
                    if hooks == "before":
                        autograd_hacks.add_hooks(nn.Sequential(net, head), probe=probe)
                    model = nn.Sequential(cut(net, mesh).requires_grad_(not frozen), head)
                    autograd_hacks.add_hooks(model, probe=probe)
                    with pytest.raises(ShardedParameters, match=r"0\.1\.weight.*Tensor parallelism.*fully_shard"):
                        model(x)
                    with autograd_hacks.pause_hooks():
                        model(x).square().sum().backward()
                    assert head.weight.grad is not None
    # Shards of parts.
    both = dist.init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp", "tp"))
    net = fully_shard(by_columns(blocks(), both["tp"]), mesh=both["dp"])
    autograd_hacks.add_hooks(net)
    for _ in range(2):
        with pytest.raises(ShardedParameters, match="Tensor parallelism"):
            net(x)


@in_both
def test_dtensors_are_refused() -> None:
    mesh, x = dist.init_device_mesh("cpu", (WORLD,)), torch.randn(3, 2, 4)
    net = nn.Sequential(nn.Linear(4, 2))
    with autograd_hacks.add_hooks(net), pytest.raises(TypeError, match="to_local"):
        net(DTensor.from_local(x, mesh, [Replicate()]))

    def enters(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Parameters are ordinary, and the computation is not."""
        inside = DTensor.from_local(torch.tanh(m.first(x)), mesh, [Shard(1)])
        return (inside @ DTensor.from_local(m.weight, mesh, [Replicate()])).sum(1).full_tensor()

    for probe in (True, False):
        inside = Bare(enters, weight=torch.randn(4, 4), first=nn.Linear(4, 4))
        with pytest.raises(ShardedParameters, match="computes with a DTensor"):
            check_batches(inside, x, probe=probe)


def attends(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = m.layer(x)[:, None]
    return nn.functional.scaled_dot_product_attention(q, q, q)[:, 0]


@in_both
def test_context_parallelism_is_refused() -> None:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import _disable_context_parallel_dispatcher as leave
    from torch.distributed.tensor.experimental._attention import _enable_context_parallel_dispatcher as enter

    net, x, mesh = Bare(attends, layer=nn.Linear(4, 4)), torch.randn(2, 8, 4), dist.init_device_mesh("cpu", (WORLD,))
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


@in_both
def test_pipelines_are_refused() -> None:
    """Both stages of a pipeline in this process, so that no other waits."""
    x, alone = torch.randn(8, 3), [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
    for schedule, count in ((ScheduleInterleaved1F1B, 2), (ScheduleGPipe, 1)):
        nets = [nn.Linear(3, 3), nn.Linear(3, 3)][:count]
        stages = [PipelineStage(net, n, count, torch.device("cpu"), group=alone) for n, net in enumerate(nets)]
        run = schedule(stages if count > 1 else stages[0], 4, loss_fn=nn.functional.mse_loss)
        run.step(x, target=x)
        for net in nets:
            autograd_hacks.add_hooks(net)
        with pytest.raises(RuntimeError) as raised:  # torch's own, which names the stage and quotes ours as its cause
            run.step(x, target=x)
        assert isinstance(raised.value.__cause__, ShardedParameters)
        assert "one stage of a pipeline" in str(raised.value.__cause__)
        with autograd_hacks.pause_hooks():
            run.step(x, target=x)
        nets[0](x).square().sum(1).mean().backward()
        assert len(autograd_hacks.per_sample_grads(nets[0]).norms()) == 8


# Models that ``fully_shard`` has cut: what one process gives on the whole batch


def steps(name: str, sizes: tuple[int, ...], param_grad: bool, probe: bool, each: bool, **options: Any) -> None:
    model = sharded(made(name), each=each, **options)
    autograd_hacks.add_hooks(model, probe=probe, param_grad=param_grad)
    train(model, name, sizes)


@crossed(each=[False, True], param_grad=[True, False], name=MODELS)
@in_both
def test_steps(name: str, param_grad: bool, each: bool) -> None:
    steps(name, (5, 3), param_grad, True, each)


@crossed(each=[False, True], param_grad=[True, False])
@in_both
def test_a_loss_that_the_model_makes(each: bool, param_grad: bool) -> None:
    torch.manual_seed(1)
    one = Gains().double()
    model = sharded(copy.deepcopy(one), each=each)
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    for step in range(3):
        x, y = batch(step, 8)
        model(x[own((5, 3))], y[own((5, 3))])[0].backward()
        norms = autograd_hacks.clip_grad1_norm_(model, BOUND)
        by_name = one_loss_at_a_time(one, lambda x=x, y=y: squares(one(x, y)[1], y))
        rows = torch.cat([own.flatten(1) for own in by_name.values()], 1)
        expected = rows.norm(dim=1)
        assert_close(norms, expected[own((5, 3))])
        found = torch.cat([whole(p.grad).flatten() for p in model.parameters()])
        assert_close(found, (BOUND / expected).clamp(max=1) @ rows / 8)
        model.zero_grad()


@in_both
def test_other_ways() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    for param_grad in (True, False):
        steps("mlp", (4, 4), param_grad, False, False)
        steps("mlp", (4, 4), param_grad, True, True, reshard_after_forward=False)
        steps("mlp", (4, 4), param_grad, True, False, offload_policy=CPUOffloadPolicy(pin_memory=False))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(made("mlp").float(), each=True, mp_policy=policy)
        autograd_hacks.add_hooks(model, param_grad=param_grad)
        train(model, "mlp", (4, 4), 2, rtol=0.1, atol=0.05)


def hybrid() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for param_grad in (True, False):
        model = sharded(made("mlp"), mesh=mesh)
        autograd_hacks.add_hooks(model, param_grad=param_grad)
        train(model, "mlp", (3, 2, 4, 2))
        steps("Attends", (3, 2, 4, 2), param_grad, True, True)


@pytest.mark.slow
def test_four_processes_that_hold_parts_and_copies(four: Both) -> None:
    four(hybrid)
