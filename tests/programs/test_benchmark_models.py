"""The benchmark's architectures in a small size, over three steps of an optimizer: rows and every verb against one backward
pass per sample, each alone unless random numbers are drawn."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn as nn
from architectures import ARCHITECTURES
from families import TINY
from measuring import batch_of
from oracle import assert_rows, one_loss_at_a_time
from quantities import assert_quantities
from rarely import rarely
from systems import each_loss, loop, trainable
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from workloads import Batch, Workload

import autograd_hacks

COARSE = ("gemma", "llama", "mamba", "mixtral", "qwen", "rwkv", "t5")
"""Of names of models that compute in part in single precision, whatever they are given."""

USUAL = (
    *("deit, layer scale", "cait", "mixer", "resnet18, BatchNorm in eval", "llama, LoRA", "qwen3", "rwkv", "dlrm", "gat"),
    *("mixtral, one expert after the other", "UNet, noise drawn inside", "hubert, CTC", "yolos, matched boxes"),
    *("bert, dropout", "deberta-v2", "gpt2", "t5", "mamba", "swin", "convnext"),
)
"""What every run has; the others are like these."""


def model_of(workload: Workload) -> nn.Module:
    """The model of a workload, in its dtype; the test is skipped where its library isn't there."""
    try:
        return workload.model().to(workload.dtype)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} isn't installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("param_grad", [True, *rarely(False)], ids=["default", "param_grad=False"])
@pytest.mark.parametrize("name", [*USUAL, *rarely(*(name for name in ARCHITECTURES if name not in USUAL))])
def test_three_steps(name: str, param_grad: bool) -> None:
    workload = ARCHITECTURES[name](TINY)
    model = model_of(workload)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    coarse = torch.float32 if name.startswith(COARSE) else None
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for step in range(3):
            batch = batch_of(workload, step, torch.device("cpu"), workload.dtype)

            optimizer.zero_grad()
            workload.losses(model, batch).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                found = (each_loss if workload.drawn else loop)(workload, model)(batch)
            rows = {key: found.get(key) for key in trainable(model)}
            assert_rows(model, rows, inside=coarse)
            if step == 2:
                assert_quantities(model, rows, **({"rtol": 1e-3, "atol": 1e-5} if coarse else {}))
            if not param_grad:
                for key, p in trainable(model).items():
                    p.grad = found[key].mean(0) if key in found else None
            optimizer.step()
            autograd_hacks.clear_backprops(model)


# The benchmark's architectures in a small size: a penalty on the slope of each sample's loss by what its first layer
# returns


QUICK = ["dlrm", "gat", "gpt2, dropout", "mixtral", "mamba", "convnext"]


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
