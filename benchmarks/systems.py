"""This library, and what needs no other one: a plain step, writing once, one backward pass per sample.

A way is made from a workload and a model of its own.  It takes a batch and returns what it found: of each parameter the rows
(N, *shape) or the mean of the clipped ones (*shape); or the norms, N; references find nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from workloads import Batch, Workload

import autograd_hacks

Found = dict[str, Tensor]
Step = Callable[[Batch], Found]
Maker = Callable[[Workload, nn.Module], Step]
Numbers = list[float]
Data = dict[str, Any]

MAX_NORM = 1.0


def trainable(model: nn.Module) -> Found:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients(model: nn.Module) -> Found:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain(workload: Workload, model: nn.Module, run: Any = None) -> Step:
    """run: what stands for the model in the forward pass"""

    def step(batch: Batch) -> Found:
        model.zero_grad()
        workload.losses(run or model, batch).mean().backward()
        return {}

    return step


def plain_compiled(workload: Workload, model: nn.Module) -> Step:
    return plain(workload, model, torch.compile(model))


def hooks_alone(workload: Workload, model: nn.Module) -> Step:
    autograd_hacks.add_hooks(model)
    return plain(workload, model)


def write_once(workload: Workload, model: nn.Module) -> Step:
    buffers: list[Tensor] = []

    def step(batch: Batch) -> Found:
        if not buffers:
            samples = len(next(iter(batch.values())))
            buffers.extend(p.new_empty(samples, *p.shape, requires_grad=False) for p in trainable(model).values())
        for buffer in buffers:
            buffer.fill_(0.0)
        return {}

    return step


def hooked(workload: Workload, model: nn.Module, read: Callable[[nn.Module], Found], param_grad: bool = True) -> Step:
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    backward = plain(workload, model)

    def step(batch: Batch) -> Found:
        backward(batch)
        return read(model)

    return step


def written(model: nn.Module) -> Found:
    autograd_hacks.compute_grad1(model)
    return {name: p.grad1 for name, p in trainable(model).items() if p.grad1 is not None}


def clipped(model: nn.Module) -> Found:
    autograd_hacks.clip_grad1_norm_(model, MAX_NORM)
    return gradients(model)


def normed(model: nn.Module) -> Found:
    return {"norms": autograd_hacks.per_sample_grads(model).norms()}


def clip_twice(workload: Workload, model: nn.Module) -> Step:
    """Norms while the backward pass runs, then a second one: little memory."""
    autograd_hacks.add_hooks(model)

    def step(batch: Batch) -> Found:
        model.zero_grad()
        losses = workload.losses(model, batch)
        with autograd_hacks.during_backward(model, "norms", max_bytes=2**21) as found:
            losses.mean().backward(retain_graph=True)
        model.zero_grad()
        with autograd_hacks.pause_hooks():
            (losses * clip_weights(found.norms)).mean().backward()
        return gradients(model)

    return step


def compiled(workload: Workload, model: nn.Module, verb: str, backend: str | None) -> Step:
    numbers: dict[str, Any] = {"max_norm": MAX_NORM} if verb == "clip" else {}
    run = autograd_hacks.compile(model, verb, loss_type="mean", param_grad=False, backend=backend, **numbers)
    backward = plain(workload, model, run)

    def step(batch: Batch) -> Found:
        backward(batch)
        if verb == "norms":
            return {"norms": run.norms}
        return gradients(model) if verb == "clip" else {name: p.grad1 for name, p in trainable(model).items()}

    return step


def loop(workload: Workload, model: nn.Module) -> Step:
    """Each sample alone."""
    return partial(rows_of, trainable(model), partial(alone, workload, model))


def each_loss(workload: Workload, model: nn.Module) -> Step:
    """One forward, and a backward pass from each sample's loss: where random numbers are drawn."""
    return partial(rows_of, trainable(model), partial(workload.losses, model), retain_graph=True)


def alone(workload: Workload, model: nn.Module, batch: Batch) -> Iterator[Tensor]:
    for n in range(len(next(iter(batch.values())))):
        yield workload.losses(model, {name: x[n : n + 1] for name, x in batch.items()}).sum()


def rows_of(
    parameters: Found, losses: Callable[[Batch], Iterable[Tensor]], batch: Batch, retain_graph: bool = False
) -> Found:
    """A backward pass from each loss, by parameters that some loss reached."""
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    reached = set()
    for loss in losses(batch):
        own = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True, retain_graph=retain_graph)
        for (name, p), g in zip(parameters.items(), own):
            rows[name].append(torch.zeros_like(p) if g is None else g)
            if g is not None:
                reached.add(name)
    return {name: torch.stack(rows[name]) for name in parameters if name in reached}


def loop_clip(workload: Workload, model: nn.Module) -> Step:
    """Each sample alone, whose rows are not kept."""
    parameters = list(trainable(model).values())

    def step(batch: Batch) -> Found:
        model.zero_grad()
        samples = len(next(iter(batch.values())))
        for loss in alone(workload, model, batch):
            own = torch.autograd.grad(loss, parameters)
            weight = clip_weights(torch.stack([g.norm() for g in own]).norm()) / samples
            for p, g in zip(parameters, own):
                p.grad = g * weight if p.grad is None else p.grad.add_(g * weight)
        return gradients(model)

    return step


def clip_weights(norms: Tensor) -> Tensor:
    """Weights that bring each sample's gradient to MAX_NORM at most, of the norms' shape."""
    return (MAX_NORM / norms).clamp(max=1)


def norms_of(rows: Found) -> Found:
    """From rows that are written out."""
    own = [
        torch.linalg.vector_norm(x.flatten(1), dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
        for x in rows.values()
    ]
    return {"norms": torch.stack(own).norm(dim=0)}


def mean_of_clipped(rows: Found) -> Found:
    """From rows that are written out."""
    norms = norms_of(rows)["norms"]
    weights = clip_weights(norms) / len(norms)
    return {name: torch.tensordot(weights.to(own), own, 1) for name, own in rows.items()}


def after(rows: Maker, change: Callable[[Found], Found]) -> Maker:
    """A way that makes something of another's rows."""

    def make(workload: Workload, model: nn.Module) -> Step:
        step = rows(workload, model)
        return lambda batch: change(step(batch))

    return make
