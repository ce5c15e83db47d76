"""Norm layers: y = x̂ · weight + bias, where x̂ is x normalised.  J is g x̂ for the weight and g for the bias, summed over
the positions that share an entry."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.errors import SamplesMixed
from autograd_hacks.forms import Form
from autograd_hacks.formulas.call import Call
from autograd_hacks.formulas.met import Kept, Met, of_layer

Normal = Callable[[Kept], Tensor]
"""x̂ from operands, by name."""


def product_of(x: Tensor, factor: Tensor) -> Tensor:
    """A product with a tensor that was made for it: written there if no gradient is needed, since new memory costs more."""
    in_place = not (x.requires_grad or factor.requires_grad) and torch.result_type(x, factor) == x.dtype
    return x.mul_(factor) if in_place else x * factor


def layer_norm(met: Met, normal: Normal) -> Form | None:
    """x, g: N *T *S, normalised over S; by RMSNorm, divided by the root mean square over S."""
    return met.summed(met.grad if met.place == 2 else product_of(normal(met.kept), met.grad))


def group_norm(met: Met, normal: Normal) -> Form | None:
    """x, g: N C *T, normalised over T and the channels of a group."""
    return met.by_channel(met.grad if met.place == 2 else product_of(normal(met.kept), met.grad))


def batch_norm(met: Met) -> Form | None:
    """BatchNorm and InstanceNorm.  x, g: N C *T, normalised with running statistics, or each instance by its own."""
    if met.kept("training") and met.samples == 1:
        return None
    if met.kept("training"):
        raise SamplesMixed(
            "normalises with statistics of the batch (training=True), so its samples have no gradients of their own. "
            "Use training=False, or group_norm."
        )
    return group_norm(met, _by_running)


# x̂ with the mean and the scale that a node has saved, or computed again.  Over last axes the former takes a third of the
# time, over groups as long.

STATISTICS = {"NativeLayerNormBackward0": ("result1", "result2"), "FusedRmsNormBackward0": ("result1",)}
"""By node, the names of what it saves: means and scales."""


def by_saved(kept: Kept) -> Tensor:
    return product_of(kept("input") - kept("result1"), kept("result2"))


def by_saved_groups(kept: Kept) -> Tensor:
    x = kept("input")
    groups = x.reshape(len(x), kept("group"), -1)
    return product_of(groups - kept("result1")[..., None], kept("result2")[..., None]).reshape(x.shape)


def _by_running(kept: Kept) -> Tensor:
    x, mean, var = (kept(name) for name in ("input", "running_mean", "running_var"))
    if mean is None:  # each instance by its own
        return F.instance_norm(x, eps=kept("eps"))
    return F.batch_norm(x, mean.to(x.dtype), var.to(x.dtype), training=False, eps=kept("eps"))


def by_groups(kept: Kept) -> Tensor:
    return F.group_norm(kept("input"), kept("num_groups"), eps=kept("eps"))


def _by_last_axes(kept: Kept) -> Tensor:
    if kept("result1") is not None:
        return kept("input") * kept("result1") if kept("is_rms") else by_saved(kept)
    normalise: Any = F.rms_norm if kept("is_rms") else F.layer_norm
    x: Tensor = normalise(kept("input"), kept("normalized_shape"), eps=kept("eps"))
    return x


norm_of_last_axes = of_layer(
    layer_norm,
    "(N, ..., *normalized_shape)",
    axes=lambda layer: 1 + len(layer.normalized_shape),
    kept=lambda layer, call, x: {
        "input": x,
        "is_rms": isinstance(layer, nn.RMSNorm),
        "result1": None,
        **({} if x.requires_grad or call.saved is None else call.saved),  # with a graph, rows depend on x by these, too
    },
    normal=_by_last_axes,
)


def why_norm_mixes(layer: nn.modules.batchnorm._NormBase, training: bool) -> str | None:
    of_batch = training or not layer.track_running_stats or layer.running_mean is None
    if not of_batch or isinstance(layer, nn.modules.instancenorm._InstanceNorm):
        return None
    why, mend = (
        ("training mode", "Call .eval() on it") if training else ("no running statistics", "Give it running statistics")
    )
    return (
        f"normalises with statistics of the batch ({why}), so its samples have no gradients of their own. {mend}, or "
        "replace it by GroupNorm: model = autograd_hacks.private.without_batch_norm(model)."
    )


def statistics(layer: nn.modules.batchnorm._NormBase, call: Call, x: Tensor) -> Mapping[str, Any]:
    if why := why_norm_mixes(layer, call.training):
        raise SamplesMixed(why)
    is_running, names = layer.track_running_stats and not call.training, ("running_mean", "running_var")
    return {"input": x, "training": False} | {name: call.read(name) if is_running else None for name in names}
