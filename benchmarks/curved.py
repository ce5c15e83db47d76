"""Curvature: products with the Gauss-Newton matrix, its diagonal, and Kronecker factors, by this library and by others.

The model is the tutorial's network with logits at its end, as a sequence of modules, which BackPACK asks for; all batches
are one, so that a product can be taken from passes that ran before.
"""

from __future__ import annotations

import importlib
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from systems import DEFAULT, PLAIN, SKIPPED, WITH_PASSES, Found, Maker, Step, plain
from torch import Tensor
from torch.func import functional_call, jvp, vjp
from workloads import Batch, Workload

import autograd_hacks

MATVEC, DIAGONAL, FACTORS = "GGN matvec", "GGN diagonal", "KFAC, one drawn label"
FUNC, CURVLINOPS, BACKPACK = "torch.func, jvp and vjp", "curvlinops", "BackPACK"
TASKS = (MATVEC, DIAGONAL, FACTORS)


def direction(model: nn.Module) -> Found:
    """One for all systems."""
    draws = torch.Generator().manual_seed(0)
    return {name: torch.randn(p.shape, generator=draws).to(p) for name, p in model.named_parameters()}


def passes(model: nn.Module, batch: Batch, samples: int | None = None) -> autograd_hacks.PerSampleGrads:
    autograd_hacks.clear_backprops(model)
    autograd_hacks.backprop_hess(model(batch["x"]), samples=samples)
    return autograd_hacks.per_sample_grads(model)


def matvec(workload: Workload, model: nn.Module, anew: bool = False) -> Step:
    """anew: whether the backward passes are a part of the step"""
    autograd_hacks.add_hooks(model)
    v, held = direction(model), list[autograd_hacks.PerSampleGrads]()

    def step(batch: Batch) -> Found:
        if anew or not held:
            held[:] = [passes(model, batch)]
        return held[0].ggn_matvec(v)

    return step


def diagonal(workload: Workload, model: nn.Module) -> Step:
    autograd_hacks.add_hooks(model)

    def step(batch: Batch) -> Found:
        autograd_hacks.clear_backprops(model)
        autograd_hacks.backprop_hess(model(batch["x"]))
        autograd_hacks.compute_hess(model, kind="diag")
        return {name: p.hess_diag for name, p in model.named_parameters()}

    return step


def factors(workload: Workload, model: nn.Module, param_grad: bool = True) -> Step:
    autograd_hacks.add_hooks(model, param_grad=param_grad)

    def step(batch: Batch) -> Found:
        autograd_hacks.clear_backprops(model)
        autograd_hacks.backprop_hess(model(batch["x"]), samples=1)
        autograd_hacks.compute_hess(model, kind="kfac")
        return {}  # of labels that were drawn; the tests compare them

    return step


def func_matvec(workload: Workload, model: nn.Module) -> Step:
    """Jᵀ (H (J v)) by forward and reverse mode."""
    v = direction(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def step(batch: Batch) -> Found:
        def run(own: Found) -> Tensor:
            output: Tensor = functional_call(model, own, (batch["x"],))
            return output

        along = jvp(run, (parameters,), (v,))[1]
        z, pull = vjp(run, parameters)[:2]
        p = z.softmax(1)
        return pull((p * along - p * (p * along).sum(1, keepdim=True)) / len(z))[0]

    return step


def loop_diagonal(workload: Workload, model: nn.Module) -> Step:
    """A backward pass for each sample and each column of the square root."""
    parameters = dict(model.named_parameters())

    def step(batch: Batch) -> Found:
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for x in batch["x"].split(1):
            z = model(x)[0]
            p = z.detach().softmax(0)
            for c in range(len(p)):
                s = p[c].sqrt() * (F.one_hot(torch.tensor(c, device=p.device), len(p)).to(p) - p)
                for name, g in zip(parameters, torch.autograd.grad(z, list(parameters.values()), s, retain_graph=True)):
                    total[name] += g.square() / len(batch["x"])
        return total

    return step


def backpack(workload: Workload, model: nn.Module, quantity: str, attribute: str, **arguments: int) -> Step:
    library = importlib.import_module("backpack")
    kind = getattr(importlib.import_module("backpack.extensions"), quantity)
    extended, loss = library.extend(model), library.extend(nn.CrossEntropyLoss())

    def step(batch: Batch) -> Found:
        extended.zero_grad()
        with library.backpack(kind(**arguments)):
            loss(extended(batch["x"]), batch["y"]).backward()
        found = {name: vars(p).pop(attribute) for name, p in model.named_parameters()}
        return {name: x for name, x in found.items() if isinstance(x, Tensor)}

    return step


def curvlinops(workload: Workload, model: nn.Module, kind: str) -> Step:
    library = importlib.import_module("curvlinops")
    v, parameters, loss = direction(model), list(model.parameters()), nn.CrossEntropyLoss()

    def step(batch: Batch) -> Found:
        data = [(batch["x"], batch["y"])]
        if kind == FACTORS:
            operator = library.KFACLinearOperator(
                model, loss, parameters, data, check_deterministic=False, fisher_type="mc", mc_samples=1
            )
            operator.compute_kronecker_factors()
            return {}
        operator = library.GGNLinearOperator(model, loss, parameters, data, check_deterministic=False)
        return dict(zip(v, operator @ list(v.values())))

    return step


SYSTEMS: dict[str, dict[str, Maker]] = {
    MATVEC: {PLAIN: plain, DEFAULT: matvec, WITH_PASSES: partial(matvec, anew=True)},
    DIAGONAL: {PLAIN: plain, DEFAULT: diagonal},
    FACTORS: {PLAIN: plain, DEFAULT: factors, SKIPPED: partial(factors, param_grad=False)},
}
PEERS: dict[str, dict[str, Maker]] = {
    MATVEC: {FUNC: func_matvec, CURVLINOPS: partial(curvlinops, kind=MATVEC)},
    DIAGONAL: {BACKPACK: partial(backpack, quantity="DiagGGNExact", attribute="diag_ggn_exact")},
    FACTORS: {
        BACKPACK: partial(backpack, quantity="KFAC", attribute="kfac", mc_samples=1),
        CURVLINOPS: partial(curvlinops, kind=FACTORS),
    },
}
ORACLES: dict[str, Maker] = {
    MATVEC: func_matvec,
    DIAGONAL: loop_diagonal,
    FACTORS: lambda workload, model: lambda batch: {},  # drawn
}
"""{task: what the systems are compared with}"""
