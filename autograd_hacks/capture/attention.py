"""The linear maps that MultiheadAttention's own function runs: each is noted as it runs, so that nothing is recomputed.

No mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autograd_hacks.probe.layout import Layout
from autograd_hacks.rules.attention import attention
from autograd_hacks.rules.table import covered, rule_for

if TYPE_CHECKING:
    from autograd_hacks.capture.forward import Recorder
    from autograd_hacks.capture.records import Visit


@dataclass(frozen=True)
class Map:
    """A linear map inside a layer, from its only argument to its only output.

    rows: by a parameter's name in the layer, the entries of its first axis that the map uses    weight: its weight's name
    """

    rows: Mapping[str, slice]
    weight: str


class Inside(TorchFunctionMode):
    """Is there while an attention layer runs, and notes its maps.

    off: the layer's parameters that are switched off    replayed: the ids of those whose rows a module around gives
    samples: N
    """

    def __init__(
        self, recorder: Recorder, path: str, layer: nn.Module, off: Sequence[Tensor], replayed: Collection[int], samples: int
    ) -> None:
        super().__init__()
        self.recorder, self.path, self.layer, self.off, self.samples = recorder, path, layer, off, samples
        self.visits: list[Visit] = []
        self._all, asking = covered(layer), {id(p) for p in off}
        self._wanted = {
            name: p for name, p in self._all.items() if (p.requires_grad or id(p) in asking) and id(p) not in replayed
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            func = _with_maps_by(self._run)
        return func(*args, **(kwargs or {}))

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear map of the layer's function."""
        if self.off and x.ndim == 3:
            # As torch does where the weight asks for a gradient, and else for each position apart: 2.4 ms against 3.5.
            out = F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])
        else:
            out = F.linear(x, weight, bias)
        found, shift = self._find(weight), self._find(bias)
        if found is None:
            return out
        return self._note(x, out, Map(dict([found, shift or found]), found[0]))

    def covers_all(self) -> bool:
        """Whether each parameter's gradients are noted."""
        return {name for visit in self.visits for name in visit.parameters} >= set(self._wanted)

    def _find(self, tensor: Tensor | None) -> tuple[str, slice] | None:
        """Which of the layer's parameters a tensor is, or which rows of it."""
        if tensor is None:
            return None
        for name, p in self._all.items():
            if p.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() and tensor.shape[1:] == p.shape[1:]:
                start = (tensor.storage_offset() - p.storage_offset()) // max(1, p.stride(0))
                return name, slice(start, start + len(tensor))
        return None

    def _note(self, x: Tensor, out: Tensor, inside: Map) -> Tensor:
        parameters = {name: self._wanted[name] for name in inside.rows if name in self._wanted}
        # The function puts positions first, and folds them into the samples before the last map.
        layout = Layout(1) if out.ndim == 3 else Layout(0, "T·N")
        if not parameters or not layout.fits(out, self.samples):
            return out
        noted, visit = self.recorder.visit_inside(
            self.path, self.layer, x, out, inside, parameters, self.off, layout, self.samples
        )
        if visit is not None:
            self.visits.append(visit)
        return noted


def _with_maps_by(run: Callable[..., Tensor]) -> Callable[..., Any]:
    """torch's own function of attention, with its linear maps run by another function.

    It is the same code, compiled once, in a namespace in which ``linear`` means something else.
    """
    space = dict(vars(F))
    space |= {name: FunctionType(getattr(F, name).__code__, space, name, getattr(F, name).__defaults__) for name in _PARTS}
    space |= {"linear": run, "has_torch_function": lambda tensors: False}
    for name in _PARTS:
        space[name].__kwdefaults__ = getattr(F, name).__kwdefaults__
    found: Callable[..., Any] = space["multi_head_attention_forward"]
    return found


_PARTS = ("multi_head_attention_forward", "_in_projection_packed", "_in_projection")
"""What attention is made of in torch.nn.functional."""


def looks_inside(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's maps can be noted as they run."""
    query = args[0] if args else kwargs.get("query")
    return (
        isinstance(layer, nn.MultiheadAttention)
        and (rule := rule_for(layer)) is not None
        and rule.formula is attention
        and isinstance(query, Tensor)
        and query.ndim == 3
        and not query.is_nested
        and layer.bias_k is None  # which would be another map
    )
