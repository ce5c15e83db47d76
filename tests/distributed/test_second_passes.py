"""What would make replicas drift apart is an error."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from processes import WORLD, Both
from rarely import crossed
from spread import BOUND, assert_grads, batch, clipped, made, squares, wrapped
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NotReduced


def own(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def check(net: nn.Module) -> None:
    """Against one process."""
    assert_grads(net, clipped(made("mlp"), *batch(0, 8))[1])


def reduce_grads(net: nn.Module) -> None:
    """As the error says it."""
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


WHERE = ["before", "inner", "wrapper", "around"]


def two_passes(where: str, options: dict[str, bool]) -> None:
    (x, y), bound = batch(0, 8), BOUND
    hooked, run, ddp = wrapped(made("mlp"), where, **options)
    autograd_hacks.add_hooks(hooked)

    def norms(losses: Tensor, retain_graph: bool) -> Tensor:
        with autograd_hacks.during_backward(hooked, "norms") as streamed:
            autograd_hacks.backward(losses, retain_graph=retain_graph)
        ddp.zero_grad()
        return streamed.norms

    def weighted(losses: Tensor, norms: Tensor) -> None:
        with autograd_hacks.pause_hooks():
            (losses * (bound / norms).clamp(max=1)).mean().backward()

    def losses() -> Tensor:
        return squares(run(own(x)), own(y))

    for step in range(2):
        each = losses()
        found = norms(each, retain_graph=True)
        if step or "static_graph" not in options:  # in whose first step torch doesn't tell
            with pytest.raises(NotReduced, match="second backward pass"):
                weighted(each, found)
        ddp.zero_grad()
        # What the error says: another forward,
        with ddp.no_sync():
            found = norms(losses(), retain_graph=False)
        with autograd_hacks.pause_hooks():
            each = losses()
        weighted(each, found)
        check(ddp)
        ddp.zero_grad()
        # or all by hand.
        with ddp.no_sync():
            each = losses()
            weighted(each, norms(each, retain_graph=True))
        reduce_grads(ddp)
        check(ddp)
        ddp.zero_grad()
    autograd_hacks.remove_hooks(hooked)
    each = losses().mean()
    each.backward(retain_graph=True)
    each.backward()


@crossed(option=["", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"], where=WHERE)
def test_a_second_backward_pass_is_refused_where_the_first_was_reduced(both: Both, where: str, option: str) -> None:
    both(two_passes, where, {option: True} if option else {})


def checkpointed(m: nn.Module, x: Tensor) -> Tensor:
    for layer in (m.first, m.second):
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def agree(net: nn.Module) -> None:
    """Raises where the processes don't have the same gradients."""
    for p in net.parameters():
        found = [torch.empty_like(p.grad) for _ in range(WORLD)]
        dist.all_gather(found, p.grad.contiguous())
        assert_close(*found)


def several_passes() -> None:
    x = torch.randn(4, 3) + dist.get_rank()
    for unused in (False, True):
        ddp = DistributedDataParallel(
            Bare(lambda m, x: (m.first(x), m.second(x)), first=nn.Linear(3, 2), second=nn.Linear(3, 2)),
            find_unused_parameters=unused,
        )
        autograd_hacks.add_hooks(ddp)
        for _ in range(2):
            first, second = ddp(x)
            first.square().sum().backward(retain_graph=True)
            if unused:  # the first pass has reduced all
                with pytest.raises(NotReduced):
                    second.square().sum().backward()
            else:
                second.square().sum().backward()
                agree(ddp)
            ddp.zero_grad()
    for static in (False, True):
        ddp = DistributedDataParallel(Bare(checkpointed, first=nn.Linear(3, 3), second=nn.Linear(3, 3)), static_graph=static)
        autograd_hacks.add_hooks(ddp, probe=False)
        for _ in range(3):
            ddp(x.clone().requires_grad_()).square().sum().backward()
            agree(ddp)
            ddp.zero_grad()
    ddp = DistributedDataParallel(nn.Linear(3, 2, bias=False))
    autograd_hacks.add_hooks(ddp.module)
    one, other = ddp(x).square().mean(), ddp(2 * x).square().mean()
    one.backward()
    agree(ddp)
    with pytest.raises(NotReduced):
        other.backward()
    loss = ddp(x).square().mean()
    torch.autograd.grad(loss, [ddp.module.weight], retain_graph=True)  # which reduces nothing
    ddp.zero_grad()
    with torch.no_grad():
        ddp(x)
    loss.backward()
    agree(ddp)
    ddp.module(x).square().mean().backward()  # past the wrapper: nothing was to be reduced


def test_passes_that_are_reduced_are_not_refused(both: Both) -> None:
    both(several_passes)


def test_one_process_may_do_all() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x, y = batch(0, 8)
        for where in WHERE:
            hooked, run, ddp = wrapped(made("mlp"), where)
            autograd_hacks.add_hooks(hooked)
            for _ in range(2):
                each = squares(run(x), y)
                each.mean().backward(retain_graph=True)
                autograd_hacks.compute_grad1(hooked, set_grad=True)
                autograd_hacks.clip_grad1_norm_(hooked, 3.0)
                check(ddp)
                each.mean().backward()
    finally:
        dist.destroy_process_group()
