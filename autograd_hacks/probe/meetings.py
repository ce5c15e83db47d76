"""Where parameters meet the batch.

From a parameter towards the outputs, the first node that also follows from the batch is a *meeting*: x is among what it
keeps, g is what arrives at it.  Between the parameter and the meeting lies φ(θ): views, sums, norms, other parameters;
nothing of it belongs to a sample.  The graph's structure says where meetings are; whose the gradients are there
(`probe/owners.py`) says whether samples stay apart, and how they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from enum import IntEnum
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.probe.owners import Verdict
from autograd_hacks.support.graph import Graph, Leaf, Taker, Value, inputs_of, made, operands_of, shape_of
from autograd_hacks.support.parts import part_of


class Follows(IntEnum):
    """Whether a node follows from the batch."""

    NO = 0
    MAYBE = 1  # it was given a tensor without a graph, of which it isn't known whether it does
    YES = 2


class Meeting(NamedTuple):
    """A use of a value of parameters beside the batch."""

    value: Value
    taker: Taker
    verdict: Verdict | None  # whose the gradients are that arrive there; None where none has


class Meetings:
    """What a forward's graph says of where parameters meet the batch.

    names: of the parameters, by their leaves    given: the memory of the model's arguments    fixed: that of its parameters
    and buffers    samples: N    verdict: whose the gradients at a node are; None where no pass has come there
    covered: the parameters, by the nodes that belong to a layer's call whose rule gives the rows of these    ends: nodes
    that follow from the batch, behind which nothing is looked for    assumed: whether what may follow from the batch does
    of_parameters: nodes that follow from parameters alone    of_batch: nodes of layers that were given the batch
    """

    def __init__(
        self,
        graph: Graph,
        names: Mapping[Node, str],
        given: Collection[int],
        fixed: Collection[int],
        samples: int,
        verdict: Callable[[Node], Verdict | None] = lambda node: None,
        covered: Mapping[Node, Collection[str]] | None = None,
        ends: Collection[Node] = (),
        assumed: bool = False,
        of_parameters: Collection[Node] = (),
        of_batch: Collection[Node] = (),
    ) -> None:
        self.graph, self.names, self.given, self.fixed, self.samples = graph, names, given, fixed, samples
        self.verdict, self.covered, self.ends, self.assumed = verdict, covered or {}, ends, assumed
        self.of_parameters, self.of_batch = of_parameters, of_batch
        self._follows: dict[Node, Follows] = {}
        self.keys = Keys(names)

    def find(self) -> Meetings:
        """Climbs from each parameter."""
        self.found: list[Meeting] = []
        self.mixed: dict[Value, Taker] = {}  # values whose samples mix behind a taker
        self.returned: set[Value] = set()  # values that nobody in the graph takes: outputs
        self.climbed: dict[Node, None] = {}  # the nodes that were come by
        self.inner: list[tuple[Value, Taker]] = []  # uses of values that make others
        waiting = [Value(leaf, 0) for leaf in self.graph.leaves if leaf in self.names]
        seen = set(waiting)
        while waiting:
            value = waiting.pop()
            takers = self.graph.takers.get(value, ())
            if not takers:
                self.returned.add(value)
            for taker in takers:
                if self.is_covered(value, taker.node):
                    continue
                self.climbed[taker.node] = None
                if self._is_meeting(value, taker):
                    continue
                self.inner.append((value, taker))
                above = {Value(taker.node, number) for number in range(max(1, len(made(taker.node))))} - seen
                seen |= above
                waiting += above
        return self

    def _is_meeting(self, value: Value, taker: Taker) -> bool:
        """Whether a use is a meeting, which is noted then, or one behind which samples mix."""
        node, verdict = taker.node, self.verdict(taker.node)
        if node in self.of_parameters:
            return False
        follows = self.follows(node)
        if verdict is not None and verdict.is_owned:
            if follows is Follows.YES or (not self._is_doubtful(node) and (follows or self._grows(node))):
                self.found.append(Meeting(value, taker, verdict))
                return True
        elif follows is Follows.YES:
            if verdict is not None and verdict.is_mixed:
                self.mixed[value] = taker
            else:
                self.found.append(Meeting(value, taker, verdict))
            return True
        return False

    def open(self) -> list[Node]:
        """The nodes of which gradients have to tell whether they follow from the batch."""
        return [node for node, follows in self._follows.items() if follows is Follows.MAYBE]

    def doubtful(self) -> list[Node]:
        """The nodes that were given something of which it isn't known whether it follows from the batch, and in which its
        samples mix, if it does."""
        mixed = [node for node in self.climbed if (verdict := self.verdict(node)) is not None and verdict.is_mixed]
        return [node for node in mixed if self.follows(node) is Follows.MAYBE]

    def is_covered(self, value: Value, node: Node) -> bool:
        return node in self.covered and self.keys.below(value.node) <= set(self.covered[node])

    def follows(self, node: Node) -> Follows:
        """Whether a node follows from the batch: it, or something behind it, was given a part of that."""
        waiting = [node]
        while waiting:
            at = waiting[-1]
            behind = () if at in self.ends else [value.node for value in inputs_of(at)]
            missing = [other for other in behind if other not in self._follows]
            if at in self._follows or not missing:
                waiting.pop()
                if at not in self._follows:
                    own = self._own(at)
                    self._follows[at] = max([own, *(Follows.YES for b in behind if self._follows[b] is Follows.YES)])
            else:
                waiting += missing
        return self._follows[node]

    def _own(self, node: Node) -> Follows:
        """What a node was given beside what other nodes made."""
        if node in self.of_parameters:
            return Follows.NO
        if node in self.ends:
            return Follows.YES
        if type(node) is Leaf:
            leaf: Any = node
            is_fixed = node in self.names or isinstance(leaf.variable, nn.Parameter)
            return Follows.NO if is_fixed else Follows.YES
        operands = list(operands_of(node))
        if any(memory_of(x) in self.given for x in operands):
            return Follows.YES
        verdict = self.verdict(node)
        if verdict is not None and verdict.is_owned and self._grows(node) and not self._is_doubtful(node):
            return Follows.YES  # copies, a sample each
        unknown = [x for x in operands if x.ndim and memory_of(x) not in self.fixed]
        bare = sum(ahead is None for ahead, _ in node.next_functions) > len(operands) - len(unknown)
        # Something that no node made, and sizes in which samples may be: of the batch if its gradients are samples' own.
        if (self.assumed or node in self.of_batch) and (unknown or bare):
            return Follows.YES
        if not unknown and not bare:
            return Follows.NO
        if any(size and size % self.samples == 0 for x in made(node) for size in x.shape):
            return Follows.MAYBE if verdict is None or verdict.is_mixed or verdict.owners == 0 else Follows.YES
        return Follows.YES if verdict is not None and verdict.is_owned else Follows.NO  # rows of some samples

    def _is_doubtful(self, node: Node) -> bool:
        """Whether there is something behind a node that may be of the batch and in which its samples mix, if it is."""
        waiting, seen = [value.node for value in inputs_of(node)], set[Node]()
        while waiting:
            at = waiting.pop()
            if at in seen or self.follows(at) is Follows.YES:
                continue
            seen.add(at)
            verdict = self.verdict(at)
            if self.follows(at) is Follows.MAYBE and verdict is not None and verdict.is_mixed:
                return True
            waiting += [value.node for value in inputs_of(at)]
        return False

    def _grows(self, node: Node) -> bool:
        """Whether a node makes a copy for each sample."""
        if not made(node):
            return False
        before = max((shape_of(value).numel() for value in inputs_of(node)), default=0)
        return shape_of(Value(node, 0)).numel() >= self.samples * before > 0


class Keys:
    """What uses of values of parameters are known by, from step to step.  names: of the parameters, by their leaves"""

    def __init__(self, names: Mapping[Node, str]) -> None:
        self.names = names
        self._known: dict[Node, tuple[str, frozenset[str]]] = {}

    def below(self, node: Node) -> frozenset[str]:
        """The parameters that a value follows from."""
        return self._of(node)[1]

    def of(self, value: Value, taker: Taker) -> Hashable:
        """How a value is made of parameters, and what takes it."""
        return self._of(value.node)[0], value.number, taker.node.name(), taker.place, len(shape_of(Value(taker.node, 0)))

    def _of(self, node: Node) -> tuple[str, frozenset[str]]:
        waiting = [node]
        while waiting:
            at = waiting[-1]
            missing = [value.node for value in inputs_of(at) if value.node not in self._known]
            if at in self._known or not missing:
                waiting.pop()
                self._known.setdefault(at, self._made(at))
            else:
                waiting += missing
        return self._known[node]

    def _made(self, node: Node) -> tuple[str, frozenset[str]]:
        if type(node) is Leaf:
            name = self.names.get(node, "")
            return name, frozenset({name} if name else ())
        behind = [self._known[value.node] for value in inputs_of(node)]
        # Short, however many ways lead there.
        text = f"{node.name()} {' '.join(own for own, _ in behind)}"
        return f"{node.name()} {blake2b(text.encode(), digest_size=8).hexdigest()}", frozenset().union(
            *(b for _, b in behind)
        )


def memory_of(x: Tensor) -> int:
    """What tells tensors apart that lie in different memory; of those that have none of their own, what tells objects."""
    if x.is_nested or x.layout != torch.strided or x.is_meta:
        return id(x)
    return part_of(x).untyped_storage().data_ptr()
