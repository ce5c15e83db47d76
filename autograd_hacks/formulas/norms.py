"""Norm layers: y = x̂ · weight + bias, where x̂ is x normalised.  J is g x̂ for the weight and g for the bias, summed over
the positions that share an entry."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import SamplesMixed
from autograd_hacks.forms import Dense, Form
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


def _sums(call: Call, x: Tensor, mean: Tensor | None, scale: Tensor | None) -> Mapping[str, Form] | None:
    """Σ g x̂ and Σ g over the positions, N C each; None where rows have a graph, or for another precision.

    They come from GroupNorm's own backward kernel, to which all samples are one with N · C channels.  It reads x and g once
    and writes nothing of their size: with statistics that were saved it takes half of the time, of running ones a sixth.

    x: N C *T    mean, scale: N G, or 1 G, of G groups of channels
    """
    g, dtype, count = call.grad, x.dtype, x.shape[:2].numel()
    has_kernel = x.is_cpu and dtype in (torch.float32, torch.float64) and x.numel() > 0 and x.shape == g.shape
    if not has_kernel or x.requires_grad or g.requires_grad or any(y is None or y.dtype != dtype for y in (g, mean, scale)):
        return None
    # The kernel reads memory without its strides, and a gradient may be one number for all.
    inputs = [y.contiguous().view(1, count, -1) for y in (g, x)] + [
        y.expand(len(x), -1).contiguous().view(1, -1) for y in (mean, scale) if y is not None
    ]
    _, *sums = torch.ops.aten.native_group_norm_backward(
        *inputs, x.new_empty(count), 1, count, x.numel() // count, inputs[2].numel(), [False, True, True]
    )
    return {name: Dense(y.view(x.shape[:2])) for name, y in zip(("weight", "bias"), sums)}


# x̂ with the mean and the scale that a node has saved, or computed again by what nobody patches.  The former takes a third of
# the time.

STATISTICS = {
    "NativeLayerNormBackward0": ("result1", "result2"),
    "NativeGroupNormBackward0": ("result1", "result2"),
    "FusedRmsNormBackward0": ("result1",),
}
"""By node, the names of what it saves: means and scales."""


def by_saved(kept: Kept) -> Tensor:
    return product_of(kept("input") - kept("result1"), kept("result2"))


def _by_running(kept: Kept) -> Tensor:
    x, mean, var = (kept(name) for name in ("input", "running_mean", "running_var"))
    if mean is None:  # each instance by its own
        return torch.instance_norm(x, None, None, None, None, True, 0.0, kept("eps"), False)
    return torch.batch_norm(x, None, None, mean.to(x.dtype), var.to(x.dtype), False, 0.0, kept("eps"), False)


def groups(layer: nn.GroupNorm, call: Call, x: Tensor) -> Mapping[str, Any]:
    found = [*(call.saved or {}).values()] or torch.native_group_norm(
        x.contiguous(), None, None, len(x), x.shape[1], x.shape[2:].numel(), layer.num_groups, layer.eps
    )[1:]
    return {"input": x, "forms": _sums(call, x, *found)}


def by_groups(kept: Kept, number: str = "num_groups") -> Tensor:
    return torch.group_norm(kept("input"), kept(number), eps=kept("eps"))


def _by_last_axes(kept: Kept) -> Tensor:
    if kept("result1") is not None:
        return kept("input") * kept("result1") if kept("is_rms") else by_saved(kept)
    normalise: Any = torch.rms_norm if kept("is_rms") else torch.layer_norm
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
    mean, var = (call.read(name) if is_running else None for name in names)
    if is_running and layer.num_batches_tracked is not None:
        call.read("num_batches_tracked")  # a forward in training mode writes the others without moving their versions
    forms = _sums(call, x, mean, None if var is None else (var + layer.eps).rsqrt())
    return {"input": x, "training": False, "running_mean": mean, "running_var": var, "forms": forms}
