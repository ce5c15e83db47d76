"""Convolutions and transposed convolutions."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms import Convolution, Form
from autograd_hacks.formulas.call import Call
from autograd_hacks.formulas.met import Met
from autograd_hacks.support.layout import POSITIONS


def conv(met: Met) -> Form | None:
    """x: N C *S    g: N O *L."""
    if met.place == 2:
        return met.by_channel(met.grad)
    if met.layout.axis or met.layout.fold == POSITIONS:
        return None
    settings = map(met.kept, ("stride", "padding", "dilation", "groups", "transposed"))
    return met.added_up(weight_gradient(met.kept("input").conj(), met.grad, met.shape, *settings))


def weight_gradient(
    x: Tensor,
    g: Tensor,
    shape: torch.Size,
    stride: Sequence[int],
    padding: Sequence[Any],
    dilation: Sequence[int],
    groups: int,
    is_transposed: bool,
) -> Form:
    """x̄: N C *S    g: N O *L    shape: the weight's.  Sample n's gradient is the ordinary weight gradient of x[n] and g[n].

    stride, padding, dilation: for each axis, or for all.  Padding may be a pair (before, after); negative cuts off.  Equal
    numbers of zeros on both sides are left to the convolution, which needs no copy.  Otherwise x itself is padded
    """
    axes = len(shape) - 2
    stride, padding, dilation = ((tuple(given) * axes)[:axes] for given in (stride, padding, dilation))
    sides = [pad if isinstance(pad, tuple) else (int(pad), int(pad)) for pad in padding]
    if is_transposed:
        # The operation is a convolution's input gradient, so x and g swap roles.  That convolution maps L to S.  Its padding
        # after L is smaller than the padding before L, by output_padding.
        sides = [
            (pad, (size - 1) * step + rate * (kernel - 1) + 1 - pad - length)
            for size, length, kernel, step, (pad, _), rate in zip(
                x.shape[2:], g.shape[2:], shape[2:], stride, sides, dilation
            )
        ]
        x, g = g, x
    if any(first != last for first, last in sides):
        x, sides = F.pad(x, [pad for side in reversed(sides) for pad in side]), [(0, 0)] * len(sides)
    return Convolution(x, g, shape, stride, [before for before, _ in sides], dilation, groups, is_transposed)


def padded(layer: nn.modules.conv._ConvNd, call: Call, x: Tensor) -> Mapping[str, Any]:
    """The input, with anything but zeros padded here, and the padding that is left to do."""
    if layer.padding_mode != "zeros":
        return {"input": F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), "padding": (0,)}
    padding: Any = layer.padding if layer.padding != "valid" else (0,)
    if padding == "same":
        totals = [rate * (size - 1) for rate, size in zip(layer.dilation, layer.kernel_size)]
        padding = [(total // 2, total - total // 2) for total in totals]
    return {"input": x, "padding": padding}
