"""The benchmark's architectures in a small size: a penalty on the slope of each sample's loss by what its first layer
returns."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn as nn
from architectures import ARCHITECTURES
from families import TINY
from measuring import batch_of
from oracle import assert_rows, one_loss_at_a_time
from rarely import rarely
from systems import trainable
from test_benchmark_models import COARSE, model_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Batch, Workload

import autograd_hacks

QUICK = ["dlrm", "gat", "gpt2", "gpt2, dropout", "bert", "llama", "mixtral", "mamba", "convnext", "swin"]


@contextmanager
def first_outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """What layers return, as they run, which a gradient can come to."""
    found: list[Tensor] = []

    def keep(layer: nn.Module, args: object, out: object) -> None:
        if isinstance(out, Tensor) and out.requires_grad:
            found.append(out)

    handles = [m.register_forward_hook(keep) for m in model.modules() if not list(m.children())]
    yield found
    for handle in handles:
        handle.remove()


def penalised(workload: Workload, model: nn.Module, batch: Batch) -> Tensor:
    """N losses, each with the squared slope by what came out of the first layers."""
    # Fused attention has no second derivatives.
    with sdpa_kernel(SDPBackend.MATH), first_outputs(model) as outputs:
        losses = workload.losses(model, batch)
    for h in outputs:
        if len(h) == len(losses) and h.ndim > 1:
            (slope,) = torch.autograd.grad(losses.sum(), h, create_graph=True, allow_unused=True)
            if slope is not None and slope.any():
                return losses + slope.flatten(1).square().sum(1)
    raise AssertionError("nothing that a layer has returned leads to the losses")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*QUICK, *rarely(*(name for name in ARCHITECTURES if name not in QUICK))])
def test_a_penalty(name: str) -> None:
    workload = ARCHITECTURES[name](TINY)
    model = model_of(workload)
    with torch.no_grad():  # zeros, at the beginning, would hide what is behind them
        for p in trainable(model).values():
            if not p.any():
                p.normal_(0, 0.1)
    with autograd_hacks.add_hooks(model):
        for step in range(2):
            batch = batch_of(workload, step, torch.device("cpu"), workload.dtype)
            state = torch.get_rng_state()
            model.zero_grad()
            try:
                penalised(workload, model, batch).sum().backward()
            except RuntimeError as error:
                if "is not implemented" in str(error):  # torch's own: of hardsigmoid, say
                    return
                raise
            autograd_hacks.compute_grad1(model, "sum")
            torch.set_rng_state(state)
            with autograd_hacks.pause_hooks():
                found = one_loss_at_a_time(model, lambda batch=batch: penalised(workload, model, batch))
            expected = {key: found[key] for key in trainable(model)}
            assert_rows(model, expected, inside=torch.float32 if name.startswith(COARSE) else None)
            autograd_hacks.clear_backprops(model)
