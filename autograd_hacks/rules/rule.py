"""A rule is a formula of a layer's J, and what else must be known of the layer; and two decorators for common formulas."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import where
from autograd_hacks.forms import Form
from autograd_hacks.rules.call import Call

Formula = Callable[[Any, Call], Mapping[str, Form]]
"""``formula(layer, call)`` returns a form for each of the layer's own parameters."""


@dataclass(frozen=True)
class Rule:
    """Which J a layer's parameters have, and what the library must know of the layer to ask for it."""

    #: ``formula(layer, call)``: {name: form}, a form for each parameter
    formula: Formula
    #: ``features(layer)``, for a layer that does the same at every position, wherever the batch is: how many of the output's
    #: last axes belong to one position.  Its formula gets samples first
    features: Callable[[Any], int] | None = None
    #: ``axes(layer)``: where the samples are in each output.  None: on axis 0
    axes: Callable[[Any], Sequence[int]] | None = None
    #: ``count(layer, args, kwargs)``: how many samples a call has.  None: as many as axis 0 of its output has entries
    count: Callable[[Any, Sequence[Any], Mapping[str, Any]], int] | None = None
    #: ``covers(layer)``: submodules whose parameters the layer reads itself, so that the formula has forms for them too
    covers: Callable[[Any], Sequence[str]] | None = None
    #: ``mixes(layer, training)``: why the layer mixes samples in this mode, for people, or None
    mixes: Callable[[Any, bool], str | None] | None = None
    #: whether the output may be a loss of the whole batch, so that only the first argument tells where the samples are
    by_input: bool = False
    #: whether the formula recomputes the layer's output, which is kept for it as ``call.outputs``
    recomputes: bool = False

    @property
    def name(self) -> str:
        """The formula's name, for people."""
        return getattr(self.formula, "__name__", "of yours")


def single_input(formula: Callable[[Any, Tensor, Tensor], Mapping[str, Form]]) -> Formula:
    """A formula of (layer, call) from ``formula(layer, x, g)``, for a layer of one tensor in, x, and one out, with the
    gradient g at it."""

    @wraps(formula)
    def of_call(layer: nn.Module, call: Call) -> Mapping[str, Form]:
        inputs = (*call.args, *call.kwargs.values())
        if len(inputs) != 1:
            raise TypeError(
                f"{where(call.path, layer)} was given {len(inputs)} arguments, but its rule {formula.__name__} is for one. "
                "Write rule(layer, call) without single_input, which sees all of them."
            )
        return formula(layer, inputs[0], call.grad)

    return of_call


def positionwise(features: Callable[[Any], int]) -> Callable[[Formula], Rule]:
    """A `autograd_hacks.rules.Rule` from the formula of a layer that does the same at every position, wherever the batch is.

    ``features(layer)`` says how many of the output's last axes belong to one position.
    """
    return lambda formula: Rule(formula, features=features)
