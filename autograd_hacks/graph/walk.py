"""Which sample each gradient belongs to, in one forward: labels from the roots down, and where parameters meet the batch.

A *use* is an edge from a node whose output has owners to a value that no sample owns: a parameter, behind views, casts and
stateless operations on parameters and buffers alone, or a value that is made of parameters and of tensors without a graph
of which nothing says that they are of the batch (a table of positions).  The rows of such a value are always those of this
forward; whether a constant in it was computed from the batch is a question of values and not of gradients.  Where several
samples contribute to any other value, samples mix there.

Two words are near each other: *own* is what parameters alone make, *owned* is what has owners, which are samples.

The labels are a function of the trace's key and of the values in ``read``; which tensors are the model's own or the batch's
memory, of ``origins`` too.  So a memo may keep a walk, if it compares these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autograd_hacks.graph.label import MIXED, NOBODY, SUM, Entries, Label, One, Several, joined
from autograd_hacks.graph.laws import Answer, Deferred, asked, law_of
from autograd_hacks.graph.trace import END, LEAF, Trace
from autograd_hacks.support.graph import operands_of
from autograd_hacks.support.parts import memory_of

OWN, OPEN, BATCH = "parameters alone", "parameters and tensors without a graph", "the batch"


class Meeting(NamedTuple):
    """An edge of the graph where parameters meet the batch, where samples mix, or where owners are lost.

    node: the number of the node that takes the value; -1 if the value is an output of the model
    place: the number of the node's input, or of the root
    label: of the gradient at the input, where parameters meet the batch: mostly SUM.  Whose the rows are, the labels at the
    node's outputs say
    why: what was found there, if it isn't plain
    """

    node: int
    place: int
    label: Label = None
    why: str = ""


@dataclass
class Memory:
    """Whether an address is that of a parameter or buffer of the model, and the addresses of its arguments."""

    is_fixed: Callable[[int], bool]
    given: Collection[int] = ()

    def origin(self, node: Any, edges: Iterable[Any]) -> str:
        """What a node's own operands are, besides the values that other nodes made.

        An input without a graph that the node hasn't kept may be anybody's, so it is OPEN."""
        operands = list(operands_of(node))
        places = [memory_of(x) for x in operands if x.ndim]  # numbers aren't of the batch
        if any(own in self.given for own in places):
            return BATCH
        is_bare = sum(edge is None for edge in edges) > len(operands)
        return OPEN if is_bare or not all(map(self.is_fixed, places)) else OWN


@dataclass
class Walk:
    """What a walk found.  Nodes are numbered as in the trace.

    labels: of the gradients at each node's outputs
    uses: where parameters meet the batch
    mixes: where samples mix
    mixed: the leaves of parameters that lie behind a mix
    read: the saved values on which labels rest, each with its node and its name there
    asked: the nodes that were asked, with the labels at their outputs and inputs, which hold for this forward alone
    met_zero: whether an answer was that nothing arrives, perhaps because an operand is zero today
    origins: what some nodes' operands were
    deferred: nodes whose law needs what a checkpoint recomputes; labels behind them are unknown until then
    by_values: whether rules alone would say that samples mix
    own: whether each node's outputs are made of parameters and buffers alone
    unknown: nodes behind the deferred ones
    read_as: what readers made of it, by what they read besides
    compared: the parameters whose rows by it agreed with gradients that were not zero, or can't be compared
    """

    labels: list[list[Label]]
    uses: list[Meeting] = field(default_factory=list)
    mixes: list[Meeting] = field(default_factory=list)
    mixed: set[int] = field(default_factory=set)
    read: list[tuple[int, str, Any]] = field(default_factory=list)
    asked: list[tuple[int, Sequence[Label], Sequence[Label]]] = field(default_factory=list)
    origins: dict[int, str] = field(default_factory=dict)
    deferred: list[int] = field(default_factory=list)
    own: list[bool] = field(default_factory=list)
    unknown: set[int] = field(default_factory=set)
    met_zero: bool = False
    by_values: bool = False
    compared: set[str] = field(default_factory=set)
    read_as: dict[Hashable, Any] = field(default_factory=dict)

    def has_tensors(self) -> bool:
        values = [x for *_, own in self.read for x in (own if type(own) is list else [own])]
        return any(isinstance(x, Tensor | Entries) for x in (*values, *(label for outs in self.labels for label in outs)))


def walked(trace: Trace, roots: Mapping[int, Label], samples: int, memory: Memory, settled: Collection[int] = ()) -> Walk:
    """Labels all gradients behind the roots, and finds the uses.

    Rules don't see what values hide, such as the branch that a ``where`` doesn't take.  So if samples seem to mix, the nodes
    with saved values are asked before it is said; and then also which entries get nothing, as behind a mask of blocks.

    roots: labels of the trace's roots, by their number
    settled: deferred nodes that may be read now, since their checkpoints run again in this pass
    """
    walk = _walked(trace, roots, samples, memory, settled)
    if walk.mixes:
        again = _walked(trace, roots, samples, memory, settled, exact=True)
        if not again.mixes:
            again.by_values = True
            return again
    return walk


def _walked(
    trace: Trace, roots: Mapping[int, Label], samples: int, memory: Memory, settled: Collection[int], exact: bool = False
) -> Walk:
    walk = Walk([[None] * len(own) for own in trace.shapes])
    if samples == 0:
        return walk
    order = trace.order()
    own = walk.own = _own(trace, order, memory, walk)
    lost: list[Meeting] = []  # edges at which owners are lost, to values that aren't of parameters alone
    owned: set[int] = set()  # values of the batch: some gradient that arrives there has owners
    answers: dict[Hashable, Answer] = {}  # of nodes so far, by all that laws by rule read
    meetings: dict[int, list[Meeting]] = {}  # by value of parameters alone: edges from nodes that have owners
    labels, shapes, edges, kinds, numbers = walk.labels, trace.shapes, trace.edges, trace.kinds, trace.numbers
    for number, label in roots.items():
        k, at = trace.roots[number]
        labels[k][at] = joined(labels[k][at], label, shapes[k][at] or (), samples)
        if own[k]:
            meetings.setdefault(k, []).append(Meeting(-1, number, label))
            continue
        owned.add(k)
        if type(labels[k][at]) is Several:
            walk.mixes.append(Meeting(-1, number, why="two outputs are one value, with samples on other axes"))
            walk.mixed.update(_leaves(trace, own, [k]))
    for k in order:
        outs = labels[k]
        if k in walk.unknown:
            walk.unknown.update(edge[0] for edge in edges[k] if edge is not None)
            continue
        kind = kinds[k]
        there = {*map(type, outs)}
        if kind is LEAF or kind is END or there <= {NoneType}:
            continue
        has_owners = Several not in there
        if own[k] and (samples == 1 or not has_owners):
            continue
        ahead, like = edges[k], None
        ins = [None if edge is None else shapes[edge[0]][edge[1]] for edge in ahead]
        alone = [edge is not None and own[edge[0]] for edge in ahead]
        asks = exact and has_owners and (kind.has_operands or kind.law is not None)
        if not (asks or Entries in there):
            like = kind, numbers[k], tuple(outs), shapes[k], tuple(ins), tuple(alone)
        try:
            law = answers.get(like) or _answer(trace, k, outs, ins, alone, samples, k in settled, asks)
        except Deferred:
            walk.deferred.append(k)
            walk.unknown.update(edge[0] for edge in ahead if edge is not None)
            continue
        answer, why = law.ins, law.why
        if law.read:
            walk.read += [(k, name, _kept(x)) for name, x in law.read.items()]
        if law.was_asked:
            walk.asked.append((k, tuple(outs), tuple(answer)))
            arriving = [label for edge, label in zip(ahead, answer) if edge is not None]
            walk.met_zero |= any(
                label is None or (isinstance(label, Entries) and bool((label.samples == NOBODY).all())) for label in arriving
            )
        if like is not None and not (law.read or law.was_asked):  # it rests on nothing else
            answers[like] = law
        for place, (edge, label) in enumerate(zip(ahead, answer)):
            if edge is None or label is None:
                continue
            j, at = edge
            before = labels[j][at]
            labels[j][at] = now = label if before is None else joined(before, label, ins[place] or (), samples)
            if has_owners:
                if own[j]:
                    meetings.setdefault(j, []).append(Meeting(k, place, label, why))
                    continue
                if type(label) is not Several:
                    owned.add(j)
                if type(label) is Several or (type(now) is Several and type(before) is not Several):
                    lost.append(Meeting(k, place, label, why))
    for j, met in meetings.items():
        if kinds[j] is LEAF or samples == 1 or any(isinstance(label, Several) for label in labels[j]):
            walk.uses += met
    if lost:
        _decide(trace, order, own, owned, lost, memory, walk)
    of_parameters = {trace.roots[number][0]: number for number in roots if own[trace.roots[number][0]]}
    if of_parameters:
        _part(trace, own, of_parameters, walk)
    return walk


def _answer(
    trace: Trace, k: int, outs: Sequence[Label], ins: Sequence[Any], alone: Sequence[bool], samples: int,
    may_recompute: bool, asks: bool,
) -> Answer:  # fmt: skip
    """What a node does to labels.  Raises Deferred.

    outs: the labels at its outputs    ins: the shapes of its inputs    alone: whether these are made of parameters alone"""
    node, ahead = trace.nodes[k], trace.edges[k]
    if all(label is None or 0 in (shape or ()) for label, shape in zip(outs, trace.shapes[k])):  # no gradient has an entry
        return Answer(
            [
                None if edge is None else SUM if is_own else _of_nobody(sizes or (), samples)
                for edge, is_own, sizes in zip(ahead, alone, ins)
            ]
        )
    if asks and not all(edge is None or is_own for edge, is_own in zip(ahead, alone)):
        return asked(node, outs, samples, may_recompute, keeps_zeros=True)
    return law_of(trace.kinds[k], node, trace.numbers[k], outs, trace.shapes[k], ins, alone, samples, may_recompute)


def _part(trace: Trace, own: list[bool], roots: Mapping[int, int], walk: Walk) -> None:
    """Tells uses at nodes of outputs that are made of parameters alone, from outputs that the batch meets elsewhere, too:
    the gradient at their nodes is then that of all samples.

    roots: the outputs' numbers, by node
    """
    met = [edge[0] for k, place, *_ in walk.uses if k >= 0 and not own[k] and (edge := trace.edges[k][place]) is not None]
    behind = trace.behind(met)
    for k, number in roots.items():
        inside = trace.behind([k]) & {use.node for use in walk.uses if use.node >= 0 and own[use.node]}
        if k in behind or not inside.isdisjoint(behind):
            walk.mixes.append(
                Meeting(-1, number, why="an output is made of parameters, and the batch meets it inside the model")
            )
            walk.mixed.update(_leaves(trace, own, [k]))
        elif not inside:  # of one sample
            walk.uses += [Meeting(k, n, One(0)) for n, edge in enumerate(trace.edges[k]) if edge is not None]


def _of_nobody(shape: Sequence[int], samples: int) -> Label:
    """The label of a gradient of zeros that arrives at a value of the batch; behind it there may be uses."""
    return One(0) if samples == 1 or 0 in shape else Entries(torch.full([1] * len(shape), NOBODY, device="cpu"))


def _own(trace: Trace, order: list[int], memory: Memory, walk: Walk) -> list[bool]:
    """Whether each node's outputs are made of parameters and buffers alone."""
    own = [False] * len(order)
    for k in trace.fixed:
        own[k] = True
    for k in reversed(order):
        kind = trace.kinds[k]
        if kind.is_stateless and all(edge is None or own[edge[0]] for edge in trace.edges[k]):
            own[k], ahead = True, trace.read_by(k)
            if kind.has_operands or None in ahead:
                walk.origins[k] = origin = memory.origin(trace.nodes[k], ahead)
                own[k] = origin == OWN
    return own


