"""Layers whose squared norms can be taken inside a compiled graph: what they compute, from parameters that may be detached,
and a sample's squared norm from x and g.

Norms of matrices, tables and kernels come from the forms' own, by operations that a compiler leaves alone: where positions
cancel, rows are written out, which depends on the values.  All else is a few sums that it fuses.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms import Form
from autograd_hacks.rules.conv import conv, convolution
from autograd_hacks.rules.embedding import embedding, lookup
from autograd_hacks.rules.linear import linear, product, transposed_linear
from autograd_hacks.rules.norm import group_norm, layer_norm, rms_norm, running_norm
from autograd_hacks.rules.rule import Formula
from autograd_hacks.rules.table import rule_for
from autograd_hacks.support.contexts import without_autocast

Compute = Callable[[Any, Tensor, Tensor | None, Tensor | None], Tensor]
Squares = Callable[[Any, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Kind:
    """A kind of layer, of one tensor in and one out, whose only parameters are a weight and perhaps a bias."""

    compute: Compute  # (layer, x, weight, bias) -> y
    weight: Squares  # (layer, x, g) -> N: the squared norms of the weight's rows
    channels: bool  # whether the bias is along axis 1 of the output, or else along its last axes
    axes: Callable[[Any], int]  # how many axes x has at least


def kind_of(layer: nn.Module) -> Kind | None:
    """The layer's kind, or None where its norms can't be taken inside."""
    rule = rule_for(layer)
    if rule is None or isinstance(layer, nn.modules.instancenorm._InstanceNorm | nn.SyncBatchNorm):
        return None
    return KINDS.get(rule.formula)


def squares_of_bias(kind: Kind, layer: nn.Module, g: Tensor) -> Tensor:
    """The squared norms of the bias's rows.  g: N *T O, or N O *T for channels.  Returns N"""
    return _squares(g, None if kind.channels else len(getattr(layer, "normalized_shape", (0,))))


def _squares(values: Tensor, last: int | None) -> Tensor:
    """Of what is added up over positions; on the `last` axes, or on axis 1 where `last` is None.  Returns N"""
    shared = range(2, values.ndim) if last is None else range(1, values.ndim - last)
    return (values.sum(tuple(shared)) if len(shared) else values).square().flatten(1).sum(1)


def _norms(form: Form) -> Tensor:
    with without_autocast([form.like]):
        return form.norms().square()


_operation = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))  # values decide


@_operation("autograd_hacks::squares_of_products")
def _of_products(left: Tensor, right: Tensor) -> Tensor:
    return _norms(product(left, right))


@_operation("autograd_hacks::squares_of_lookups")
def _of_lookups(g: Tensor, index: Tensor, shape: Sequence[int], padding_idx: int) -> Tensor:
    return _norms(lookup(index, g, torch.Size(shape), None if padding_idx < 0 else padding_idx))


@_operation("autograd_hacks::squares_of_windows")
def _of_windows(
    g: Tensor,
    x: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    same: bool,
    mode: str,
) -> Tensor:
    settings = stride, "same" if same else padding, dilation, groups
    return _norms(convolution(x, g, torch.Size(shape), settings, mode))


for _known in (_of_products, _of_lookups, _of_windows):
    _known.register_fake(lambda g, *_: g.new_empty(g.shape[0]))


def _conv_squares(layer: Any, x: Tensor, g: Tensor) -> Tensor:
    same, given = layer.padding == "same", layer.padding
    padding = [0] * len(layer.kernel_size) if isinstance(given, str) else list(given)
    shape, stride, dilation = list(layer.weight.shape), list(layer.stride), list(layer.dilation)
    return _of_windows(g, x, shape, stride, padding, dilation, layer.groups, same, layer.padding_mode)


def _linear(layer: Any, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight, bias)


def _embedded(layer: Any, x: Tensor, weight: Any, bias: object) -> Tensor:
    return F.embedding(x, weight, layer.padding_idx, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse)


def _looked_up(layer: Any, x: Tensor, g: Tensor) -> Tensor:
    return _of_lookups(g, x, list(layer.weight.shape), -1 if layer.padding_idx is None else layer.padding_idx)


def _by_columns(layer: Any, x: Tensor, weight: Any, bias: Any) -> Tensor:
    return x @ weight + bias


def _normalised(normalise: Callable[[Any, Tensor], Tensor], last: Callable[[Any], int | None]) -> Squares:
    return lambda layer, x, g: _squares(g * normalise(layer, x), last(layer))


def _running(layer: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return F.batch_norm(x, layer.running_mean, layer.running_var, weight, bias, False, 0.0, layer.eps)


def _by_running(layer: Any, x: Tensor) -> Tensor:
    mean, var = layer.running_mean.to(x.dtype), layer.running_var.to(x.dtype)
    return F.batch_norm(x, mean, var, training=False, eps=layer.eps)


def _rank(layer: Any) -> int:
    return len(layer.normalized_shape)


KINDS: Mapping[Formula, Kind] = {
    linear: Kind(_linear, lambda _, x, g: _of_products(g, x), False, lambda _: 2),
    transposed_linear: Kind(_by_columns, lambda _, x, g: _of_products(x, g), False, lambda _: 2),
    conv: Kind(lambda c, x, w, b: c._conv_forward(x, w, b), _conv_squares, True, lambda c: 2 + len(c.kernel_size)),
    embedding: Kind(_embedded, _looked_up, False, lambda _: 1),
    layer_norm: Kind(
        lambda n, x, w, b: F.layer_norm(x, n.normalized_shape, w, b, n.eps),
        _normalised(lambda n, x: F.layer_norm(x, n.normalized_shape, eps=n.eps), _rank),
        False,
        lambda n: 1 + _rank(n),
    ),
    rms_norm: Kind(
        lambda n, x, w, b: F.rms_norm(x, n.normalized_shape, w, n.eps),
        _normalised(lambda n, x: F.rms_norm(x, n.normalized_shape, eps=n.eps), _rank),
        False,
        lambda n: 1 + _rank(n),
    ),
    group_norm: Kind(
        lambda n, x, w, b: F.group_norm(x, n.num_groups, w, b, n.eps),
        _normalised(lambda n, x: F.group_norm(x, n.num_groups, eps=n.eps), lambda n: None),
        True,
        lambda _: 2,
    ),
    running_norm: Kind(_running, _normalised(_by_running, lambda n: None), True, lambda _: 2),
}
"""{a rule's formula: the kind of its layers}"""
