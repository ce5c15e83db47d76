"""All that is asked of autograd's graph: hooks at the outputs of calls, where parameters end it, and what runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.nn import Parameter

from autograd_hacks.capture.calls import Graph, RecordedCall
from autograd_hacks.capture.records import Announcement
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import Plan
from autograd_hacks.support.switch import current_task
from autograd_hacks.support.trees import cloned, map_tensors, tensors_of

EXECUTED, CAPTURED, NOT_REACHED = "executed", "captured", ""
"""What a backward pass does at a parameter's node; torch.autograd.grad takes the gradient in front of it."""

Live = tuple[tuple[Any, ...], Mapping[str, Any]] | None
"""A call's arguments in their graph; None where nobody differentiates rows."""

Receive = Callable[[RecordedCall, int, Tensor | None, Tensor | None, Live], Tensor | None]
"""``receive(call, slot, grad, raw, live)`` gets the gradient at one of a call's outputs, and as it came to the node.
Returns what is to go on in its place, or None."""

Hear = Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...] | None]
"""A hook on a node: gets the gradients there, and may return others."""

ANNOUNCED: dict[int, Announcement] = {}
"""What is known beforehand of the passes that run now, by graph task: hooks may run in another thread than `backward`."""


@dataclass(frozen=True, eq=False)
class Returned:
    """An output of a model, from a forward that was just proven; held by the node that made it."""

    edge: int  # which of the node's outputs it is
    layout: Layout  # where its samples are
    samples: int  # N
    plan: Plan


RETURNED: weakref.WeakSet[Returned] = weakref.WeakSet()
"""Those whose graphs are there."""


def mark_returned(output: Tensor, layout: Layout, samples: int, plan: Plan) -> None:
    """Has `returned_in` find an output of a model."""
    if output.grad_fn is not None:
        mark = Returned(output.output_nr, layout, samples, plan)
        RETURNED.add(mark)
        notes: Any = output.grad_fn.metadata  # which torch has as a method in its types
        notes.setdefault(Returned, {})[mark.edge] = mark


def returned_in(losses: Tensor) -> list[tuple[GradientEdge, Returned]]:
    """The marked outputs that a tensor follows from."""
    found: list[tuple[GradientEdge, Returned]] = []
    waiting = [losses.grad_fn] if RETURNED and losses.grad_fn is not None else []
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


def node_of(parameter: Tensor) -> Node:
    """Where a parameter ends the graph."""
    if type(parameter) is Parameter and parameter.requires_grad and torch.is_grad_enabled():
        # What get_gradient_edge does, without its context, which takes two thirds of 3 µs.
        function = parameter.view_as(parameter).grad_fn
        if function is not None and function.next_functions[0][0] is not None:
            return function.next_functions[0][0]
    with torch._C.DisableTorchFunctionSubclass():  # which would put a node for the subclass in between
        return get_gradient_edge(parameter).node


def reach_of(node: Node) -> str:
    """What the running backward pass does at a parameter's node: EXECUTED, CAPTURED or NOT_REACHED."""
    try:
        return EXECUTED if torch._C._will_engine_execute_node(node) else NOT_REACHED
    except RuntimeError as error:
        # autograd.grad captures this leaf: the engine raises instead of answering.
        if "A leaf node was passed to _will_engine_execute_node" in str(error):
            return CAPTURED
        raise


def attach(
    call: RecordedCall,
    graph: Graph,
    output: Any,
    receive: Receive,
    is_compared: bool,
    parameters: Sequence[Tensor] = (),
    live: Live = None,
) -> Any:
    """Has the gradients at a call's outputs sent to ``receive``.  Returns the output.

    graph: the one that the call refers to    is_compared: whether the call keeps its output, to compare a later one with
    it    parameters: those that were switched off in the call
    """
    outputs = tensors_of(output)
    if len(outputs) > 1 or is_compared or not all(x._base is None or _keeps_its_node(x) for x in outputs):
        # One output may be computed from another, as an LSTM's h from its c.  The gradient at a copy is that of the
        # uses outside the layer alone; and the user may overwrite the copy, where the result is to be compared or a
        # view's node would be lost.
        output = map_tensors(lambda x: cloned(x) if x.grad_fn is not None or parameters else x, output)
        outputs = tensors_of(output)
    if parameters:
        slots = count()

        def anchor(x: Tensor) -> Tensor:
            at = AtNode(call, graph, receive, next(slots), 0, x.shape, live)
            return anchored(x, at, parameters) if x.is_floating_point() or x.is_complex() else x

        return map_tensors(anchor, output)
    for slot, x in enumerate(outputs):
        if x.grad_fn is not None:
            source = x if x._base is None else x._base
            assert source.grad_fn is not None  # what is no reshaped base has been copied
            source.grad_fn.register_prehook(AtNode(call, graph, receive, slot, source.output_nr, x.shape, live))
    return output


