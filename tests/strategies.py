"""Random layers with an input, and random forms.  Valid by construction: nothing is drawn to be thrown away."""

from dataclasses import dataclass

import torch
import torch.nn as nn
from hypothesis import strategies as st
from torch import Tensor

from autograd_hacks.forms import Concatenation, Convolution, Dense, Form, Grouping, Outer

small = st.integers(1, 3)


@dataclass
class Case:
    """A layer and a batch for it."""

    layer: nn.Module
    x: Tensor

    def __repr__(self) -> str:
        return f"{self.layer} on {tuple(self.x.shape)}, strides {self.x.stride()}"


@st.composite
def linears(draw: st.DrawFn, least: int = 0) -> Case:
    """least: the fewest samples and positions"""
    torch.manual_seed(draw(st.integers(0, 999)))
    fan_in, fan_out = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    between = draw(st.lists(st.integers(least, 3), max_size=3))
    layer = nn.Linear(fan_in, fan_out, bias=draw(st.booleans()))
    return Case(layer.double(), torch.randn(draw(st.integers(least, 4)), *between, fan_in, dtype=torch.float64))


@st.composite
def convs(draw: st.DrawFn) -> Case:
    torch.manual_seed(draw(st.integers(0, 999)))
    dims, groups = draw(small), draw(small)
    per_axis = st.tuples(*[small] * dims)
    kernel, dilation = draw(per_axis), draw(per_axis)
    mode = draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"]))
    padding = draw(st.one_of(st.just("valid"), st.just("same"), st.tuples(*[st.integers(0, 2)] * dims)))
    stride = (1,) * dims if padding == "same" else draw(per_axis)
    # Room for the dilated kernel without padding, and for the reflection of the widest padding.
    room = [max((k - 1) * d + 1, k * d + 1, 3) for k, d in zip(kernel, dilation)]
    size = [extent + draw(st.integers(0, 2)) for extent in room]
    layer = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims](
        groups * draw(small if dims < 3 else st.integers(1, 2)),
        groups * draw(small if dims < 3 else st.integers(1, 2)),
        kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        bias=draw(st.booleans()),
        padding_mode=mode,
    )
    x = torch.randn(draw(st.integers(1, 3)), layer.in_channels, *size, dtype=torch.float64)
    if dims == 2 and draw(st.booleans()):
        x = x.to(memory_format=torch.channels_last)
    return Case(layer.double(), x)


layers = st.one_of(linears(), convs())
filled_layers = st.one_of(linears(least=1), convs())


@st.composite
def leaf_forms(draw: st.DrawFn, samples: int, shape: tuple[int, ...]) -> Form:
    """A form that is made of no other.  shape: (O, C, K)"""
    kind = draw(st.sampled_from(["dense", "outer", "convolution"]))
    fan_out, channels, kernel = shape
    positions = draw(st.integers(0 if kind == "outer" else 1, 4))
    if kind == "dense":
        return Dense(torch.randn(samples, *shape, dtype=torch.float64))
    if kind == "outer":
        left = torch.randn(samples, positions, fan_out, dtype=torch.float64)
        return Outer(left, torch.randn(samples, positions, channels * kernel, dtype=torch.float64), torch.Size(shape))
    # Without groups, so that one shape fits all kinds; test_rules draws the groups.
    stride, padding, dilation = draw(small), draw(st.integers(0, 2)), draw(small)
    length = (positions - 1) * stride + (kernel - 1) * dilation + 1 + draw(st.integers(0, stride - 1))
    padding = min(padding, (length - 1) // 2)
    x = torch.randn(samples, channels, length - 2 * padding, dtype=torch.float64)
    g = torch.randn(samples, fan_out, positions, dtype=torch.float64)
    return Convolution(x, g, torch.Size(shape), [stride], [padding], [dilation], 1)


@st.composite
def forms(draw: st.DrawFn, samples: int, shape: tuple[int, ...], depth: int = 2) -> Form:
    """Any form, made of others up to `depth` times."""
    kind = draw(st.sampled_from(["leaf", "sum", "grouping", "concatenation"])) if depth else "leaf"
    if kind == "sum":
        return draw(forms(samples, shape, depth - 1)) + draw(forms(samples, shape, depth - 1))
    if kind == "grouping" and samples:
        many = draw(st.integers(0, 5))
        rows = torch.tensor(draw(st.lists(st.integers(0, samples - 1), min_size=many, max_size=many)), dtype=torch.long)
        return Grouping(draw(forms(many, shape, depth - 1)), rows, samples)
    if kind == "concatenation":
        first = draw(st.integers(0, samples))
        return Concatenation([draw(forms(first, shape, depth - 1)), draw(forms(samples - first, shape, depth - 1))])
    return draw(leaf_forms(samples, shape))
