"""Users' own hooks, and objects that hold something, are as if no trace and no second run had been."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import BareVector
from oracle import squares
from steps import assert_right, check
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import autograd_hacks

SEEN: list[Tensor] = []


class Keeper:
    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.all: dict[str, list[Tensor]] = {"out": []}
        self.sum = torch.zeros(4)

    def hook(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        self.last = output
        self.all["out"].append(output)
        self.sum += output.detach().sum(0).to(self.sum)


def note(store: list[Tensor], layer: nn.Module, args: Any, output: Tensor) -> None:
    store.append(output)


def run_again() -> nn.Sequential:
    """A part of it is run again for its rows."""
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(BareVector(), nn.Tanh()), nn.Linear(4, 2))


@pytest.mark.parametrize("where", ["1.0", "1.0.inside", "1.1", "0", "1", ""])
def test_what_hooks_store_is_of_the_forward_alone(where: str) -> None:
    model, x = run_again(), torch.randn(3, 4)
    layer = model.get_submodule(where)
    if not where:
        model.append(nn.Linear(2, 4))
    keeper, features, parts, count = Keeper(), {}, [], 0

    def closes_over(layer: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal count
        count += 1
        features["h"] = output

    def of_module(layer: nn.Module, args: Any, output: Tensor) -> None:
        SEEN.append(output)

    def before(layer: nn.Module, args: Any) -> None:
        parts.append(args[0])

    SEEN.clear()
    layer.register_forward_hook(closes_over)
    layer.register_forward_hook(keeper.hook, prepend=True)
    layer.register_forward_hook(partial(note, parts))
    layer.register_forward_hook(of_module)
    layer.register_forward_pre_hook(before)
    with autograd_hacks.add_hooks(model):
        for step in (1, 2):
            model.zero_grad()
            squares(model(x)).mean().backward()
            stored = features["h"]
            expected = stored.detach().clone()
            autograd_hacks.compute_grad1(model)
            autograd_hacks.per_sample_grads(model).weighted_sum(torch.ones(3))
            autograd_hacks.verify(model, samples=1)
            assert features["h"] is stored
            assert keeper.last is stored
            assert SEEN[-1] is stored
            assert torch.equal(stored, expected)
            assert (count, len(keeper.all["out"]), len(SEEN), len(parts)) == (step, step, step, 2 * step)
            assert torch.allclose(keeper.sum, sum(out.detach().sum(0) for out in SEEN))


def test_hooks_on_gradients_hear_of_the_users_passes_alone() -> None:
    model, x, heard = run_again(), torch.randn(3, 4), []
    model[1][0].inside.register_full_backward_hook(lambda layer, into, out: heard.append(out[0]))
    model[1][0].register_forward_hook(lambda layer, args, out: out.register_hook(lambda g: heard.append(g)) and None)
    with autograd_hacks.add_hooks(model):
        for step in (1, 2):
            model.zero_grad()
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            autograd_hacks.verify(model)
            assert len(heard) == 2 * step


@pytest.mark.parametrize("how", ["output", "input", "in place", "gradient", "pruned", "spectral"])
def test_hooks_that_change_something_are_a_part_of_the_model(how: str) -> None:
    model = run_again().double()
    inner = model[1][0].inside
    if how == "output":
        inner.register_forward_hook(lambda layer, args, out: 3 * out)
    if how == "input":
        inner.register_forward_pre_hook(lambda layer, args: (args[0] + 1,))
    if how == "in place":
        inner.register_forward_hook(lambda layer, args, out: [None, out.mul_(2)][0])
    if how == "gradient":
        inner.register_forward_hook(lambda layer, args, out: out.register_hook(lambda g: 2 * g) and None)
    if how == "pruned":
        prune.l1_unstructured(inner, "weight", 3)
    if how == "spectral":
        spectral_norm(inner).eval()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            check(model, torch.randn(3, 4).double())


class Queue:
    """A user's own object, with memory."""

    def __init__(self) -> None:
        self.keys, self.at, self.log = torch.zeros(8, 4), 0, []

    def put(self, keys: Tensor) -> None:
        for key in keys.detach():
            self.keys[self.at % 8] = key
            self.at += 1
        self.log.append(len(keys))


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.queue = nn.Linear(4, 4), Queue()

    def forward(self, x: Tensor) -> Tensor:
        q = self.encode(x)
        out = q @ self.queue.keys.clone().T
        self.queue.put(q)
        return out


def test_an_object_of_the_model_that_the_forward_changes() -> None:
    hooked, plain = Contrast(), Contrast()
    plain.load_state_dict(hooked.state_dict())
    queue = hooked.queue
    with autograd_hacks.add_hooks(hooked):
        for _ in range(3):
            x = torch.randn(3, 4)
            out = hooked(x)
            assert torch.equal(out, plain(x))
            hooked.zero_grad()
            squares(out).mean().backward()
            state = queue.at, list(queue.log), queue.keys.clone()
            autograd_hacks.verify(hooked)
            assert hooked.queue is queue
            assert (queue.at, queue.log) == state[:2] == (plain.queue.at, plain.queue.log)
            assert torch.equal(queue.keys, state[2])
            assert torch.equal(queue.keys, plain.queue.keys)


def test_an_object_among_the_arguments_is_not_changed_by_verify() -> None:
    class Cache:
        def __init__(self) -> None:
            self.layers = [{"keys": torch.zeros(3, 5, 4)}]

        def update(self, keys: Tensor) -> Tensor:
            self.layers[0]["keys"] = torch.cat([self.layers[0]["keys"], keys], 1)
            return self.layers[0]["keys"]

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            return self.out(cache.update(self.key(x)).cumsum(1))

    model, x, cache = Cached(), torch.randn(3, 2, 4), Cache()
    with autograd_hacks.add_hooks(model):
        squares(model(x, cache)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert cache.layers[0]["keys"].shape == (3, 7, 4)
        autograd_hacks.verify(model)
        assert cache.layers[0]["keys"].shape == (3, 7, 4)


@pytest.mark.parametrize("make", [
    lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), nn.Tanh()),
])  # fmt: skip
def test_parametrize_cached_around_the_step(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2)).double()
    x = torch.randn(3, 4).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            with parametrize.cached():
                squares(model(x)).mean().backward()
                plain = dict(parametrize._cache)
                autograd_hacks.compute_grad1(model)
                autograd_hacks.verify(model)
                assert plain.keys() == parametrize._cache.keys()
                assert all(parametrize._cache[key] is value for key, value in plain.items())
            assert all(p.grad is not None for p in model.parameters())
            assert_right(model, x)
            for p in model.parameters():
                p.data.sub_(0.1 * p.grad)


def test_autocasts_memory_of_weights() -> None:
    model, x = run_again(), torch.randn(3, 4)
    expected = []
    for hooked in (False, True):
        with (
            autograd_hacks.add_hooks(model) if hooked else autograd_hacks.pause_hooks(),
            torch.autocast("cpu", torch.bfloat16),
        ):
            model.zero_grad()
            out = model(x)
            squares(out.float()).mean().backward()
            if hooked:
                autograd_hacks.compute_grad1(model)
                autograd_hacks.verify(model)
                model.zero_grad()
                squares(model(x).float()).mean().backward()
            assert torch.is_autocast_cache_enabled()
        expected.append([p.grad.clone() for p in model.parameters()])
    for plain, own in zip(*expected):
        assert torch.equal(plain, own)
