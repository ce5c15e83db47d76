"""Programs that mix samples, and checks that what mixes is refused and what doesn't is right."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Between
from oracle import assert_rows, one_loss_at_a_time, rows_of_one_graph, squares
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError

SIZES = (3, 4, 17)
"""Of batches: an odd number that is the features' too, an even one, and more than are told apart by one digit."""
How = Callable[..., Tensor]


class AtEnd(Between):
    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.how(self.last(self.first(x).tanh()), *more)


class InFront(Between):
    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.last(self.first(self.how(x, *more)).tanh())


class AsLoss(AtEnd):
    """Makes its loss itself, of what its last layer returns."""


def losses_of(out: Any) -> Tensor:
    """N losses; of a scalar the one that the model has made."""
    outs = [x for x in (out if isinstance(out, tuple) else (out,)) if x.ndim]
    return squares(tuple(x.to(torch.promote_types(x.dtype, torch.float)) for x in outs)) if outs else out


def steps_of(
    model: nn.Module,
    batches: Sequence[tuple[Any, ...]],
    losses: Callable[[Any], Tensor] = losses_of,
    context: Any = None,
    **options: Any,
) -> Iterator[None]:
    """A hooked model's steps, each up to its rows.  options: of `add_hooks`"""
    with autograd_hacks.add_hooks(model, **options):
        for args in batches:
            model.zero_grad()
            with context or contextlib.nullcontext():
                out = model(*args)
            losses(out).mean().backward()
            yield


def check_refused(
    model: nn.Module,
    *batches: tuple[Any, ...],
    losses: Callable[[Any], Tensor] = losses_of,
    context: Any = None,
    error: type[Exception] = PerSampleGradientError,
    match: str | None = None,
    **options: Any,
) -> None:
    """Each step is refused, in these words.  options: of `add_hooks`; ``independent``, where samples mix without gradient"""
    for _ in steps_of(model, batches, losses, context, **options):
        with pytest.raises(error, match=match):
            autograd_hacks.compute_grad1(model)


def check_refused_or_right(model: nn.Module, *batches: tuple[Any, ...]) -> None:
    """Where chance has left the samples apart rows are derivatives of the very losses; everywhere else they are refused."""
    refused = 0
    with autograd_hacks.add_hooks(model):
        for args in batches:
            model.zero_grad()
            losses = losses_of(model(*args))
            with autograd_hacks.pause_hooks():
                expected = rows_of_one_graph(model, losses)
            losses.mean().backward()
            try:
                autograd_hacks.compute_grad1(model)
            except PerSampleGradientError:
                refused += 1
                continue
            assert_rows(model, expected)
    assert refused


def check_right(model: nn.Module, *batches: tuple[Any, ...], losses: Callable[[Any], Tensor] = losses_of) -> None:
    """Each step's rows are the derivatives of each loss, whatever values of other samples went into that."""
    for args, _ in zip(batches, steps_of(model, batches, losses)):
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_loss_at_a_time(model, lambda: losses(model(*args))))  # noqa: B023


def mixes(model: nn.Module, x: Tensor) -> bool:
    """Whether the losses of the batch are others than those of its samples, or their gradients are."""
    losses = losses_of(model(x))
    own = torch.cat([losses_of(model(x[n : n + 1])) for n in range(len(x))])
    grads = [torch.autograd.grad(total.sum(), model.first.weight, retain_graph=True)[0] for total in (losses, own)]
    return not (torch.allclose(losses, own, 1e-12, 1e-12) and torch.allclose(*grads, 1e-12, 1e-12))


def data(samples: int, *shape: int) -> Tensor:
    return torch.randn(samples, *(shape or (3,)), dtype=torch.float64)


# Values: by index, by pairs, by order, detached


def nearest(h: Tensor) -> Tensor:
    far = torch.cdist(h, h) + 1e9 * torch.eye(len(h), dtype=h.dtype)
    return h[far.argmin(1)] if len(h) > 1 else h


def pairs(h: Tensor) -> Tensor:
    n = len(h) // 2
    return torch.cat([h[:n] + h[n : 2 * n], h[n : 2 * n] - h[:n], h[2 * n :]])


def swapped(h: Tensor) -> Tensor:
    n = len(h) // 2
    return torch.cat([h[n : 2 * n], h[:n], h[2 * n :]])


def by_groups(h: Tensor) -> Tensor:
    """The deviation over groups of samples, as StyleGAN's discriminator has it."""
    n = len(h) // 2
    if not n:
        return h
    spread = h[: 2 * n].view(2, n, -1).var(0, unbiased=False).mean(1)
    return h + torch.cat([spread, spread, spread.new_zeros(len(h) - 2 * n)])[:, None]


def one_edge(h: Tensor) -> Tensor:
    out = h.clone()
    out[-1] += h[1 % len(h)] if len(h) > 2 else h[0] * (len(h) > 1)
    return out


def centred(h: Tensor, y: Tensor) -> Tensor:
    return h - h.new_zeros(2, h.shape[1]).index_add(0, y, h)[y]


def ranked(h: Tensor) -> Tensor:
    """Ranks have no gradient at all."""
    return h * (1 + h.argsort(0).argsort(0).to(h.dtype))


MIXING: dict[str, How] = {
    "hard negatives": lambda h: h - nearest(h),
    "the nearest alone": nearest,
    "centres taken back": lambda h: centred(h, (h[:, 0] > 0).long()),
    "pairs": pairs,
    "swapped halves": swapped,
    "deviation of groups": by_groups,
    "one edge": one_edge,
    "a fixed permutation": lambda h: 0.7 * h + 0.3 * h[torch.arange(len(h)).flip(0)],
    "detached": lambda h: h + h.roll(len(h) // 2, 0).detach(),
    "the largest, detached": lambda h: h / h.abs().max().detach(),
    "ranks": ranked,
    "sums so far": lambda h: h.cumsum(0),
    "norm": lambda h: h / (1 + h.norm()),
    "attention": lambda h: (h @ h.T).softmax(1) @ h,
    "dense layers across": lambda h: (h.T @ torch.ones(len(h), len(h), dtype=h.dtype)).T / len(h) + h,
    "a gate of 1e-6": lambda h: h + 1e-6 * h.mean(0),
}


WITHOUT_GRADIENT = frozenset(("detached", "the largest, detached", "ranks"))
"""Of these the ways by which samples mix have no gradient."""


def zeroed(layer: nn.Module) -> nn.Module:
    for p in layer.parameters():
        nn.init.zeros_(p)
    return layer
