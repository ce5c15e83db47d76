"""Processes that hold parts of one model run it as often as each other, and fail together."""

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
import torch.nn as nn
from oracle import one_loss_at_a_time
from processes import WORLD, in_both
from rarely import crossed
from spread import (
    BOUND,
    assert_grads,
    batch,
    clipped,
    made,
    own,
    sharded,
    spread_out,
    squares,
    train,
    train_one,
    whole,
    wrapped,
)  # fmt: skip
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, NotReduced, PerSampleGradientError, ProcessesDisagree, SamplesMixed


@crossed(name=["mlp", "Attends"], each=[False, True])
@in_both
def test_batches_of_other_sizes_on_each_process(name: str, each: bool) -> None:
    model = sharded(made(name), each=each)
    autograd_hacks.add_hooks(model)
    # A new signature on one process alone, an empty one, larger batches, and what comes again after a while.
    for sizes in ((1, 9), (2, 3), (9, 1), (3, 0), (0, 5), (1, 1), (2, 3)):
        train_one(model, name, sizes)


def masked(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Takes an argument on some processes alone, and so is another kind of forward there."""
    x = m.first(x).tanh()
    return m.second(x if mask is None else x * mask)


@in_both
def test_a_new_signature_on_one_process_alone() -> None:
    torch.manual_seed(1)
    twin = Bare(masked, first=nn.Linear(3, 4), second=nn.Linear(4, 2)).double()
    model = sharded(copy.deepcopy(twin), each=True)
    autograd_hacks.add_hooks(model)
    for step in range(6):
        torch.manual_seed(1)
        (x, y), mask = batch(step, 7), torch.rand(7, 1).double()
        has_mask = [False, step % 3 == 1]  # by process
        masks = torch.cat([mask[:4] if has_mask[0] else torch.ones(4, 1), mask[4:] if has_mask[1] else torch.ones(3, 1)])
        rows = one_loss_at_a_time(twin, lambda x=x, y=y, masks=masks: squares(twin(x, masks), y))
        here = own((4, 3))
        out = model(x[here], mask[here]) if has_mask[dist.get_rank()] else model(x[here])
        squares(out, y[here]).mean().backward()
        total = autograd_hacks.per_sample_grads(model).weighted_sum(torch.ones(len(x[here])).double())
        for name, found in total.items():
            assert_close(whole(found), rows[name].sum(0), msg=lambda m, at=name: f"{at}: {m}")
        model.zero_grad()


@in_both
def test_models_that_were_hooked_differently() -> None:
    model, (x, _), rank = sharded(made("mlp")), batch(0, 8), dist.get_rank()
    autograd_hacks.add_hooks(model, param_grad=rank == 0)
    with pytest.raises(ProcessesDisagree, match=r"(?s)Process 0: .*param_grad=True.*Process 1: .*param_grad=False"):
        model(x[own((4, 4))])
    autograd_hacks.add_hooks(model)
    train_one(model)
    autograd_hacks.remove_hooks(model)
    autograd_hacks.add_hooks(model, probe=rank == 0)
    with pytest.raises(ProcessesDisagree, match=r"(?s)probe=True.*probe=False"):
        model(x[own((4, 4))])


def fails(m: Any, x: Tensor) -> Tensor:
    """Runs its own batch, and no other, on one process."""
    if dist.get_rank() == 1 and not (x.diff(dim=0)[:, 0] >= 0).all():
        raise ValueError("not in order")
    return m.layer(x)


@in_both
def test_where_one_process_can_not_make_a_plan_all_raise() -> None:
    torch.manual_seed(1)
    model = sharded(Bare(fails, layer=nn.Linear(3, 2)).double())
    autograd_hacks.add_hooks(model, independent=True)
    x = torch.arange(12).view(4, 3).double()
    with pytest.raises(PerSampleGradientError, match="not in order"):
        model(x)
    autograd_hacks.add_hooks(model, probe=False)
    model(x).square().sum(1).mean().backward()
    autograd_hacks.clip_grad1_norm_(model, BOUND)


def mixes(m: Any, x: Tensor) -> Tensor:
    out = m.layer(x)
    return out - out.mean(0) if dist.get_rank() == 1 else out


@in_both
def test_samples_that_mix_on_one_process() -> None:
    torch.manual_seed(1)
    model, (x, y) = sharded(Bare(mixes, layer=nn.Linear(3, 2)).double()), batch(0, 8)
    autograd_hacks.add_hooks(model)
    for _ in range(3):
        squares(model(x[own((4, 4))]), y[own((4, 4))]).mean().backward()
        with pytest.raises(SamplesMixed if dist.get_rank() else ProcessesDisagree):
            autograd_hacks.clip_grad1_norm_(model, BOUND)


EXCHANGES = {
    "without a gradient": lambda h: all_reduce(h.detach(), "sum", dist.group.WORLD) + 0,
    "a sum": lambda h: collectives.all_reduce(h.clone()),
    "each": lambda h: sum(collectives.all_gather(h.contiguous())),
    "a functional sum": lambda h: all_reduce(h, "sum", dist.group.WORLD) + 0,
}


@crossed(how=EXCHANGES, independent=[True, False], samples=[1, 4])
@in_both
def test_samples_that_other_processes_have_in_the_same_places(how: str, independent: bool, samples: int) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(
        Bare(lambda m, x: m.b(m.a(x) + EXCHANGES[how](m.a(x))), a=nn.Linear(3, 3), b=nn.Linear(3, 2))
    )
    autograd_hacks.add_hooks(model, independent=independent)
    with pytest.raises(PerSampleGradientError) if independent or how != "without a gradient" else nullcontext():
        model(torch.randn(samples, 3)).square().sum(1).mean().backward()
        autograd_hacks.compute_grad1(model)


class Packs(nn.Module):
    """Documents that are packed into samples, and told by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.last(self.table(ids))


def of_documents(out: Tensor) -> Tensor:
    return torch.zeros(4).double().index_add(0, torch.tensor([0, 0, 1, 2, 3, 3]), out.square().sum(2).flatten())


@pytest.mark.parametrize("each", [False, True])
@in_both
def test_a_forward_that_one_process_refuses(each: bool) -> None:
    torch.manual_seed(1)
    twin, ids, told = Packs().double(), torch.randint(5, (2, 3)), torch.tensor([[0, 0, 1], [0, 1, 1]])
    model = sharded(copy.deepcopy(twin), each=each)
    autograd_hacks.add_hooks(model, segments="documents")
    rows = one_loss_at_a_time(twin, lambda: of_documents(twin(ids)))
    norms = torch.stack([own.flatten(1).norm(dim=1) for own in rows.values() if own is not None]).norm(dim=0)
    for _ in range(2):
        with pytest.raises(ValueError if dist.get_rank() else ProcessesDisagree, match="no argument of this name"):
            model(ids, **({} if dist.get_rank() else {"documents": told}))
        autograd_hacks.backward(of_documents(model(ids, documents=told)))
        assert_close(autograd_hacks.clip_grad1_norm_(model, BOUND), norms)


@in_both
def test_forwards_without_gradients_agree_on_nothing() -> None:
    model, (x, _) = sharded(made("mlp")), batch(0, 8)
    autograd_hacks.add_hooks(model)
    train(model, "mlp", (4, 4), 2)
    with torch.no_grad():  # no word of the hooks: as many gathers as without them, on each process
        outs = [whole(model(x)) for _ in range(1 + 0 * dist.get_rank())]
    assert outs[0].shape == (8, 2)
    for hooks in ("before", "after"):  # what is gathered still, after a forward without gradients, is a part all the same
        for each in (False, True):
            model = sharded(made("mlp"), each=each)
            if hooks == "before":
                autograd_hacks.add_hooks(model)
            with torch.no_grad():
                model(x)
            if hooks == "after":
                autograd_hacks.add_hooks(model)
            for _ in range(2):
                train_one(model, "mlp", (5, 3))


@crossed(param_grad=[True, False], way=["replicas", "shards", "shards of layers"])
@in_both
def test_a_pass_that_nobody_has_read_is_not_lost(way: str, param_grad: bool) -> None:
    """What an earlier pass has left is in ``.grad`` too, and nobody has read it."""
    model = spread_out(made("mlp"), way)
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    x, y = (part[own((4, 4))] for part in batch(0, 8))
    for _ in range(2):
        for _ in range(2):
            squares(model(x), y).mean().backward()
        for read in (autograd_hacks.per_sample_grads, lambda m: autograd_hacks.clip_grad1_norm_(m, BOUND)):
            if param_grad or "lambda" in read.__name__:
                with pytest.raises(NothingRecorded, match="an earlier backward pass"):
                    read(model)
        model.zero_grad()
        autograd_hacks.clear_backprops(model)
        squares(model(x), y).mean().backward()
        autograd_hacks.clip_grad1_norm_(model, BOUND)
        model.zero_grad()


# What would make replicas drift apart


def half(x: Tensor) -> Tensor:
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


@crossed(option=["", "static_graph", "find_unused_parameters", "gradient_as_bucket_view"], where=WHERE)
@in_both
def test_a_second_backward_pass_is_refused_where_the_first_was_reduced(where: str, option: str) -> None:
    (x, y), bound = batch(0, 8), BOUND
    hooked, run, ddp = wrapped(made("mlp"), where, **({option: True} if option else {}))
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
        return squares(run(half(x)), half(y))

    for step in range(2):
        each = losses()
        found = norms(each, retain_graph=True)
        if step or option != "static_graph":  # in whose first step torch doesn't tell
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


@in_both
def test_passes_that_are_reduced_are_not_refused() -> None:
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
