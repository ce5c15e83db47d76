"""Loops that are written otherwise than documented: a private step is the same one, or refused."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from private_steps import EXPECTED, LR, NOISE, STEPS, by_hand, dataset, losses, net, train, training
from private_steps import data as numbers
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import TensorDataset
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.private import PrivateTraining
from autograd_hacks.private.accounting import spent

pytestmark = pytest.mark.usefixtures("double")


def begun(private: PrivateTraining, *models: nn.Module, **options: Any) -> Iterator[tuple[nn.Module, Tensor, Tensor]]:
    """A model in training, and its batches."""
    model = models[0] if models else net()
    with private.attach(model):
        for x, y in private.loader(dataset(), **options):
            yield model, x, y


def epoch(private: PrivateTraining, model: nn.Module, **options: Any) -> int:
    """A pass; how many steps it has had."""
    return len(train(private, model, **options))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_steps_after_each_micro_batch_never_sees_a_sum_without_noise(momentum: float) -> None:
    """As a loop does that takes no notice of what step() returns: it also empties .grad each time."""
    models = []
    for options in ({}, {"parts": 3}, {"micro_batch_size": 2}):
        private, model = training(), net()
        optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum, weight_decay=0.01 * momentum)
        with private.attach(model, optimizer):
            for x, y in private.loader(dataset(), **options):
                private.backward(losses(model, x, y))
                private.step()
                optimizer.step()
                optimizer.zero_grad()
        models.append(model.state_dict())
    if not momentum:
        assert_close(models[0], by_hand(net(), *numbers(), STEPS).state_dict())
    assert_close(models[1], models[0])
    assert_close(models[2], models[0])


@pytest.mark.parametrize("at", [0, 2])
def test_a_batch_that_was_left_out_is_refused(at: int) -> None:
    """Also where all have one shape: another's mask would take padding for a sample."""
    private = training()
    for i, (model, x, y) in enumerate(begun(private, micro_batch_size=12, padded=True)):
        if i != at:
            private.backward(losses(model, x, y))
            with pytest.raises(RuntimeError, match="one call for each, in order") if i > at else nullcontext():
                private.step()
        if i > at:
            break


def test_a_rate_that_changes_amid_a_pass_is_refused() -> None:
    private = training()
    model, x, y = next(batches := begun(private))
    private.expected_batch_size = 2
    private.backward(losses(model, x, y))
    with pytest.raises(RuntimeError, match=r"drawn at a rate of 0\.2"):
        private.step()
    batches.close()


@pytest.mark.parametrize("how", ["views", "accumulated", "cut"])
def test_another_number_of_losses_than_samples_is_refused(how: str) -> None:
    private = training()
    model, x, y = next(batches := begun(private))
    x, y = {"views": (x.repeat(2, 1), y.repeat(2)), "accumulated": (x, y), "cut": (x[:1], y[:1])}[how]
    with autograd_hacks.accumulate(model) if how == "accumulated" else nullcontext():
        for _ in range(1 + (how == "accumulated")):
            private.backward(losses(model, x, y))
    with pytest.raises(ValueError, match=r"\d samples were drawn, but \d+ have losses; expected one loss for each"):
        private.step()
    batches.close()


def test_views_of_a_sample_are_one_sample() -> None:
    private = training()
    model, x, y = next(
        batches := begun(
            private, Bare(lambda m, x: m.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2]), layer=nn.Linear(4, 3))
        )
    )
    logits = model(torch.stack([x, x + 0.1, x - 0.1], 1))
    each = nn.functional.cross_entropy(logits.mT, y[:, None].expand(-1, 3), reduction="none")
    private.backward(each.mean(1))
    assert private.step().norms.shape == y.shape
    batches.close()


def test_parameters_that_an_optimizer_gets_later_are_refused() -> None:
    private, model, head = training(), net(), nn.Linear(3, 3).requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=LR)
    with private.attach(model, optimizer):
        for x, y in private.loader(dataset()):
            private.backward(losses(model, x, y))
            private.step()
            head.requires_grad_()
            with pytest.raises(ValueError, match="without clipping and noise"):
                private.step()
            break


def test_each_pass_has_its_own_length() -> None:
    private, model = training(), net()
    assert epoch(private, model) == STEPS
    private.expected_batch_size = 10
    assert epoch(private, model) == 3
    assert epoch(private, model, steps=7) == 7
    assert private.history == [(NOISE, EXPECTED / 30, STEPS), (NOISE, 10 / 30, 10)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_more_is_spent_than_was_to_be() -> None:
    given: dict[str, Any] = {"noise_multiplier": None, "epsilon": 3.0}
    whole, model = training(**given, steps=2 * STEPS), net()
    epoch(whole, model)
    state = copy.deepcopy(whole.state_dict())
    again = training(**given, steps=2 * STEPS)  # goes on, with the same noise
    again.load_state_dict(state)
    epoch(whole, model)
    epoch(again, net())
    assert again.history == whole.history == [(whole.multiplier, EXPECTED / 30, 2 * STEPS)]
    with pytest.raises(RuntimeError, match=r"the 10 steps that may spend epsilon=3\.0 are done"):
        epoch(whole, model)
    longer = training(**given, steps=4 * STEPS)  # more steps, or larger batches, spend what is left
    longer.load_state_dict(state)
    epoch(longer, model)
    longer.expected_batch_size = 10
    for _ in range(4):
        epoch(longer, model, steps=2)
    assert 2.9 < spent([*longer.history, (longer.multiplier, 10 / 30, 4 * STEPS - longer.steps)], 1e-3) <= 3.0


@pytest.mark.parametrize("kind", ["a list", "an array"])
@pytest.mark.parametrize("mixes", [False, True])
def test_samples_that_mix_by_numbers_that_are_no_tensors_are_refused(kind: str, mixes: bool) -> None:
    x, y = numbers()

    def of_numbers(m: nn.Module, x: Tensor, rows: Any) -> Tensor:
        """Samples are numbers in a list, or an array, beside a tensor of no meaning."""
        own = torch.tensor(rows)
        return m.layer(own - own.mean(0) * mixes) + 0 * x[:, :3]

    model = Bare(of_numbers, layer=nn.Linear(4, 3))
    context = pytest.raises(SamplesMixed, match="while others were replaced") if mixes else nullcontext()
    private, expected = training(), by_hand(copy.deepcopy(model.layer), x, y, STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with private.attach(model, optimizer), context:
        for own, targets in private.loader(TensorDataset(x, y)):
            rows = own.tolist() if kind == "a list" else own.numpy()
            private.backward(nn.functional.cross_entropy(model(own, rows), targets, reduction="none"))
            private.step()
            optimizer.step()
        assert_close(model.layer.state_dict(), expected.state_dict())
