"""
Solve an equation by a network
==============================

A network u is trained until it solves Poisson's equation -Δu = f in a square: the loss is by how much each point
misses the equation, which has second derivatives by the input in it.  First-order methods are slow at that.  The
energy natural gradient takes the rows of the residuals, one gradient for each point, and solves with their inner
products (:doc:`/derivatives`).  Adam starts from the same weights, on the same points. ::

    python docs/examples/pinn.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/pinn.png'

from __future__ import annotations

import math
import time
from collections.abc import Callable

from common import command_line, save  # before the others: it tells what to install

# isort: split
import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from torch import Tensor
from tqdm import tqdm

import autograd_hacks

EDGE = 10.0  # how much more a residual on the edge counts
DAMPING = 1e-10  # λ, of the mean of the rows' squared norms
ADAM_STEPS = 40  # for each of the natural gradient, which takes longer
Curve = list[tuple[float, float]]
"""After each step: the seconds that all of them took, and the relative error of the solution."""

parser = command_line(
    "Solves Poisson's equation by a network, trained by energy natural gradient and by Adam.",
    points=(400, "inside; a quarter more are on the edge"),
    steps=(60, f"Adam takes {ADAM_STEPS} for each"),
)
options = parser.parse_args()

# %%
# The equation and the network
# ----------------------------


def solution(points: Tensor) -> Tensor:
    """u = sin πx sin πy solves -Δu = 2 π² u in the unit square with u = 0 on its edge.  points: N 2.  Returns N."""
    return (math.pi * points).sin().prod(1)


def some_points(inside: int, seed: int) -> Tensor:
    """N 2, inside of the square and on its edge."""
    draws = torch.Generator().manual_seed(seed)
    points = torch.rand(inside + inside // 4, 2, dtype=torch.float64, generator=draws)
    for n in range(inside, len(points)):  # to one of the four sides
        points[n, n % 2] = n // 2 % 2
    return points


def small_mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()


def residuals(model: nn.Module, points: Tensor) -> Tensor:
    """By how much each point misses the equation, or u = 0.  points: N 2.  Returns N."""
    x = points.clone().requires_grad_()
    u = model(x)[:, 0]
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(2)]
    on_edge = ((points == 0) | (points == 1)).any(1)
    return torch.where(on_edge, EDGE * u, second[0] + second[1] + 2 * math.pi**2 * solution(points))


# %%
# Two ways to take a step
# -----------------------
# ``backward(r, "sum")`` leaves the rows of the residuals r themselves.


def adam_step(model: nn.Module, points: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    def step() -> None:
        optimizer.zero_grad()
        residuals(model, points).square().mean().backward()
        optimizer.step()

    return step


def natural_step(model: nn.Module, points: Tensor) -> Callable[[], None]:
    """A step along Jᵀ (J Jᵀ + λ)⁻¹ r = (JᵀJ + λ)⁻¹ Jᵀ r, with J the residuals' rows; halved until they get smaller."""
    autograd_hacks.add_hooks(model, mode="derivatives", param_grad=False)

    def step() -> None:
        r = residuals(model, points)
        autograd_hacks.backward(r, "sum")
        rows = autograd_hacks.per_sample_grads(model)
        kernel = rows.gram()
        kernel.diagonal().add_(DAMPING * kernel.diagonal().mean())
        direction = rows.weighted_sum(torch.linalg.solve(kernel, r.detach()))
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        with autograd_hacks.pause_hooks():
            for halvings in range(12):
                for name, p in model.named_parameters():
                    p.data = start[name] - 0.5**halvings * direction[name]
                if residuals(model, points).norm() < r.norm():
                    break

    return step


# %%
# Train by both
# -------------


@torch.no_grad()
def relative_error(model: nn.Module) -> float:
    side = torch.linspace(0, 1, 101, dtype=torch.float64)
    grid = torch.cartesian_prod(side, side)
    with autograd_hacks.pause_hooks():
        return float((model(grid)[:, 0] - solution(grid)).norm() / solution(grid).norm())


def train_by(name: str, step: Callable[[], None], model: nn.Module, steps: int) -> Curve:
    curve, seconds = [(0.0, relative_error(model))], 0.0
    for _ in tqdm(range(steps), desc=name, unit="step"):
        start = time.perf_counter()
        step()
        seconds += time.perf_counter() - start
        curve.append((seconds, relative_error(model)))
    return curve


points = some_points(options.points, options.seed)
curves: dict[str, Curve] = {}
for name, way, number in (("energy natural gradient", natural_step, 1), ("Adam", adam_step, ADAM_STEPS)):
    model = small_mlp(options.seed)
    curves[name] = train_by(name, way(model, points), model, number * options.steps)
print(f"{'':26}{'relative error':>15}{'seconds':>10}")
for name, curve in curves.items():
    print(f"{name:26}{curve[-1][1]:15.1e}{curve[-1][0]:10.1f}")

# %%
# The errors
# ----------

figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
for name, curve in curves.items():
    axes.semilogy(*zip(*curve), label=name)
axes.set(xlabel="seconds of steps", ylabel="relative error of u")
axes.legend()
axes.grid(alpha=0.3)
save(figure, options, "pinn.png")
