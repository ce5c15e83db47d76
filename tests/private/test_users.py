"""Private training of users: against a loop by hand, whole, cut, padded, resumed, and what is refused."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn as nn
from private_steps import BOUND, NOISE, SEED, SIZE, STEPS, by_hand, dataset, losses, net, train, training
from private_steps import data as numbers
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from torch.utils.data import TensorDataset

from autograd_hacks.private import PrivateTraining
from autograd_hacks.private.poisson import Mark, PoissonBatches, Users

pytestmark = pytest.mark.usefixtures("double")

SIZES = {"ann": 8, "bob": 1, "cid": 5, "dee": 2, "eve": 4, "flo": 3, "gus": 2, "hal": 1, "ida": 2, "joe": 2}
NAMES = list(SIZES)
USERS = [[own for own, size in SIZES.items() for _ in range(size)][7 * n % SIZE] for n in range(SIZE)]
"""The users of the samples, in no order."""
COUNT, EXPECTED = len(SIZES), 4  # users


def of_users(**options: Any) -> PrivateTraining:
    return training(**({"groups": USERS, "expected_batch_size": EXPECTED} | options))


def trained(private: PrivateTraining, model: nn.Module, **options: Any) -> list[Any]:
    return train(private, model, steps=2 * STEPS, **options)


def expected() -> nn.Module:
    return by_hand(net(), *numbers(), groups=USERS, expected=EXPECTED)


WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "in three parts": {"parts": 3},
    "of eight samples at most": {"micro_batch_size": 8},
    "all of one shape": {"micro_batch_size": 9, "padded": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_it_trains_as_a_loop_by_hand(way: str) -> None:
    private, model = of_users(), net()
    done = trained(private, model, **WAYS[way])
    assert_close(model.state_dict(), expected().state_dict())
    assert private.history == [(NOISE, EXPECTED / COUNT, 2 * STEPS)]
    batches = private.loader(dataset()).batches
    assert [len(step.norms) for step in done] == [len(batches.drawn(t)) for t in range(2 * STEPS)]  # of users
    assert {step.unit for step in done} == {"group"}
    assert done[0].bound == BOUND
    assert done[0].sensitivity() == BOUND / EXPECTED


def test_users_as_numbers_are_the_same_users() -> None:
    for groups in (torch.tensor([NAMES.index(own) for own in USERS]), [NAMES.index(own) for own in USERS]):
        model = net()
        trained(of_users(groups=groups), model)
        assert_close(model.state_dict(), expected().state_dict())


def test_users_of_one_sample_each_are_samples() -> None:
    users, samples = net(), net()
    trained(of_users(groups=range(SIZE), expected_batch_size=6), users, micro_batch_size=3)
    trained(of_users(groups=None, expected_batch_size=6), samples, micro_batch_size=3)
    assert_close(users.state_dict(), samples.state_dict(), rtol=1e-12, atol=1e-12)


@crossed(clip=["per_parameter", "a quantile"], options=[{"parts": 3}, {"micro_batch_size": 8, "padded": True}])
def test_other_ways_to_clip_are_the_same_of_micro_batches(clip: str, options: dict[str, Any]) -> None:
    states = []
    for given in ({}, options):
        private, model = of_users(clip=clip), net()
        trained(private, model, **given)
        states.append((model.state_dict(), getattr(private.clip, "bound", None)))
    assert_close(states[0], states[1])


def test_every_user_is_drawn_with_its_probability_and_with_all_samples() -> None:
    batches = of_users().loader(dataset()).batches
    count: Counter[str] = Counter()
    for t in range(3000):
        (mark,) = batches._micro_batches(t)
        users = Counter(USERS[n] for n in mark.numbers[: mark.samples])
        assert users == {own: SIZES[own] for own in users}
        count.update(users.keys())
    rate = EXPECTED / COUNT
    assert all(abs(count[own] - 3000 * rate) < 5 * (3000 * rate * (1 - rate)) ** 0.5 for own in SIZES)


def test_at_most_some_samples_of_a_user_each_as_likely_as_others() -> None:
    users, count = Users(USERS, per_user=3), Counter[int]()
    numbers_of_a_step = torch.Generator().manual_seed(0)

    def draws(count: int) -> Tensor:
        return torch.rand(count, generator=numbers_of_a_step)

    for _ in range(2000):
        for own in users.samples_of(range(COUNT), draws):
            assert len(own) == len(set(own)) == min(3, USERS.count(USERS[own[0]]))
            assert len({USERS[n] for n in own}) == 1
            count.update(own)
    for n in range(SIZE):
        share = min(1.0, 3 / USERS.count(USERS[n]))
        assert abs(count[n] - 2000 * share) <= 5 * (2000 * share * (1 - share)) ** 0.5
    batches = of_users(per_user=1).loader(dataset(), micro_batch_size=1).batches
    chosen = [[own.numbers for own in batches._micro_batches(t)] for t in (3, 3, 4)]
    assert chosen[0] == chosen[1] != chosen[2]


def test_the_chosen_samples_of_a_user_are_clipped_together() -> None:
    """Without noise, against rows of the samples that the loader gave."""
    private, model, plain, (x, y) = of_users(per_user=2, noise_multiplier=0.0), net(), net(), numbers()
    with private.attach(model):
        for _ in range(3):
            batches = private.loader(TensorDataset(x, y, torch.arange(SIZE)), steps=2, parts=2)
            total, seen = [torch.zeros_like(p) for p in model.parameters()], list[int]()
            for a, b, chosen in batches:
                private.backward(losses(model, a, b))
                mark = private._marks[0]
                real = chosen[: mark.samples].tolist()
                seen += real
                whole = private.step()
                for user in {USERS[n] for n in real}:
                    own = [n for n in real if USERS[n] == user]
                    loss = losses(plain, x[own], y[own]).sum()
                    grads = torch.autograd.grad(loss, list(plain.parameters()))
                    norm = float(torch.cat([g.flatten() for g in grads]).norm())
                    total = [t + g * min(1.0, BOUND / norm) / EXPECTED for t, g in zip(total, grads)]
                if whole is not None:
                    assert len(seen) == len(set(seen))
                    assert max(Counter(USERS[n] for n in seen).values(), default=0) <= 2
                    assert_close([p.grad for p in model.parameters()], total)
                    total, seen = [torch.zeros_like(p) for p in model.parameters()], []


@crossed(most=[None, 8, 11], parts=[1, 2])
def test_processes_have_the_same_micro_batches_of_different_users(most: int | None, parts: int) -> None:
    def share(rank: int) -> list[Mark]:
        own = PoissonBatches(COUNT, 0.8, 1, lambda: SEED, lambda: 0, parts, most, (rank, 3), users=Users(USERS))
        return list(own._micro_batches(4))

    shares = [share(rank) for rank in range(3)]
    whole = PoissonBatches(COUNT, 0.8, 1, lambda: SEED, lambda: 0, users=Users(USERS))
    for marks in zip(*shares, strict=True):
        assert len({(mark.size, mark.is_last) for mark in marks}) == 1
        assert all(mark.size <= (most or SIZE) for mark in marks)
        ids = [set(mark.users) for mark in marks if mark.users]
        assert not ids[0] & ids[1] | ids[0] & ids[2] | ids[1] & ids[2]
    found = sorted(n for own in shares for mark in own for n in mark.numbers[: mark.samples])
    assert found == sorted(n for own in whole._micro_batches(4) for n in own.numbers)


def test_the_loader_has_as_many_items_as_its_length_says() -> None:
    """Also where draws need more micro-batches, so that trainers may skip items."""
    batches = PoissonBatches(SIZE, 0.5, 6, lambda: 1, lambda: 0, parts=2, most=3)
    lists = list(batches)
    assert len(lists) == len(batches) == 12
    for step in range(6):
        first, second = lists[2 * step : 2 * step + 2]
        assert first + second == list(batches._micro_batches(step))
        assert second


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"groups": USERS[:-1]}, "groups of 29 samples, and data of 30"),
    "a name": ({"groups": "ann"}, "groups=str"),
    "none": ({"groups": []}, "groups=list"),
    "fractions": ({"groups": [0.5] * SIZE}, "whole numbers or names"),
    "tensor of fractions": ({"groups": torch.zeros(SIZE)}, "whole numbers or names"),
    "too small a micro-batch": ({"per_user": 7}, "micro_batch_size=6, but a user has 7 samples"),
    "without": ({"groups": None, "per_user": 2}, "per_user=2 without groups"),
    "more users than there are": ({"expected_batch_size": COUNT + 1}, f"data of {COUNT} users"),
    "delta for samples": ({"delta": 1 / (COUNT + 1) + 0.01}, f"for {COUNT} users"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_users_are_refused(name: str) -> None:
    options, told = WRONG[name]
    given = {"micro_batch_size": options["per_user"] - 1} if name == "too small a micro-batch" else {}
    with pytest.raises((TypeError, ValueError), match=told):
        of_users(**options).loader(dataset(), **given)


def test_a_training_of_users_does_not_go_on_with_others() -> None:
    private = of_users()
    trained(private, net(), upto=1)
    other = of_users(groups=None)
    other.load_state_dict(private.state_dict())
    with pytest.raises(ValueError, match=f"30 samples, but the training began with {COUNT}"):
        other.loader(dataset())
