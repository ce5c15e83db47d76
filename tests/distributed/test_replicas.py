"""DistributedDataParallel: rows are a process's own, sums over samples are everyone's."""

import copy
from contextlib import nullcontext
from typing import Any

import private_steps as hand
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from oracle import one_backward_per_sample
from private_steps import EXPECTED, NOISE, SEED, STEPS, by_hand, data, losses, net, training
from processes import Both, in_both
from rarely import crossed
from spread import BOUND, MODELS, assert_grads, batch, clipped, made, own, spread_out, squares, train, wrapped
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.data import TensorDataset
from twin import Bare

import autograd_hacks

WHERE = ["before", "inner", "wrapper", "around"]
OPTIONS = ["", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"]


def steps(name: str, where: str, param_grad: bool, probe: bool, sizes: tuple[int, ...], **options: Any) -> None:
    hooked, run, _ = wrapped(made(name), where, **options)
    autograd_hacks.add_hooks(hooked, probe=probe, param_grad=param_grad)
    train(hooked, name, sizes, run=run)


@crossed(param_grad=[True, False], name=MODELS)
@in_both
def test_steps(name: str, param_grad: bool) -> None:
    steps(name, "inner", param_grad, True, (5, 3), find_unused_parameters=name == "Tied")


@crossed(param_grad=[True, False], option=OPTIONS)
@in_both
def test_ways_to_wrap(param_grad: bool, option: str) -> None:
    for where in WHERE:
        steps("mlp", where, param_grad, True, (4, 4), **({option: True} if option else {}))
    steps("mlp", "inner", param_grad, False, (6, 0), **({option: True} if option else {}))


@in_both
def test_plain_steps_between() -> None:
    """What a wrapper reduces, and what not, is as it was, also after a forward that failed."""
    for where in WHERE:
        hooked, run, ddp = wrapped(made("mlp"), where)
        autograd_hacks.add_hooks(hooked, param_grad=False)
        for step in range(3):
            x, y = (part[own((4, 4))] for part in batch(step, 8))
            with pytest.raises(RuntimeError):
                run(x[:, :2])
            assert ddp.require_backward_grad_sync
            assert "_post_forward" not in vars(ddp)
            squares(run(x), y).mean().backward()
            assert ddp.require_backward_grad_sync
            assert "_post_forward" not in vars(ddp)
            assert all(p.grad is None for p in ddp.parameters())
            with autograd_hacks.pause_hooks():
                squares(run(x), y).mean().backward()
            twin = made("mlp")
            squares(twin(batch(step, 8)[0]), batch(step, 8)[1]).mean().backward()
            for p, expected in zip(ddp.parameters(), twin.parameters()):
                assert_close(p.grad, expected.grad)
            ddp.zero_grad()
            with ddp.no_sync():
                assert not ddp.require_backward_grad_sync
                squares(run(x), y).mean().backward()
                assert not ddp.require_backward_grad_sync


@in_both
def test_buffers() -> None:
    """Processes that probe different numbers of times, with a wrapper that sends buffers in each forward."""
    for where in WHERE:
        torch.manual_seed(1)
        net = Bare(lambda m, x: m.layer(x) * m.scale, layer=nn.Linear(3, 2)).double()
        net.register_buffer("scale", torch.ones(()))  # which the wrapper sends around
        twin = copy.deepcopy(net)
        hooked, run, ddp = wrapped(net, where)
        autograd_hacks.add_hooks(hooked)
        for step, sizes in enumerate(((4, 4), (1, 9), (2, 5), (30, 3))):
            x, y = (part[own(sizes)] for part in batch(step, sum(sizes)))
            squares(run(x), y).mean().backward()
            autograd_hacks.clip_grad1_norm_(hooked, BOUND)
            _, grads = clipped(twin, *batch(step, sum(sizes)))
            assert_grads(ddp, grads)
            ddp.zero_grad()


@pytest.mark.parametrize("where", WHERE)
@in_both
def test_micro_batches(where: str) -> None:
    for param_grad in (True, False):
        for waits in (True, False):
            hooked, run, ddp = wrapped(made("mlp"), where)
            autograd_hacks.add_hooks(hooked, param_grad=param_grad)
            x, y = batch(0, 8)
            _, grads = clipped(made("mlp"), x, y)
            with autograd_hacks.accumulate(hooked):
                for last, (a, b) in enumerate(zip(x[own((4, 4))].split(2), y[own((4, 4))].split(2))):
                    with ddp.no_sync() if waits and not last else nullcontext():
                        squares(run(a), b).mean().backward()
            autograd_hacks.clip_grad1_norm_(hooked, BOUND)
            assert_grads(ddp, grads)
            ddp.zero_grad()
            if not param_grad:  # each by itself
                for a, b in zip(x[own((4, 4))].split(2), y[own((4, 4))].split(2)):
                    squares(run(a), b).mean().backward()
                    autograd_hacks.clip_grad1_norm_(hooked, BOUND, add=True, batch_size=8)
                assert_grads(ddp, grads)


@in_both
def test_groups() -> None:
    """Processes that the user names, and none."""
    net, (x, y), group = made("mlp"), batch(0, 7), dist.new_group([0, 1])
    autograd_hacks.add_hooks(net)
    squares(net(x[own((4, 3))]), y[own((4, 3))]).mean().backward()
    _, alone = clipped(made("mlp"), x[own((4, 3))], y[own((4, 3))])
    _, together = clipped(made("mlp"), x, y)
    for given, expected in (
        (group, together),
        (dist.init_device_mesh("cpu", (2,)), together),
        (False, alone),
        (None, alone),
    ):
        autograd_hacks.clip_grad1_norm_(net, BOUND, process_group=given)
        assert_grads(net, expected)
    with pytest.raises(TypeError, match=r"process_group is 'gloo'; expected a torch\.distributed\.ProcessGroup"):
        autograd_hacks.per_sample_grads(net, process_group="gloo")


# A compiled step within DistributedDataParallel: clipped sums of all samples, with no word more


@pytest.mark.parametrize("verb", ["clip", "norms"])
@in_both
def test_sums_over_processes(verb: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    numbers = {"max_norm": 0.5} if verb == "clip" else {}
    step = autograd_hacks.compile(model, verb, loss_type="sum", backend=None, **numbers)  # type: ignore[arg-type]
    replica, x = nn.parallel.DistributedDataParallel(step), torch.randn(12, 4).double()
    mine = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    for _ in range(2):
        model.zero_grad()
        replica(x[mine]).square().sum().backward()
    rows = one_backward_per_sample(model, torch.square, x).values()
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in rows]).norm(dim=0)
    assert_close(step.norms, norms[mine])
    weights = (0.5 / norms).clamp(max=1) if verb == "clip" else torch.ones(12).double()
    for p, each in zip(model.parameters(), rows):
        assert_close(2 * p.grad, torch.tensordot(weights, each, 1))  # DDP takes the mean over processes