def _decide(
    trace: Trace, order: list[int], own: list[bool], owned: set[int], lost: list[Meeting], memory: Memory, walk: Walk
) -> None:
    """Tells uses of values that no sample owns from places where samples mix."""
    of_batch = [False] * len(order)
    are_sized = list(own)  # whether its axes are those of parameters, as those of ``table + buffer``
    for k in reversed(order):
        kind, ahead = trace.kinds[k], [edge for edge in trace.edges[k] if edge is not None]
        if own[k]:
            continue
        if kind.is_entrywise:
            are_sized[k] = any(are_sized[j] and trace.shapes[j][n] == trace.shapes[k][0] for j, n in ahead)
        if k in owned or kind is LEAF or kind is END or any(of_batch[j] for j, _ in ahead):
            of_batch[k] = True
        elif any(label is not None for label in walk.labels[k]):
            walk.origins[k] = origin = memory.origin(trace.nodes[k], trace.read_by(k))
            of_batch[k] = origin == BATCH
    behind: list[int] = []
    for node, place, label, why in lost:
        edge = trace.edges[node][place]
        assert edge is not None
        met, is_table = walk.labels[edge[0]][edge[1]], are_sized[edge[0]] and not why
        if not of_batch[edge[0]] and (met is SUM or (met is MIXED and is_table)):
            walk.uses.append(Meeting(node, place, label))
        else:
            walk.mixes.append(Meeting(node, place, why=why))
            behind.append(edge[0])
    walk.mixed.update(_leaves(trace, own, behind))


def _leaves(trace: Trace, own: list[bool], starts: list[int]) -> set[int]:
    """The parameters behind some nodes."""
    return {k for k in trace.behind(starts) if trace.kinds[k] is LEAF and own[k]}


def _kept(x: Any) -> Any:
    """A copy, since a tensor of indices may be written to before the next forward."""
    if isinstance(x, Tensor):
        return x.clone()
    return [_kept(own) for own in x] if type(x) in (list, tuple) else x
