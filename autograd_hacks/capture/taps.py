"""Layers that bring squared norms to a vector of N as its gradient, in whatever graph they are compiled into.

Norms of matrices, tables and kernels come from the forms' own, by operations that a compiler leaves alone: where positions
cancel, rows are written out, which depends on the values.  All else is a few sums that it fuses.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import BatchSizeError, SamplesMixed, where
from autograd_hacks.forms.opaque import squares as squares_of
from autograd_hacks.rules.norm import why_norm_mixes
from autograd_hacks.rules.rule import Call, Formula
from autograd_hacks.rules.table import rule_for


def formula_inside(layer: nn.Module) -> Formula | None:
    """The formula of the layer's rule, or None where its norms can't be taken inside."""
    rule = rule_for(layer)
    return rule.formula if rule is not None and rule.inside else None


class Basin:
    """Where the norms of one model's layers arrive, within a pass for them; nothing is there outside."""

    def __init__(self, param_grad: bool) -> None:
        self.param_grad = param_grad  # whether the pass computes ordinary gradients, too
        self.squares: Tensor | None = None  # N; its gradient is Σ of the squared norms over parameters
        self.uses: Tensor | None = None  # one for each layer; its gradient counts how often a pass came through


class Tap:
    """What a layer with a tap knows.  place: its own in `Basin.uses`"""

    def __init__(self, basin: Basin, layer: nn.Module, formula: Formula, path: str, place: int) -> None:
        self.basin, self.formula, self.path, self.place = basin, formula, path, place
        self.forward = type(layer).forward  # of its class, which a tap comes in front of


class _Inside(Call):
    """A call whose pass is running, so that the layer is as it was."""

    def read(self, name: str) -> Tensor:
        found: Tensor = getattr(self.layer, name)
        return found


class _Tapped(torch.autograd.Function):
    """y, with the norms as the gradient of `squares`: autograd adds them up over layers.

    A copy, since torch refuses to write into what a Function has handed on as it is; compiled code has none.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, squares: Tensor, uses: Tensor, layer: Any, tap: Tap, trains: Sequence[str]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.tap, ctx.trains, ctx.dtype, ctx.count = layer, tap, trains, squares.dtype, uses.shape[0]
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,), wide = ctx.saved_tensors, g.to(ctx.dtype)
        x = x.to(ctx.dtype) if x.is_floating_point() else x
        forms = ctx.tap.formula(ctx.layer, _Inside(ctx.tap.path, ctx.layer, (x,), {}, ctx.layer.training, (wide,)))
        squares = wide.new_zeros(wide.shape[0])
        for name in ctx.trains:
            squares = squares + squares_of(forms[name])
        uses = (torch.arange(ctx.count, device=g.device) == ctx.tap.place).to(ctx.dtype)
        return g, None, squares, uses, None, None, None


class _Detached:
    """A layer for its own forward, its parameters detached."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._layer, name)
        return found.detach() if isinstance(found, nn.Parameter) else found


class WithTap:
    """Stands in front of a layer's class, with its parameters, their names and its state as they were."""

    _tap: Tap

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tap: Tap = self._tap
        squares, uses = tap.basin.squares, tap.basin.uses
        trains = [name for name in ("weight", "bias") if getattr(getattr(self, name, None), "requires_grad", False)]
        if squares is None or uses is None or not trains or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        inputs = (*args, *kwargs.values())
        if len(inputs) != 1:
            raise TypeError(f"{where(tap.path, self)} was given {len(inputs)} arguments; norms_inside expects one")
        x = inputs[0]
        if x.ndim < 1 or x.shape[0] != squares.shape[0]:
            raise BatchSizeError(
                f"{where(tap.path, self)} was given an input of shape {tuple(x.shape)} in a pass for the norms of "
                f"{squares.shape[0]} samples. norms_inside expects samples on axis 0 of every layer's input, and an axis "
                "for each feature and position behind: (N, ...), also for tables of positions, index.expand(N, -1). Or use "
                "add_hooks."
            )
        if isinstance(self, nn.modules.batchnorm._BatchNorm) and (why := why_norm_mixes(self, self.training)):
            raise SamplesMixed(f"{where(tap.path, self)} {why}")
        y = tap.forward(self if tap.basin.param_grad else _Detached(self), *args, **kwargs)
        return _Tapped.apply(y, x, squares.to(y.device), uses.to(y.device), self, tap, trains)


def put_tap(layer: nn.Module, tap: Tap) -> None:
    kind = type(layer)
    if kind not in _WITH_TAP:
        own = {"__module__": kind.__module__, "__doc__": kind.__doc__}
        _WITH_TAP[kind] = type(kind.__name__, (WithTap, kind), own)
    layer.__class__ = _WITH_TAP[kind]
    vars(layer)["_tap"] = tap


_WITH_TAP: dict[type[nn.Module], type[nn.Module]] = {}


def take_tap(layer: nn.Module) -> None:
    """Puts a layer's class back, where no other has come in front of it since; then the tap stays, and does nothing."""
    if type(layer).__mro__[1] is WithTap:
        layer.__class__ = type(layer).__mro__[2]
        del vars(layer)["_tap"]
