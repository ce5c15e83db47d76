"""Several processes: rows are a process's own, and what would make replicas drift apart, or go missing, is an error."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from oracle import one_backward_per_sample
from processes import WORLD, Both, both
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks.errors import NotReduced

__all__ = ["both"]  # a fixture


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().flatten(1).sum(1)


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch() -> tuple[Tensor, Tensor]:
    """The whole batch; the first half is process 0's."""
    torch.manual_seed(2)
    return torch.randn(8, 3).double(), torch.randn(8, 2).double()


def own(x: Tensor) -> Tensor:
    return x.chunk(WORLD)[dist.get_rank()]


def clipped_by_one_process(max_norm: float) -> dict[str, Tensor]:
    """The mean of the whole batch's clipped gradients, by one backward pass for each sample."""
    rows = one_backward_per_sample(model(), squares, *batch())
    norms = torch.stack([r.flatten(1).norm(dim=1) for r in rows.values() if r is not None]).norm(dim=0)
    weights = (max_norm / norms).clamp(max=1) / len(norms)
    assert 0 < (norms > max_norm).sum() < len(norms)
    return {name: torch.tensordot(weights, r, 1) for name, r in rows.items() if r is not None}


def reduce_grads(net: nn.Module) -> None:
    """As the error says it."""
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def wrapped(where: str, **options: bool) -> tuple[nn.Module, nn.Module, DistributedDataParallel]:
    """The model that is hooked, the one that is run, and the wrapper."""
    net = model()
    if where == "before":
        autograd_hacks.add_hooks(net)
    ddp = DistributedDataParallel(net, **options)
    hooked = {"before": net, "inner": net, "wrapper": ddp, "around": nn.Sequential(ddp)}[where]
    autograd_hacks.add_hooks(hooked)
    return hooked, hooked if where == "around" else ddp, ddp


WHERE = ["before", "inner", "wrapper", "around"]


def in_each_step(where: str, options: dict[str, bool]) -> None:
    (x, y), bound = batch(), 3.0
    hooked, run, ddp = wrapped(where, **options)
    for step in range(3):
        squares(run(own(x)), own(y)).mean().backward()
        with pytest.raises(NotReduced, match="clip_grad1_norm_ puts"):
            autograd_hacks.clip_grad1_norm_(hooked, bound)
        with pytest.raises(NotReduced, match=r"compute_grad1\(set_grad=True\) puts"):
            autograd_hacks.compute_grad1(hooked, set_grad=True)
        assert not hasattr(next(hooked.parameters()), "grad1")
        autograd_hacks.compute_grad1(hooked)
        rows = one_backward_per_sample(model(), squares, own(x), own(y))
        for p, expected in zip(hooked.parameters(), rows.values()):
            assert_close(p.grad1, expected)
        assert autograd_hacks.per_sample_grads(hooked).gram().shape == (4, 4)
        ddp.zero_grad()
        with ddp.no_sync():
            squares(run(own(x)), own(y)).mean().backward()
        autograd_hacks.clip_grad1_norm_(hooked, bound)
        reduce_grads(ddp)
        for p, expected in zip(ddp.parameters(), clipped_by_one_process(bound).values()):
            assert_close(p.grad, expected)
        with ddp.no_sync():
            squares(run(own(x)), own(y)).mean().backward()
        autograd_hacks.compute_grad1(hooked, set_grad=step < 2)
        ddp.zero_grad()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("option", ["", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_what_sets_grad_is_refused_where_gradients_are_reduced(both: Both, where: str, option: str) -> None:
    both(in_each_step, where, {option: True} if option else {})


def accumulating(where: str) -> None:
    (x, y), bound = batch(), 3.0
    hooked, run, ddp = wrapped(where)
    for reduced in (True, False):
        with autograd_hacks.accumulate(hooked):
            for last, (a, b) in enumerate(zip(own(x).split(2), own(y).split(2))):
                with nullcontext() if last and reduced else ddp.no_sync():
                    squares(run(a), b).mean().backward()
        if reduced:
            with pytest.raises(NotReduced):
                autograd_hacks.clip_grad1_norm_(hooked, bound)
        else:
            autograd_hacks.clip_grad1_norm_(hooked, bound)
            reduce_grads(ddp)
            for p, expected in zip(ddp.parameters(), clipped_by_one_process(bound).values()):
                assert_close(p.grad, expected)
        ddp.zero_grad()


@pytest.mark.parametrize("where", WHERE)
def test_micro_batches(both: Both, where: str) -> None:
    both(accumulating, where)


def two_passes(where: str, options: dict[str, bool]) -> None:
    (x, y), bound = batch(), 3.0
    hooked, run, ddp = wrapped(where, **options)

    def norms(losses: Tensor, retain_graph: bool) -> Tensor:
        with autograd_hacks.streaming(hooked) as streamed:
            autograd_hacks.backward(losses, retain_graph=retain_graph)
        ddp.zero_grad()
        return streamed.norms

    def weighted(losses: Tensor, norms: Tensor) -> None:
        with autograd_hacks.pause_hooks():
            (losses * (bound / norms).clamp(max=1)).mean().backward()

    def losses() -> Tensor:
        return squares(run(own(x)), own(y))

    def check() -> None:
        for p, expected in zip(ddp.parameters(), clipped_by_one_process(bound).values()):
            assert_close(p.grad, expected)
        ddp.zero_grad()

    for step in range(3):
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
        check()
        # or all by hand.
        with ddp.no_sync():
            each = losses()
            weighted(each, norms(each, retain_graph=True))
        reduce_grads(ddp)
        check()
    autograd_hacks.remove_hooks(hooked)
    each = losses().mean()
    each.backward(retain_graph=True)
    each.backward()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("option", ["", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"])
def test_a_second_backward_pass_is_refused_where_the_first_was_reduced(both: Both, where: str, option: str) -> None:
    both(two_passes, where, {option: True} if option else {})


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second):
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
        ddp = DistributedDataParallel(Heads(), find_unused_parameters=unused)
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
        ddp = DistributedDataParallel(Checkpointed(), static_graph=static)
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
        x, y = batch()
        for where in WHERE:
            hooked, run, ddp = wrapped(where)
            for _ in range(2):
                each = squares(run(x), y)
                each.mean().backward(retain_graph=True)
                autograd_hacks.compute_grad1(hooked, set_grad=True)
                autograd_hacks.clip_grad1_norm_(hooked, 3.0)
                for p, expected in zip(ddp.parameters(), clipped_by_one_process(3.0).values()):
                    assert_close(p.grad, expected)
                each.mean().backward()
    finally:
        dist.destroy_process_group()
