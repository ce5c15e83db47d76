"""Other ways: a loop, ``torch.func``, ExpandedWeights, Opacus and BackPACK, each as its documentation has it."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

import curved
import derived
import torch.nn as nn
from curved import BACKPACK, CURVLINOPS
from systems import (
    CLIPPED,
    GRAD1,
    LOOP,
    MAX_NORM,
    REAL,
    Found,
    Maker,
    Step,
    gradients,
    loop,
    loop_clip,
    mean_of_clipped,
    trainable,
)
from torch import Tensor
from torch.func import functional_call, grad, vmap
from workloads import Batch, Workload

VMAP, EXPANDED = derived.FUNC_GRAD, "ExpandedWeights"
OPACUS, GHOST = "Opacus", "Opacus, ghost clipping"
PACKAGES = {OPACUS: "opacus", GHOST: "opacus", BACKPACK: "backpack-for-pytorch", CURVLINOPS: "curvlinops-for-pytorch"}


class Sample(nn.Module):
    """A sample's loss, as a module."""

    def __init__(self, workload: Workload, model: nn.Module) -> None:
        super().__init__()
        self.workload, self.model = workload, model

    def forward(self, batch: Batch) -> Tensor:
        """batch: tensors without their first axis.  Returns a number."""
        return self.workload.losses(self.model, {name: x[None] for name, x in batch.items()}).sum()


def torch_func(workload: Workload, model: nn.Module) -> Step:
    sample = Sample(workload, model)
    weights = {name: p.detach() for name, p in trainable(sample).items()}
    gradient = grad(lambda weights, one: functional_call(sample, weights, (one,)))
    rows_of = vmap(gradient, (None, 0), randomness="different" if workload.drawn else "error")

    def step(batch: Batch) -> Found:
        return {name.removeprefix("model."): own for name, own in rows_of(weights, batch).items()}

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

    def step(batch: Batch) -> Found:
        wrapped.zero_grad()
        workload.losses(wrapped, batch).mean().backward()
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
    """The rows that a peer left on the parameters, which keep them no longer."""
    return {name: vars(p).pop(attribute) for name, p in model.named_parameters() if attribute in vars(p)}


def clipping(rows: Maker) -> Maker:
    """The clipped task by a peer's rows."""

    def make(workload: Workload, model: nn.Module) -> Step:
        step = rows(workload, model)
        return lambda batch: mean_of_clipped(step(batch))

    return make


PEERS: dict[str, dict[str, Maker]] = {
    GRAD1: {LOOP: loop, VMAP: torch_func, EXPANDED: expanded_weights, OPACUS: opacus, BACKPACK: backpack},
    CLIPPED: {
        LOOP: loop_clip,
        VMAP: clipping(torch_func),
        EXPANDED: clipping(expanded_weights),
        GHOST: ghost_clipping,
        BACKPACK: clipping(backpack),
    },
    REAL: {LOOP: loop, VMAP: torch_func},
    **curved.PEERS,
    **derived.PEERS,
}
"""{task: {system: its maker}}"""

ORACLES: dict[str, Maker] = {GRAD1: loop, CLIPPED: loop_clip, REAL: loop, **curved.ORACLES, **derived.ORACLES}
"""{task: what the systems are compared with}"""


def installed(task: str) -> dict[str, Maker]:
    """The task's peers, without those whose package is not here."""
    return {system: maker for system, maker in PEERS[task].items() if version(system) is not None}


def version(system: str) -> str | None:
    """Of the peer's package; '' if it needs none, None if it is not installed."""
    return installed_version(PACKAGES[system]) if system in PACKAGES else ""


def installed_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
