"""The table of supported layers, and how a layer finds its rule."""

from collections.abc import Sequence

import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_RULES
from autograd_hacks.rules.conv import conv
from autograd_hacks.rules.embedding import embedding, embedding_bag
from autograd_hacks.rules.linear import bilinear, linear, linear_cross_entropy, prelu, transposed_linear
from autograd_hacks.rules.norm import group_norm, layer_norm, running_norm, why_norm_mixes
from autograd_hacks.rules.recurrent import cell, count_sequences, recurrent
from autograd_hacks.rules.rule import Formula, Rule

_RUNNING_NORM = Rule(running_norm, mixes=why_norm_mixes)

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: Rule(linear, features=lambda layer: 1),
    nn.Bilinear: Rule(bilinear, features=lambda layer: 1),
    nn.PReLU: Rule(prelu),
    **dict.fromkeys((nn.Conv1d, nn.Conv2d, nn.Conv3d), Rule(conv)),
    **dict.fromkeys((nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d), Rule(conv)),
    nn.Embedding: Rule(embedding, features=lambda layer: 1),
    nn.EmbeddingBag: Rule(embedding_bag, recomputes=True),
    **dict.fromkeys((nn.LayerNorm, nn.RMSNorm), Rule(layer_norm, features=lambda layer: len(layer.normalized_shape))),
    nn.GroupNorm: Rule(group_norm),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _RUNNING_NORM),
    **dict.fromkeys((nn.SyncBatchNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _RUNNING_NORM),
    **dict.fromkeys(
        (nn.RNN, nn.LSTM, nn.GRU),
        Rule(recurrent, axes=lambda layer: (0 if layer.batch_first else 1, 1, 1), count=count_sequences, recomputes=True),
    ),
    **dict.fromkeys((nn.RNNCell, nn.LSTMCell, nn.GRUCell), Rule(cell, recomputes=True)),
}
"""{layer type: rule}"""

if hasattr(nn, "LinearCrossEntropyLoss"):  # since torch 2.12 or so
    RULES[nn.LinearCrossEntropyLoss] = Rule(
        linear_cross_entropy,
        count=lambda layer, args, kwargs: len(args[0] if args else kwargs["input"]),
        covers=lambda layer: ("linear",),
        by_input=True,
        recomputes=True,
    )

FOREIGN: dict[str, Rule] = {"transformers.pytorch_utils.Conv1D": Rule(transposed_linear, features=lambda layer: 1)}
"""{full name of another library's layer type: rule}.  The library is not imported."""

_OWN = frozenset(map(id, (*RULES.values(), *FOREIGN.values())))

_COMPUTES = frozenset({"__call__", "forward", "_conv_forward", "weight", "bias"})


def rule_for(layer: nn.Module) -> Rule | None:
    """The rule of the layer's type, or of the nearest base class that has one.

    None if the layer has its own forward, weight or bias, because the base class's rule would be silently wrong for it.
    """
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


def is_given(layer: nn.Module) -> bool:
    """Whether a user has registered the layer's rule."""
    return (rule := rule_for(layer)) is not None and id(rule) not in _OWN


def covered(layer: nn.Module) -> dict[str, nn.Parameter]:
    """{name: parameter} for which the layer's rule gives forms: its own, and those of submodules that it reads itself."""
    parameters = {name: p for name, p in layer._parameters.items() if p is not None}
    # Checked first: most layers have no submodules, and `rule_for` takes 0.4 µs, or 1 µs in a subclass.
    if layer._modules and (rule := rule_for(layer)) is not None and rule.covers is not None:
        for part in rule.covers(layer):
            owner = layer.get_submodule(part)
            parameters |= {f"{part}.{name}": p for name, p in owner._parameters.items() if p is not None}
    return parameters


def parts_of_composites(model: nn.Module) -> set[nn.Module]:
    """The layers inside a model whose parameters are covered by the rule of a layer around them."""
    return {
        layer.get_submodule(part)
        for layer in model.modules()
        if (rule := rule_for(layer)) is not None and rule.covers is not None
        for part in rule.covers(layer)
    }


def axes_for(layer: nn.Module, ndim: int) -> Sequence[int]:
    """The axes of a layer's first output on which its rule accepts the samples, the usual one first.

    ndim: the output's number of axes
    """
    rule = rule_for(layer)
    if rule is not None and rule.features is not None:
        return range(max(1, ndim - rule.features(layer)))
    return (0 if rule is None or rule.axes is None else rule.axes(layer)[0],)


def is_supported(layer: nn.Module) -> bool:
    """Whether a rule gives the per-sample gradients of the layer's own parameters.

    False for layers without parameters, such as ReLU, which need no rule.
    """
    return rule_for(layer) is not None


def register_rule(layer_type: type[nn.Module], rule: Rule | Formula) -> None:
    """Adds a rule for a layer type.

    The rule is a formula, ``formula(layer, call)``, which returns a form for each of the layer's own parameters, or a
    `autograd_hacks.rules.Rule`, which has more settings.  It also applies to subclasses, unless they change ``forward``, and
    replaces an earlier rule for the type.  See the page "Add your own layer" in the documentation.

    Raises TypeError if ``layer_type`` is not a subclass of ``torch.nn.Module``, or ``rule`` is not a rule.
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, nn.Module)):
        raise TypeError(f"register_rule: layer_type is {layer_type!r}; expected a subclass of torch.nn.Module." + ON_RULES)
    if not (isinstance(rule, Rule) or callable(rule)):
        raise TypeError(f"register_rule: rule is {rule!r}; expected a function of (layer, call), or a Rule." + ON_RULES)
    RULES[layer_type] = rule if isinstance(rule, Rule) else Rule(rule)
