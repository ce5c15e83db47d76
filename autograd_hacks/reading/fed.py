"""Whether the node of a layer's call takes what the call was given: its argument, and the layer's own tensors as they are.

Only then does the layer's rule, which sees the call, say what autograd's gradient is.  Else something stands between them: a
patched function, a mode, a class of tensors, a hook that packs what nodes save, a checkpoint that runs again.  What it does
may change from step to step, without a trace in the graph.  So the node itself gives the rows, if it has a formula.  Else
rows are compared with gradient in each step."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.arrivals import AtOutput
from autograd_hacks.capture.calls import Layer
from autograd_hacks.capture.log import Noted
from autograd_hacks.forms.numerics import looks_free
from autograd_hacks.formulas.table import NODES
from autograd_hacks.graph.trace import Trace
from autograd_hacks.graph.walk import Walk
from autograd_hacks.support.graph import USUAL, is_packed, spelt
from autograd_hacks.support.internals import RAW, SAVED, address_of, without_subclasses

SAME, COPY, UNKNOWN = "same", "copy", "unknown"
"""What a node has saved of a call: the very argument, another tensor, or something that hooks or others made."""

_COPIES = frozenset(f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Clone", "Unsqueeze"))
"""Nodes whose output has the numbers of their input, in the same order."""
_CAST, _TURN = "ToCopyBackward0", "TBackward0"

Taken = tuple[str, Any, Any]
"""What a node has saved of a call's argument, its dtype, and the settings that it has saved."""


class _Kind(NamedTuple):
    """A kind of nodes that layers are.

    layer: their type    raw: the name of what it saves of the argument, and what reads it as it is
    settings: the names of those that rules take from the layer, and what reads them
    others: the names of what else it saves as it is, of the layer's buffers and the call's arguments
    places: the numbers of its inputs, by the parameters' names in the layer, and of the argument as x
    usual: the only settings that rules know
    """

    layer: Any
    raw: Any
    settings: Any = ""
    others: Sequence[str] = ()
    places: Mapping[str, int] = {"x": 0, "weight": 1, "bias": 2}
    usual: Any = None


_KINDS = {
    "AddmmBackward0": _Kind(nn.Linear, "mat1", "alpha beta", (), {"x": 1, "weight": 2, "bias": 0}, (1, 1)),
    "MmBackward0": _Kind(nn.Linear, "self", places={"x": 0, "weight": 1}),
    "ConvolutionBackward0": _Kind(nn.modules.conv._ConvNd, "input", "stride padding dilation groups transposed"),
    "EmbeddingBagBackward0": _Kind(
        nn.EmbeddingBag, "indices", "mode padding_idx scale_grad_by_freq", ("offsets", "per_sample_weights"), {"weight": 0}
    ),
    "EmbeddingBackward0": _Kind(nn.Embedding, "indices", "padding_idx scale_grad_by_freq", places={"weight": 0}),
    "NativeLayerNormBackward0": _Kind(nn.LayerNorm, "input"),
    "FusedRmsNormBackward0": _Kind(nn.RMSNorm, "input"),
    "NativeGroupNormBackward0": _Kind(nn.GroupNorm, "input", "group eps"),
    "NativeBatchNormBackward0": _Kind(
        nn.modules.batchnorm._BatchNorm, "input", "training eps", ("running_mean", "running_var")
    ),
}


@cache
def _kind_of(node: type) -> _Kind | None:
    if (kind := _KINDS.get(USUAL.get(node.__name__, node.__name__))) is None:
        return None
    names = [SAVED + spelt(node, name) for name in kind.settings.split()]
    return kind._replace(raw=attrgetter(RAW + kind.raw), settings=attrgetter(*names) if names else lambda node: None)


def _behind(value: Any, through: Collection[str], ends: Collection[Node] = ()) -> tuple[Any, int, list[str]]:
    """The value behind some kinds of nodes, and the kinds that were passed."""
    (node, number), passed = value, list[str]()
    while node is not None and node not in ends and (name := type(node).__name__) in through:
        passed.append(name)
        node, number = node.next_functions[0]
    return node, number, passed


