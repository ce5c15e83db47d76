"""Steps of hooked models, read, compared with the oracle and measured; and a small model to take them with."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn as nn
from measuring import Held
from oracle import Losses, assert_rows, joined, one_backward_per_sample, one_loss_at_a_time, squares, targets
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks


def assert_right(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None = None,
    loss_type: str | None = None,
    run: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Reads the rows of the last step, which was from `squares`: those of each sample alone through the model.

    run: how x goes through the model, if not by a call
    """
    autograd_hacks.compute_grad1(model, loss_type)
    with autograd_hacks.pause_hooks():
        assert_rows(model, one_backward_per_sample(model, squares, x, y, run))


def backward(model: nn.Module, x: Tensor) -> None:
    autograd_hacks.backward(squares(model(x)))


def check(model: nn.Module, x: Tensor, loss_type: str | None = None, run: Callable[[Tensor], Tensor] | None = None) -> None:
    """A step of a hooked model, with samples on axis 0 of x and of the output: rows are those of each sample alone."""
    y = targets(len(x))
    model.zero_grad()
    losses = squares((run or model)(x), y)
    (losses.sum() if loss_type == "sum" else losses.mean()).backward()
    assert_right(model, x, y, loss_type, run)


def check_losses(model: nn.Module, losses: Callable[[], Tensor]) -> None:
    """A step of a hooked model with any arguments: rows are those of each loss alone, the random numbers the same."""
    state = torch.get_rng_state()
    model.zero_grad()
    autograd_hacks.backward(losses())
    autograd_hacks.compute_grad1(model)
    torch.set_rng_state(state)
    with autograd_hacks.pause_hooks():
        assert_rows(model, one_loss_at_a_time(model, losses))


def check_hooked(model: nn.Module, *losses: Callable[[], Tensor], **options: Any) -> None:
    """`check_losses`, of one after the other, under the same hooks.  options: of `add_hooks`"""
    with autograd_hacks.add_hooks(model, **options):
        for own in losses:
            check_losses(model, own)


def check_batches(
    model: nn.Module,
    *batches: Tensor,
    loss_type: str | None = None,
    run: Callable[[Tensor], Tensor] | None = None,
    verify: int = 0,
    **options: Any,
) -> None:
    """Steps of one model under the same hooks.

    verify: of how many samples, after each step
    options: of `add_hooks`
    """
    with autograd_hacks.add_hooks(model, **options):
        for x in batches:
            check(model, x, loss_type, run)
            if verify:
                autograd_hacks.verify(model, rows=verify)


def rows_of(model: nn.Module, x: Tensor, y: Tensor | None = None, losses: Losses = squares) -> dict[str, Tensor]:
    """The rows by plain backward passes while hooks are off, of the parameters that a loss reaches."""
    with autograd_hacks.pause_hooks():
        found = one_backward_per_sample(model, losses, x, y)
    return {name: own for name, own in found.items() if own is not None}


def rows_joined(model: nn.Module, x: Tensor) -> Tensor:
    """J of `squares`, N P."""
    return joined(rows_of(model, x))


def assert_means(model: nn.Module) -> None:
    """``.grad`` is the mean of the rows, and isn't there where they aren't."""
    for name, p in model.named_parameters():
        assert (p.grad1 is None) == (p.grad is None), name
        if p.grad is not None:
            assert_close(p.grad1.mean(0), p.grad, msg=lambda told, name=name: f"{name}: {told}")


class Count:
    """How many there were, without those of copies that the library runs."""

    def __init__(self) -> None:
        self.number = 0

    def __len__(self) -> int:
        return self.number

    def clear(self) -> None:
        self.number = 0

    def add(self, *_: object) -> None:
        self.number += 1


def count_forwards(model: nn.Module) -> Count:
    """Counts the forwards of a model from now on, traces included."""
    calls = Count()
    model.register_forward_hook(calls.add)
    return calls


# A small model


@contextmanager
def at_most(bytes_held: int, what: str = "it") -> Iterator[None]:
    """No more memory is held at any time within."""
    gc.collect()
    with Held() as held:
        yield
    assert held.most <= bytes_held, f"{what} held {held.most} bytes, of {bytes_held}"


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def batch(n: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)


def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
    squares(model(x), y).mean().backward()


@contextmanager
def raises(model: nn.Module, error: type[Exception], *words: str) -> Iterator[None]:
    """The error with all of the words in its message; and then the next step is right."""
    with pytest.raises(error) as info:
        yield
    for word in words:
        assert word in str(info.value), str(info.value)
    autograd_hacks.enable_hooks()
    model.zero_grad()
    step(model, *batch(6, 9))
    assert_right(model, *batch(6, 9))


def stepped(model: nn.Module, x: Tensor) -> autograd_hacks.PerSampleGrads:
    autograd_hacks.add_hooks(model)
    squares(model(x)).mean().backward()
    return autograd_hacks.per_sample_grads(model)


def alive(kind: type) -> int:
    """How many objects of a class there are, and of those made from it."""
    gc.collect()
    return sum(issubclass(type(thing), kind) for thing in gc.get_objects())
