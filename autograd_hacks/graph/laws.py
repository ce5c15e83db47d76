"""The law of each kind of node: labels of the gradients at its outputs in, labels at its inputs out.

Three classes: by rule (`axes.py`, `moves.py`), by rule from saved values (`values.py`), by asking the node (`probed.py`).
`Answer` is that of one node in one forward.  A rule gives links of axes (`axes.py`) or moves labels (`moves.py`); a
layer's rule, in `formulas/table.py`, is something else.

A kind is known by ``node.name()``: a node's type is not enough, since all nodes of other people's C++ have one type.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from torch.autograd.function import BackwardCFunction

from autograd_hacks.graph.axes import AXES, Axes
from autograd_hacks.graph.label import (
    MIXED,
    SUM,
    Entries,
    Label,
    One,
    Owned,
    Several,
    Shapes,
    Sizes,
    joined,
    linked,
    same,
    tidied,
)
from autograd_hacks.graph.moves import MOVES, Law
from autograd_hacks.graph.probed import CannotAsk, probed
from autograd_hacks.graph.values import MASKS
from autograd_hacks.support.graph import IDENTITIES, is_collective, kept_by, raw_names
from autograd_hacks.support.internals import SAVED


@dataclass(frozen=True, eq=False)
class Kind:
    """What the walk knows of a kind of node.

    name: ``node.name()``
    numbers: the saved numbers that its law reads
    get: reads them from a node
    entry: its law by rule without values, or None
    law: its law that moves labels, with or without values, or None
    by_values: whether the law reads saved tensors
    is_stateless: whether its backward depends on nothing but what it shows
    has_operands: whether it saves tensors
    keeps_sizes: whether the sizes of its outputs follow from its numbers and the sizes of its inputs, if all have a graph
    overwritten: how many of its first inputs only lend their memory
    is_entrywise: whether each entry of its output is made of one entry of each input
    """

    name: str
    numbers: tuple[str, ...] = ()
    get: Callable[[Any], Any] | None = None
    entry: Axes | None = None
    law: Law | None = None
    by_values: bool = False
    is_stateless: bool = False
    has_operands: bool = True
    keeps_sizes: bool = False
    overwritten: int = 0
    is_entrywise: bool = False

    def named(self, values: Any) -> dict[str, Any]:
        return dict(zip(self.numbers, values if len(self.numbers) > 1 else (values,)))


_SIZED = """add sub mul div neg abs exp log sqrt rsqrt reciprocal tanh sigmoid relu gelu silu elu leaky_relu softplus
hardswish hardsigmoid mish erf sin cos native_dropout clone alias t transpose permute unsqueeze mm addmm bmm
baddbmm native_layer_norm _softmax _log_softmax"""
"""Operations whose output's sizes are a function of the sizes of their inputs.  None has a mask or an index of its own."""


def node_name(operation: str) -> str:
    """The name under which autograd generates a node: native_layer_norm, NativeLayerNorm."""
    return "".join(word.title() for word in operation.split("_"))


_BY_NODE = {node_name(name): name for name in (*AXES, *MOVES)}  # where an operation is in both, `MOVES` is more exact


@cache
def kind_of_name(name: str, kind: type) -> Kind:
    if name in IDENTITIES:
        return Kind(name, law=lambda label, sizes, _: [label if k == sizes.o else None for k in range(len(sizes.ins))])
    found = re.fullmatch(r"(?:torch::autograd::)?(\w+?)Backwards?\d*(_copy)?", name)
    operation = _BY_NODE.get(found[1]) if found else None
    if operation is None or issubclass(kind, BackwardCFunction):
        return Kind(name)
    if (own := MOVES.get(operation)) is not None:
        return _kind(name, kind, own.reads, law=own.law, by_values=own.by_values, is_stateless=True)
    entry, more = AXES[operation], {"overwritten": int(operation == "copy"), "keeps_sizes": operation in _SIZED.split()}
    return _kind(name, kind, entry.reads, entry=entry, is_stateless=True, is_entrywise=entry.rule is None, **more)


def _kind(name: str, kind: type, reads: Sequence[str], **more: Any) -> Kind:
    numbers = tuple(n for n in reads if hasattr(kind, SAVED + n))
    get = attrgetter(*(SAVED + n for n in numbers)) if numbers else None
    return Kind(name, numbers, get, has_operands=bool(raw_names(kind)), **more)


_BY_TYPE: dict[type, Kind | None] = {}


def kind_of(node: Any) -> Kind:
    found = _BY_TYPE.get(kind := type(node))
    if found is None:
        found = kind_of_name(node.name(), kind)  # type: ignore[arg-type]  # types are hashable
        if kind.__name__ != "CppFunction":  # all nodes of other people's C++ have this type
            _BY_TYPE[kind] = found
    return found


