"""Models whose curvature is tested, hooked, and all blocks of a curvature matrix."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from autograd_hacks.curvature.sums import Coverage
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import autograd_hacks

HESS_TYPES = ("CrossEntropy", "BinaryCrossEntropy", "LeastSquares", "Jacobian")


class Tied(nn.Module):
    """A table that is read by index, and as the weight of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(5, 3), nn.Linear(3, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


class Reused(nn.Module):
    """A layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


class Bare(nn.Module):
    """Parameters of its own, which no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn(4, 3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.tanh(x @ self.scale).square())


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.inner, x, use_reentrant=False))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 2, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


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
    "tied": (Tied, lambda: torch.randint(5, (3, 2))),
    "reused": (Reused, lambda: torch.randn(4, 3)),
    "replayed": (Bare, lambda: torch.randn(4, 4)),
    "weight_norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Tanh(), nn.Linear(3, 2)),
        lambda: torch.randn(4, 3),
    ),
    "checkpointed": (Checkpointed, lambda: torch.randn(4, 3)),
    "recurrent": (Recurrent, lambda: torch.randn(3, 4, 2)),
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
    sizes = {name: form.shape.numel() for name, form in grads.items()}
    return torch.cat([torch.cat([grads.block(a, b).reshape(sizes[a], sizes[b]) for b in grads], dim=1) for a in grads])


def network(param_grad: bool = True) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    return model, torch.randn(5, 3)
