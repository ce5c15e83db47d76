"""Decides which values are numbers, including NumPy's and tensors without axes."""

from numbers import Integral, Real

import torch
from torch import Tensor


def is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.ndim == 0 and not value.is_complex() and value.dtype != torch.bool
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
