"""Clipped steps whose batch comes in parts, or by chance: each equals one clip of the whole batch, done by hand."""

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn as nn
from nets import BareMatrix, with_spare
from oracle import clipped, squares
from refused import check_each
from steps import batch, mlp, rows_of, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import NothingRecorded

BOUND = 0.5
Micro = Sequence[tuple[Tensor, Tensor]]


def clipped_sum(plain: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Of the whole batch, from a plain backward pass for each sample."""
    return (
        [*clipped(rows_of(plain, x, y), BOUND)[1].values()] if len(x) else [torch.zeros_like(p) for p in plain.parameters()]
    )


class Trainer:
    """As trainers are: the loop is theirs, and users' code is called back."""

    def __init__(self, model: nn.Module, divides: bool = False) -> None:
        self.model, self.divides = model, divides
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step(self, micro: Micro) -> None:
        self.on_step_begin()
        for x, y in micro:
            loss = squares(self.model(x), y).mean()
            (loss / len(micro) if self.divides else loss).backward()
            self.on_micro_batch_end(micro)
        self.on_pre_optimizer_step()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def on_step_begin(self) -> None: ...
    def on_micro_batch_end(self, micro: Micro) -> None: ...
    def on_pre_optimizer_step(self) -> None: ...


class Appended(Trainer):
    def on_step_begin(self) -> None:
        autograd_hacks.accumulate(self.model).start()

    def on_pre_optimizer_step(self) -> None:
        autograd_hacks.accumulate(self.model).stop()
        autograd_hacks.clip_grad1_norm_(self.model, BOUND)


class Added(Trainer):
    def on_micro_batch_end(self, micro: Micro) -> None:
        size = None if self.divides else sum(len(x) for x, _ in micro)
        bound = BOUND / len(micro) if self.divides else BOUND
        autograd_hacks.clip_grad1_norm_(self.model, bound, add=True, batch_size=size)


MODELS = {"layers": mlp, "run again": lambda: nn.Sequential(BareMatrix(3), nn.Linear(3, 2)).double()}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(
    ("kind", "divides", "sizes", "param_grad"),
    [
        (Appended, False, (3, 1, 2), True),
        (Appended, False, (3, 1, 2), False),
        (Added, False, (3, 1, 2), False),
        (Added, False, (5,), False),
        (Added, True, (2, 2, 2), False),
    ],
)
def test_a_training_loop_of_micro_batches(
    kind: type[Trainer], divides: bool, sizes: Sequence[int], param_grad: bool, build: Callable[[], nn.Module]
) -> None:
    model = build()
    plain = copy.deepcopy(model)
    trainer, by_hand = kind(model, divides), torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for seed in range(4):
            x, y = batch(sum(sizes), seed)
            trainer.train_step(list(zip(x.split(sizes), y.split(sizes))))
            for p, total in zip(plain.parameters(), clipped_sum(plain, x, y)):
                p.grad = total / len(x)
            by_hand.step()
            assert_close(list(model.parameters()), list(plain.parameters()))


def test_what_the_loss_did_not_reach_keeps_its_gradient() -> None:
    model = with_spare(mlp()).double()
    model.spare.weight.grad = kept = torch.ones(2, 2).double()
    with autograd_hacks.add_hooks(model, param_grad=False):
        step(model, *batch())
        autograd_hacks.clip_grad1_norm_(model, BOUND, add=True)
    assert model.spare.weight.grad is kept
    assert model.spare.bias.grad is None


def test_adding_is_refused_where_grad_holds_some_of_it() -> None:
    model = mlp()

    def add() -> None:
        autograd_hacks.clip_grad1_norm_(model, BOUND, add=True)

    autograd_hacks.add_hooks(model)
    step(model, *batch())
    grads = [p.grad.clone() for p in model.parameters()]
    check_each((ValueError, r"unclipped.*param_grad=False", add))
    autograd_hacks.add_hooks(model, param_grad=False)  # too late for that pass
    check_each((ValueError, "unclipped", add))
    assert_close([p.grad for p in model.parameters()], grads)
    model.zero_grad()
    squares(model[2](torch.ones(2, 4).double())).mean().backward()  # a layer by itself, with an ordinary gradient
    check_each((ValueError, "unclipped", add))


@pytest.mark.parametrize(
    "put",
    [
        lambda m: autograd_hacks.clip_grad1_norm_(m, BOUND, add=True, batch_size=5),
        lambda m: autograd_hacks.clip_grad1_norm_(m, BOUND),
        lambda m: autograd_hacks.compute_grad1(m, set_grad=True),
    ],
)
def test_no_pass_is_added_twice(put: Callable[[nn.Module], object]) -> None:
    model = mlp()
    with autograd_hacks.add_hooks(model, param_grad=False):
        step(model, *batch())
        put(model)
        grads = [p.grad for p in model.parameters()]
        with pytest.raises(NothingRecorded, match="a second time"):
            autograd_hacks.clip_grad1_norm_(model, BOUND, add=True, batch_size=5)
        assert all(p.grad is grad for p, grad in zip(model.parameters(), grads))


# Passes that nobody has read, where .grad can't tell


@pytest.mark.parametrize(
    "read",
    [lambda m: autograd_hacks.clip_grad1_norm_(m, BOUND), lambda m: autograd_hacks.compute_grad1(m, set_grad=True)],
)
def test_an_earlier_micro_batch_that_nobody_has_read(read: Callable[[nn.Module], object]) -> None:
    model = mlp()
    with autograd_hacks.add_hooks(model, param_grad=False):
        for clears in (True, False):  # a refused pass isn't in the way of the next one
            for seed in range(2):
                step(model, *batch(3, seed))
            with pytest.raises(NothingRecorded, match=r"discarded.*accumulate.*add=True"):
                read(model)
            assert all(p.grad is None for p in model.parameters())
            if clears:
                autograd_hacks.clear_backprops(model)
        step(model, *batch())
        read(model)


def test_reading_some_steps_alone_is_no_mistake() -> None:
    model = mlp()
    with autograd_hacks.add_hooks(model, param_grad=False):
        for seed in range(6):
            step(model, *batch(3, seed))
            if seed % 3 == 2:
                assert autograd_hacks.per_sample_grads(model).norms().shape == (3,)


def test_a_pass_of_another_loss_before_grad_is_cleared_is_no_mistake() -> None:
    """A generator's step goes through the discriminator, whose gradients are thrown away."""
    critic, maker = mlp(), nn.Linear(2, 3).double()
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (critic, maker))
    with autograd_hacks.add_hooks(critic, param_grad=False):
        for seed in range(3):
            critic.zero_grad()
            step(critic, *batch(3, seed))
            autograd_hacks.clip_grad1_norm_(critic, BOUND)
            ours.step()
            maker.zero_grad()
            critic(maker(torch.randn(4, 2).double())).sum(1).mean().backward()
            theirs.step()
