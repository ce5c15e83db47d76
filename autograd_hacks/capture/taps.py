"""Layers that bring squared norms to a vector of N as its gradient, in whatever graph they are compiled into.

No mathematics.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import BatchSizeError, SamplesMixed, where
from autograd_hacks.rules.norm import why_norm_mixes
from autograd_hacks.rules.squares import Kind, squares_of_bias


class Basin:
    """Where the norms of one model's layers arrive, within a pass for them; nothing is there outside."""

    def __init__(self, param_grad: bool) -> None:
        self.param_grad = param_grad  # whether the pass computes ordinary gradients, too
        self.squares: Tensor | None = None  # N; its gradient is Σ of the squared norms over parameters
        self.uses: Tensor | None = None  # one for each layer; its gradient counts how often a pass came through


class Tap:
    """What a layer with a tap knows.  place: its own in `Basin.uses`"""

    def __init__(self, basin: Basin, kind: Kind, path: str, place: int) -> None:
        self.basin, self.kind, self.path, self.place = basin, kind, path, place


class _Tapped(torch.autograd.Function):
    """y, with the norms as the gradient of `squares`: autograd adds them up over layers.

    A copy, since torch refuses to write into what a Function has handed on as it is; compiled code has none.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, squares: Tensor, uses: Tensor, layer: Any, tap: Tap, trains: tuple[bool, bool]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.tap, ctx.trains, ctx.dtype, ctx.count = layer, tap, trains, squares.dtype, uses.shape[0]
        return y.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,), wide = ctx.saved_tensors, g.to(ctx.dtype)
        of_weight, of_bias = ctx.trains
        squares = wide.new_zeros(wide.shape[0])
        if of_weight:
            squares = squares + ctx.tap.kind.weight(ctx.layer, x.to(ctx.dtype) if x.is_floating_point() else x, wide)
        if of_bias:
            squares = squares + squares_of_bias(ctx.tap.kind, ctx.layer, wide)
        uses = (torch.arange(ctx.count, device=g.device) == ctx.tap.place).to(ctx.dtype)
        return g, None, squares, uses, None, None, None


class WithTap:
    """Stands in front of a layer's class, with its parameters, their names and its state as they were."""

    _tap: Tap

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tap: Tap = self._tap
        squares, uses = tap.basin.squares, tap.basin.uses
        weight, bias = self.weight, getattr(self, "bias", None)
        trains = weight is not None and weight.requires_grad, bias is not None and bias.requires_grad
        if squares is None or uses is None or not any(trains) or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        inputs = (*args, *kwargs.values())
        if len(inputs) != 1:
            raise TypeError(f"{where(tap.path, self)} was given {len(inputs)} arguments; norms_inside expects one")
        x = inputs[0]
        _check(self, tap, x, squares.shape[0])
        if tap.basin.param_grad:
            y = super().forward(*args, **kwargs)  # type: ignore[misc]
        else:
            y = tap.kind.compute(self, x, *(p if p is None else p.detach() for p in (weight, bias)))
        return _Tapped.apply(y, x, squares.to(y.device), uses.to(y.device), self, tap, trains)


def _check(layer: nn.Module, tap: Tap, x: Tensor, samples: int) -> None:
    if x.ndim < tap.kind.axes(layer) or x.shape[0] != samples:
        raise BatchSizeError(
            f"{where(tap.path, layer)} was given an input of shape {tuple(x.shape)} in a pass for the norms of {samples} "
            "samples. norms_inside expects samples on axis 0 of every layer's input, and an axis for each feature and "
            "position behind: (N, ...), also for tables of positions, index.expand(N, -1). Or use add_hooks."
        )
    if isinstance(layer, nn.modules.batchnorm._BatchNorm) and (why := why_norm_mixes(layer, layer.training)):
        raise SamplesMixed(f"{where(tap.path, layer)} {why}")


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
