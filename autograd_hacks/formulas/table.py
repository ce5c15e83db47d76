"""The table: layers and nodes of autograd with their formulas; and how a layer finds its rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_RULES
from autograd_hacks.forms import Dense, Form
from autograd_hacks.formulas import matrices, norms
from autograd_hacks.formulas.call import LayerFormula
from autograd_hacks.formulas.conv import conv, padded
from autograd_hacks.formulas.embedding import embedding, embedding_bag, indexed, table
from autograd_hacks.formulas.met import Formula, Met, of_layer
from autograd_hacks.formulas.recurrent import cell, count_sequences, recurrent
from autograd_hacks.support.graph import USUAL
from autograd_hacks.support.layout import POSITIONS


@dataclass(frozen=True)
class Rule:
    """The J of a layer's parameters, and what the library must know about the layer to use it."""

    #: ``formula(layer, call)``: {name: form}, a form for each parameter
    formula: LayerFormula
    #: ``features(layer)``, for a layer that treats every position alike, on whatever axis the batch is: how many of the
    #: output's last axes belong to one position.  Its formula gets samples first
    features: Callable[[Any], int] | None = None
    #: ``axes(layer)``: where the samples are in each output.  None: on axis 0
    axes: Callable[[Any], Sequence[int]] | None = None
    #: ``count(layer, args, kwargs)``: the number of samples in a call.  None: the size of axis 0 of the output
    count: Callable[[Any, Sequence[Any], Mapping[str, Any]], int] | None = None
    #: ``mixes(layer, training)``: why the layer mixes samples in this mode, as text for messages, or None
    mixes: Callable[[Any, bool], str | None] | None = None
    #: whether the formula recomputes the layer's output, which is then kept as ``call.outputs``
    recomputes: bool = False
    #: whether the layer is one node of autograd that has the same formula, so that it can be read there too
    is_node: bool = False
    #: ``single(layer)``: how many axes the output of a single sample has, for a layer without ``features`` that takes one
    single: Callable[[Any], int] | None = None

    @property
    def name(self) -> str:
        """The formula's name, for messages."""
        return getattr(self.formula, "__name__", "of yours")

    def axes_of(self, layer: nn.Module, ndim: int) -> Sequence[int]:
        """The axes of the first output on which the formula accepts the samples, the usual one first.  ndim: the output's"""
        if self.features is not None:
            return range(max(1, ndim - self.features(layer)))
        return (0,) if self.axes is None else self.axes(layer)[:1]


def positionwise(features: Callable[[Any], int]) -> Callable[[LayerFormula], Rule]:
    """A `autograd_hacks.formulas.Rule` for a layer that treats every position alike, on whatever axis the batch is.

    ``features(layer)``: how many of the output's last axes belong to one position
    """
    return lambda formula: Rule(formula, features=features)


# Values that meet the batch entry by entry, or are repeated over it.


def _divided(met: Met) -> Form | None:
    other = met.kept("other").conj()
    return met.summed(met.grad / other if met.place == 0 else -met.grad * met.kept("self").conj() / other.square())


def _repeated(met: Met) -> Form | None:
    """The value, repeated along each axis."""
    times, axis, fold = list(met.kept("repeats")), met.layout.axis, met.layout.fold
    sizes, count = [1] * (len(times) - len(met.shape)) + list(met.shape), max(1, met.samples)
    if fold == POSITIONS or times[axis] % count or (sizes[axis] != 1 and fold != "N·T"):
        return None  # an entry belongs to one sample
    rows = met.first(met.grad)
    times[axis] //= count  # of each sample
    if not fold:
        del times[axis], sizes[axis]
    rows = rows.reshape(len(rows), *[n for pair in zip(times, sizes) for n in pair])
    over = [2 * n + 1 for n, count in enumerate(times) if count != 1]
    return Dense((rows.sum(over) if over else rows).reshape(len(rows), *met.shape))


def _prelu(met: Met) -> Form | None:
    """x, g: N C *T.  y = x where x > 0, else weight · x, for a weight with the axes of x."""
    x = met.kept("self")
    return met.summed(torch.where(x > 0, 0, met.grad * x)) if met.place == 1 else None


_RUNNING_NORM = Rule(of_layer(norms.batch_norm, "(N, C, *spatial)", 1, norms.statistics), mixes=norms.why_norm_mixes)
_INSTANCE_NORM = Rule(
    of_layer(norms.batch_norm, "(N, C, *spatial)", lambda layer: 1 + layer._get_no_batch_dim(), norms.statistics),
    single=lambda layer: layer._get_no_batch_dim(),
)
_CONV = Rule(
    of_layer(conv, "(N, in_channels, *spatial)", lambda layer: 2 + len(layer.kernel_size), padded),
    is_node=True,
    single=lambda layer: 1 + len(layer.kernel_size),
)

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(of_layer(matrices.linear, "(N, ..., in_features)", 2), features=lambda layer: 1, is_node=True),
    nn.Bilinear: Rule(of_layer(matrices.bilinear, "(N, ..., in1_features)", 2, matrices.both), features=lambda layer: 1),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), _CONV),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), _CONV),
    nn.Embedding: Rule(
        of_layer(embedding, "(N, ...)", 1, lambda layer, call, x: {"indices": x}, places={"weight": 0}),
        features=lambda layer: 1,
        is_node=True,
    ),
    nn.EmbeddingBag: Rule(embedding_bag, recomputes=True),
    **dict.fromkeys(
        (nn.LayerNorm, nn.RMSNorm),
        Rule(norms.norm_of_last_axes, features=lambda layer: len(layer.normalized_shape), is_node=True),
    ),
    nn.GroupNorm: Rule(of_layer(norms.group_norm, "(N, C, ...)", 1, norms.groups, normal=norms.by_groups), is_node=True),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), replace(_RUNNING_NORM, is_node=True)),
    nn.SyncBatchNorm: _RUNNING_NORM,
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _INSTANCE_NORM),
    **dict.fromkeys(
        (nn.RNN, nn.LSTM, nn.GRU),
        Rule(
            recurrent,
            axes=lambda layer: (0 if layer.batch_first else 1, 1, 1),
            count=count_sequences,
            recomputes=True,
            single=lambda layer: 2,
        ),
    ),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), Rule(cell, recomputes=True, single=lambda layer: 1)),
}
"""{layer type: rule}"""


