"""
Energy natural gradient: solve an equation
==========================================

A network u is trained until it solves Poisson's equation -Δu = f in a square, to 1e-7.  The loss is by how much each point
misses the equation, which contains second derivatives with respect to the input.  First-order methods are slow on such
losses.  The energy natural gradient takes a gradient of each point's residual, and solves with their inner products
(:doc:`/derivatives`).  ``torch.func`` takes the same steps; Adam starts from the same weights, on the same points. ::

    pip install matplotlib tqdm
    python pinn.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/pinn.png'

import argparse
import copy
import math
import time
from collections.abc import Callable
from functools import partial

import matplotlib.pyplot as plt
import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call, grad_and_value, hessian, vmap
from tqdm import tqdm

import autograd_hacks

torch.set_num_threads(1)  # a network this small is slower with more threads
DAMPING = 1e-13  # λ, as a share of the rows' mean squared norm
ADAM_STEPS = 20  # for each step of the natural gradient, which takes longer
Rows = tuple[Tensor, Tensor, Callable[[Tensor], dict[str, Tensor]]]  # the residuals r; J Jᵀ of their rows J; w ↦ Jᵀ w

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--points", type=int, default=400, help="inside the square")
parser.add_argument("--steps", type=int, default=100, help=f"of natural gradient; Adam takes {ADAM_STEPS} for each")
options = parser.parse_args()
torch.manual_seed(0)
points = torch.rand(options.points, 2, dtype=torch.float64)
network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()

# %%
# The equation
# ------------
# u = sin πx sin πy solves -Δu = 2 π² u with u = 0 on the edge.  The factor in front of the network's output makes it zero
# there.


def solution(x: Tensor) -> Tensor:
    return (math.pi * x).sin().prod(-1)


def u(network: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return (x * (1 - x)).prod(-1) * network(x)[..., 0]


def residuals() -> Tensor:
    """By how much each point misses the equation, N."""
    x = points.clone().requires_grad_()
    (slope,) = torch.autograd.grad(u(network, x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(2)]
    return second[0] + second[1] + 2 * math.pi**2 * solution(x)


# %%
# Rows, by this library and by ``torch.func``
# -------------------------------------------
# After ``backward(r, "sum")`` the rows are those of the residuals r themselves.


def by_ours() -> Rows:
    r = residuals()
    autograd_hacks.backward(r, "sum")
    rows = autograd_hacks.per_sample_grads(network)
    return r.detach(), rows.gram(), rows.weighted_sum


def by_torch_func() -> Rows:
    def residual(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        laplacian = hessian(lambda x: u(partial(functional_call, network, weights), x))(x).trace()
        return laplacian + 2 * math.pi**2 * solution(x)

    weights = {name: p.detach() for name, p in network.named_parameters()}
    rows, r = vmap(grad_and_value(residual), (None, 0))(weights, points)
    jacobian = torch.cat([own.flatten(1) for own in rows.values()], 1)
    return r, jacobian @ jacobian.mT, lambda w: {name: torch.tensordot(w, own, 1) for name, own in rows.items()}


# %%
# Train by each
# -------------
# The natural step is Jᵀ (J Jᵀ + λ)⁻¹ r = (JᵀJ + λ)⁻¹ Jᵀ r, halved until the residuals get smaller.


def natural_step(rows_of: Callable[[], Rows]) -> None:
    r, kernel, weighted_sum = rows_of()
    kernel.diagonal().add_(DAMPING * kernel.diagonal().mean())
    direction = weighted_sum(torch.linalg.solve(kernel, r))
    before = copy.deepcopy(network.state_dict())
    with autograd_hacks.pause_hooks():
        for halvings in range(12):
            network.load_state_dict({name: p - 0.5**halvings * direction[name] for name, p in before.items()})
            if residuals().norm() < r.norm():
                break


def adam_step() -> None:
    adam.zero_grad()
    residuals().square().mean().backward()
    adam.step()


def train(name: str, step: Callable[[], None], line: str, times: int = 1) -> None:
    network.load_state_dict(start)
    seconds, errors = [0.0], []
    for _ in tqdm(range(times * options.steps), desc=name):
        begun = time.perf_counter()
        step()
        seconds.append(seconds[-1] + time.perf_counter() - begun)
        with torch.no_grad(), autograd_hacks.pause_hooks():
            errors.append(float((u(network, grid) - solution(grid)).norm() / solution(grid).norm()))
    print(f"{name:26}{errors[-1]:15.1e}{seconds[-1]:10.1f}")
    axes.semilogy(seconds[1:], errors, line, label=name)


adam = torch.optim.Adam(network.parameters(), lr=3e-3)
start = copy.deepcopy(network.state_dict())
grid = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 101, dtype=torch.float64)])
plt.rc("font", size=12)
figure, axes = plt.subplots(figsize=(6, 4.4), layout="constrained")
print(f"{'':26}{'relative error':>15}{'seconds':>10}")
with autograd_hacks.add_hooks(network, param_grad=False):
    ours = by_ours()[1]
    train("energy natural gradient", partial(natural_step, by_ours), "-")
network.load_state_dict(start)
theirs = by_torch_func()[1]
torch.testing.assert_close(ours, theirs)
train("the same by torch.func", partial(natural_step, by_torch_func), ":")
train("Adam", adam_step, "-", ADAM_STEPS)
off = float((ours - theirs).abs().max() / theirs.max())
print(f"inner products of rows: furthest from torch.func's {off:.0e} of the largest")
axes.set(xlabel="seconds", ylabel="relative error of u")
axes.legend()
plt.show()
