"""Samples that mix: in any order along the batch, by any way, behind a gate."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from mixing import check_refused
from oracle import squares
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

HOW: dict[str, Callable[[Tensor], Tensor]] = {
    "in place": lambda h: h.sub_(h.mean(0)),
    "batch norm": lambda h: F.batch_norm(h, None, None, training=True),
    "where gradients are on": lambda h: h - h.mean(0) if torch.is_grad_enabled() else h,
    "where it has a gradient": lambda h: h - h.mean(0) if h.requires_grad else h,
}


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("how", HOW)
def test_what_is_said_of_samples_that_mix(how: str, param_grad: bool) -> None:
    for first in (nn.Linear(3, 4), torch.randn(3, 4)):  # a layer, or a parameter that no layer has
        model = Bare(
            lambda m, x: m.last(HOW[how](m.first(x) if callable(m.first) else x @ m.first)),
            first=first,
            last=nn.Linear(4, 2),
        )
        says = r"samples mix: .* reaches other samples at .*, before first.* batch_dim"
        check_refused(model, *[(torch.randn(6, 3),)] * 3, error=SamplesMixed, match=says, param_grad=param_grad)


def test_samples_that_mix_at_the_very_end() -> None:
    """Also where every forward writes its outputs to the same place."""
    memory, words = torch.empty(6, 4), {"error": SamplesMixed, "match": "output number 0"}
    model = Bare(lambda m, x: (z := m.tower(x)) @ z.T, tower=nn.Linear(3, 4))
    losses = lambda z: F.cross_entropy(z, torch.arange(6), reduction="none")  # noqa: E731
    check_refused(model, (torch.randn(6, 3),), losses=losses, **words)
    model = Bare(lambda m, x: memory.detach_().copy_((z := m.tower(x)) - z.mean(0)), tower=nn.Linear(3, 4))
    check_refused(model, (torch.randn(6, 3),), **words)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_mixing_in_a_part_that_is_called_by_itself(batch_dim: int) -> None:
    """The samples of a part are on axis 0 of its input, whatever the axis of the model's."""
    # Only the gradient depends on other samples.
    centred = Bare(lambda m, x: x * m.scale + (m.scale - m.scale.detach()) * x.detach().mean(0), scale=torch.ones(3))
    model = nn.Sequential(centred, nn.Linear(3, 2))
    with autograd_hacks.add_hooks(model, batch_dim=batch_dim, independent=True):
        squares(model[0](torch.randn(4, 5, 3))).mean().backward()
        with pytest.raises(SamplesMixed, match=r"by the laws of operations .* at add "):
            autograd_hacks.compute_grad1(model)


def centred(before: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> nn.Module:
    """Layers that meet no argument itself don't show on which axis the samples are."""
    body = nn.Sequential(nn.Linear(6, 6), Bare(lambda m, h: h.tanh() - h.tanh().mean(0)), nn.Linear(6, 6))
    return Bare(lambda m, x: m.body(before(x)), body=body.to(dtype))


SQUARE: dict[str, Callable[[], nn.Module]] = {
    "centred": lambda: centred(lambda x: x),
    "centred, computed from": lambda: centred(lambda x: x * 2),
    "centred, cast": lambda: centred(Tensor.bfloat16, torch.bfloat16),
    "softmax": lambda: Bare(lambda m, x: (x * m.w).softmax(0), w=torch.randn(6)),
    "a part of the columns": lambda: Bare(lambda m, x: (x[:, :6] * m.w).softmax(0), w=torch.randn(6)),
    "turned": lambda: Bare(lambda m, x: (x.t()[:6] * m.w).softmax(1), w=torch.randn(6, 1)),
    "batch norm": lambda: nn.Sequential(nn.PReLU(6), nn.BatchNorm1d(6, affine=False)),
    "linear": lambda: nn.Sequential(nn.Linear(6, 6), nn.Softmax(0)),
}


@pytest.mark.parametrize("what", SQUARE)
def test_as_many_features_as_samples_make_no_samples_of_columns(what: str) -> None:
    """Where nothing else shows which axis has the samples, it is the batch's."""
    model = SQUARE[what]()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            squares(model(torch.randn(6, 6))).sum().backward()
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(model, "sum")
