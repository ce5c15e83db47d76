"""Hooks on the graph's nodes: what arrives at uses, what a pass does at parameters, and what it was announced as."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from autograd_hacks.capture.records import Announcement
from autograd_hacks.capture.uses import Graph, LayerCall, NodeUse, Use
from autograd_hacks.probe.plan import Plan
from autograd_hacks.support.internals import current_node, keeps_graph, will_execute, without_subclasses
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.switch import current_task
from autograd_hacks.support.trees import cloned, map_tensors, tensors_of

EXECUTED, CAPTURED, NOT_REACHED = "executed", "captured", ""
"""What a backward pass does at a parameter's node; torch.autograd.grad takes the gradient in front of it."""

Receive = Callable[[Use, int, Sequence[Tensor | None], "Node | None", "AtOutput | None"], None]
"""``receive(use, slot, grads, node, hook)`` gets the gradients at some of a use's tensors, from the number ``slot`` on.

node: where the hook is; None for a call in a pass of which no graph is made    hook: the one at a call's output
"""

ANNOUNCED: dict[int, Announcement] = {}
"""What is known beforehand of the passes that run now, by graph task: hooks may run in another thread than `backward`."""


def node_of(parameter: Tensor) -> Node:
    """Where a parameter ends the graph."""
    if type(parameter) is Parameter and parameter.requires_grad and torch.is_grad_enabled():
        # What get_gradient_edge does, without its context, which takes two thirds of 3 µs.
        function = parameter.view_as(parameter).grad_fn
        if function is not None and (node := function.next_functions[0][0]) is not None:
            return node
    with without_subclasses():  # which would put a node for the subclass in between
        return get_gradient_edge(parameter).node


def reach_of(node: Node) -> str:
    """What the running backward pass does at a parameter's node: EXECUTED, CAPTURED or NOT_REACHED."""
    try:
        return EXECUTED if will_execute(node) else NOT_REACHED
    except RuntimeError as error:
        # autograd.grad captures this leaf: the engine raises instead of answering.
        if "A leaf node was passed to _will_engine_execute_node" in str(error):
            return CAPTURED
        raise


class AtOutput:
    """A hook on the node of a layer's output, or of the base that the output is a view of.

    On the node and not on the tensor, since it so sees the gradient that the layer's own backward will use, after the
    user's hooks on the tensor, and since in-place operations after the layer can't move it: they give a view another node,
    but leave its base's in the graph.
    """

    __slots__ = ("call", "graph", "inputs", "live", "number", "receive", "shape", "slot")

    def __init__(
        self, call: LayerCall, graph: Graph, receive: Receive, slot: int, output: Tensor, live: Any, inputs: frozenset[Node]
    ) -> None:
        self.receive, self.slot, self.shape = receive, slot, output.shape
        self.number = (output if output._base is None else output._base).output_nr  # which of what the node made it is
        self.live = live  # the call's arguments in their graph, where rows may be differentiated
        self.inputs = inputs  # what made these
        self.call: LayerCall | None = call
        self.graph: Graph | None = graph

    def __call__(self, grads: tuple[Tensor | None, ...], node: Node | None = None, keeps: bool | None = None) -> None:
        if self.call is None:
            return
        grad = grads[self.number]
        if grad is not None and grad.shape != self.shape:
            grad = grad.reshape(self.shape)
        if node is None and torch.is_grad_enabled():
            node = current_node()
        self.receive(self.call, self.slot, (grad,), node, self)
        if not (keeps_graph() if keeps is None else keeps):
            # Autograd frees what it saved, and a loss that is kept must not keep the inputs.
            self.call = self.graph = self.live = None
            self.inputs = frozenset()


class AtNode:
    """A hook on a node at which values of parameters meet the batch.  It doesn't hold the node, which holds it."""

    __slots__ = ("graph", "receive", "use")

    def __init__(self, use: NodeUse, graph: Graph, receive: Receive) -> None:
        self.receive, self.use, self.graph = receive, use, graph

    def __call__(self, grads: tuple[Tensor | None, ...], node: Node | None = None, keeps: bool | None = None) -> None:
        self.receive(self.use, 0, grads, current_node() if node is None else node, None)


