"""How coarsely products in single precision round their factors: to TF32, of ten bits, where torch is told that it may."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MATMUL, CONV, RNN = "matmul", "conv", "rnn"
KINDS = (MATMUL, CONV, RNN)
UNITS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""By torch's name of what factors are rounded to: a unit of the last digit that they keep, of 1."""

_CUDNN: Any = torch.backends.cudnn  # whose settings have no types
_SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {MATMUL: torch.backends.cuda.matmul, CONV: _CUDNN.conv, RNN: _CUDNN.rnn},
    "cpu": {kind: getattr(torch.backends.mkldnn, kind) for kind in KINDS},
}


def unit_of_products(x: Tensor, kinds: Iterable[str] = KINDS) -> float:
    """The unit to which the factors of products on x's device may be rounded; 0 where they keep all digits.

    By default cuDNN rounds those of convolutions and recurrent layers to TF32; ``torch.set_float32_matmul_precision`` and
    ``allow_tf32`` tell it of others.

    kinds: of products, some of `KINDS`
    """
    if x.dtype not in (torch.float32, torch.complex64):
        return 0.0
    settings = _SETTINGS.get(x.device.type, {})
    return max((UNITS.get(settings[kind].fp32_precision, 0.0) for kind in kinds if kind in settings), default=0.0)
