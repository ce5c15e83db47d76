"""A loss that reads what the model keeps, past its outputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import squares
from rarely import crossed
from steps import assert_right
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import UnseenGradient


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


DOORS: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
    "aux": lambda model, store: model.aux,
    r"kept\['features'\]\[0\]": lambda model, store: model.kept["features"][0],
    "what a hook, a global or a function keeps": lambda model, store: store["h"],
}


@crossed(door=DOORS, param_grad=[True, False])
def test_a_loss_that_reads_what_the_model_keeps(door: str, param_grad: bool) -> None:
    model, x = Keeping().double(), torch.randn(5, 3).double()
    store: dict[str, Tensor] = {}
    model.first.register_forward_hook(lambda layer, args, out: store.update(h=out))
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for read in (False, True, True, False):
            model.zero_grad()
            loss = squares(model(x)).mean()
            if read:
                (loss + mixing(DOORS[door](model, store))).backward()
                with pytest.raises(UnseenGradient, match=f"the loss reads {door}, .* Return it from forward"):
                    autograd_hacks.compute_grad1(model)
            else:
                loss.backward()
                assert_right(model, x)


SEEN: list[Tensor] = []


class Global(Keeping):
    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        SEEN.append(h)
        return self.last(h)


class Closing(Keeping):
    """Returns a function that knows its features."""

    def forward(self, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:  # type: ignore[override]
        h = self.first(x).tanh()
        return self.last(h), lambda: mixing(h)


def test_what_forwards_keep_in_globals_and_in_functions() -> None:
    x = torch.randn(5, 3).double()
    model = Global().double()
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            (squares(model(x)).mean() + mixing(SEEN[-1])).backward()
            with pytest.raises(UnseenGradient, match="the loss reads what a hook, a global or a function keeps"):
                autograd_hacks.compute_grad1(model)
    SEEN.clear()
    closing = Closing().double()
    with autograd_hacks.add_hooks(closing):
        for _ in range(3):
            out, regularise = closing(x)
            (squares(out).mean() + regularise()).backward()
            with pytest.raises(UnseenGradient, match="the loss reads what a hook, a global or a function keeps"):
                autograd_hacks.compute_grad1(closing)


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
