"""What is true of curvature: Jacobians by one backward pass for each entry of the output, and the losses' own Hessians by
differentiating twice.  Imports nothing from the library."""

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


def sample_loss(hess_type: str, z: Tensor) -> Tensor:
    """A sample's loss at its output, (C,) or (T, C), for targets that don't matter to the Hessian."""
    z = z.view(-1, z.shape[-1])
    if hess_type == "CrossEntropy":
        return F.cross_entropy(z, torch.zeros(len(z), dtype=torch.long))
    if hess_type == "BinaryCrossEntropy":
        return F.binary_cross_entropy_with_logits(z, torch.ones_like(z), reduction="none").sum(1).mean()
    if hess_type == "LeastSquares":
        return F.mse_loss(z, torch.zeros_like(z), reduction="none").sum(1).mean() / 2
    assert hess_type == "Jacobian"
    return z.square().sum() / 2


def jacobian(model: nn.Module, output: Tensor) -> Tensor:
    """(N, entries of a sample's output, P)"""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for z in output.flatten():
        found = torch.autograd.grad(z, parameters, retain_graph=True, materialize_grads=True)
        rows.append(torch.cat([g.flatten() for g in found]))
    return torch.stack(rows).view(len(output), output[0].numel(), -1)


def gauss_newton(model: nn.Module, output: Tensor, hess_type: str) -> Tensor:
    """Σₙ Jₙᵀ Hₙ Jₙ / N, (P, P)."""
    total = torch.zeros(())
    for z, own in zip(output.detach(), jacobian(model, output)):
        curvature = torch.autograd.functional.hessian(lambda z: sample_loss(hess_type, z), z)
        total = total + own.mT @ curvature.view(z.numel(), z.numel()) @ own
    return total / len(output)


def hessian_of(model: nn.Module, name: str, loss: Callable[[], Tensor]) -> Tensor:
    """The Hessian of a loss by one parameter, (P, P), by differentiating twice."""
    parameter = model.get_parameter(name)
    (first,) = torch.autograd.grad(loss(), parameter, create_graph=True)
    rows = [torch.autograd.grad(g, parameter, retain_graph=True, materialize_grads=True)[0] for g in first.flatten()]
    return torch.stack([row.flatten() for row in rows])
