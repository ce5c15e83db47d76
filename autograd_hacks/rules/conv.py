"""Convolutions and transposed convolutions."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms import Convolution, Form
from autograd_hacks.rules.linear import added
from autograd_hacks.rules.rule import Call, needs_batch

_Settings = tuple[Sequence[int], Any, Sequence[int], int]


def conv(layer: nn.modules.conv._ConvNd, call: Call) -> Mapping[str, Form]:
    """x: N C *S    g: N O *L."""
    x, g = call.argument(0, "input"), call.grad
    needs_batch(x, at_least=2 + len(layer.kernel_size), layout="(N, in_channels, *spatial)")
    make = transposed_convolution if layer.transposed else partial(convolution, mode=layer.padding_mode)
    settings = layer.stride, layer.padding, layer.dilation, layer.groups
    weight = make(x.conj(), g, layer.weight.shape, settings)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": added(g)}


def convolution(
    x: Tensor, g: Tensor, shape: torch.Size, settings: _Settings, mode: str = "zeros", is_transposed: bool = False
) -> Form:
    """x̄: N C *S    g: N O *L    shape: the weight's.  Sample n's gradient is the ordinary weight gradient of x[n] and g[n].

    settings: stride, padding, dilation, groups.  Padding may be a pair for each axis (before, after); negative cuts off.
    Equal numbers of zeros on both sides are left to the convolution, which needs no copy.  Otherwise x itself is padded.
    """
    stride, padding, dilation, groups = settings
    if padding == "same":
        totals = [rate * (size - 1) for rate, size in zip(dilation, shape[2:])]
        padding = [(total // 2, total - total // 2) for total in totals]
    given = [0] * len(shape[2:]) if isinstance(padding, str) else padding
    sides = [pad if isinstance(pad, tuple) else (int(pad), int(pad)) for pad in given]
    before = tuple(first for first, _ in sides)
    if mode != "zeros" or any(first != last for first, last in sides):
        x = F.pad(x, [pad for side in reversed(sides) for pad in side], mode="constant" if mode == "zeros" else mode)
        before = (0,) * len(sides)
    return Convolution(x, g, shape, stride, before, dilation, groups, is_transposed)


def transposed_convolution(x: Tensor, g: Tensor, shape: torch.Size, settings: _Settings) -> Form:
    """x̄: N C *S    g: N O *L.  The operation is a convolution's input gradient, so x and g swap roles.

    That convolution maps L to S.  Its padding after L is smaller than the padding before L, by output_padding.
    """
    spread = zip(x.shape[2:], g.shape[2:], shape[2:], *settings[:3])
    sides = [
        (int(pad), (size - 1) * stride + dilation * (kernel - 1) + 1 - int(pad) - length)
        for size, length, kernel, stride, pad, dilation in spread
    ]
    return convolution(g, x, shape, (settings[0], sides, *settings[2:]), is_transposed=True)
