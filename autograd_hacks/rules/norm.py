"""Norm layers: y = x̂ · weight + bias, where x̂ is x normalised.  J is g x̂ for the weight and g for the bias, summed over
the positions that share an entry."""

from collections.abc import Mapping
from math import prod
from typing import Any

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.errors import SamplesMixed
from autograd_hacks.forms import Dense, Form
from autograd_hacks.forms.cost import WIDEST_VECTOR, takes_kernel
from autograd_hacks.rules.linear import added
from autograd_hacks.rules.rule import Call, needs_batch, single_input

_INSTANCE_NORMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}  # number of axes with a batch


@single_input
def layer_norm(layer: nn.LayerNorm | nn.RMSNorm, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x, g: N *T *S, normalised over S; by RMSNorm, divided by the root mean square over S."""
    needs_batch(x, at_least=1 + len(layer.normalized_shape), layout="(N, ..., *normalized_shape)")
    is_rms = isinstance(layer, nn.RMSNorm)
    normalise: Any = F.rms_norm if is_rms else F.layer_norm
    width = prod(layer.normalized_shape)
    # torch's kernels read or write seven numbers for each of x: x̂ is written, multiplied, and added up.
    if width <= WIDEST_VECTOR and layer.eps is not None and takes_kernel(7, 2, x, g):
        from autograd_hacks.kernels.affine import affine_rows  # imports Triton

        flat_x, flat_g = (t.reshape(len(t), -1, width) for t in (x, g))
        rows = affine_rows(flat_x, flat_g, layer.eps, is_rms)
        found: dict[str, Form] = {n: Dense(r.view(-1, *layer.normalized_shape)) for n, r in zip(("weight", "bias"), rows)}
        return {"weight": found["weight"]} if getattr(layer, "bias", None) is None else found
    return _affine(layer, normalise(x, layer.normalized_shape, eps=layer.eps), g, len(layer.normalized_shape))


@single_input
def group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x, g: N C *T, normalised over T and the channels of a group."""
    return _affine(layer, F.group_norm(x, layer.num_groups, eps=layer.eps), g)


def why_norm_mixes(layer: nn.modules.batchnorm._NormBase, training: bool) -> str | None:
    of_batch = training or not layer.track_running_stats or layer.running_mean is None
    if not of_batch or isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return None
    why, mend = (
        ("training mode", "Call .eval() on it") if training else ("no running statistics", "Give it running statistics")
    )
    return (
        f"normalises with statistics of the batch ({why}), so its samples have no gradients of their own. {mend}, or use "
        "GroupNorm."
    )


def running_norm(layer: nn.modules.batchnorm._NormBase, call: Call) -> Mapping[str, Form]:
    """BatchNorm and InstanceNorm.  x, g: N C *T, normalised with running statistics, or each instance by its own."""
    if why := why_norm_mixes(layer, call.training):
        raise SamplesMixed(why)
    x, g = call.argument(0, "input"), call.grad
    for kind, axes in _INSTANCE_NORMS.items():
        if isinstance(layer, kind):
            needs_batch(x, at_least=axes, layout="(N, C, *spatial)")
    if call.training or not layer.track_running_stats:
        xhat = F.instance_norm(x, eps=layer.eps)
    else:
        mean, var = call.read("running_mean").to(x.dtype), call.read("running_var").to(x.dtype)
        xhat = F.batch_norm(x, mean, var, training=False, eps=layer.eps)
    return _affine(layer, xhat, g)


def _affine(layer: nn.Module, xhat: Tensor, g: Tensor, last: int | None = None) -> Mapping[str, Form]:
    """The weight and the bias lie on the `last` axes of x̂, or on axis 1, the channels, where `last` is None."""
    # In place if possible: nothing else holds x̂, and new memory costs more.
    products = g * xhat if xhat.requires_grad or xhat.dtype != g.dtype else xhat.mul_(g)
    forms = {"weight": added(products, last)}
    return forms if getattr(layer, "bias", None) is None else forms | {"bias": added(g, last)}
