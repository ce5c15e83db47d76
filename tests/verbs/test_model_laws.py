"""Laws 1 and 3 for whole models: rows and quantities are those of each sample alone, and of double precision."""

import copy

import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import BareMatrix, Language
from oracle import one_backward_per_sample, squares
from quantities import assert_quantities
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks


@st.composite
def models(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A model of several layers, in double precision, and a batch."""
    torch.manual_seed(draw(st.integers(0, 999)))
    samples, steps, width = draw(st.integers(1, 6)), draw(st.integers(1, 4)), 2 * draw(st.integers(1, 3))
    bias = draw(st.booleans())
    kind = draw(st.sampled_from(["mlp", "cnn", "tied", "token", "lstm", "attention"]))
    if kind == "tied":
        return Language(7, width).double(), torch.randint(7, (samples, steps))
    if kind == "cnn":
        groups = draw(st.sampled_from([1, 2]))
        layers = [nn.Conv2d(2, width, 2, groups=groups, bias=bias), nn.GroupNorm(1, width), nn.Tanh(), nn.Flatten(2)]
        return nn.Sequential(*layers, nn.Linear(4, 3)).double(), torch.randn(samples, 2, 3, 3).double()
    model = {
        "mlp": lambda: nn.Sequential(nn.Linear(width, 5, bias=bias), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)),
        "token": lambda: nn.Sequential(BareMatrix(width), nn.Linear(width, 3)),
        "lstm": lambda: pooled(nn.LSTM(width, 3, draw(st.integers(1, 2)), bias=bias, batch_first=True)),
        "attention": lambda: nn.TransformerEncoderLayer(width, 2, 6, dropout=0.0, batch_first=True),
    }[kind]()
    return model.double(), torch.randn(samples, steps, width).double()


def pooled(layer: nn.Module) -> nn.Module:
    return Bare(lambda m, x: m.layer(x)[0].sum(1), layer=layer)


def taken(model: nn.Module, x: Tensor, param_grad: bool = True) -> autograd_hacks.PerSampleGrads:
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    squares(model(x)).sum().backward()
    return autograd_hacks.per_sample_grads(model, "sum")


@settings(max_examples=settings().max_examples // 2)
@given(models(), st.booleans())
def test_quantities_are_those_of_each_sample_alone(case: tuple[nn.Module, Tensor], param_grad: bool) -> None:
    model, x = case
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for batch in (x, x.flip(0)):
            with autograd_hacks.pause_hooks():
                rows = one_backward_per_sample(model, squares, batch)
            model.zero_grad()
            squares(model(batch)).sum().backward()
            assert_quantities(model, rows, "sum")


@settings(max_examples=settings().max_examples // 3)
@given(models())
def test_single_precision_is_that_of_double(case: tuple[nn.Module, Tensor]) -> None:
    model, x = case
    single = copy.deepcopy(model).float()
    exact, grads = taken(model, x), taken(single, x.float() if x.is_floating_point() else x)
    assert_close(grads.norms(), exact.norms().float(), rtol=1e-3, atol=1e-4)
    scale = float(exact.norms().max()) ** 2
    assert_close(grads.gram(), exact.gram().float(), rtol=1e-3, atol=1e-4 * max(1.0, scale))
