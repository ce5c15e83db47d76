"""Models in which a flag changes how samples are moved or mixed, by nodes of the same kinds: no forward is read by another's
plan."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from steps import check_losses
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

Move = Callable[[Tensor, bool], Tensor]


def halves(h: Tensor, flag: bool) -> Tensor:
    return torch.cat([h[:2], h[2:]] if flag else [h[0::2], h[1::2]])


def chunks(h: Tensor, flag: bool) -> Tensor:
    return torch.cat(h.chunk(2)[:: 1 if flag else -1])


def selected(h: Tensor, flag: bool) -> Tensor:
    return torch.stack([h.select(0, n) for n in range(len(h))[:: 1 if flag else -1]])


def chosen(h: Tensor, flag: bool) -> Tensor:
    return torch.where(torch.tensor(flag), h, h.flip(0))


MOVES: dict[str, tuple[Move, Move]] = {
    "permute": (lambda h, flag: h.permute((1, 0, 2) if flag else (0, 1, 2)),) * 2,
    "transpose": (lambda h, flag: h.transpose(*((0, 1) if flag else (1, 2))),) * 2,
    "flip": (lambda h, flag: h.flip(int(flag)),) * 2,
    "rot90": (lambda h, flag: torch.rot90(h, 2, (0, 1) if flag else (1, 2)),) * 2,
    "roll": (lambda h, flag: h.roll(1, int(flag)), lambda h, flag: h.roll(-1, int(flag))),
    "slices": (halves, halves),
    "chunks": (chunks, chunks),
    "selected": (selected, selected),
    "where": (chosen, chosen),
    "repeated": (
        lambda h, flag: h.repeat(2, 1, 1) if flag else h.repeat_interleave(2, 0),
        lambda h, flag: h.unflatten(0, (2, 4)).mean(0) if flag else h.unflatten(0, (4, 2)).mean(1),
    ),
    "another kind": (lambda h, flag: h.tanh() if flag else h.flip(0),) * 2,
}
"""There and back.  Four samples of four positions and features, so that no size tells axes from each other."""
ORDERS = [(1, 1, 1, 0, 0, 1, 0), (0, 0, 0, 1, 0, 1, 1), (1, 0, 0, 1, 0, 1, 0, 1)]


def moving(there: Move, back: Move) -> nn.Module:
    return Bare(
        lambda m, x: m.head(back(m.layer(there(m.first(x), m.flag)), m.flag).tanh()),
        first=nn.Linear(4, 4), layer=nn.Linear(4, 4), head=nn.Linear(4, 2), flag=True,
    ).double()  # fmt: skip


@crossed(name=MOVES, order=ORDERS)
def test_rows_follow_the_flag(name: str, order: tuple[int, ...]) -> None:
    model = moving(*MOVES[name])
    autograd_hacks.add_hooks(model)
    for flag in order:
        model.flag, x = bool(flag), torch.randn(4, 4, 4).double()
        check_losses(model, lambda x=x: squares(model(x)))


MIXING: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": lambda h, axis: h - h.mean(axis, keepdim=True),
    "softmax": lambda h, axis: h.softmax(axis),
    "cumsum": lambda h, axis: h.cumsum(axis),
    "norm": lambda h, axis: h / h.norm(dim=axis, keepdim=True),
    "largest": lambda h, axis: h - h.amax(axis, keepdim=True),
    "variance": lambda h, axis: h / h.var(axis, keepdim=True),
    "sorted": lambda h, axis: h.sort(axis)[0],
    "differences": lambda h, axis: torch.cat([h.diff(dim=axis), h.narrow(axis, 0, 1)], axis),
}


@crossed(name=MIXING, sizes=[(4,), (4, 5, 6, 7, 8, 9)])
def test_samples_that_mix_by_a_flag_are_refused(name: str, sizes: tuple[int, ...]) -> None:
    """Over features the samples stay apart, over the batch they mix."""
    axis = 1
    model = moving(lambda h, _: MIXING[name](h, axis), lambda h, _: h)
    autograd_hacks.add_hooks(model)
    for step, axis in enumerate((1, 1, 1, 0, 0, 1, 0)):
        x = torch.randn(sizes[step % len(sizes)], 4).double()
        squares(model(x)).sum().backward()
        with nullcontext() if axis else pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model, "sum")
