"""Loops that are written otherwise than documented: a private step is the same one, or refused."""

import copy
import enum
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from private_steps import EXPECTED, LR, NOISE, SIZE, STEPS, by_hand, dataset, losses, net, train, training
from private_steps import data as numbers
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.testing import assert_close
from torch.utils.data import StackDataset, TensorDataset, default_collate
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


Rows = list[dict[str, Any]]
Rounding = enum.Enum("Rounding", ["UP"])


class Held:
    def __init__(self, rows: Rows) -> None:
        self.of, self.x = self, SimpleNamespace(x=torch.stack([own["x"] for own in rows]))


COLLATES: dict[str, tuple[Callable[[Rows], Any], bool]] = {  # whether samples are known to be at their places
    "default": (default_collate, True),
    "sorted by a number": (lambda rows: default_collate(sorted(rows, key=lambda own: float(own["x"][0]))), False),
    "sorted by few numbers": (lambda rows: default_collate(sorted(rows, key=lambda own: -int(own["y"]))), False),
    "backwards": (lambda rows: default_collate(rows[::-1]), False),
    "shuffled": (lambda rows: default_collate(random.sample(rows, len(rows))), False),
    "sorted and random": (lambda rows: default_collate(sorted([own | {"z": random.random()} for own in rows],
                                                              key=lambda own: float(own["x"][0]))), False),
    "sorted lists": (lambda rows: sorted([own["x"] for own in rows], key=lambda x: float(x[0])), False),
    "of other samples": (lambda rows: torch.stack([x := own["x"] for own in rows]).cumsum(0) + 0 * x, False),
    "lists": (lambda rows: [own["x"] for own in rows], True),
    "samples on another axis": (lambda rows: {"x": torch.stack([own["x"] for own in rows], 1).numpy()}, True),
    "nothing by samples": (lambda rows: torch.cat([own["x"] for own in rows]), False),
    "packed": (lambda rows: (pack_sequence([own["x"] for own in rows], False), [own["y"] for own in rows]), True),
    "taken out": (lambda rows: SimpleNamespace(y=torch.stack([own.pop("y") for own in rows]), of=Rounding.UP), True),
    "sorted, in an object": (lambda rows: Held(sorted(rows, key=lambda own: float(own["x"][0]))), False),
    "in an object": (lambda rows: Held(rows), True),
    "NaN, a constant and a flip of all": (lambda rows: {"x": torch.stack([own["x"] / 0 * 0 for own in rows]),
                                                        "table": torch.arange(len(rows[0]["x"])),
                                                        "z": torch.stack([own["y"] for own in rows])
                                                        * random.choice([-1, 1])}, True),
}  # fmt: skip


@pytest.mark.parametrize("options", [{"micro_batch_size": 4}, {"groups": [n // 3 for n in range(SIZE)]}], ids=str)
@pytest.mark.parametrize("name", COLLATES)
def test_samples_must_be_at_their_places_where_padding_or_users_are(name: str, options: dict[str, Any]) -> None:
    private = training(**{key: x for key, x in options.items() if key == "groups"})
    most, (collate, keeps) = options.get("micro_batch_size"), COLLATES[name]
    x, y = numbers()
    rows = StackDataset(x=x, y=y, name=[str(n) for n in range(SIZE)])
    with nullcontext() if keeps else pytest.raises(ValueError, match="puts samples in another order"):
        list(private.loader(rows, collate_fn=collate, micro_batch_size=most))
    list(training().loader(rows, collate_fn=collate))  # without users, each batch whole


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


@pytest.mark.parametrize(
    ("name", "words"),
    [("expected_batch_size", r"drawn at a rate of 0\.2"), ("max_norm", r"clipped to max_norm=0\.5.*expected max_norm=2")],
)
def test_what_changes_amid_a_step_is_refused(name: str, words: str) -> None:
    private = training()
    batches = begun(private, parts=2)
    for refuses in (False, True):
        model, x, y = next(batches)
        private.backward(losses(model, x, y))
        with pytest.raises((RuntimeError, ValueError), match=words) if refuses else nullcontext():
            private.step()
        setattr(private, name, 2)
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


@pytest.mark.parametrize(
    "how", ["a criterion's", "no nn.Parameter", "a model that was attached before", "an input", "a batch's"]
)
def test_leaves_outside_of_the_model_get_no_gradient_without_noise(how: str) -> None:
    """Only an input of the model may, and a leaf of this batch alone: their gradients are samples' own."""
    private, first, seen = training(), net(), 0
    outside = nn.Parameter(torch.ones(())) if how.startswith("a crit") else torch.ones((), requires_grad=True)
    with private.attach(first):
        for model, x, y in begun(private):
            x = (
                x.requires_grad_()
                if how == "an input"
                else x + torch.zeros_like(x).requires_grad_()
                if how == "a batch's"
                else x
            )
            found = losses(model, x, y)
            if how in ("an input", "a batch's") or (how == "no nn.Parameter" and not seen):
                private.backward(found * outside if how.startswith("no") else found)
                seen += private.step() is not None
                continue
            with pytest.raises(ValueError, match=r"the losses use \d+ parameters outside of the attached model"):
                private.backward(found + losses(first, x, y) if how.startswith("a model") else found * outside)
            assert all(p.grad is None for p in (first.parameters() if how.startswith("a model") else [outside]) if not seen)
            break
    assert seen == {"an input": STEPS, "a batch's": STEPS, "no nn.Parameter": 1}.get(how, 0)


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
