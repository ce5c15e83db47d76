"""Convolutions and transposed convolutions."""

from collections.abc import Mapping

import torch.nn as nn
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

from autograd_hacks.forms import Convolution, Dense, Form
from autograd_hacks.rules.call import Call, needs_batch
from autograd_hacks.rules.rule import single_input

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
_ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d


@single_input
def conv(layer: _Conv, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x: N C *S    g: N O *L.  Sample n's gradient is the ordinary weight gradient of x[n] and g[n]."""
    needs_batch(x, at_least=2 + len(layer.kernel_size), layout="(N, in_channels, *spatial)")
    if layer.padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(layer.dilation, layer.kernel_size)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        padding = (0,) * len(layer.kernel_size) if layer.padding == "valid" else layer.padding
        sides = [(int(pad), int(pad)) for pad in padding]
    return _forms(layer, x.conj(), g, g, sides, layer.padding_mode)


def conv_transpose(layer: _ConvTranspose, call: Call) -> Mapping[str, Form]:
    """x: N C *S    g: N O *L.  The layer is a convolution's input gradient, so x and g change places.

    That convolution takes L to S.  Its padding after L is smaller than that before by output_padding.
    """
    x, g = call.argument(0, "input"), call.grad
    needs_batch(x, at_least=2 + len(layer.kernel_size), layout="(N, in_channels, *spatial)")
    spread = zip(x.shape[2:], g.shape[2:], layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    sides = [
        (int(pad), (size - 1) * stride + dilation * (kernel - 1) + 1 - int(pad) - length)
        for size, length, kernel, stride, pad, dilation in spread
    ]
    return _forms(layer, g, x.conj(), g, sides, "zeros")


def _forms(
    layer: _Conv | _ConvTranspose, x: Tensor, g: Tensor, at_output: Tensor, sides: list[tuple[int, int]], mode: str
) -> Mapping[str, Form]:
    """The weight's form for a convolution from x to g, and the bias's.

    sides: the padding before and after each spatial axis of x, negative to cut off    at_output: the gradient at the output
    Zeros of equal number on both sides are left to the convolution, which needs no copy; else x itself is padded.
    """
    padding = tuple(before for before, _ in sides)
    if mode != "zeros" or any(before != after for before, after in sides):
        x = F.pad(x, [pad for side in reversed(sides) for pad in side], mode="constant" if mode == "zeros" else mode)
        padding = (0,) * len(sides)
    weight: Form = Convolution(x, g, layer.weight.shape, layer.stride, padding, layer.dilation, layer.groups)
    bias = {} if layer.bias is None else {"bias": Dense(reduce(at_output, "n o ... -> n o", "sum"))}
    return {"weight": weight, **bias}
