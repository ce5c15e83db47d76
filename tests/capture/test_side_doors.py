"""A loss that reads what the model keeps, past its outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from steps import assert_right, check_losses
from torch import Tensor

import autograd_hacks


class Keeping(nn.Module):
    """Keeps its features, in an attribute, in a list in a dictionary, and its output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        self.aux, self.kept = h, {"features": [h * 2]}
        self.out = self.last(h)
        return self.out


def mixing(h: Tensor) -> Tensor:
    return (h.mean(0) ** 2).sum()


DOORS: dict[str, Callable[[Any], Tensor]] = {
    "an attribute": lambda model: model.aux,
    "of a list in a dictionary": lambda model: model.kept["features"][0],
    "a global": lambda model: SEEN[-1],
}
SEEN: list[Tensor] = []


@crossed(door=DOORS, param_grad=[True, False], begins=[0, 1, 3])
def test_a_loss_that_reads_what_the_model_keeps(door: str, param_grad: bool, begins: int) -> None:
    """The graph of the outputs shows whose the values inside are."""
    model = Keeping().double()
    model.first.register_forward_hook(lambda layer, args, out: SEEN.append(out))

    def losses(x: Tensor, read: bool) -> Tensor:
        out = model(x)
        return squares(out) + DOORS[door](model).pow(3).sum(1) if read else squares(out)

    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in range(5):
            x = torch.randn(5, 3).double()
            check_losses(model, lambda x=x, n=n: losses(x, n >= begins and n != 4))
    SEEN.clear()


@pytest.mark.parametrize("param_grad", [True, False])
def test_a_loss_that_reads_a_layer_whose_output_is_not_returned(param_grad: bool) -> None:
    class Side(Keeping):
        def __init__(self) -> None:
            super().__init__()
            self.side, self.scale = nn.Linear(4, 1), nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.scored, self.scaled = self.side(self.aux), self.aux * self.scale
            return out

    def losses(x: Tensor, what: str) -> Tensor:
        out = squares(model(x))
        return out + getattr(model, what).square().mean(1) if what else out

    model = Side().double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for what in ("", "scored", "scaled", "", "scaled", "scored"):
            x = torch.randn(5, 3).double()
            check_losses(model, lambda x=x, what=what: losses(x, what))


def test_what_is_kept_may_be_read_without_a_gradient_and_inside() -> None:
    class Inside(Keeping):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out * self.aux.sum(1, keepdim=True)

    model, x = Inside().double(), torch.randn(5, 3).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            losses = squares(model(x))
            (losses.mean() + 0 * mixing(model.aux.detach())).backward()
            assert_right(model, x)


def test_the_output_may_be_taken_from_where_it_is_kept() -> None:
    model, x = Keeping().double(), torch.randn(5, 3).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            model(x)
            squares(model.out).mean().backward()
            assert_right(model, x)
