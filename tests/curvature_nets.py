"""Models whose curvature is tested, hooked, and all blocks of a curvature matrix."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.curvature.sums import Coverage

HESS_TYPES = ("CrossEntropy", "BinaryCrossEntropy", "LeastSquares", "Jacobian")


def tied() -> nn.Module:
    """A table that is read by index, and as the weight of the last layer."""
    model = Bare(
        lambda m, x: m.head(torch.tanh(m.inner(m.embed(x)))),
        embed=nn.Embedding(5, 3), inner=nn.Linear(3, 3), head=nn.Linear(3, 5, bias=False),
    )  # fmt: skip
    model.head.weight = model.embed.weight
    return model


def images(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "relu": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), lambda: torch.randn(6, 4)),
    "tanh": (lambda: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)), lambda: torch.randn(6, 4)),
    "positions": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)), lambda: torch.randn(3, 4, 2)),
    "convolution": (
        lambda: images(nn.Conv2d(2, 3, 2, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2, dilation=2)),
        lambda: torch.randn(3, 2, 6, 6),
    ),
    "groups": (
        lambda: images(nn.Conv1d(4, 4, 3, groups=2, padding_mode="circular", padding=1)),
        lambda: torch.randn(3, 4, 5),
    ),
    "norms": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4).eval(), nn.PReLU(), nn.Linear(4, 2)),
        lambda: torch.randn(4, 3),
    ),
    "tied": (tied, lambda: torch.randint(5, (3, 2))),
    "reused": (
        lambda: Bare(
            lambda m, x: m.head(torch.tanh(m.layer(torch.tanh(m.layer(x))))), layer=nn.Linear(3, 3), head=nn.Linear(3, 2)
        ),
        lambda: torch.randn(4, 3),
    ),
    "replayed": (
        lambda: Bare(lambda m, x: m.layer(torch.tanh(x @ m.scale).square()), scale=torch.randn(4, 3), layer=nn.Linear(3, 2)),
        lambda: torch.randn(4, 4),
    ),
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)),
        lambda: torch.randn(4, 3),
    ),
    "checkpointed": (
        lambda: Bare(
            lambda m, x: m.head(checkpoint(m.inner, x, use_reentrant=False)),
            inner=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)),
            head=nn.Linear(3, 2),
        ),
        lambda: torch.randn(4, 3),
    ),
    "recurrent": (
        lambda: Bare(lambda m, x: m.head(m.lstm(x)[0][:, -1]), lstm=nn.LSTM(2, 2, batch_first=True), head=nn.Linear(2, 2)),
        lambda: torch.randn(3, 4, 2),
    ),
}


def hooked(name: str, param_grad: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, inputs = CASES[name]
    model, x = build(), inputs()
    model(x)  # the lazy ones
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    return model, x


def curve(model: nn.Module, output: Tensor, hess_type: str = "CrossEntropy", **options: Any) -> Coverage:
    """The curvature of passes from an output.  options: of `compute_hess`"""
    autograd_hacks.backprop_hess(output, hess_type)
    return autograd_hacks.compute_hess(model, **options)


def matrix(grads: autograd_hacks.PerSampleGrads) -> Tensor:
    """All blocks."""
    rows = torch.cat([form.matrix() for form in grads.values()], 1)
    return rows.mT @ rows / grads.batch


def network(param_grad: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    return model, torch.randn(5, 3)
