"""The linear maps inside MultiheadAttention: each is noted as torch's own function runs it, so that nothing is recomputed.

No mathematics.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autograd_hacks.capture.records import Way
from autograd_hacks.capture.ways import ByCopies, ByMap
from autograd_hacks.probe.layout import Layout
from autograd_hacks.rules.attention import attention
from autograd_hacks.rules.table import covered, rule_for
from autograd_hacks.support.restored import leave

Note = Callable[[Way, tuple[Tensor, ...], Tensor, Mapping[str, Tensor]], Tensor | None]
"""``note(way, inputs, output, parameters)`` returns the output that is to be used, or None where it needn't be noted."""


class InnerMaps(TorchFunctionMode):
    """Is there while an attention layer runs, and notes its maps.

    wanted: the layer's parameters, by name, whose rows the maps give    off: those that are switched off
    count: how many rows the layer has, a batch of its own
    """

    def __init__(self, layer: nn.Module, wanted: Collection[str], off: Sequence[Tensor], count: int, note: Note) -> None:
        super().__init__()
        self.off, self.count, self.note = off, count, note
        self.noted = False  # whether there was a map whose gradients are wanted
        self._all, asking = covered(layer), {id(p) for p in off}
        self._wanted = {name: p for name, p in self._all.items() if name in wanted and (p.requires_grad or id(p) in asking)}
        self._appended = [name for name in ("bias_k", "bias_v") if name in self._all]  # still to come

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            func = _with_maps_by(self._run, self._append)
        return func(*args, **(kwargs or {}))

    def _run(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear map of the layer's function."""
        if self.off and x.ndim == 3:
            # As torch does where the weight asks for a gradient, and else for each position apart: 2.4 ms against 3.5.
            out = F.linear(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])
        else:
            out = F.linear(x, weight, bias)
        found, shift = self._find(weight), self._find(bias)
        # The function puts positions first, and folds them into the rows before the last map.
        at = Layout(1) if out.ndim == 3 else Layout(0, "T·N")
        if found is None or not at.fits(out, self.count):
            return out
        uses = dict([found, shift or found])
        return self._note(ByMap(uses, found[0], self.count, at), (x,), out, uses)

    def _append(self, tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        """What the layer's function calls torch.cat for: ``bias_k`` and ``bias_v`` behind keys and values, in this order."""
        if self._appended and len(tensors) == 2:
            name, (keys, copies) = self._appended.pop(0), tensors
            tensors = [keys, self._note(ByCopies(name, self.count), (), copies, [name])]
        return torch.cat(list(tensors), *args, **kwargs)

    def _find(self, tensor: Tensor | None) -> tuple[str, slice] | None:
        """Which of the layer's parameters a tensor is, or which rows of it."""
        if tensor is None:
            return None
        for name, p in self._all.items():
            offset = tensor.storage_offset() - p.storage_offset()
            is_inside = 0 <= offset <= p.numel() - tensor.numel() and tensor.shape[1:] == p.shape[1:]
            if is_inside and p.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
                start = offset // max(1, p.stride(0))
                return name, slice(start, start + len(tensor))
        return None

    def _note(self, way: Way, inputs: tuple[Tensor, ...], out: Tensor, names: Iterable[str]) -> Tensor:
        parameters = {name: self._wanted[name] for name in names if name in self._wanted}
        noted = self.note(way, inputs, out, parameters) if parameters else None
        self.noted |= noted is not None
        return out if noted is None else noted


class OpenMaps:
    """The attention layers that run, each with its maps."""

    def __init__(self) -> None:
        self._open: dict[nn.Module, InnerMaps] = {}

    def enter(self, layer: nn.Module, maps: InnerMaps) -> None:
        self._open[layer] = maps  # first, for what an interrupt may leave
        maps.__enter__()

    def leave(self, layer: nn.Module) -> InnerMaps | None:
        """Ends a layer's maps, if it has some, and returns them."""
        maps = self._open.get(layer) if self._open else None
        if maps is not None:
            leave(maps)
            del self._open[layer]
        return maps

    def leave_all(self) -> None:
        for layer in list(self._open):
            self.leave(layer)


class _Torch:
    """torch, with another ``cat``."""

    def __init__(self, cat: Callable[..., Tensor]) -> None:
        self.cat = cat

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _with_maps_by(run: Callable[..., Tensor], append: Callable[..., Tensor]) -> Callable[..., Any]:
    """torch's own function of attention, with its linear maps and concatenations run by other functions.

    It is the same code, compiled once, in a namespace in which ``linear`` means something else.
    """
    space = dict(vars(F))
    space |= {name: FunctionType(getattr(F, name).__code__, space, name, getattr(F, name).__defaults__) for name in _PARTS}
    space |= {"linear": run, "torch": _Torch(append), "has_torch_function": lambda tensors: False}
    for name in _PARTS:
        space[name].__kwdefaults__ = getattr(F, name).__kwdefaults__
    found: Callable[..., Any] = space["multi_head_attention_forward"]
    return found


_PARTS = ("multi_head_attention_forward", "_in_projection_packed", "_in_projection")
"""What attention is made of in torch.nn.functional."""


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
