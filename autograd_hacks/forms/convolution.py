"""The weight of a convolution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Dense, Form
from autograd_hacks.forms.cost import saving, way_of_convolution
from autograd_hacks.forms.factored import Factored, norms_by_positions
from autograd_hacks.forms.numerics import put, slices_of
from autograd_hacks.forms.outer import Outer
from autograd_hacks.forms.positions import Positions, Windows

FORWARD = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
"""{number of spatial axes: the convolution}"""
# How many numbers are cut into windows at a time.  Windows that fit the cache took 0.4 of the time of one copy of all
# (64 samples, 32 -> 64 channels, 26×26, 3×3, two cores).
_WINDOWS = 2**20
# How many numbers of rows a grouped convolution writes at a time, to be copied.  In milliseconds, 16 samples, 3×3, one core,
# all at once and some: 128 -> 128 channels, 8×8, 13.0 and 3.9; 256 -> 256, 14×14, 71 and 26.
_ROWS = 2**19


class Convolution(Factored):
    """Row n of J is the ordinary weight gradient of sample n alone.  The verbs use torch's own convolution kernels.

    x: ``(N, C, *S)``
    g: ``(N, O, *L)``, the gradient at the output
    shape: the weight's, ``(O, C / groups, *K)``
    stride, padding, dilation: a number for each spatial dimension
    is_transposed: whether x is the gradient and g the input, as for a transposed convolution
    """

    varies = (1,)

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        shape: torch.Size,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        is_transposed: bool = False,
    ) -> None:
        self.x, self.g, self.shape, self.samples, self.is_transposed = x, g, shape, x.shape[0], is_transposed
        self.stride, self.padding, self.dilation, self.groups = tuple(stride), tuple(padding), tuple(dilation), groups
        self.held, self.smallest = (x, g), 0 if x.numel() < g.numel() else 1
        self.kernel, self.positions, self.cuts_well = tuple(shape[2:]), prod(g.shape[2:]), groups == 1
        self.windows = Windows(x, self.kernel, self.stride, self.padding, self.dilation, tuple(g.shape[2:]))
        self.pair = (g.flatten(2).mT, self.windows) if groups == 1 else None
        # Each group has one input channel, so its rows are a convolution of that channel with each gradient.
        self.is_depthwise = groups > 1 and shape[1] == 1
        # J is written through windows and a matrix product, or by a grouped convolution.
        # Of one position that is a product: 0.04 ms, where the convolution took 4 (16 samples, 288 channels, 5×5).
        self.by_windows = self.positions == 1 if self.is_depthwise else way_of_convolution(self.windows, shape[0], groups)[0]

    def _of(self, *held: Tensor) -> Convolution:
        (x, g), settings = held, (self.stride, self.padding, self.dilation, self.groups, self.is_transposed)
        return Convolution(x, g, torch.Size((g.shape[1], *self.shape[1:])), *settings)

    def row_size(self) -> int:
        return 2 * self.shape.numel() + self.held_size()  # the kernels copy their inputs and reorder their outputs

    def dense(self, out: Tensor | None = None, factor: float = 1.0) -> Tensor:
        if not self.samples:
            return self.x.new_zeros(0, *self.shape) if out is None else out
        by_windows = self.by_windows and (out is None or self.groups == 1 or out.is_contiguous())
        each, most = (
            (self.positions * self.shape[1:].numel() * self.groups, _WINDOWS) if by_windows else (self.shape.numel(), _ROWS)
        )
        if self.samples > 1 and self.samples * each > most and not self.is_depthwise:
            pieces = slices_of(self.samples, most // max(1, each))
            if out is None and not (torch.is_grad_enabled() and any(f.requires_grad for f in self.held)):
                out = self.x.new_empty(self.samples, *self.shape)
            found = [self[piece].dense(None if out is None else out[piece], factor) for piece in pieces]
            return torch.cat(found) if out is None else out
        if by_windows:
            product = self._product()
            rows = product.dense(None if out is None else out.view(product.samples, *product.shape), factor)
            return rows.view(self.samples, *self.shape) if out is None else out
        x, g = self.held
        if self.held[self.smallest].numel() < self.samples * self.shape.numel():  # else J itself is multiplied
            (x, g), factor = self._times(factor), 1.0
        # One operation in which every sample is a separate group.
        if self.is_depthwise:  # x is convolved with g: the numbers of a window are `dilation` apart
            x = x if self.shape[0] == self.groups else x.repeat_interleave(self.shape[0] // self.groups, 1)
            x, g = x.reshape(1, -1, *x.shape[2:]), g.reshape(-1, 1, *g.shape[2:])
            rows = FORWARD[len(self.kernel)](x, g, None, self.dilation, self.padding, self.stride, g.shape[0])
            rows = rows[(slice(None), slice(None), *map(slice, self.kernel))]  # the rest is what the stride leaves over
        else:
            x, g = (t.flatten(0, 1).unsqueeze(0) for t in (x, g))
            rows = self._weight_gradient(self.samples, x, g)
        return put(rows.reshape(self.samples, *self.shape), out, factor)

    def block(self, rows: slice) -> Form:
        return super().block(rows) if self.groups > 1 else self.varied(1, self.g[:, rows])

    def tangent(self, place: int, v: Tensor) -> Tensor:
        return FORWARD[len(self.kernel)](self.x, v, None, self.stride, self.padding, self.dilation, self.groups)

    def terms(self, u: Tensor, v: Tensor) -> Tensor:
        if self.like.dtype != self.sum_dtype:  # windows would be rounded three times
            return self.wide().terms(u.to(self.sum_dtype), v.to(self.sum_dtype))
        # Convolutions with the directions cost more: 75 ms and 1 (16 samples, 96 channels, 32×32, 3×3).
        if self.is_depthwise:
            return Dense(self.dense()).terms(u, v)
        groups, kernels = self.groups, v.view(len(v), self.shape[1], -1)
        # The second axis, and then the rest.
        x = (kernels[:, :, 0] @ self.x.flatten(2).unflatten(1, (groups, -1))).view(
            self.samples, groups * len(v), *self.x.shape[2:]
        )
        weight = kernels[:, 0].reshape(len(v), 1, *self.kernel).repeat(groups, *[1] * (1 + len(self.kernel)))
        own = FORWARD[len(self.kernel)](x, weight, None, self.stride, self.padding, self.dilation, len(weight))
        theirs = u.view(len(u), groups, -1).transpose(0, 1) @ self.g.flatten(2).unflatten(1, (groups, -1))
        return (own.view(theirs.shape).to(self.sum_dtype) * theirs).permute(2, 0, 1, 3).flatten(1)

    def saving(self, fresh: bool = False) -> float:
        return float(self.positions) if self.pair is None else saving([self.pair], fresh)

    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET, total: Tensor | None = None) -> Tensor:
        # torch has no summed weight gradient for complex convolutions.  Writing out costs as much as one such sum, or a
        # tenth of it for depthwise convolutions (16 samples, 40 channels, 56×56, 7×7: 29 ms and 340 ms).
        if w.ndim == 2 or self.like.is_complex() or self.is_depthwise:
            return super().weighted_sum(w, max_bytes, total)
        for samples, part in self.chunks(max_bytes, self.g.shape[1:].numel()):
            found = self._weight_gradient(1, *part._times(w[samples].to(self.sum_dtype)))
            total = found.contiguous() if total is None else total.add_(found)
        assert total is not None  # there is a chunk
        return total

    norms = norms_by_positions

    def factors(self, others: Sequence[Form] = ()) -> Sequence[Positions]:
        if self.is_transposed:
            return ()
        (fan_out, channels), found = self.shape[:2], list[Positions]()
        for group in range(self.groups):
            rows = slice(group * fan_out // self.groups, (group + 1) * fan_out // self.groups)
            windows = replace(self.windows, x=self.x[:, group * channels : (group + 1) * channels])
            found.append(Positions([form.held[1][:, rows].flatten(2).mT for form in (self, *others)], windows, rows))
        return found

    def _product(self) -> Outer:
        """As matrix products of gradients, (N·G, L, O / G), and windows, (N·G, L, C·K / G)."""
        cut, count = self.windows.cut(), self.samples * self.groups
        return Outer(
            self.g.reshape(count, self.shape[0] // self.groups, self.positions).mT,
            cut.reshape(count, self.shape[1:].numel(), self.positions).mT,
        )

    def _weight_gradient(self, copies: int, x: Tensor, g: Tensor) -> Tensor:
        # Strides of axes of length 1 are arbitrary, and some kernels read another memory format from them.
        x, g = (t.resolve_conj().contiguous().flatten().view(t.shape) for t in (x, g))
        settings = self.stride, self.padding, self.dilation, False, (0,) * len(self.kernel), copies * self.groups
        weight = x.new_empty(1).expand(copies * self.shape[0], *self.shape[1:])  # only its shape is read
        return torch.ops.aten.convolution_backward(g, x, weight, None, *settings, (False, True, False))[1]
