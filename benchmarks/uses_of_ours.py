"""Whole uses of per-sample gradients by this library."""

from __future__ import annotations

import given
import torch
import torch.nn as nn
from given import Given
from torch import Tensor

import autograd_hacks


def hooked(of: Given) -> nn.Sequential:
    model = of.model()
    autograd_hacks.add_hooks(model, param_grad=False, probe=of.probe)
    return model


def grams(of: Given) -> Tensor:
    model, found = hooked(of), []
    for batch in of.loader(batch=64):
        autograd_hacks.backward(given.losses(model, batch), "sum")
        found.append(autograd_hacks.per_sample_grads(model).gram().sum(0))
    return torch.cat(found)


def private(of: Given) -> Tensor:
    model, noise = given.private_net(), torch.Generator().manual_seed(3)
    autograd_hacks.add_hooks(model, param_grad=False, probe=of.probe)
    optimizer = torch.optim.SGD(model.parameters(), given.RATE)
    for batch in given.poisson(of):
        autograd_hacks.backward(given.losses(model, batch), "sum")
        autograd_hacks.private.clip_and_noise_(model, given.BOUND, given.NOISE, given.BATCH, noise=noise)
        optimizer.step()
    return given.weights(model)


def tracin(of: Given) -> Tensor:
    """Σ rate · rows, over the checkpoints of a training."""
    model, found, gram = hooked(of), torch.zeros(()), autograd_hacks.PerSampleGrads.gram
    for state, rate in of.checkpoints:
        model.load_state_dict(state)
        found = found + rate * autograd_hacks.over(model, of.loader(), given.losses, gram, against=of.loader(of.test))
    return found


def ekfac(of: Given) -> Tensor:
    def influence(grads: autograd_hacks.PerSampleGrads, model: nn.Module) -> Tensor:
        rows, solved = grads.dense(), autograd_hacks.curvature.ekfac_solve(model, grads).dense()
        return torch.stack([(rows[name] * solved[name]).flatten(1).sum(1) for name in rows]).sum(0)

    model, draws = hooked(of), torch.Generator().manual_seed(5)
    autograd_hacks.curvature.compute_hess_over(
        model, of.loader(), kind="ekfac", kfac_bias="joint", samples=1, generator=draws
    )
    found: Tensor = autograd_hacks.over(model, of.loader(), given.losses, lambda grads: influence(grads, model))
    return found
