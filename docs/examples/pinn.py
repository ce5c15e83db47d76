"""Solves Poisson's equation by a network: trained by the energy natural gradient, and by Adam.

python docs/examples/pinn.py --output demo-output
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor
from wrong_labels import positive  # before the others: it tells what to install

# isort: split
from matplotlib.figure import Figure
from tqdm import tqdm

import autograd_hacks

EDGE = 10.0  # how much more a residual on the edge counts
DAMPING = 1e-10  # λ, of the mean of the rows' squared norms
ADAM_STEPS = 40  # for each of the natural gradient, which takes longer
Curve = list[tuple[float, float]]
"""After each step: the seconds that all of them took, and the relative error of the solution."""


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


def draw(curves: dict[str, Curve], path: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for name, curve in curves.items():
        axes.semilogy(*zip(*curve), label=name)
    axes.set_xlabel("seconds of steps")
    axes.set_ylabel("relative error of u")
    axes.set_title("Poisson's equation in a square, by a network of 1,185 parameters")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Solves Poisson's equation by a network, trained by energy natural gradient and by Adam.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--output", type=Path, default=Path("demo-output"), metavar="DIR", help="where the picture goes")
    parser.add_argument("--points", type=positive, default=400, metavar="N", help="inside; a quarter more are on the edge")
    parser.add_argument("--steps", type=positive, default=60, metavar="N", help=f"Adam takes {ADAM_STEPS} for each")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    options = parser.parse_args()

    points = some_points(options.points, options.seed)
    curves = {}
    for name, way, number in (("energy natural gradient", natural_step, 1), ("Adam", adam_step, ADAM_STEPS)):
        model = small_mlp(options.seed)
        curves[name] = train_by(name, way(model, points), model, number * options.steps)
    print(f"\n{'':26}{'relative error':>15}{'seconds':>10}")
    for name, curve in curves.items():
        print(f"{name:26}{curve[-1][1]:15.1e}{curve[-1][0]:10.1f}")
    options.output.mkdir(parents=True, exist_ok=True)
    picture = options.output / "pinn.png"
    draw(curves, picture)
    print(f"\nthe errors: {picture}")


if __name__ == "__main__":
    main()
