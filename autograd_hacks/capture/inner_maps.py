"""The linear maps inside MultiheadAttention: operations that no trace need show, since torch's own function runs them.

No mathematics.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.capture.reads import Notes, Reads, Running
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import RECORDED, VALUE, Plan, Read, Reading
from autograd_hacks.probe.tracker import Frame
from autograd_hacks.rules.attention import attention
from autograd_hacks.rules.table import rule_for


class InnerMaps(Reads):
    """Is there while an attention layer runs, and notes its maps.

    parameters: those whose rows the maps give, by name    count: how many rows the layer has, a batch of its own
    """

    def __init__(
        self, path: str, layer: nn.Module, parameters: Mapping[str, Tensor], count: int, notes: Notes, mode: str
    ) -> None:
        super().__init__(Plan(mode, reading=Reading(frozenset(parameters))), parameters, count, notes)
        self.running = [Running(Frame(path, 0), layer)]
        self.noted = False  # whether there was a map whose gradients are wanted

    def _find(self, frame: Frame, name: str, names: frozenset[str]) -> tuple[Read | None, bool]:
        if name in ("linear", "repeat"):  # the maps, with positions first; and bias_k and bias_v, one for each row
            return Read(RECORDED, Layout(1), names, (Layout(1),)), True
        return (Read(VALUE, None, names) if name in ("split", "chunk") else None), True

    def _record(self, name: str, func: Any, args: Any, kwargs: Any, read: Read, off: bool, *rest: Any) -> Any:
        self.noted = True
        if args[0].ndim == 2:  # for the last map the function folds positions into the rows
            read = replace(read, layout=Layout(0, "T·N"), operands=(Layout(0, "T·N"),))
        run = _linear if off and name == "linear" and args[0].ndim == 3 else func
        return super()._record(name, run, args, kwargs, read, off, *rest)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """As torch does where the weight asks for a gradient, and else for each position apart: 2.4 ms against 3.5."""
    return F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])


def has_inner_maps(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's maps can be noted as they run."""
    query = args[0] if args else kwargs.get("query")
    return (
        isinstance(layer, nn.MultiheadAttention)
        and (rule := rule_for(layer)) is not None
        and rule.formula is attention
        and isinstance(query, Tensor)
        and query.ndim == 3
        and not query.is_nested
    )
