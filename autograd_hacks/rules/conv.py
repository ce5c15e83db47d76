"""Conv1d, Conv2d, Conv3d."""

from collections.abc import Mapping

import torch.nn as nn
import torch.nn.functional as F
from einops import reduce
from torch import Tensor

from autograd_hacks.forms import Convolution, Dense, Form
from autograd_hacks.rules.call import needs_batch, single_input

_Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


@single_input
def conv(layer: _Conv, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x: N C *S    g: N O *L.  Sample n's gradient is the ordinary weight gradient of x[n] and g[n]."""
    needs_batch(x, at_least=2 + len(layer.kernel_size), layout="(N, in_channels, *spatial)")
    x, padding = _pad(layer, x)
    forms: dict[str, Form] = {
        "weight": Convolution(x, g, layer.weight.shape, layer.stride, padding, layer.dilation, layer.groups)
    }
    if layer.bias is not None:
        forms["bias"] = Dense(reduce(g, "n o ... -> n o", "sum"))
    return forms


def _pad(layer: _Conv, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """The input, and the zeros that the convolution is still to add on both sides of each axis.

    A kernel sees the same input whether padding is cut from the convolution or put into x; zeros on both sides are left
    to the convolution, which needs no copy, and all else is put into x: reflections, and the extra column that 'same'
    adds at the end for an even kernel.
    """
    none = (0,) * len(layer.kernel_size)
    if layer.padding == "valid":
        return x, none
    if layer.padding == "same":
        totals = [dilation * (size - 1) for dilation, size in zip(layer.dilation, layer.kernel_size)]
        sides = [(total // 2, total - total // 2) for total in totals]
    else:
        sides = [(int(pad), int(pad)) for pad in layer.padding]
    if layer.padding_mode == "zeros" and all(before == after for before, after in sides):
        return x, tuple(before for before, _ in sides)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, [pad for side in reversed(sides) for pad in side], mode=mode), none
