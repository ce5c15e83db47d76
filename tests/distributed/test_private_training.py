"""Private training over processes: what one process gives on whole batches."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from private_steps import BOUND, EXPECTED, LR, NOISE, SEED, STEPS, Reader, by_hand, data, losses, losses_of_text, net, text
from processes import Both, in_both
from rarely import crossed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from autograd_hacks.private import PrivateTraining

USERS = [n % 9 if n % 2 else n % 5 for n in range(30)]


@in_both
def test_texts_have_other_lengths_in_each_process() -> None:
    """Each process has texts of a length of its own, so that its forwards run operations of other sizes."""
    expected, model = by_hand(Reader(), *text(), STEPS, losses_of_text), Reader()
    run, private = DistributedDataParallel(model), PrivateTraining(BOUND, NOISE, EXPECTED, 1e-3, seed=SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with private.attach(run, optimizer):
        for x, y in private.loader(TensorDataset(*text())):
            private.backward(losses_of_text(run, x, y))
            private.step()
            optimizer.step()
            optimizer.zero_grad()
    assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def steps(way: str, secure: bool = False, groups: list[int] | None = None, options: dict[str, int] | None = None) -> None:
    expected, model = by_hand(net(), *data(), groups=groups), net()
    run: nn.Module = model
    if way == "ddp":
        run = DistributedDataParallel(model)
    elif way == "fsdp2":
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    private = PrivateTraining(BOUND, NOISE, EXPECTED, 1e-3, seed=SEED + (torch.distributed.get_rank() if secure else 0),
                              secure=secure, groups=groups)  # fmt: skip
    optimizer, kept = torch.optim.SGD(model.parameters(), lr=LR), list[Any]()
    with private.attach(run, optimizer):
        for _ in range(2):
            for x, y in private.loader(TensorDataset(*data()), steps=STEPS, **(options or {})):
                private.backward(losses(run, x, y))
                if (found := private.step()) is not None:
                    optimizer.step()
                    optimizer.zero_grad()
                    kept.append(len(found.norms))
    assert private.history == [(NOISE, EXPECTED / (30 if groups is None else len(set(groups))), 2 * STEPS)]
    parameters = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    if not secure:
        assert_close([p.detach() for p in parameters], [p.detach() for p in expected.parameters()], rtol=1e-4, atol=1e-5)
        return
    for p in parameters:  # the same secret draws on all
        everyones = [torch.empty_like(p) for _ in range(2)]
        torch.distributed.all_gather(everyones, p.detach())
        assert torch.equal(*everyones)


@crossed(way=["ddp", "fsdp2"], options=[{}, {"micro_batch_size": 2}])
def test_each_process_has_its_part_of_each_batch(both: Both, way: str, options: dict[str, int]) -> None:
    both(steps, way, False, None, options)


@crossed(way=["fsdp2", "ddp"], options=[{}, {"micro_batch_size": 7}])
def test_each_process_has_its_users_of_each_batch(both: Both, way: str, options: dict[str, int]) -> None:
    both(steps, way, False, USERS, options)


def test_processes_agree_on_the_seed_and_on_secure_noise(both: Both) -> None:
    both(steps, "ddp", True)


@in_both
def test_a_loader_takes_processes_for_what_the_model_does() -> None:
    """Where nobody adds up over them, each would train on half of a batch."""
    model, private = net(), PrivateTraining(BOUND, NOISE, EXPECTED, 1e-3, seed=SEED)
    with private.attach(model):
        for x, y in private.loader(TensorDataset(*data())):
            private.backward(losses(model, x, y))
            with pytest.raises(ValueError, match="over 2 processes, but the model sums over 1"):
                private.step()
            break
