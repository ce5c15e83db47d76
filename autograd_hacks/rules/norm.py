"""Normalisations: y = x̂ · weight + bias, where x̂ is x normalised.  So J is g x̂ for the weight and g for the bias, summed
over the positions that share an entry."""

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.errors import SamplesMixed
from autograd_hacks.forms import Form
from autograd_hacks.rules.linear import added
from autograd_hacks.rules.rule import Call, needs_batch, single_input

_INSTANCE_NORMS = {nn.InstanceNorm1d: 3, nn.InstanceNorm2d: 4, nn.InstanceNorm3d: 5}  # axes of a batch


@single_input
def layer_norm(layer: nn.LayerNorm | nn.RMSNorm, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x, g: N *T *S, normalised over S; by RMSNorm, divided by the root mean square over S."""
    needs_batch(x, at_least=1 + len(layer.normalized_shape), layout="(N, ..., *normalized_shape)")
    normalise: Any = F.rms_norm if isinstance(layer, nn.RMSNorm) else F.layer_norm
    return _affine(layer, normalise(x, layer.normalized_shape, eps=layer.eps), g, len(layer.normalized_shape))


@single_input
def group_norm(layer: nn.GroupNorm, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x, g: N C *T, normalised over T and the channels of a group."""
    return _affine(layer, F.group_norm(x, layer.num_groups, eps=layer.eps), g)


def why_norm_mixes(layer: nn.modules.batchnorm._NormBase, training: bool) -> str | None:
    of_batch = training or not layer.track_running_stats
    if not of_batch or isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return None
    return (
        f"normalises with statistics of the batch ({'training mode' if training else 'no running statistics'}), so that its "
        "samples have no gradients of their own. Call .eval() on it, or use GroupNorm."
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
    # In place where it can be: nobody else holds x̂, and new memory costs more.
    products = g * xhat if xhat.requires_grad or xhat.dtype != g.dtype else xhat.mul_(g)
    forms = {"weight": added(products, last)}
    return forms if getattr(layer, "bias", None) is None else forms | {"bias": added(g, last)}