def _of_weights(formula: Formula) -> Formula:
    """A formula for the node's weight and bias alone, and not for a value of parameters as its input."""
    return lambda met: formula(met) if met.place else None


NODES: dict[str, Formula] = {
    "AddmmBackward0": partial(matrices.matrix_product, names=(None, "mat1", "mat2")),
    "MmBackward0": partial(matrices.matrix_product, names=("self", "mat2")),
    "MvBackward0": partial(matrices.matrix_product, names=("self", "vec")),
    "BmmBackward0": partial(matrices.batched_product, names=("self", "mat2")),
    "BaddbmmBackward0": partial(matrices.batched_product, names=(None, "batch1", "batch2")),
    "MulBackward0": lambda met: met.summed(met.grad * met.kept("self" if met.place else "other").conj()),
    "AddBackward0": lambda met: met.summed(met.grad_times("alpha") if met.place else met.grad),
    "SubBackward0": lambda met: met.summed(-met.grad_times("alpha") if met.place else met.grad),
    "DivBackward0": _divided,
    "ExpandBackward0": lambda met: met.summed(met.grad),
    "RepeatBackward0": _repeated,
    "PreluKernelBackward0": _prelu,
    "ConvolutionBackward0": _of_weights(conv),
    "EmbeddingBackward0": embedding,
    "IndexBackward0": indexed,
    "IndexSelectBackward0": lambda met: None if met.kept("dim") else table(met, met.kept("index")),
    "NativeLayerNormBackward0": _of_weights(partial(norms.layer_norm, normal=norms.by_saved)),
    "FusedRmsNormBackward0": _of_weights(partial(norms.layer_norm, normal=lambda kept: kept("input") * kept("result1"))),
    "NativeGroupNormBackward0": _of_weights(partial(norms.group_norm, normal=partial(norms.by_groups, number="group"))),
    **dict.fromkeys(("NativeBatchNormBackward0", *USUAL), _of_weights(norms.batch_norm)),
}
"""{node name: formula}"""

BY_OWNERS: dict[str, Callable[[Met, Tensor], Form | None]] = {"GroupedMmBackward0": matrices.grouped_product}
"""Formulas that get the sample of each row of the gradient, M, and return rows by sample."""

_OWN = frozenset(map(id, RULES.values()))

_COMPUTES = frozenset({"__call__", "forward", "_conv_forward", "weight", "bias"})


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of the layer's type, or of the nearest base class that has one.

    None if the layer has its own forward, weight or bias, because the base class's rule would be silently wrong for it.
    """
    own = layer.__dict__
    if not _COMPUTES.isdisjoint(own) and any(callable(own[n]) or isinstance(own[n], Tensor) for n in _COMPUTES & own.keys()):
        return None
    for cls in type(layer).__mro__:
        if cls in RULES:
            return RULES[cls]
        if any(map(vars(cls).__contains__, _COMPUTES)):
            return None
    return None


def is_given(layer: nn.Module) -> bool:
    """Whether a user has registered the layer's rule."""
    return (rule := rule_for(layer)) is not None and id(rule) not in _OWN


def is_supported(layer: nn.Module) -> bool:
    """Whether a rule gives the per-sample gradients of the layer's own parameters.

    False for layers without parameters, such as ReLU, which need no rule.
    """
    return rule_for(layer) is not None


def register_rule(layer_type: type[nn.Module], rule: Rule | LayerFormula) -> None:
    """Adds a rule for a layer type.

    The rule is a formula, ``formula(layer, call)``, which returns a form for each of the layer's own parameters, or a
    `autograd_hacks.formulas.Rule`, which has more settings.  It also applies to subclasses, unless they change ``forward``,
    and replaces an earlier rule for the type.  See the page "Add your own layer" in the documentation.

    Raises TypeError if ``layer_type`` is not a subclass of ``torch.nn.Module``, or ``rule`` is not a rule.
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise TypeError(f"register_rule: layer_type is {layer_type!r}; expected a subclass of torch.nn.Module." + ON_RULES)
    if not (isinstance(rule, Rule) or callable(rule)):
        raise TypeError(f"register_rule: rule is {rule!r}; expected a function of (layer, call), or a Rule." + ON_RULES)
    RULES[layer_type] = rule if isinstance(rule, Rule) else Rule(rule)
