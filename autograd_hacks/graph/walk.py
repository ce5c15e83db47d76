"""Which sample each gradient belongs to, in one forward: labels from the roots down, and where parameters meet the batch.

A *use* is an edge from a node whose output has owners to a value that no sample owns: a parameter, behind views, casts and
stateless operations on parameters and buffers alone, or a value that is made of parameters and of tensors without a graph
of which nothing says that they are of the batch (a table of positions, quantised weights).  The rows of such a value are
always those of this forward; whether a constant in it was computed from the batch is a question of values and not of
gradients.  Where several samples contribute to any other value, samples mix there.

Two words are near each other: *own* is what parameters alone make, *owned* is a label with owners, which are samples.

The labels are a function of the trace's key and of the values in ``read``; which tensors are the model's own or the batch's
memory, of ``origins`` too.  So a memo may keep a walk, if it compares these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autograd_hacks.graph.label import NOBODY, SUM, Entries, Label, One, Several, joined
from autograd_hacks.graph.laws import Answer, asked, law_of
from autograd_hacks.graph.probed import Asked
from autograd_hacks.graph.trace import END, LEAF, Trace
from autograd_hacks.support.graph import operands_of
from autograd_hacks.support.parts import memory_of

OWN, OPEN, BATCH = "parameters alone", "parameters and tensors without a graph", "the batch"
ORDERS, ZEROS = "orders", "zeros"
"""What nodes with saved values are asked for: where the samples are; also which entries get nothing."""


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
    """Whether a tensor has the memory of a parameter or buffer of the model, and the addresses of its arguments."""

    is_fixed: Callable[[Tensor], bool]
    given: Collection[int] = ()

    def origin(self, node: Any, edges: Iterable[Any]) -> str:
        """What a node's own operands are, besides the values that other nodes made.

        An input without a graph that the node hasn't kept may be anybody's, so it is OPEN."""
        operands = list(operands_of(node))
        arrays = [x for x in operands if x.ndim]  # numbers aren't of the batch
        if any(memory_of(x) in self.given for x in arrays):
            return BATCH
        is_bare = sum(edge is None for edge in edges) > len(operands)
        return OPEN if is_bare or not all(map(self.is_fixed, arrays)) else OWN


@dataclass
class Walk:
    """What a walk found.  Nodes are numbered as in the trace.

    labels: of the gradients at each node's outputs
    uses: where parameters meet the batch
    mixes: where samples mix
    mixed: the leaves of parameters that lie behind a mix
    read: the saved values on which labels rest, each with its node and its name there
    asked: the nodes that were asked, with labels that hold for this forward alone
    met_zero: whether an answer was that nothing arrives, perhaps because an operand is zero today
    origins: what some nodes' operands were
    by_values: whether rules alone would say that samples mix
    of_parameters: whether each node's outputs are made of parameters and buffers alone
    read_as: what readers made of it, by what they read besides
    compared: by the same, the parameters whose rows agreed with gradients that were not zero, or can't be compared
    parameters: weak references to those whose identities are in a memo's key, which goes with them
    """

    labels: list[list[Label]]
    uses: list[Meeting] = field(default_factory=list)
    mixes: list[Meeting] = field(default_factory=list)
    mixed: set[int] = field(default_factory=set)
    read: list[tuple[int, str, Any]] = field(default_factory=list)
    asked: dict[int, Asked] = field(default_factory=dict)
    origins: dict[int, str] = field(default_factory=dict)
    of_parameters: list[bool] = field(default_factory=list)
    met_zero: bool = False
    by_values: bool = False
    read_as: dict[Hashable, Any] = field(default_factory=dict)
    compared: dict[Hashable, set[str]] = field(default_factory=dict)
    parameters: Sequence[Any] = ()

    @cached_property
    def has_tensors(self) -> bool:
        values = [x for *_, own in self.read for x in (own if type(own) is list else [own])]
        return any(isinstance(x, Tensor | Entries) for x in (*values, *(label for outs in self.labels for label in outs)))


def walked(
    trace: Trace, roots: Mapping[int, Label], samples: int, memory: Memory, modes: Sequence[str] = ("", ORDERS, ZEROS)
) -> Walk:
    """Labels all gradients behind the roots, and finds the uses.

    Rules don't see what values hide, such as the branch that a ``where`` doesn't take.  So if samples seem to mix, the nodes
    with saved values are asked before it is said; and then also which entries get nothing, as behind a mask of blocks.

    roots: labels of the trace's roots, by their number
    modes: what nodes are asked for, one after the other
    """
    walks = list[Walk]()
    for exact in modes if samples > 1 else modes[:1]:
        walks.append(walk := _Walking(trace, samples, memory, exact).run(roots))
        if not walk.mixes:
            walk.by_values = bool(exact)
            return walk
    return walks[0]


class _Walking:
    """A walk that is under way.

    of_parameters: see `Walk`
    of_batch: nodes of the batch: some gradient that arrives there has owners
    lost: edges at which owners are lost, to values that aren't of parameters alone
    met: by value of parameters alone, edges from nodes that have owners
    known: answers of nodes so far, by all that laws by rule read
    """

    def __init__(self, trace: Trace, samples: int, memory: Memory, exact: str = "") -> None:
        self.trace, self.samples, self.memory, self.exact = trace, samples, memory, exact
        self.walk = Walk([[None] * len(outs) for outs in trace.shapes])
        self.of_batch, self.lost, self.met = set[int](), list[Meeting](), dict[int, list[Meeting]]()
        self.known: dict[Hashable, Answer] = {}

    def run(self, roots: Mapping[int, Label]) -> Walk:
        trace, walk = self.trace, self.walk
        self.order = trace.order
        self.of_parameters = walk.of_parameters = self._made_of_parameters()
        for number, label in roots.items():
            self._begin(number, label)
        for k in self.order:
            if trace.kinds[k] is not LEAF and trace.kinds[k] is not END:
                self._pass(k)
        for j, met in self.met.items():
            if trace.kinds[j] is LEAF or self.samples == 1 or any(isinstance(label, Several) for label in walk.labels[j]):
                walk.uses += met
        if self.lost:
            self._tell_uses_from_mixes()
        outputs = {k: number for number in roots if self.of_parameters[k := trace.roots[number][0]]}
        if outputs:
            self._part(outputs)
        return walk

    def _made_of_parameters(self) -> list[bool]:
        """Whether each node's outputs are made of parameters and buffers alone."""
        trace, fixed = self.trace, {*self.trace.fixed}
        own = [k in fixed for k in range(len(self.order))]
        for k in reversed(self.order):
            kind = trace.kinds[k]
            if kind.is_stateless and all(edge is None or own[edge[0]] for edge in trace.edges[k]):
                own[k] = not (kind.has_operands or None in trace.read_by(k)) or self._origin(k) == OWN
        return own

    def _origin(self, k: int) -> str:
        self.walk.origins[k] = origin = self.memory.origin(self.trace.nodes[k], self.trace.read_by(k))
        return origin

    def _begin(self, number: int, label: Label) -> None:
        """Labels a root."""
        k, at = self.trace.roots[number]
        labels = self.walk.labels[k]
        labels[at] = joined(labels[at], label, self.trace.shapes[k][at] or (), self.samples)
        if self.of_parameters[k]:
            self.met.setdefault(k, []).append(Meeting(-1, number, label))
            return
        self.of_batch.add(k)
        if type(labels[at]) is Several:
            self._mix(number, k, "two outputs are one value, with samples on other axes")

    def _mix(self, root: int, k: int, why: str) -> None:
        self.walk.mixes.append(Meeting(-1, root, why=why))
        self.walk.mixed |= self._leaves([k])

    def _pass(self, k: int) -> None:
        """Brings labels through a node."""
        trace, walk, outs = self.trace, self.walk, self.walk.labels[k]
        there = {*map(type, outs)}
        has_owners = Several not in there
        if there <= {NoneType} or (self.of_parameters[k] and self.samples == 1):
            return
        kind, ahead, like = trace.kinds[k], trace.edges[k], None
        ins = [None if edge is None else trace.shapes[edge[0]][edge[1]] for edge in ahead]
        alone = [edge is not None and self.of_parameters[edge[0]] for edge in ahead]
        asks = has_owners and (kind.has_operands or kind.law is not None) and bool(self.exact)
        if not (asks or Entries in there):
            like = kind, trace.numbers[k], tuple(outs), trace.shapes[k], tuple(ins), tuple(alone)
        answer = self.known.get(like) or self._answer(k, ins, alone, asks)
        walk.read += [(k, name, _kept(x)) for name, x in (answer.read or {}).items()]
        if answer.was_asked:
            walk.asked[k] = Asked(tuple(outs), tuple(answer.ins))
            walk.met_zero |= any(
                label is None or (isinstance(label, Entries) and bool((label.samples == NOBODY).all()))
                for edge, label in zip(ahead, answer.ins)
                if edge is not None
            )
        elif like is not None and not answer.read:  # it rests on nothing else
            self.known[like] = answer
        for place, (edge, label) in enumerate(zip(ahead, answer.ins)):
            if edge is not None and label is not None:
                self._arrive(edge, Meeting(k, place, label, answer.why), ins[place] or (), has_owners)

    def _answer(self, k: int, ins: Sequence[Any], alone: Sequence[bool], asks: bool) -> Answer:
        """What a node does to labels.

        ins: the shapes of its inputs    alone: whether these are made of parameters alone"""
        trace, samples, outs = self.trace, self.samples, self.walk.labels[k]
        node, ahead, shapes = trace.nodes[k], trace.edges[k], trace.shapes[k]
        if all(label is None or 0 in (shape or ()) for label, shape in zip(outs, shapes)):  # no gradient has an entry
            labels = [SUM if is_own else _of_nobody(sizes or (), samples) for is_own, sizes in zip(alone, ins)]
            return Answer([None if edge is None else label for edge, label in zip(ahead, labels)])
        if asks and not all(edge is None or is_own for edge, is_own in zip(ahead, alone)):
            return asked(node, outs, samples, self.exact == ZEROS)
        return law_of(trace.kinds[k], node, trace.numbers[k], outs, shapes, ins, alone, samples)

    def _arrive(self, value: tuple[int, int], at: Meeting, shape: Sequence[int], has_owners: bool) -> None:
        """Adds the label of a gradient that comes to a value from a node.  has_owners: whether the node's outputs do"""
        j, number = value
        labels, label = self.walk.labels[j], at.label
        before = labels[number]
        labels[number] = now = label if before is None else joined(before, label, shape, self.samples)
        if not has_owners:
            return
        if self.of_parameters[j]:
            self.met.setdefault(j, []).append(at)
        elif type(label) is not Several:
            self.of_batch.add(j)
            if type(now) is Several and type(before) is not Several:
                self.lost.append(at)
        else:
            self.lost.append(at)

    def _tell_uses_from_mixes(self) -> None:
        """Tells uses of values that no sample owns from places where samples mix."""
        trace, walk, of_batch, behind = self.trace, self.walk, self.of_batch, list[int]()
        for k in reversed(self.order):
            if self.of_parameters[k] or k in of_batch:
                continue
            kind, ahead = trace.kinds[k], [edge for edge in trace.edges[k] if edge is not None]
            is_reached = any(label is not None for label in walk.labels[k])
            if kind is LEAF or kind is END or any(j in of_batch for j, _ in ahead) or (
                is_reached and self._origin(k) == BATCH
            ):  # fmt: skip
                of_batch.add(k)
        tables = trace.tables(self.of_parameters) if walk.asked else ()
        for at in self.lost:
            edge = trace.edges[at.node][at.place]
            assert edge is not None
            is_table = at.node not in walk.asked or self._is_table(at.node, edge, tables, of_batch)
            if walk.labels[edge[0]][edge[1]] is SUM and edge[0] not in of_batch and is_table:
                walk.uses.append(at._replace(why=""))
            else:
                walk.mixes.append(at._replace(label=None))
                behind.append(edge[0])
        walk.mixed |= self._leaves(behind)

    def _is_table(self, k: int, value: tuple[int, int], tables: Sequence[bool], of_batch: Collection[int]) -> bool:
        """Whether a value whose entries get those of several samples, as a node says that was asked, has no axis of samples.

        No number tells that.  What has only axes of parameters is a table, if samples may have come in otherwise."""
        kind, edges, shape = self.trace.kinds[k], self.trace.edges[k], self.trace.shapes[value[0]][value[1]]
        may_come = kind.by_values or any(edge is None or (edge != value and edge[0] in of_batch) for edge in edges)
        is_product = kind.entry is not None and kind.entry.multiplies
        return is_product or (tables[value[0]] and may_come) or all(size % self.samples for size in shape)

    def _part(self, outputs: Mapping[int, int]) -> None:
        """Tells uses at nodes of outputs of parameters alone, from outputs that the batch meets elsewhere, too:
        the gradient at their nodes is then that of all samples.

        outputs: their numbers, by node
        """
        trace, walk, own = self.trace, self.walk, self.of_parameters
        at = [trace.edges[use.node][use.place] for use in walk.uses if use.node >= 0 and not own[use.node]]
        behind = trace.behind([edge[0] for edge in at if edge is not None])
        for k, number in outputs.items():
            inside = trace.behind([k]) & {use.node for use in walk.uses if use.node >= 0 and own[use.node]}
            if k in behind or not inside.isdisjoint(behind):
                self._mix(number, k, "an output is made of parameters, and the batch meets it inside the model")
            elif not inside:  # of one sample
                walk.uses += [Meeting(k, n, One(0)) for n, edge in enumerate(trace.edges[k]) if edge is not None]

    def _leaves(self, starts: list[int]) -> set[int]:
        """The parameters behind some nodes."""
        return {k for k in self.trace.behind(starts) if self.trace.kinds[k] is LEAF and self.of_parameters[k]}


def _of_nobody(shape: Sequence[int], samples: int) -> Label:
    """The label of a gradient of zeros that arrives at a value of the batch; behind it there may be uses."""
    return One(0) if samples == 1 or 0 in shape else Entries(torch.full([1] * len(shape), NOBODY, device="cpu"))


def _kept(x: Any) -> Any:
    """A copy, since a tensor of indices may be written to before the next forward."""
    if isinstance(x, Tensor):
        return x.clone()
    return [_kept(own) for own in x] if type(x) in (list, tuple) else x