def attach(
    call: LayerCall, graph: Graph, output: Any, receive: Receive, is_compared: bool, live: Any, inputs: frozenset[Node]
) -> tuple[Any, list[tuple[Node, AtOutput]]]:
    """Has the gradients at a call's outputs sent to ``receive``.  Returns the output, and the hooks with their nodes.

    graph: the one that the call refers to    is_compared: whether the call keeps its output, to compare a later one with
    it    live: the arguments in their graph    inputs: what made these
    """
    outputs = tensors_of(output)
    if len(outputs) > 1 or is_compared or not all(x._base is None or keeps_its_node(x) for x in outputs):
        # One output may be computed from another, as an LSTM's h from its c.  The gradient at a copy is that of the
        # uses outside the layer alone; and the user may overwrite the copy, where the result is to be compared or a
        # view's node would be lost.
        output = map_tensors(lambda x: cloned(x) if x.grad_fn is not None else x, output)
        outputs = tensors_of(output)
    hooked = []
    for slot, x in enumerate(outputs):
        source = x if x._base is None or x.grad_fn is None else x._base
        if source.grad_fn is not None:
            hook = AtOutput(call, graph, receive, slot, x, live, inputs)
            source.grad_fn.register_prehook(hook)
            hooked.append((source.grad_fn, hook))
    return output, hooked


def keeps_its_node(output: Tensor) -> bool:
    """Whether an output is no view, or its base reshaped and nothing else: the gradients at both are the same numbers."""
    if output._base is None or output.grad_fn is None:
        return True
    is_reshaped = output.grad_fn.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
    return is_reshaped and output._base.grad_fn is not None and output.grad_fn.next_functions[0][0] is output._base.grad_fn


@dataclass(frozen=True, eq=False)
class Returned:
    """An output of a model; held by the node that made it."""

    edge: int  # which of the node's outputs it is
    layout: Layout  # where its samples are
    samples: int  # N
    plan: Plan
    recorder: weakref.ref[Any]  # of the model
    forward: int
    is_proven: bool  # whether the forward was just proven


RETURNED: weakref.WeakSet[Returned] = weakref.WeakSet()
"""Those whose graphs are there and which losses are asked for: of forwards that were just proven, or return parameters."""


def mark_returned(output: Tensor, mark: Returned) -> None:
    """Has `returned_in` find an output of a model."""
    if output.grad_fn is not None:
        if mark.is_proven or mark.plan.returns_parameters:
            RETURNED.add(mark)
        notes: Any = output.grad_fn.metadata  # which torch has as a method in its types
        notes.setdefault(Returned, {})[mark.edge] = mark


def returned_in(x: Tensor) -> list[tuple[GradientEdge, Returned]]:
    """The marked outputs that a tensor follows from."""
    found: list[tuple[GradientEdge, Returned]] = []
    waiting = [] if x.grad_fn is None else [x.grad_fn]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        notes: Any = node.metadata
        marks = notes.get(Returned, {})
        found += [(GradientEdge(node, edge), mark) for edge, mark in marks.items()]
        ahead = {other for other, _ in node.next_functions if other is not None} - seen if not marks else set()
        waiting += ahead
        seen |= ahead
    return found


@contextmanager
def announced(output: Tensor, losses: Announcement) -> Iterator[Tensor]:
    """A context in which the hooks know what a backward pass is for, that begins at the tensor which it gives."""
    # A node of its own in front of all others, which tells the recorders about this pass before any of them records.
    with torch.enable_grad():
        root = output.view_as(output)
    tasks: list[int] = []

    def announce(_: object) -> None:
        tasks.append(current_task())
        ANNOUNCED[tasks[-1]] = losses

    if root.grad_fn is not None:
        root.grad_fn.register_prehook(announce)
    try:
        yield root
    finally:
        for task in tasks:
            ANNOUNCED.pop(task, None)
