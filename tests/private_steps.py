"""Private training by hand: batches and noise by the same seeds, rows by one backward pass for each sample."""

from collections.abc import Callable, Sequence

import torch
import torch.nn as nn
import torch.nn.functional as F
from counted import normals, stream, uniforms
from torch import Tensor

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
SIZE, EXPECTED, BOUND, NOISE, LR = 30, 6, 0.5, 1.1, 0.3
SEED = 0x5EED_5EED_5EED_5EED_5EED_5EED_5EED_5EED
"""Too long to be guessed, if it weren't written here."""
STEPS = 5  # of an epoch


def data() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(5)
    return torch.randn(SIZE, 4, generator=draws), torch.randint(3, (SIZE,), generator=draws)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


def by_hand(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    steps: int = 2 * STEPS,
    loss: Loss = losses,
    expected: int = EXPECTED,
    groups: Sequence[object] | None = None,
) -> nn.Module:
    """The model, trained by SGD.  groups: each sample's user, if users are drawn and clipped"""
    ids = range(len(x)) if groups is None else groups
    units = [[n for n, own in enumerate(ids) if own == user] for user in dict.fromkeys(ids)]
    for t in range(steps):
        drawn = torch.tensor(uniforms(stream(SEED, "batch", t), len(units)), dtype=torch.float64) < expected / len(units)
        total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for unit in drawn.nonzero()[:, 0].tolist():
            grads = [torch.zeros_like(p) for p in model.parameters()]
            for n in units[unit]:
                own = torch.autograd.grad(loss(model, x[n : n + 1], y[n : n + 1]).sum(), list(model.parameters()))
                grads = [g + h for g, h in zip(grads, own)]
            norm = torch.cat([g.flatten() for g in grads]).norm()
            for name, g in zip(total, grads):
                total[name] += g * min(1.0, BOUND / float(norm))
        with torch.no_grad():
            for number, (name, p) in enumerate(model.named_parameters()):
                own = torch.tensor(normals(stream(*stream(SEED, "noise", t), number), p.numel()), dtype=torch.float64)
                p -= LR * (total[name] / expected + NOISE * BOUND / expected * own.view(p.shape).to(p.dtype))
    return model
