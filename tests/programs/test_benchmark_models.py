"""The benchmark's architectures in a small size, over three steps of an optimizer: rows and every verb against one backward
pass per sample, each alone unless random numbers are drawn."""

import pytest
import torch
import torch.nn as nn
from architectures import ARCHITECTURES
from families import TINY
from measuring import batch_of
from oracle import assert_rows
from quantities import assert_quantities
from rarely import rarely
from systems import each_loss, loop, trainable
from workloads import Workload

import autograd_hacks

COARSE = ("gemma", "llama", "mamba", "mixtral", "qwen", "rwkv", "t5")
"""Of names of models that compute in part in single precision, whatever they are given."""

TOO = (
    *("vit", "vit, dropout", "swin", "convnext", "bert", "bert, dropout", "deberta-v2", "gpt2", "gpt2, dropout"),
    *("llama", "opt", "mixtral", "t5", "t5, dropout", "mamba", "wav2vec2", "wav2vec2, dropout", "whisper"),
)
"""Families that `test_architectures` has as well, with dropout and without."""


def model_of(workload: Workload) -> nn.Module:
    """The model of a workload, in its dtype; the test is skipped where its library isn't there."""
    try:
        return workload.model().to(workload.dtype)
    except ModuleNotFoundError as error:
        pytest.skip(f"{error.name} isn't installed")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("param_grad", [True, *rarely(False)], ids=["default", "param_grad=False"])
@pytest.mark.parametrize("name", [*(name for name in ARCHITECTURES if name not in TOO), *rarely(*TOO)])
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
