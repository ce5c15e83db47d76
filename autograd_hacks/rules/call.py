"""What a rule sees of a layer's call, and the helper that spares the common one-tensor rule the ceremony."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import BatchSizeError, where
from autograd_hacks.forms import Form


@dataclass(frozen=True)
class Call:
    """One call of a layer as the gate hands it on: samples on axis 0, the loss's scale taken out, one dtype.

    args, kwargs: what the layer's forward was given
    grads: for each tensor that the layer returned, the gradient of the sum of the samples' losses at it, or None where
    the loss did not reach it
    """

    path: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    grads: tuple[Tensor | None, ...]


Rule = Callable[[Any, Call], Mapping[str, Form]]
"""``rule(layer, call)`` returns a form for each of the layer's own parameters."""


def single_input(formula: Callable[[Any, Tensor, Tensor], Mapping[str, Form]]) -> Rule:
    """A rule from ``formula(layer, x, g)``, for a layer of one tensor in, x, and one out, with the gradient g at it."""

    @wraps(formula)
    def rule(layer: nn.Module, call: Call) -> Mapping[str, Form]:
        inputs = (*call.args, *call.kwargs.values())
        if len(inputs) != 1 or len(call.grads) != 1 or call.grads[0] is None:
            raise TypeError(
                f"the rule {formula.__name__} for {where(call.path, layer)} is for one tensor in and one out, but the layer "
                f"was given {len(inputs)} arguments and returned {len(call.grads)} tensors. Write rule(layer, call) without "
                "single_input, which sees all of them."
            )
        return formula(layer, inputs[0], call.grads[0])

    return rule


def needs_batch(x: Tensor, at_least: int, layout: str) -> None:
    """Raises for an input with fewer axes than a batch has.  layout: a batch's shape, for people."""
    if x.ndim < at_least:
        raise BatchSizeError(
            f"was given an input without a batch axis, of shape {tuple(x.shape)}; expected {layout}. "
            "Give a single sample as a batch of one: x.unsqueeze(0)."
        )
