"""A forward that has run, with its graph and the uses of parameters that were found there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from sys import maxsize
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.arrivals import AtNode, on_node, own_hook, put_on
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.kinds import Known, Within
from autograd_hacks.capture.log import Noted
from autograd_hacks.capture.uses import Edge, NodeUse, Planned
from autograd_hacks.graph.trace import Trace
from autograd_hacks.support.graph import Leaf, Value, nodes_behind
from autograd_hacks.support.internals import sequence_number, tree_leaves
from autograd_hacks.support.layout import differs, rounding_of, samples_of_rows
from autograd_hacks.support.parts import memory_of
from autograd_hacks.support.switch import current_task
from autograd_hacks.support.trees import is_packed, tensors_in, unpacked

UsersHooks = Sequence[tuple[dict[int, Any], int]]
"""Dictionaries of hooks that torch calls, and keys."""


@dataclass(eq=False)
class Ran:
    """A forward that has run, with its graph.  The first fields are set as it begins."""

    within: Within  # what its uses share
    receiver: Backward  # to which its uses send gradients
    ends: frozenset[Node] = frozenset()  # nothing behind these nodes belongs to it: they made the arguments, for example
    known: Known | None = None  # what was known as it began; None if its graph isn't to be read
    began: int = 0  # torch's number of the first node that it could make
    is_threaded: bool = False  # whether another thread has run forwards, too, whose nodes may have any numbers
    hooks_before: int = 0  # torch's count of hooks as it began
    users_hooks: UsersHooks = ()  # on gradients, that were registered since
    modules: Sequence[nn.Module] = ()  # whose own parameters and buffers are used
    trained: Callable[[], Mapping[str, Tensor]] = dict  # returns the trainable parameters by name
    arguments: Any = ()
    outputs: Sequence[Tensor] = ()  # the tensors that were returned, and behind them those that the model keeps
    noted: Sequence[Noted] = ()
    returned: Any = None  # the structure that holds the outputs
    count: int = maxsize  # how many of the outputs are returned
    added: Mapping[Value, Any] = field(default_factory=dict)  # where samples are in what its own losses add up
    labels: Sequence[Sequence[Any]] = ()  # by node of its trace, of the gradients at the outputs, once that was read
    uses: dict[Node, Planned] = field(default_factory=dict)  # by the node that takes values of parameters
    takers: Sequence[int] = ()  # the numbers of the nodes that take a parameter

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trainable parameters, by name."""
        return self.trained()

    @cached_property
    def tensors(self) -> list[Tensor]:
        return tensors_in(*self.arguments) if self.arguments else []

    @cached_property
    def packed(self) -> dict[Any, Tensor]:
        """By number of an output that is a packed sequence, the sample of each row."""
        rows = packed_rows(self.returned)
        return {slot: rows[id(x)] for slot, x in enumerate(self.outputs) if id(x) in rows}

    @cached_property
    def trace(self) -> Trace:
        """The graph behind the outputs; a reader puts its own here.  Raises Nested."""
        return self.traced([(x.grad_fn, x.output_nr) for x in self.outputs if x.grad_fn is not None])

    def traced(self, roots: Sequence[tuple[Node, int]]) -> Trace:
        """The graph behind some values.  It ends at uses of earlier forwards, which these have found.

        A state leads there that something else than an argument holds, such as a cache."""
        parameters = {*map(id, self.parameters.values())}
        trace = Trace(roots, parameters, self.ends, self.within.kind.plan)
        if self.is_threaded or (self.began and min(map(sequence_number, trace.nodes), default=maxsize) < self.began):
            self.ends |= {
                node
                for node in trace.nodes
                if self.is_threaded or sequence_number(node) < self.began
                for hook in on_node(node)
                if hook.receiver is self.receiver
                and (use := hook.use) is not None
                and use.edges
                and use.within is not self.within
            }
            trace = Trace(roots, parameters, self.ends, self.within.kind.plan)
        return trace

    @cached_property
    def leaves(self) -> dict[Node, str]:
        """The parameters' names, by the node at which each ends the graph."""
        trace, names = self.trace, dict(zip(map(id, self.parameters.values()), self.parameters))
        ends = zip(map(trace.nodes.__getitem__, trace.leaves), map(id, trace.variables))
        return {leaf: names[at] for leaf, at in ends if at in names}

    @cached_property
    def leaf_of(self) -> dict[str, Any]:
        """The same the other way round."""
        return {name: leaf for leaf, name in self.leaves.items()}

    def is_fixed(self, x: Tensor) -> bool:
        """Whether a tensor has the memory of a buffer or, if it can, of a parameter."""
        address, may_train = memory_of(x), x.is_floating_point() or x.is_complex()
        return address in self._of_buffers or (may_train and address in self._of_parameters)

    @cached_property
    def _of_buffers(self) -> set[int]:
        return {memory_of(x) for m in self.modules if m._buffers for x in m._buffers.values() if x is not None}

    @cached_property
    def _of_parameters(self) -> set[int]:
        return {memory_of(p) for m in self.modules for p in m._parameters.values() if p is not None}

    def is_covered(self) -> bool:
        """Whether layers with rules cover all parameters."""
        return {name for noted in self.noted for name in noted.call.known.names} >= self.parameters.keys()

    def value(self, at: int | Value) -> Value:
        """An output by its number, or a value itself."""
        if not isinstance(at, int):
            return at
        x = self.outputs[at]
        assert x.grad_fn is not None
        return Value(x.grad_fn, x.output_nr)

    @cached_property
    def inside(self) -> Sequence[Sequence[Node]]:
        """The nodes of each noted call, from its outputs to its inputs."""
        graphs = [(nodes_behind([node for node, _ in noted.hooks], noted.inputs), noted.inputs) for noted in self.noted]
        return [[node for node in own if node not in ends and type(node) is not Leaf] for own, ends in graphs]

    def attach(self) -> None:
        """Sends the gradients at the uses' nodes to the receiver."""
        for node, plan in self.uses.items():
            edges = {name: Edge(name, (leaf := self.leaf_of[name]).variable, leaf) for name in plan.locals}
            for edge in edges.values():
                self.receiver.watch(edge.parameter)  # it may be new since `add_hooks`
            own = NodeUse(
                known=plan,
                edges=edges,
                slots=plan.slots,
                within=self.within,
                whose=plan.whose,
                is_plain=not plan.is_users and self.within.samples != 1,
            )
            put_on(node, AtNode(own, self.receiver))

    def watch(self, slots: Sequence[int], why: str) -> None:
        """Refuses gradient that comes through outputs from outside of the forward, as from a loss that reads them.

        slots: the outputs' numbers    why: the reason"""
        if not slots:
            return
        nodes = nodes_behind([x.grad_fn for x in self.outputs if x.grad_fn is not None], self.ends)
        edges = [(node, n, at) for node in nodes if node not in self.ends for n, at in enumerate(node.next_functions)]
        for slot in slots:
            if self.outputs[slot].grad_fn is not None:
                own, at = list[Tensor | None](), self.value(slot)
                for taker, place in [edge[:2] for edge in edges if edge[2] == at]:  # what these bring comes from inside
                    own_hook(taker.register_hook(lambda brought, _, own=own, n=place: own.append(brought[n])))
                own_hook(at.node.register_prehook(partial(_note_mixed, self.receiver, why, own, at.number)))


def packed_rows(tree: Any) -> dict[int, Tensor]:
    """By the data (id) of packed sequences, the sample of each row."""
    sequences = [x for x in tree_leaves(unpacked(tree, everything=True), is_packed) if is_packed(x)]
    return {id(p.data): samples_of_rows(p) for p in sequences}


def _note_mixed(
    backward: Backward, why: str, own: list[Tensor | None], number: int, grads: tuple[Tensor | None, ...]
) -> None:
    """own: what has come to the value from inside"""
    brought, grad = [x for x in own if x is not None], grads[number]
    own.clear()
    if grad is None or not backward.hears():
        return
    if not brought or bool(differs(grad, torch.stack(brought).sum(0), rounding_of(grad)).any()):
        backward.refuse(why)


def watch_penalty(backward: Backward, node: Node, names: Collection[str]) -> None:
    """Notes gradients that come through an output of parameters alone, which belongs to no sample.  names: theirs"""

    def note(grads: tuple[Tensor | None, ...]) -> None:
        if backward.hears() and any(grad is not None for grad in grads):
            backward.enter(current_task()).beside.update(names)

    own_hook(node.register_prehook(note))