def hear_at(output: Tensor, hear: Hear) -> Tensor:
    """A tensor at whose node gradients are heard of."""
    output = output if output.grad_fn is not None else output.view_as(output)
    if output.grad_fn is not None:
        output.grad_fn.register_prehook(hear)
    return output


class AtNode:
    """A hook on the node of a layer's output, or of the base that the output is a view of.

    On the node and not on the tensor, since it so sees the gradient that the layer's own backward will use, after the
    user's hooks on the tensor, and since in-place operations after the layer can't move it: they give a view another node,
    but leave its base's in the graph.
    """

    __slots__ = ("call", "graph", "live", "output_nr", "receive", "shape", "slot")

    def __init__(
        self,
        call: RecordedCall,
        graph: Graph,
        receive: Receive,
        slot: int,
        output_nr: int,
        shape: torch.Size,
        live: Live = None,
    ) -> None:
        self.receive, self.slot, self.output_nr, self.shape, self.live = receive, slot, output_nr, shape, live
        self.call: RecordedCall | None = call
        self.graph: Graph | None = graph

    def __call__(self, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
        if self.call is None:
            return None
        grad = raw = grads[self.output_nr]
        if grad is not None and grad.shape != self.shape:
            grad = grad.reshape(self.shape)
        other = self.receive(self.call, self.slot, grad, raw, self.live)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # Autograd frees what it saved, and a loss that is kept must not keep the inputs.
            self.call = self.graph = self.live = None
        return None if other is None else (*grads[: self.output_nr], other, *grads[self.output_nr + 1 :])


def _keeps_its_node(output: Tensor) -> bool:
    """Whether an output is no view, or its base reshaped and nothing else: the gradients at both are the same numbers."""
    if output._base is None or output.grad_fn is None:
        return True
    is_reshaped = output.grad_fn.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
    return is_reshaped and output._base.grad_fn is not None and output.grad_fn.next_functions[0][0] is output._base.grad_fn


class _Anchor(torch.autograd.Function):
    """The identity, behind a layer whose parameters are switched off.

    It keeps them in the graph, with no gradient of their own: a pass comes here whether or not the layer's input asks for
    one, and can be asked whether it goes on to them; and what does arrive at them has come by another way.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, hear: Hear, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.hear, ctx.parameters = hear, len(parameters)
        if output._is_view():
            return output.data  # a view that is changed in place later may not come out of a function
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.hear((grad,)) or (grad,)
        return grad if ctx.needs_input_grad[0] else None, None, *[None] * ctx.parameters


def anchored(output: Tensor, hear: Hear, parameters: Sequence[Tensor]) -> Tensor:
    """A layer's output, as one that its parameters lead to.  hear: gets the gradient at it"""
    if output._is_view() and not (
        output._base is not None and output.is_contiguous() and output._base.shape.numel() == output.numel()
    ):
        output = output.clone()
    result: Tensor = _Anchor.apply(output, hear, *parameters)
    return result


def attach_copies(
    call: RecordedCall, graph: Graph, copies: Tensor, receive: Receive, parameters: Sequence[Tensor]
) -> Tensor:
    """The same for copies of a value, a view that has just been made.  With ``parameters`` the gradients go no further."""
    at = AtNode(call, graph, receive, 0, 0, copies.shape, ((), {}))
    if parameters:
        anchor: Tensor = _AnchoredCopies.apply(copies.detach(), at, *parameters)
        return anchor
    return hear_at(copies, at)


class _AnchoredCopies(_Anchor):
    """The same for a view, which stays one: whether what it is of has been overwritten is asked of it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, hear: Hear, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.hear, ctx.parameters = hear, len(parameters)
        return output.view_as(output)


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
