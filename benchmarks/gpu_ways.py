"""The ways to step that are timed on a GPU: plain, this library's verbs, and what else there is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import in_compiler
import peers
import torch
import torch.nn as nn
from gpu_report import PLAIN
from peers import clipping
from systems import CLIPPED, GRAD1, SKIPPED, SYSTEMS, Found, Maker, Step, hooked, hooks_alone, loop, plain, trainable
from workloads import Batch, Workload

import autograd_hacks
from autograd_hacks.forms import cost

HOOKED, DOT, NORMS, CLIP, ROWS = "hooks alone", "dot", "norms", "clip", "rows"
NORMS_BY_KERNELS, NORMS_BY_TORCH = "norms, our kernels wherever they fit", "norms, torch's kernels alone"
PROJECT, NORMS_COMPILED, CLIP_COMPILED = "project", "norms, compiled", "clip, compiled"
LOOP, VMAP, VMAP_CLIP = "rows by a loop", "rows by vmap(grad)", "clip by vmap(grad)"
OPACUS, GHOST = "rows by Opacus", "clip by Opacus, ghost"
OTHERS = (LOOP, VMAP, VMAP_CLIP, OPACUS, GHOST)
RANK = 16


def dot(workload: Workload, model: nn.Module) -> Step:
    """The mean of the gradients in ``.grad``, and each sample's inner product with a direction: both of one reading of each
    layer's factors, in the place of autograd's own weight gradients."""
    autograd_hacks.add_hooks(model, param_grad=False)
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}

    def step(batch: Batch) -> Found:
        model.zero_grad()
        losses = workload.losses(model, batch)
        weights = torch.full_like(losses, 1 / len(losses), dtype=torch.float32, requires_grad=False)
        with autograd_hacks.during_backward(model, dot=direction, weights=weights) as found:
            losses.mean().backward()
        return {"dot": found.dot}

    return step


def with_kernels(fused: float | None) -> Maker:
    """Norms, where the package's own kernels are taken to cost so much of torch's for a step; None to do without them."""

    def make(workload: Workload, model: nn.Module) -> Step:
        step = hooked(workload, model, in_compiler.norms, param_grad=False)

        def run(batch: Batch) -> Found:
            kept = cost._costs_of
            cost._costs_of = lambda kind, index: replace(kept(kind, index), fused=fused)  # type: ignore[assignment]
            try:
                return step(batch)
            finally:
                cost._costs_of = kept

        return run

    return make


def projected(model: nn.Module) -> Found:
    """Each parameter's rows between two random maps, as gradients are stored for attribution."""
    low = autograd_hacks.Metric.low_rank(model, RANK)
    return autograd_hacks.per_sample_grads(model).preconditioned(low).dense()


def in_graph(verb: str) -> Maker:
    """A compiled step; of the uncompiled graph on a CPU, where compiling takes longest."""
    name, _, give, _ = in_compiler.READ[verb]

    def make(workload: Workload, model: nn.Module) -> Step:
        is_cuda = next(model.parameters()).is_cuda
        return in_compiler.compiled(workload, model, name, give, "inductor" if is_cuda else None)

    return make


WAYS: dict[str, Maker] = {
    PLAIN: plain,
    HOOKED: hooks_alone,
    DOT: dot,
    NORMS: partial(hooked, read=in_compiler.norms, param_grad=False),
    CLIP: SYSTEMS[CLIPPED][SKIPPED],
    ROWS: SYSTEMS[GRAD1][SKIPPED],
    NORMS_BY_KERNELS: with_kernels(0.0),
    NORMS_BY_TORCH: with_kernels(None),
    PROJECT: partial(hooked, read=projected, param_grad=False),
    NORMS_COMPILED: in_graph("norms"),
    CLIP_COMPILED: in_graph("clip"),
    LOOP: loop,
    VMAP: peers.torch_func,
    VMAP_CLIP: clipping(peers.torch_func),
    OPACUS: peers.opacus,
    GHOST: peers.ghost_clipping,
}
"""{way: its maker}"""
