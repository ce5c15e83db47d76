"""Whole uses of per-sample gradients by this library."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn as nn
from given import (
    BATCH,
    BOUND,
    DIM,
    NOISE,
    RATE,
    Given,
    Run,
    checksums,
    losses,
    margins,
    poisson,
    positions,
    private_net,
    sequence_losses,
    texts,
    weights,
)  # fmt: skip
from torch import Tensor

import autograd_hacks

LAST = "7.weight"
"""Of the network's last layer; captum leaves out its bias."""


def squares(grads: autograd_hacks.PerSampleGrads) -> Tensor:
    return grads.norms().square()


def hooked(of: Given) -> nn.Sequential:
    model = of.model()
    autograd_hacks.add_hooks(model, param_grad=False, probe=of.probe)
    return model


def grams(of: Given) -> Run:
    def run() -> Tensor:
        model, found = hooked(of), []
        for batch in of.loader(batch=64):
            autograd_hacks.backward(losses(model, batch), "sum")
            found.append(autograd_hacks.per_sample_grads(model).gram().sum(0))
        return torch.cat(found)

    return run


def private(of: Given) -> Run:
    def run() -> Tensor:
        model, noise = private_net(), torch.Generator().manual_seed(3)
        autograd_hacks.add_hooks(model, param_grad=False, probe=of.probe)
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        for batch in poisson(of):
            autograd_hacks.backward(losses(model, batch), "sum")
            autograd_hacks.clip_and_noise_(model, BOUND, NOISE, BATCH, noise=noise)
            optimizer.step()
        return weights(model)

    return run


def tracin(of: Given, only: str | None = None) -> Run:
    def run() -> Tensor:
        found: Tensor = autograd_hacks.over(
            hooked(of), of.loader(), losses, autograd_hacks.PerSampleGrads.gram,
            against=of.loader(of.test), checkpoints=of.checkpoints, only=only,
        )  # fmt: skip
        return found

    return run


def self_influence(of: Given) -> Run:
    return lambda: autograd_hacks.over(hooked(of), of.loader(), losses, squares, checkpoints=of.checkpoints)


def projected(of: Given) -> Run:
    def run() -> Tensor:
        with tempfile.TemporaryDirectory() as folder:
            found: Tensor = autograd_hacks.over(
                hooked(of), of.loader(), margins, lambda grads: grads.project(DIM), out=Path(folder) / "rows.npy"
            )
            return found.clone()

    return run


def collected(of: Given) -> Run:
    def run() -> Tensor:
        model = positions()
        autograd_hacks.add_hooks(model, param_grad=False, probe=of.probe)
        found = []
        for x in texts(of):
            autograd_hacks.backward(sequence_losses(model, x), "sum")
            grads = autograd_hacks.per_sample_grads(model, only="*.weight").dense()
            found.append(checksums(grads))
        return torch.cat(found)

    return run


def ekfac(of: Given) -> Run:
    def influence(grads: autograd_hacks.PerSampleGrads, model: nn.Module) -> Tensor:
        rows, solved = grads.dense(), autograd_hacks.ekfac_solve(model, grads).dense()
        return torch.stack([(rows[name] * solved[name]).flatten(1).sum(1) for name in rows]).sum(0)

    def run() -> Tensor:
        model, draws = hooked(of), torch.Generator().manual_seed(5)
        autograd_hacks.compute_hess_over(model, of.loader(), kind="ekfac", kfac_bias="joint", samples=1, generator=draws)
        found: Tensor = autograd_hacks.over(model, of.loader(), losses, lambda grads: influence(grads, model))
        return found

    return run