# Private training: what one process gives on whole batches


USERS = [n % 9 if n % 2 else n % 5 for n in range(30)]


@in_both
def test_texts_have_other_lengths_in_each_process() -> None:
    """Each process has texts of a length of its own, so that its forwards run operations of other sizes."""
    expected, model = by_hand(hand.Reader(), *hand.text(), STEPS, hand.losses_of_text), hand.Reader()
    hand.train(training(), DistributedDataParallel(model), given=hand.text(), loss=hand.losses_of_text)
    assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def as_one(way: str, secure: bool = False, groups: list[int] | None = None, options: dict[str, int] | None = None) -> None:
    expected, model = by_hand(net(), *data(), groups=groups), net()
    run = spread_out(model, way)
    private = training(seed=SEED + (torch.distributed.get_rank() if secure else 0), secure=secure, groups=groups)
    hand.train(private, run, epochs=2, steps=STEPS, **(options or {}))
    assert private.history == [(NOISE, EXPECTED / (30 if groups is None else len(set(groups))), 2 * STEPS)]
    parameters = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    if not secure:
        assert_close([p.detach() for p in parameters], [p.detach() for p in expected.parameters()], rtol=1e-4, atol=1e-5)
        return
    for p in parameters:  # the same secret draws on all
        everyones = [torch.empty_like(p) for _ in range(2)]
        torch.distributed.all_gather(everyones, p.detach())
        assert torch.equal(*everyones)


@crossed(way=["replicas", "shards of layers"], options=[{}, {"micro_batch_size": 2}])
def test_each_process_has_its_part_of_each_batch(both: Both, way: str, options: dict[str, int]) -> None:
    both(as_one, way, False, None, options)


@crossed(way=["shards of layers", "replicas"], options=[{}, {"micro_batch_size": 7}])
def test_each_process_has_its_users_of_each_batch(both: Both, way: str, options: dict[str, int]) -> None:
    both(as_one, way, False, USERS, options)


def test_processes_agree_on_the_seed_and_on_secure_noise(both: Both) -> None:
    both(as_one, "replicas", True)


@in_both
def test_a_loader_takes_processes_for_what_the_model_does() -> None:
    """Where nobody adds up over them, each would train on half of a batch."""
    model, private = net(), training()
    with private.attach(model):
        for x, y in private.loader(TensorDataset(*data())):
            private.backward(losses(model, x, y))
            with pytest.raises(ValueError, match="over 2 processes, but the model sums over 1"):
                private.step()
            break
