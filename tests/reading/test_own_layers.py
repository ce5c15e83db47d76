"""Layers that compute in their own way: subclasses, patched forwards, parametrisations, and bare parameters."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Patched
from oracle import assert_rows, one_loss_at_a_time, squares
from steps import check_batches
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize
from twin import Bare

import autograd_hacks


class Standardised(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def patched() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)
    return layer


def adapted() -> nn.Module:
    """W + B A, as a parametrisation."""
    layer, lora = nn.Linear(3, 2), Bare(lambda m, w: w + m.b @ m.a, a=torch.randn(1, 3), b=torch.randn(2, 1))
    parametrize.register_parametrization(layer, "weight", lora)
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "inside"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: Doubled(3, 2),
        patched,
        adapted,
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).eval(),
        lambda: parametrizations.orthogonal(nn.Linear(3, 2)),
        lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
    ],
    ids=[
        "subclass", "patched", "LoRA", "weight_norm", "spectral_norm", "spectral_norm in eval", "orthogonal",
        "old weight_norm", "old spectral_norm",
    ],
)  # fmt: skip
def test_layers_that_compute_in_their_own_way(build: Callable[[], nn.Module], alone: bool) -> None:
    layer = build().double()
    assert not autograd_hacks.is_supported(layer)
    model = layer if alone else nn.Sequential(layer, nn.ReLU(inplace=True), nn.Linear(2, 2).double())
    x = torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            squares(model(x)).mean().backward()
            after = {name: buffer.clone() for name, buffer in model.named_buffers()}
            autograd_hacks.compute_grad1(model)
            assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())

            def again(before: dict[str, Tensor] = before) -> Tensor:
                for name, buffer in model.named_buffers():  # power iterations from where the step began
                    buffer.copy_(before[name])
                return squares(model(x))

            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, again))


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


@pytest.mark.parametrize(
    ("build", "x"),
    [
        (lambda: nn.Sequential(Standardised(1, 2, 2), nn.Flatten()), torch.randn(3, 1, 4, 4).double()),
        (Patched, torch.randint(7, (4, 3))),
        (Patched, torch.randint(7, (1, 3))),
        (lambda: Bare(inside, first=nn.Linear(3, 3), inner=Scaled()), torch.randn(4, 3).double()),
    ],
    ids=["weight standardisation", "bare parameters and a tied decoder", "a batch of one", "dictionaries and two calls"],
)
def test_two_steps_are_right(build: Callable[[], nn.Module], x: Tensor) -> None:
    check_batches(build().double(), x, x, verify=min(2, len(x) - 1))
