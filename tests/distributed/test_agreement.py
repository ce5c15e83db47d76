"""Processes that hold parts of one model run it as often as each other, and fail together."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from oracle import one_loss_at_a_time
from processes import Both
from rarely import crossed
from spread import (
    BOUND,
    batch,
    made,
    own,
    sharded,
    spread_out,
    squares,
    train,
    train_one,
    whole,
)  # fmt: skip
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import (
    NothingRecorded,
    PerSampleGradientError,
    ProcessesDisagree,
    SamplesMixed,
)


def uneven(name: str, each: bool) -> None:
    model = sharded(made(name), each=each)
    autograd_hacks.add_hooks(model)
    # A new signature on one process alone, an empty one, larger batches, and what comes again after a while.
    for sizes in ((1, 9), (2, 3), (9, 1), (3, 0), (0, 5), (1, 1), (2, 3)):
        train_one(model, name, sizes)


@crossed(name=["mlp", "Attends"], each=[False, True])
def test_batches_of_other_sizes_on_each_process(both: Both, name: str, each: bool) -> None:
    both(uneven, name, each)


def masked(m: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Takes an argument on some processes alone, and so is another kind of forward there."""
    x = m.first(x).tanh()
    return m.second(x if mask is None else x * mask)


def a_new_signature_on_one_process_alone() -> None:
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


def models_that_were_hooked_differently() -> None:
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


def where_one_process_can_not_make_a_plan_all_raise() -> None:
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


def samples_that_mix_on_one_process() -> None:
    torch.manual_seed(1)
    model, (x, y) = sharded(Bare(mixes, layer=nn.Linear(3, 2)).double()), batch(0, 8)
    autograd_hacks.add_hooks(model)
    for _ in range(3):
        squares(model(x[own((4, 4))]), y[own((4, 4))]).mean().backward()
        with pytest.raises(SamplesMixed if dist.get_rank() else ProcessesDisagree):
            autograd_hacks.clip_grad1_norm_(model, BOUND)


class Packs(nn.Module):
    """Documents that are packed into samples, and told by name."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.last(self.table(ids))


def of_documents(out: Tensor) -> Tensor:
    return torch.zeros(4).double().index_add(0, torch.tensor([0, 0, 1, 2, 3, 3]), out.square().sum(2).flatten())


def one_is_refused(each: bool) -> None:
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


@pytest.mark.parametrize("each", [False, True])
def test_a_forward_that_one_process_refuses(both: Both, each: bool) -> None:
    both(one_is_refused, each)


def forwards_without_gradients_agree_on_nothing() -> None:
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


def two_passes(way: str, param_grad: bool) -> None:
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


@crossed(param_grad=[True, False], way=["replicas", "shards", "shards of layers"])
def test_a_pass_that_nobody_has_read_is_not_lost(both: Both, way: str, param_grad: bool) -> None:
    both(two_passes, way, param_grad)


@pytest.mark.parametrize(
    "task",
    [
        a_new_signature_on_one_process_alone,
        models_that_were_hooked_differently,
        where_one_process_can_not_make_a_plan_all_raise,
        samples_that_mix_on_one_process,
        forwards_without_gradients_agree_on_nothing,
    ],
)
def test_in_both_processes(both: Both, task: Callable[[], None]) -> None:
    both(task)