def taken_by(node: Any, hook: AtOutput, known: Layer) -> Taken | None:
    """What the node of a layer's call takes; None for unknown kinds of nodes."""
    layer, kind = known.layer, _kind_of(node.__class__) or _kind_of((node := _behind((node, 0), _COPIES)[0]).__class__)
    if kind is None or hook.live is None or known.is_given or not isinstance(layer, kind.layer):
        return None
    raw, (args, kwargs) = kind.raw(node), hook.live
    if raw.unpack_hook is not None:
        return UNKNOWN, None, None
    saved, x = raw.data, args[0] if args else next(x for x in kwargs.values() if isinstance(x, Tensor))
    for name in kind.others:
        other: Any = getattr(node, RAW + name)
        given = (None, layer._buffers.get(name), *args, *kwargs.values())
        is_made = name == "offsets" and x.ndim == 2  # of the rows of a matrix
        if other.unpack_hook is not None or not (is_made or any(other.data is own for own in given)):
            return UNKNOWN, None, None
    if saved is x or saved is None:  # no parameter that trains needs it
        return SAME, None, kind.settings(node)
    with nullcontext() if type(x) is Tensor else without_subclasses():
        return SAME if _is_same(saved, x) else COPY, saved.dtype, kind.settings(node)


def _is_same(saved: Tensor, x: Tensor) -> bool:
    """Whether a tensor has the numbers of another one in the same memory, in the same order."""
    if (
        address_of(saved) != address_of(x)
        or saved.dtype is not x.dtype
        or (saved.dtype.is_complex and saved.is_conj() != x.is_conj())
    ):
        return False
    if saved.is_contiguous() and x.is_contiguous():
        return saved.nbytes == x.nbytes
    return (saved.shape, saved.stride(), saved.is_neg()) == (x.shape, x.stride(), x.is_neg())


def is_fed(noted: Noted, taken: Taken | None) -> bool:
    """Whether nothing but copies, and one cast as autocast makes it, is between a call and a node of its kind.

    taken: see `taken_by`"""
    known = noted.call.known
    if taken is None or taken[0] is UNKNOWN:
        return False
    ((output, hook),) = noted.hooks
    main, *_ = _behind((output, 0), _COPIES)
    kind = _kind_of(main.__class__)
    if kind is None or kind.usual not in (None, taken[2]) or not kind.places.keys() >= set(known.locals):
        return False
    for local, p, _ in known.wanted:
        leaf, _, passed = _behind(main.next_functions[kind.places[local]], (_CAST, _TURN))
        is_turned = kind.layer is nn.Linear and local == "weight"
        if getattr(leaf, "variable", None) is not p or passed.count(_TURN) != is_turned or passed.count(_CAST) > 1:
            return False
    if taken[0] is SAME:
        return True
    node, number, passed = _behind(main.next_functions[kind.places.get("x", 0)], (_CAST, *_COPIES), noted.inputs)
    return passed.count(_CAST) < 2 and (node, number) in argument_of(hook)


def argument_of(hook: AtOutput) -> list[tuple[Node, int]]:
    """The values of the graph that a call was given, as nodes and numbers of their outputs."""
    return [(x.grad_fn, x.output_nr) for x in hook.live[0] if isinstance(x, Tensor) and x.grad_fn is not None]


def is_recomputed(noted: Noted, nodes: Iterable[Node]) -> bool:
    """Whether a call's rule runs it again and compares the outputs, where the host need not wait for that.

    nodes: those inside"""
    call = noted.call
    is_recurrent = not call.known.is_given and isinstance(call.layer, nn.RNNBase | nn.RNNCellBase)
    return is_recurrent and all(map(looks_free, call.outputs)) and not any(map(is_packed, nodes))


def has_formulas(noted: Noted, nodes: Sequence[int], trace: Trace, walk: Walk) -> bool:
    """Whether formulas give the rows at the nodes in a call that take its parameters."""
    own, known = walk.of_parameters, noted.call.known
    takes = [k for k in nodes if not own[k] and any(edge is not None and own[edge[0]] for edge in trace.edges[k])]
    is_usual = known.rule.is_node and not known.is_given
    return is_usual and bool(takes) and all(trace.kinds[k].name in NODES for k in takes)
