"""The ways to step that are timed on a GPU: plain, this library's verbs, and what else there is."""

from __future__ import annotations

from functools import partial

import in_compiler
import peers
import torch
import torch.nn as nn
from gpu_report import PLAIN
from peers import clipping
from systems import CLIPPED, GRAD1, SKIPPED, SYSTEMS, Found, Maker, Step, hooked, hooks_alone, loop, plain, trainable
from torch import Tensor
from workloads import Batch, Workload

import autograd_hacks

HOOKED, DOT, NORMS, CLIP, ROWS = "hooks alone", "dot", "norms", "clip", "rows"
PROJECT, NORMS_COMPILED, CLIP_COMPILED = "project", "norms, compiled", "clip, compiled"
LOOP, VMAP, VMAP_CLIP = "rows by a loop", "rows by vmap(grad)", "clip by vmap(grad)"
OPACUS, GHOST = "rows by Opacus", "clip by Opacus, ghost"
OTHERS = (LOOP, VMAP, VMAP_CLIP, OPACUS, GHOST)
RANK = 16


def dot(workload: Workload, model: nn.Module) -> Step:
    """Ordinary gradients, and each sample's inner product with a direction."""
    autograd_hacks.add_hooks(model)
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}

    def step(batch: Batch) -> Found:
        model.zero_grad()
        loss = workload.losses(model, batch).mean()
        with autograd_hacks.during_backward(model, dot=direction) as found:
            loss.backward()
        return {"dot": found.dot}

    return step


def projected(model: nn.Module) -> Found:
    """Each parameter's rows between two random maps, as gradients are stored for attribution."""
    found: dict[str, Tensor] = autograd_hacks.per_sample_grads(model).project(rank=RANK, per_parameter=True)
    return found


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