class Answer(NamedTuple):
    """The answer of a law: what a node does to labels in one forward.

    ins: the labels that it gives to its inputs
    read: the saved tensors that this rests on, by name; of indices perhaps only sizes; None if on none
    was_asked: whether the node was asked, so that nothing of it holds for another forward
    why: why there is no answer, where the labels are MIXED for that reason
    """

    ins: Sequence[Label]
    read: dict[str, Any] | None = None
    was_asked: bool = False
    why: str = ""


def law_of(
    kind: Kind, node: Any, numbers: Any, labels: Sequence[Label], outs: Shapes, ins: Shapes, alone: Sequence[bool],
    samples: int,
) -> Answer:  # fmt: skip
    """The labels of a node's inputs.

    labels: of its outputs, at least one of which isn't None
    outs, ins: the shapes of its outputs and inputs; None for an input without a graph
    alone: for each input, whether it is made of parameters alone
    """
    there = [label for label in labels if label is not None]
    first = there[0]
    if any(type(label) is Several for label in there):
        several = SUM if all(label is SUM for label in there) else MIXED
        return Answer([None if own is None else several for own in ins])
    if (samples == 1 and not is_collective(node)) or (
        kind.entry is not None and isinstance(first, One) and all(label == first for label in there)
    ):
        return Answer([None if own is None else first for own in ins])
    if kind.entry is not None and (found := _by_entry(kind, numbers, labels, outs, ins, alone, samples)) is not None:
        if kind.entry.multiplies and None in ins:
            for label, own in zip(found, alone):
                if type(label) is Several and not own:  # the other factor may be a permutation
                    answer = asked(node, labels, samples)
                    ins_of = [b if type(a) is Several and not answer.why else a for a, b in zip(answer.ins, found)]
                    return answer._replace(ins=ins_of)
        return Answer(found)
    is_use = all(own is None or is_own for own, is_own in zip(ins, alone))
    if is_use and (kind.law is None or kind.by_values):
        return Answer([None if own is None else SUM for own in ins])
    if kind.law is None:
        return asked(node, labels, samples)
    return _by_move(kind.law, kind, node, numbers, labels, outs, ins, samples)


def _by_move(
    law: Law, kind: Kind, node: Any, numbers: Any, labels: Sequence[Label], outs: Shapes, ins: Shapes, samples: int
) -> Answer:
    """The answer of a law that moves labels; the node is asked where that has none."""
    given, seen = kind.named(numbers), dict[str, Any]()

    def read(name: str, notes_values: bool = True) -> Any:
        x = kept_by(node, name)
        seen[name] = x if notes_values else [own if own is None or own.dtype in MASKS else own.shape for own in x]
        return x

    if kind.by_values:
        given["read"] = read
    joint: list[Label] = [None] * len(ins)
    is_shared = len(labels) > 1 and all(same(own, labels[0]) for own in labels)
    for o, label in enumerate(labels):
        if label is None:
            continue
        of_output = law(label, Sizes(o, outs, ins, is_shared), samples, **given)
        if of_output is None:
            return asked(node, labels, samples)
        for k, (more, shape) in enumerate(zip(of_output, ins)):
            if shape is not None:
                joint[k] = joined(joint[k], more, shape, samples)
    # A label of one output alone might name others' samples where it leaves nothing.
    return Answer([tidied(own, shape or (), samples) for own, shape in zip(joint, ins)], seen or None)


def _by_entry(
    kind: Kind, numbers: Any, labels: Sequence[Label], outs: Shapes, ins: Shapes, alone: Sequence[bool], samples: int
) -> list[Label] | None:
    found: list[Label] = [None] * len(ins)
    for o, label in enumerate(labels):
        if not isinstance(label, Owned):
            continue
        links = kind.entry.links(o, outs, ins, kind.named(numbers)) if kind.entry else None
        if links is None:
            return None
        for k, own in enumerate(ins):
            if own is not None:
                # Rows of which samples a use has is said at the node's output.
                is_use = alone[k] and isinstance(label, Entries)
                found[k] = joined(found[k], SUM if is_use else linked(label, links[k], own), own, samples)
    return found


def asked(node: Any, labels: Sequence[Label], samples: int, keeps_zeros: bool = False) -> Answer:
    """The labels of a node's inputs, by asking it."""
    try:
        return Answer(probed(node, labels, samples, keeps_zeros), was_asked=True)
    except CannotAsk as error:
        return Answer([None if ahead is None else MIXED for ahead, _ in node.next_functions], was_asked=True, why=str(error))
