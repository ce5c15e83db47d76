"""Losses with derivatives by the input: equations of physics, score matching, gradient penalties.

Rows and a clipped step are in one interleaved run, as of architectures.  Other ways take each loss as ``torch.func`` has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn
from systems import (
    CLIPPING,
    DEFAULT,
    LOOP,
    PLAIN,
    SKIPPED,
    Found,
    Maker,
    Step,
    clipped,
    hooked,
    loop,
    plain,
    trainable,
    written,
)
from torch import Tensor
from torch.func import functional_call, grad, jacfwd, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Batch, Model, Workload, multilayer

Function = Callable[[Tensor], Tensor]

DERIVED = "derivatives"
FUNC_GRAD, NESTED = "torch.func.vmap(grad)", "vmap(jacfwd(jacrev))"
MLP, SMALL = "derivatives, MLP", "derivatives, small"
KINDS = (MLP, SMALL)


@dataclass(frozen=True)
class Derived(Workload):
    """alone: a sample's loss, of what the model makes of its x and of the sample    nested: the same by Hessians"""

    alone: Callable[[Function, Batch], Tensor] = lambda f, sample: f(sample["x"])
    nested: Callable[[Function, Batch], Tensor] | None = None


class Attention(nn.Module):
    """A Transformer's layer, whose attention can be differentiated twice, and one number of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, activation="gelu", batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return self.head(self.layer(x).mean(1))


def critic(width: int, pixels: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(width, 2 * width, 3, 2, 1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(width * pixels**2 // 2, 1),
    )  # fmt: skip


def slope(of: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), x, create_graph=True)[0]


def run(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """x, which asks for gradients, and the outputs, N."""
    x = batch["x"].detach().requires_grad_()
    return x, model(x)[:, 0]


def heat(model: Model, batch: Batch) -> Tensor:
    """(uₜ - uₓₓ)²"""
    x, u = run(model, batch)
    first = slope(u, x)
    return (first[:, 0] - slope(first[:, 1], x)[:, 1]).square()


def heat_alone(f: Function, sample: Batch) -> Tensor:
    def along(x: Tensor) -> Tensor:
        return grad(f)(x)[1]

    return (grad(f)(sample["x"])[0] - grad(along)(sample["x"])[1]).square()


def laplacian(model: Model, batch: Batch) -> Tensor:
    """(Δu - 1)²"""
    x, u = run(model, batch)
    first = slope(u, x)
    second = torch.stack([slope(first[:, n], x)[:, n] for n in range(x.shape[1])])
    return (second.sum(0) - 1).square()


def laplacian_alone(f: Function, sample: Batch) -> Tensor:
    x = sample["x"]
    second = [grad(lambda x, n=n: grad(f)(x)[n])(x)[n] for n in range(len(x))]
    return (torch.stack(second).sum() - 1).square()


def laplacian_nested(f: Function, sample: Batch) -> Tensor:
    return (jacfwd(jacrev(f))(sample["x"]).trace() - 1).square()


def score(model: Model, batch: Batch) -> Tensor:
    """‖s‖²/2 + vᵀ(∂s/∂x)v for the slope s of an energy, by Hutchinson's estimate."""
    x, u = run(model, batch)
    s = slope(u, x)
    return s.square().sum(1) / 2 + (slope((s * batch["v"]).sum(1), x) * batch["v"]).sum(1)


def score_alone(f: Function, sample: Batch) -> Tensor:
    x, v = sample["x"], sample["v"]
    return grad(f)(x).square().sum() / 2 + grad(lambda x: grad(f)(x) @ v)(x) @ v


def penalty(model: Model, batch: Batch) -> Tensor:
    """y + 10 (‖∂y/∂x‖ - 1)², of a critic"""
    x, y = run(model, batch)
    return y + 10 * (slope(y, x).flatten(1).norm(dim=1) - 1).square()


def penalty_alone(f: Function, sample: Batch) -> Tensor:
    return f(sample["x"]) + 10 * (grad(f)(sample["x"]).norm() - 1).square()


def by_func(workload: Workload, model: nn.Module, nested: bool = False) -> Step:
    alone = getattr(workload, "nested" if nested else "alone")
    weights = {name: p.detach() for name, p in trainable(model).items()}

    def loss(weights: Found, sample: Batch) -> Tensor:
        found: Tensor = alone(lambda x: functional_call(model, weights, (x[None],))[0, 0], sample)
        return found

    rows_of = vmap(grad(loss), (None, 0))
    return lambda batch: rows_of(weights, batch)


def fits(system: str, workload: Workload) -> bool:
    """Whether the workload has what the system needs."""
    return system != NESTED or (isinstance(workload, Derived) and workload.nested is not None)


def points(samples: int, *shape: int) -> Callable[[int], Batch]:
    return lambda step: {"x": torch.randn(samples, *shape), "v": torch.randn(samples, *shape).sign()}


SYSTEMS: dict[str, dict[str, Maker]] = {
    DERIVED: {
        PLAIN: plain,
        SKIPPED: partial(hooked, read=written, param_grad=False),
        DEFAULT: partial(hooked, read=written),
        CLIPPING: partial(hooked, read=clipped, param_grad=False),
    }
}
PEERS: dict[str, dict[str, Maker]] = {DERIVED: {LOOP: loop, FUNC_GRAD: by_func, NESTED: partial(by_func, nested=True)}}
ORACLES: dict[str, Maker] = {DERIVED: loop}

_penalty = Derived(nn.Identity, points(0), penalty, SMALL, alone=penalty_alone)
WORKLOADS: dict[str, Workload] = {
    "heat equation, MLP 2-64x4, N 512": Derived(
        multilayer(2, 64, 64, 64, 64, 1, between=nn.Tanh), points(512, 2), heat, MLP, alone=heat_alone
    ),
    "Laplacian, MLP 3-128x3, N 256": Derived(
        multilayer(3, 128, 128, 128, 1, between=nn.Tanh), points(256, 3), laplacian, MLP,
        alone=laplacian_alone, nested=laplacian_nested,
    ),
    "score matching, MLP 32-256x3, N 128": Derived(
        multilayer(32, 256, 256, 256, 1, between=nn.SiLU), points(128, 32), score, MLP, alone=score_alone
    ),
    "gradient penalty, MLP 64-512x3, N 64": replace(
        _penalty, model=multilayer(64, 512, 512, 512, 1, between=nn.SiLU), batch=points(64, 64), kind=MLP
    ),
    "gradient penalty, CNN 3-32-64, N 32": replace(_penalty, model=critic(32, 16), batch=points(32, 3, 16, 16)),
    "gradient penalty, attention block d 64, N 32": replace(
        _penalty, model=lambda: Attention(64), batch=points(32, 16, 64)
    ),
}  # fmt: skip
