"""
Solve an equation by a network
==============================

A network u is trained until it solves Poisson's equation -Δu = f in a square, to 1e-7: the loss is by how much each
point misses the equation, which has second derivatives by the input in it.  First-order methods are slow at that.  The
energy natural gradient takes the rows of the residuals, one gradient for each point, and solves with their inner products
(:doc:`/derivatives`).  ``torch.func`` takes the same steps; Adam starts from the same weights, on the same points. ::

    python docs/examples/pinn.py
"""
# sphinx_gallery_thumbnail_path = 'pictures/pinn.png'

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn as nn
from common import command_line, follow, furthest, panels, save
from torch import Tensor
from torch.func import functional_call, grad_and_value, hessian, vmap

import autograd_hacks

DAMPING = 1e-13  # λ, of the mean of the rows' squared norms
ADAM_STEPS = 20  # for each of the natural gradient, which takes longer
Rows = tuple[Tensor, Tensor, Callable[[Tensor], dict[str, Tensor]]]  # the residuals r; J Jᵀ of their rows J; w ↦ Jᵀ w

options = command_line(
    points=(400, "inside of the square"),
    steps=(100, f"Adam takes {ADAM_STEPS} for each"),
)
torch.manual_seed(options.seed)
points = torch.rand(options.points, 2, dtype=torch.float64)
network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).double()

# %%
# The equation
# ------------
# u = sin πx sin πy solves -Δu = 2 π² u with u = 0 on the edge, which the network's output is multiplied to keep.


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
# ``backward(r, "sum")`` leaves the rows of the residuals r themselves.


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


@torch.no_grad()
def relative_error() -> float:
    with autograd_hacks.pause_hooks():
        return float((u(network, grid) - solution(grid)).norm() / solution(grid).norm())


def train(name: str, step: Callable[[], None], line: str, times: int = 1) -> None:
    seconds, errors = follow(name, step, times * options.steps, relative_error)
    print(f"{name:26}{errors[-1]:15.1e}{seconds[-1]:10.1f}")
    axes.semilogy(seconds, errors, line, label=name)
    network.load_state_dict(start)  # for the next one


adam = torch.optim.Adam(network.parameters(), lr=3e-3)
start = copy.deepcopy(network.state_dict())
grid = torch.cartesian_prod(*2 * [torch.linspace(0, 1, 101, dtype=torch.float64)])
figure, axes = panels(1, figsize=(8, 4))
print(f"{'':26}{'relative error':>15}{'seconds':>10}")
with autograd_hacks.add_hooks(network, param_grad=False):
    ours = by_ours()[1]
    train("energy natural gradient", partial(natural_step, by_ours), "-")
theirs = by_torch_func()[1]
torch.testing.assert_close(ours, theirs)
train("the same by torch.func", partial(natural_step, by_torch_func), ":")
train("Adam", adam_step, "-", ADAM_STEPS)
print(
    f"inner products of rows: furthest from torch.func's {furthest(ours, theirs) / float(theirs.max()):.0e} of the largest"
)
axes.set(xlabel="seconds of steps", ylabel="relative error of u")
axes.legend()
save(figure, options, "pinn.png")
