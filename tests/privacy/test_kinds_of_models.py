"""Private steps of models whose forwards are not one sequence of layers equal the steps by hand."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from private_steps import (
    BOUND,
    EXPECTED,
    LR,
    NOISE,
    SEED,
    STEPS,
    Loss,
    Reader,
    by_hand,
    data,
    losses,
    losses_of_text,
    net,
    text,
)
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from autograd_hacks import PrivateTraining
from autograd_hacks.errors import UnseenGradient

Sets = tuple[Tensor, Tensor]


class Adapted(nn.Module):
    """A frozen layer with an addition of low rank, as LoRA has it, between layers that are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.net[0].requires_grad_(False)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.net
        h = first(x) + 2.0 * self.up(self.down(x))
        for layer in others:
            h = layer(h)
        return h


class Checkpointed(nn.Module):
    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.net, self.use_reentrant = nn.Linear(4, 4), net(), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.net, self.first(x), use_reentrant=self.use_reentrant)
        return found


def by_peft() -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    adapted: nn.Module = peft.get_peft_model(net(), config)
    return adapted


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Sets], Loss]] = {
    "an adapter": (Adapted, data, losses),
    "peft's adapters": (by_peft, data, losses),
    "a checkpoint": (lambda: Checkpointed(False), data, losses),
    "texts of other lengths in each step": (Reader, text, losses_of_text),
}


@crossed(options=[{}, {"micro_batch_size": 2}], name=MODELS)
def test_steps_equal_those_by_hand(name: str, options: dict[str, int]) -> None:
    make, given, loss = MODELS[name]
    model = make()
    expected = by_hand(copy.deepcopy(model), *given(), STEPS, loss)
    private, optimizer = PrivateTraining(BOUND, NOISE, EXPECTED, 1e-3, seed=SEED), torch.optim.SGD(model.parameters(), lr=LR)
    with private.attach(model, optimizer):
        for x, y in private.loader(TensorDataset(*given()), **options):
            private.backward(loss(model, x, y))
            if private.step() is not None:
                optimizer.step()
                optimizer.zero_grad()
    assert private.steps == STEPS
    assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_reentrant_checkpoint_is_refused_in_the_first_step() -> None:
    """What it runs again, in the backward pass, is on no tape."""
    private, model = PrivateTraining(BOUND, NOISE, EXPECTED, 1e-3, seed=SEED), Checkpointed(True)
    with private.attach(model):
        x, y = next(iter(private.loader(TensorDataset(*data()))))
        private.backward(losses(model, x, y))
        with pytest.raises(UnseenGradient, match="use_reentrant=False"):
            private.step()
    assert private.steps == 0
