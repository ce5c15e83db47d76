"""Models that ``fully_shard`` has cut: what one process gives on the whole batch."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import one_loss_at_a_time
from processes import Both
from rarely import crossed
from spread import BOUND, MODELS, Gains, batch, made, own, sharded, squares, train, whole
from torch.testing import assert_close

import autograd_hacks


def steps(name: str, sizes: tuple[int, ...], param_grad: bool, probe: bool, each: bool, **options: Any) -> None:
    model = sharded(made(name), each=each, **options)
    autograd_hacks.add_hooks(model, probe=probe, param_grad=param_grad)
    train(model, name, sizes)


@crossed(each=[False, True], param_grad=[True, False], name=MODELS)
def test_steps(both: Both, name: str, param_grad: bool, each: bool) -> None:
    both(steps, name, (5, 3), param_grad, True, each)


def inside(each: bool, param_grad: bool) -> None:
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


@crossed(each=[False, True], param_grad=[True, False])
def test_a_loss_that_the_model_makes(both: Both, each: bool, param_grad: bool) -> None:
    both(inside, each, param_grad)


def other_ways() -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

    for param_grad in (True, False):
        steps("mlp", (4, 4), param_grad, False, False)
        steps("mlp", (4, 4), param_grad, True, True, reshard_after_forward=False)
        steps("mlp", (4, 4), param_grad, True, False, offload_policy=CPUOffloadPolicy(pin_memory=False))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(made("mlp").float(), each=True, mp_policy=policy)
        autograd_hacks.add_hooks(model, param_grad=param_grad)
        train(model, "mlp", (4, 4), 2, rtol=0.1, atol=0.05)


def test_other_ways(both: Both) -> None:
    both(other_ways)


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
