"""Parameters that no rule covers: rows are those of one backward per sample."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Choosy, Noisy, Patched
from oracle import assert_rows, one_loss_at_a_time, squares
from steps import check
from torch import Tensor
from twin import Bare

import autograd_hacks


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor, *, shift: Tensor | None = None) -> dict[str, Tensor]:
        return {"scaled": x * self.scale, "shifted": x if shift is None else x + shift * self.scale}


def inside(m: nn.Module, x: Tensor) -> Tensor:
    """Tuple and dict outputs, arguments by keyword, and a module that is used twice."""
    h = m.inner(m.first(x), shift=torch.arange(3.0, dtype=x.dtype))
    return m.inner(h["scaled"].tanh())["scaled"] + h["shifted"]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "bare parameters and a tied decoder": (Patched, lambda: torch.randint(7, (4, 3))),
    "a batch of one": (Patched, lambda: torch.randint(7, (1, 3))),
    "dictionaries, keywords and two calls": (
        lambda: Bare(inside, first=nn.Linear(3, 3), inner=Scaled()),
        lambda: torch.randn(4, 3).double(),
    ),
    "control flow on values": (lambda: nn.Sequential(nn.Linear(3, 3), Choosy()), lambda: torch.randn(5, 3).double()),
    "a module that overwrites its input": (
        lambda: Bare(lambda m, x: m.inner(x.sin()), inner=Bare(lambda m, x: x.mul_(m.scale).tanh(), scale=torch.randn(3))),
        lambda: torch.randn(4, 3).double(),
    ),
}


@pytest.mark.parametrize("what", MODELS)
def test_two_steps_are_right(what: str) -> None:
    build, data = MODELS[what]
    model, x = build().double(), data()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            check(model, x)
        if len(x) > 1:
            autograd_hacks.verify(model, rows=2)


def test_the_same_dropout_mask() -> None:
    rate = Bare(lambda m, x: x + m.rate * torch.randn_like(x), rate=torch.tensor(0.3))  # that is learnt
    model, x = nn.Sequential(Noisy(), nn.Linear(3, 2), rate).double(), torch.randn(5, 3).double()
    with autograd_hacks.add_hooks(model):
        for seed in range(3):
            torch.manual_seed(seed)
            squares(model(x)).mean().backward()
            drawn = torch.get_rng_state()
            autograd_hacks.compute_grad1(model)
            assert torch.equal(torch.get_rng_state(), drawn)
            torch.manual_seed(seed)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, lambda: squares(model(x))))
