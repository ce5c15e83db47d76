"""Where parameters meet the batch.

From a parameter towards the outputs, the first node that also depends on the batch is a *meeting*.  The node saves x, and g
arrives at it.  Between the parameter and the meeting lies φ(θ): views, sums, norms, other parameters.  Nothing in it
belongs to a sample.  The graph's structure shows where meetings are.  The gradients' owners there (`probe/owners.py`) show
whether samples stay separate, and where they are in the tensor.
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
    """Whether a node depends on the batch."""

    NO = 0
    MAYBE = 1  # it got a tensor without a graph that may or may not depend on it
    YES = 2


class Meeting(NamedTuple):
    """A use of a value of parameters together with the batch."""

    value: Value
    taker: Taker
    verdict: Verdict | None  # the owners of the gradients that arrive there; None without gradients


class Meetings:
    """Finds where parameters meet the batch in a forward's graph.

    names: the parameters' names, by leaf
    given: the memory addresses of the model's arguments
    fixed: the memory addresses of its parameters and buffers
    samples: N
    verdict: the owners of the gradients at a node; None if no pass arrived there
    covered: by node of a layer call whose rule gives rows, the parameters of these rows
    ends: nodes that depend on the batch, at which the search stops
    assumed: whether to count everything that may depend on the batch as dependent
    of_parameters: nodes that depend on parameters only
    of_batch: nodes of layers that got the batch
    following: nodes that are counted as dependent on the batch, so that values of parameters meet it there
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
        following: Collection[Node] = (),
    ) -> None:
        self.graph, self.names, self.given, self.fixed, self.samples = graph, names, given, fixed, samples
        self.verdict, self.covered, self.ends, self.assumed = verdict, covered or {}, ends, assumed
        self.of_parameters, self.of_batch, self.following = of_parameters, of_batch, following
        self._follows: dict[Node, Follows] = {}
        self.keys = Keys(names)

    def find(self) -> Meetings:
        """Climbs from each parameter to its meetings."""
        self.found: list[Meeting] = []
        self.mixed: dict[Value, Taker] = {}  # values whose samples mix in a taker
        self.returned: set[Value] = set()  # values that no node takes: outputs
        self.climbed: dict[Node, None] = {}  # the nodes on the way
        self.inner: list[tuple[Value, Taker]] = []  # uses of values that make other values of parameters
        waiting = [Value(leaf, 0) for leaf in self.graph.leaves if leaf in self.names]
        seen = set(waiting)
        while waiting:
            value = waiting.pop()
            takers = self.graph.takers.get(value, ())
            if not takers:
                self.returned.add(value)
            for taker in takers:
                if self.is_covered(value, taker.node):
                    if not is_of(self.names, taker.node):
                        continue
                else:
                    self.climbed[taker.node] = None
                    if self._is_meeting(value, taker):
                        continue
                    self.inner.append((value, taker))
                above = {Value(taker.node, number) for number in range(max(1, len(made(taker.node))))} - seen
                seen |= above
                waiting += above
        return self

    def _is_meeting(self, value: Value, taker: Taker) -> bool:
        """Whether a use is a meeting, or a node at which samples mix.  Stores it if so."""
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
        """The nodes whose gradients must show whether they depend on the batch."""
        return [node for node, follows in self._follows.items() if follows is Follows.MAYBE]

    def doubtful(self) -> list[Node]:
        """The nodes that got something of unknown origin, and at which samples mix if that depends on the batch."""
        mixed = [node for node in self.climbed if (verdict := self.verdict(node)) is not None and verdict.is_mixed]
        return [node for node in mixed if self.follows(node) is Follows.MAYBE]

    def is_covered(self, value: Value, node: Node) -> bool:
        return gives_rows(self.covered, self.keys, value, node)

    def follows(self, node: Node) -> Follows:
        """Whether a node depends on the batch: it, or a node behind it, got a part of the batch."""
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
        """Whether a node depends on the batch through its own operands, without those made by other nodes."""
        if node in self.of_parameters:
            return Follows.NO
        if node in self.ends or node in self.following:
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
            return Follows.YES  # a copy for each sample
        unknown = [x for x in operands if x.ndim and memory_of(x) not in self.fixed]
        bare = sum(ahead is None for ahead, _ in node.next_functions) > len(operands) - len(unknown)
        # An operand that no node made, and sizes that may hold samples: of the batch if its gradients are samples' own.
        if (self.assumed or node in self.of_batch) and (unknown or bare):
            return Follows.YES
        if not unknown and not bare:
            return Follows.NO
        if any(size and size % self.samples == 0 for x in made(node) for size in x.shape):
            return Follows.MAYBE if verdict is None or verdict.is_mixed or verdict.owners == 0 else Follows.YES
        return Follows.YES if verdict is not None and verdict.is_owned else Follows.NO  # rows of some samples

    def _is_doubtful(self, node: Node) -> bool:
        """Whether a node behind this one may depend on the batch and would mix its samples if it does."""
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
    """Keys that identify uses of values of parameters from step to step.  names: the parameters' names, by leaf"""

    def __init__(self, names: Mapping[Node, str]) -> None:
        self.names = names
        self._known: dict[Node, tuple[str, frozenset[str]]] = {}

    def below(self, node: Node) -> frozenset[str]:
        """The parameters on which a value depends."""
        return self._of(node)[1]

    def of(self, value: Value, taker: Taker) -> Hashable:
        """The key of a use: how the value is computed from parameters, and what takes it."""
        return self._of(value.node)[0], value.number, taker.node.name(), taker.place, len(shape_of(Value(taker.node, 0)))

    def with_all_behind(self, key: Hashable, taker: Taker) -> Hashable:
        """A key that also tells how the other operands of the taker are computed."""
        return key, self._of(taker.node)[0]

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
        # Hashed, so that a key stays short however many ways lead to the value.
        text = f"{node.name()} {' '.join(own for own, _ in behind)}"
        return f"{node.name()} {blake2b(text.encode(), digest_size=8).hexdigest()}", frozenset().union(
            *(b for _, b in behind)
        )


def gives_rows(covered: Mapping[Node, Collection[str]], keys: Keys, value: Value, node: Node) -> bool:
    """Whether a layer's rule gives the rows of a use: of its own parameters, or of a value that it makes of them.

    A value that comes from elsewhere is the layer's argument, even if it is made of the same parameters."""
    is_own = type(value.node) is Leaf or value.node in covered
    return node in covered and is_own and keys.below(value.node) <= set(covered[node])


def is_of(names: Mapping[Node, str], node: Node) -> bool:
    """Whether a node is a view or cast of a parameter.  A derivative taken inside a forward uses those that a layer made."""
    while type(node) is not Leaf:
        if len(node.next_functions) != 1 or next(operands_of(node), None) is not None:
            return False
        ((ahead, _),) = node.next_functions
        if ahead is None:
            return False
        node = ahead
    return node in names


def memory_of(x: Tensor) -> int:
    """An address that differs for tensors in different memory; for tensors without memory, the object's id."""
    if x.is_nested or x.layout != torch.strided or x.is_meta:
        return id(x)
    return part_of(x).untyped_storage().data_ptr()
