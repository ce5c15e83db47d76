"""Independence by analysis: what it shows of whole models, and what it leaves to runs with samples replaced."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks

ANALYSED = "Independent by analysis"


def written(what: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """A layer, and then what a function makes of its output."""
    model = Bare(lambda m, x: what(m, m.layer(x)), layer=nn.Linear(4, 4))
    model.register_buffer("mean", torch.zeros(4))
    model.register_buffer("steps", torch.zeros(()))
    return model


def counted(model: Any, h: Tensor) -> Tensor:
    model.steps += 1
    return h * model.steps


def within(independent_of: nn.Module, x: Tensor) -> str:
    with autograd_hacks.add_hooks(independent_of, independent=True):
        out = independent_of(x)
        (out if isinstance(out, Tensor) else out[0]).square().sum().backward()
        autograd_hacks.compute_grad1(independent_of)
        return autograd_hacks.describe(independent_of).independence


SHOWN = {
    "convolutions": lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()), (5, 2, 6, 6)),
    "attention, dropout": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (5, 3, 8)),
    "an LSTM": lambda: (nn.Sequential(nn.Linear(4, 8), nn.LSTM(8, 8, 2, batch_first=True)), (5, 3, 4)),
    "a norm in evaluation": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), (5, 4)),
    "a count in a buffer": lambda: (written(counted), (5, 4)),
    "a checkpoint": lambda: (written(lambda own, h: checkpoint(torch.tanh, h, use_reentrant=False)), (5, 4)),
    "sorted features": lambda: (written(lambda own, h: h.sort(1).values * h.detach().amax(1, keepdim=True)), (5, 4)),
    "noise": lambda: (written(lambda own, h: h + torch.randn_like(h)), (5, 4)),
    "a product of three": lambda: (Bare(lambda m, x: m.layer(x, x.tanh()), layer=nn.Bilinear(4, 4, 3)), (5, 4)),
    "a normed weight": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (4, 4)),
    "a circle": lambda: (nn.Sequential(nn.Conv1d(2, 4, 3, padding=1, padding_mode="circular"), nn.ReLU()), (5, 2, 6)),
    "slopes that are drawn": lambda: (nn.Sequential(nn.Linear(4, 4), nn.RReLU()), (5, 4)),
}


@pytest.mark.parametrize("name", SHOWN)
def test_what_analysis_shows(name: str) -> None:
    model, shape = SHOWN[name]()
    buffers = {key: x.clone() for key, x in model.named_buffers()}
    drawn = torch.get_rng_state()
    assert within(model, torch.randn(shape)).startswith(ANALYSED)
    for key, x in model.named_buffers():
        assert type(x) is Tensor
        assert torch.equal(x, buffers[key] + 1 if name == "a count in a buffer" and key == "steps" else buffers[key])
    assert not torch.equal(drawn, torch.get_rng_state())
