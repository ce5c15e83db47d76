"""Models in which a flag changes how samples are moved or mixed, by nodes of the same kinds: no forward is read by another's
plan."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from steps import check_losses
from torch import Tensor

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


class Moving(nn.Module):
    def __init__(self, there: Move, back: Move) -> None:
        super().__init__()
        self.there, self.back, self.flag = there, back, True
        self.first, self.layer, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(self.there(self.first(x), self.flag))
        return self.head(self.back(h, self.flag).tanh())


@crossed(name=MOVES, order=ORDERS)
def test_rows_follow_the_flag(name: str, order: tuple[int, ...]) -> None:
    model = Moving(*MOVES[name]).double()
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
    model = Moving(lambda h, _: MIXING[name](h, axis), lambda h, _: h).double()
    autograd_hacks.add_hooks(model)
    for step, axis in enumerate((1, 1, 1, 0, 0, 1, 0)):
        x = torch.randn(sizes[step % len(sizes)], 4).double()
        squares(model(x)).sum().backward()
        if axis:
            autograd_hacks.compute_grad1(model, "sum")
        else:
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(model, "sum")
