"""Whose each row is, where routing has put rows elsewhere: labels that follow them through torch's functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# fmt: off
ROW_BY_ROW = frozenset((
    "mul", "add", "sub", "rsub", "div", "true_divide", "rdiv", "neg", "pow", "exp", "log", "abs", "square", "sqrt", "rsqrt",
    "sigmoid", "tanh", "relu", "silu", "gelu", "softplus", "elu", "leaky_relu", "mish", "hardswish", "logsigmoid", "erf",
    "clamp", "where", "masked_fill", "dropout", "to", "float", "half", "double", "bfloat16", "type_as", "contiguous",
    "clone", "unsqueeze", "chunk", "split", "softmax", "log_softmax", "linear", "matmul", "mm", "grouped_mm", "_grouped_mm",
    "layer_norm", "rms_norm", "mul_", "add_", "div_", "clamp_", "masked_fill_", "silu_", "relu_",
))
"""Functions whose rows, as many as they are given, stand where those do that they are made of."""
# fmt: on

_OF_FIRST = frozenset(("linear", "matmul", "mm", "grouped_mm", "_grouped_mm", "layer_norm", "rms_norm"))
"""Those whose rows are of their first tensor: a matrix from the left would move them."""

_RESHAPES = frozenset(("reshape", "view", "flatten", "unflatten"))

GROUPED = frozenset(("grouped_mm", "_grouped_mm"))
"""Products of rows, group by group, by the matrices of a stack."""


def carried(name: str, args: tuple[Any, ...], out: Tensor, rows: dict[int, Tensor]) -> Tensor | None:
    """The labels of a function's output; None where it isn't known whose its rows are.

    rows: labels by a tensor's id
    """
    tensors = [x for x in args if isinstance(x, Tensor)]
    if not tensors or not out.ndim:
        return None
    labels = rows.get(id(tensors[0]))
    if name == "getitem":
        return None if labels is None else _taken(labels, args[1], out)
    if name == "index_select":
        return labels[args[2]] if labels is not None and args[1] == 0 else None
    if name in _RESHAPES:
        return None if labels is None else _reshaped(labels, tensors[0], out)
    if name not in ROW_BY_ROW:
        return None
    tensors = tensors[:1] if name in _OF_FIRST else tensors
    found = [own for x in tensors if (own := rows.get(id(x))) is not None and len(own) == len(out)]
    return found[0] if found and all(torch.equal(found[0], other) for other in found[1:]) else None


def _taken(labels: Tensor, index: Any, out: Tensor) -> Tensor | None:
    index = index[0] if isinstance(index, tuple) else index
    if isinstance(index, slice) or (isinstance(index, Tensor) and index.ndim == 1 and index.dtype != torch.uint8):
        taken = labels[index]
        return taken if len(taken) == len(out) else None
    return labels if index is Ellipsis and len(labels) == len(out) else None


def _reshaped(labels: Tensor, x: Tensor, out: Tensor) -> Tensor | None:
    before, after = len(labels), len(out)
    if x.numel() != out.numel() or not before or not after:
        return None
    if after % before == 0:
        return labels.repeat_interleave(after // before)
    if before % after:
        return None
    groups = labels.view(after, -1)
    return groups[:, 0] if bool((groups == groups[:, :1]).all()) else None
