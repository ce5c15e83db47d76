"""Other ways to rows: ``torch.func``, ExpandedWeights, Opacus and BackPACK, each as its documentation has it."""

from __future__ import annotations

import importlib
from typing import Any

import torch.nn as nn
from systems import MAX_NORM, Found, Step, gradients, plain, trainable
from torch import Tensor
from torch.func import functional_call, grad, vmap
from workloads import Batch, Workload


def torch_func(workload: Workload, model: nn.Module) -> Step:
    weights = {name: p.detach() for name, p in trainable(model).items()}

    def loss(weights: Found, sample: Batch) -> Tensor:
        def run(*args: Tensor, **kwargs: Tensor) -> Any:
            return functional_call(model, weights, args, kwargs)

        if workload.alone is not None:
            return workload.alone(lambda x: run(x[None])[0, 0], sample)
        return workload.losses(run, {name: x[None] for name, x in sample.items()}).sum()

    rows_of = vmap(grad(loss), (None, 0), randomness="different" if workload.drawn else "error")
    return lambda batch: rows_of(weights, batch)


def expanded_weights(workload: Workload, model: nn.Module) -> Step:
    call = importlib.import_module("torch.nn.utils._per_sample_grad").call_for_per_sample_grads

    def step(batch: Batch) -> Found:
        expanded = call(model, batch_size=len(next(iter(batch.values()))), loss_reduction="mean")
        workload.losses(expanded, batch).mean().backward()
        return taken(model, "grad_sample")

    return step


def opacus(workload: Workload, model: nn.Module) -> Step:
    wrapped = importlib.import_module("opacus.grad_sample").GradSampleModule(model, loss_reduction="mean")
    backward = plain(workload, wrapped)

    def step(batch: Batch) -> Found:
        backward(batch)
        return taken(model, "grad_sample")

    return step


def ghost_clipping(workload: Workload, model: nn.Module) -> Step:
    """Norms by its hooks, then a second backward pass."""
    kind = importlib.import_module("opacus.grad_sample").GradSampleModuleFastGradientClipping
    wrapped = kind(model, max_grad_norm=MAX_NORM, use_ghost_clipping=True)

    def step(batch: Batch) -> Found:
        wrapped.zero_grad()
        losses = workload.losses(wrapped, batch)
        wrapped.enable_hooks()
        losses.mean().backward(retain_graph=True)
        weights = wrapped.get_clipping_coef()
        wrapped.zero_grad()
        wrapped.disable_hooks()
        (losses * weights).mean().backward()
        wrapped.enable_hooks()
        return gradients(model)

    return step


def backpack(workload: Workload, model: nn.Module) -> Step:
    library = importlib.import_module("backpack")
    quantity = importlib.import_module("backpack.extensions").BatchGrad
    extended = library.extend(model)

    def step(batch: Batch) -> Found:
        extended.zero_grad()
        with library.backpack(quantity()):
            workload.losses(extended, batch).sum().backward()
        return taken(model, "grad_batch")

    return step


def taken(model: nn.Module, attribute: str) -> Found:
    """What a peer left on the parameters, which keep it no longer."""
    return {name: vars(p).pop(attribute) for name, p in model.named_parameters() if attribute in vars(p)}
