"""How products in single precision round their factors: to TF32, with a ten-bit mantissa, if torch's settings allow it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MATMUL, CONV, RNN = "matmul", "conv", "rnn"
KINDS = (MATMUL, CONV, RNN)
UNITS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""By torch's name of the rounded format: its unit in the last place, for 1."""

_CUDNN: Any = torch.backends.cudnn  # its settings have no types
_SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {MATMUL: torch.backends.cuda.matmul, CONV: _CUDNN.conv, RNN: _CUDNN.rnn},
    "cpu": {kind: getattr(torch.backends.mkldnn, kind) for kind in KINDS},
}


def unit_of_products(x: Tensor, kinds: Iterable[str] = KINDS) -> float:
    """The unit to which products on x's device may round their factors; 0 if they keep all digits.

    By default cuDNN rounds the factors of convolutions and recurrent layers to TF32.  For other products, this depends on
    ``torch.set_float32_matmul_precision`` and ``allow_tf32``.

    kinds: of products, some of `KINDS`
    """
    if x.dtype not in (torch.float32, torch.complex64):
        return 0.0
    settings = _SETTINGS.get(x.device.type, {})
    return max((UNITS.get(settings[kind].fp32_precision, 0.0) for kind in kinds if kind in settings), default=0.0)
