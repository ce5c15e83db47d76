"""The support list, and how a layer finds its rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn
from torch import Tensor

from autograd_hacks.rules.attention import attention
from autograd_hacks.rules.call import Rule
from autograd_hacks.rules.conv import conv, conv_transpose
from autograd_hacks.rules.embedding import embedding, embedding_bag
from autograd_hacks.rules.linear import bilinear, linear, prelu, transposed_linear
from autograd_hacks.rules.norm import group_norm, layer_norm, rms_norm, running_norm
from autograd_hacks.rules.recurrent import cell, recurrent
from autograd_hacks.rules.softmax import adaptive_log_softmax, linear_cross_entropy

# Parameters that a layer's rule covers besides its own, because the layer reads them past their owner.
ALSO_COVERS: dict[type[nn.Module], Callable[[Any], Sequence[str]]] = {
    nn.MultiheadAttention: lambda layer: ("out_proj",),
    nn.AdaptiveLogSoftmaxWithLoss: lambda layer: (
        "head",
        *(f"tail.{part}.{place}" for part in range(len(layer.tail)) for place in (0, 1)),
    ),
}

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear,
    nn.Bilinear: bilinear,
    nn.PReLU: prelu,
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Conv3d: conv,
    nn.ConvTranspose1d: conv_transpose,
    nn.ConvTranspose2d: conv_transpose,
    nn.ConvTranspose3d: conv_transpose,
    nn.Embedding: embedding,
    nn.EmbeddingBag: embedding_bag,
    nn.LayerNorm: layer_norm,
    nn.RMSNorm: rms_norm,
    nn.GroupNorm: group_norm,
    nn.BatchNorm1d: running_norm,
    nn.BatchNorm2d: running_norm,
    nn.BatchNorm3d: running_norm,
    nn.SyncBatchNorm: running_norm,
    nn.InstanceNorm1d: running_norm,
    nn.InstanceNorm2d: running_norm,
    nn.InstanceNorm3d: running_norm,
    nn.RNN: recurrent,
    nn.LSTM: recurrent,
    nn.GRU: recurrent,
    nn.RNNCell: cell,
    nn.LSTMCell: cell,
    nn.GRUCell: cell,
    nn.MultiheadAttention: attention,
    nn.AdaptiveLogSoftmaxWithLoss: adaptive_log_softmax,
}
"""{layer type: rule}"""

if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.12 or so
    RULES[nn.LinearCrossEntropyLoss] = linear_cross_entropy
    ALSO_COVERS[nn.LinearCrossEntropyLoss] = lambda layer: ("linear",)

_COMPUTES = frozenset({"__call__", "forward", "_conv_forward", "weight", "bias"})


FOREIGN: dict[str, Rule] = {"transformers.pytorch_utils.Conv1D": transposed_linear}
"""{a layer type of another library by its full name, which is not imported: rule}"""


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of the layer's type or of the nearest base class that has one; None where the layer computes its output
    in a way of its own, for which the base class's rule would be silently wrong."""
    own = vars(layer)
    if not _COMPUTES.isdisjoint(own) and any(callable(own[n]) or isinstance(own[n], Tensor) for n in _COMPUTES & own.keys()):
        return None
    for cls in type(layer).__mro__:
        if cls in RULES:
            return RULES[cls]
        if (name := f"{cls.__module__}.{cls.__qualname__}") in FOREIGN:
            return FOREIGN[name]
        if any(name in vars(cls) for name in _COMPUTES):
            return None
    return None


def covered(layer: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter} of what a rule for the layer gives forms for: its own, and those it reads past their owner."""
    parameters = {name: p for name, p in layer._parameters.items() if p is not None}
    for cls, parts in ALSO_COVERS.items():
        if isinstance(layer, cls):
            for part in parts(layer):
                owner = layer.get_submodule(part)
                parameters |= {f"{part}.{name}": p for name, p in owner._parameters.items() if p is not None}
    return parameters


def parts_of_composites(model: nn.Module) -> set[nn.Module]:
    """The layers inside a model whose parameters the rule of a layer around them covers."""
    return {
        layer.get_submodule(part)
        for layer in model.modules()
        if rule_for(layer)
        for cls, parts in ALSO_COVERS.items()
        if isinstance(layer, cls)
        for part in parts(layer)
    }


def axes_for(layer: nn.Module, output: Tensor) -> Sequence[int]:
    """The axes of a layer's first output on which its rule may find the samples, the usual one first."""
    rule = rule_for(layer)
    if (features := getattr(rule, "features", None)) is not None:
        return range(max(1, output.ndim - features(layer)))
    axes = getattr(rule, "axes", None)
    return (0 if axes is None else axes(layer)[0],)


def is_supported(layer: nn.Module) -> bool:
    """Whether a rule gives the per-sample gradients of the layer's own parameters.

    False for layers without parameters, such as ReLU, which need none.
    """
    return rule_for(layer) is not None


def register_rule(layer_type: type[nn.Module], rule: Rule) -> None:
    """Teaches the library a layer: ``rule(layer, call)`` returns a form for each of the layer's own parameters.

    It holds for subclasses too, unless they change ``forward``, and replaces an earlier rule for the type.
    See the page "Add your own layer" in the documentation.

    Raises TypeError where ``layer_type`` is no subclass of ``torch.nn.Module`` or ``rule`` can't be called.
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise TypeError(f"register_rule was given {layer_type!r}; expected a subclass of torch.nn.Module")
    if not callable(rule):
        raise TypeError(f"register_rule was given the rule {rule!r}; expected a function of (layer, call)")
    RULES[layer_type] = rule
