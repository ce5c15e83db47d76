"""Other ways to rows: ``torch.func``, the expand trick, ExpandedWeights, Opacus and BackPACK, each as documented."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from systems import MAX_NORM, Found, Step, gradients, plain, trainable
from torch import Tensor
from torch.func import functional_call, grad, vmap
from workloads import Batch, Workload


def loss_of(workload: Workload, model: nn.Module, weights: Found, sample: Batch) -> Tensor:
    """Of one sample, with these weights."""

    def run(*args: Tensor, **kwargs: Tensor) -> Any:
        return functional_call(model, weights, args, kwargs)

    if workload.alone is not None:
        return workload.alone(lambda x: run(x[None])[0, 0], sample)
    return workload.losses(run, {name: x[None] for name, x in sample.items()}).sum()


def torch_func(workload: Workload, model: nn.Module) -> Step:
    weights = {name: p.detach() for name, p in trainable(model).items()}
    randomness = "different" if workload.drawn else "error"
    rows_of = vmap(grad(partial(loss_of, workload, model)), (None, 0), randomness=randomness)
    return lambda batch: rows_of(weights, batch)


def expand_trick(workload: Workload, model: nn.Module) -> Step:
    """Each sample has a copy of the weights of its own, which takes no memory: autograd's gradients of them are the rows."""
    losses = vmap(partial(loss_of, workload, model), randomness="different" if workload.drawn else "error")

    def step(batch: Batch) -> Found:
        samples = len(next(iter(batch.values())))
        copies = {name: p.detach().expand(samples, *p.shape).requires_grad_() for name, p in trainable(model).items()}
        return dict(zip(copies, torch.autograd.grad(losses(copies, batch).sum(), list(copies.values()))))

    return step


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
