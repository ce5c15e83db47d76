"""Backward passes of which a graph is made: each uses weights once more, and is noted as a call of its own, turned round.

A layer that is linear in its weight and in its input is one form T(W, x, g) = ⟨g, y⟩, linear in each of the three.  Its
forward uses W with x known, and the gradient that comes to y is g.  A pass of which a graph is made uses W with g known and
makes gx; the gradient u that comes to gx through that graph adds ∂T/∂W (x := u, g := g), which is the layer's own rule.  The
pass that is differentiated next turns it round again, to any order.  No mathematics.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.capture.calls import Edge, Graph, OutputGrads, RecordedCall, Way
from autograd_hacks.capture.graph import AtNode, Receive, anchored
from autograd_hacks.forms import Form
from autograd_hacks.support.trees import version_of


class Entry:
    """Where gradient leaves a call: a hook on what it was given, an alias of the user's own tensor."""

    def __init__(self, shape: torch.Size | None = None) -> None:
        self._shape = shape  # of what leaves, as formulas know it, where that isn't as it leaves
        self._made: Made | None = None  # by the running pass, whose gradient is on its way out

    def into(self, x: Tensor) -> Tensor:
        """What the call is to be given in the place of x."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        self.hear_at(alias := x.view_as(x))
        return alias

    def hear_at(self, x: Tensor) -> None:
        """Has gradient leave at what the call was given.  Gradient of other calls that were given it does no harm: what
        comes to a sum of gradients comes to each."""
        x.register_hook(self._leaves)  # and not on its node, where a gradient that is asked for itself doesn't come

    def turn(self, call: RecordedCall, grad: Tensor, shape: torch.Size, receive: Receive) -> Tensor:
        """A pass of which a graph is made brings a gradient to the call's output.  Returns what goes on in its place.

        grad: as it arrives at the node    shape: as the call returned it
        """
        self._made = Made(call, grad, shape, receive)
        return self._made.entry.into(grad)

    def forget(self) -> None:
        """The pass is over, whether or not it has gone out here."""
        self._made = None

    def _leaves(self, grad: Tensor) -> Tensor | None:
        made, self._made = self._made, None
        if made is None or not (grad.requires_grad or made.call.skipped):
            return None
        return made.attach(grad, self._shape or grad.shape)


class Made:
    """A call that a pass makes of another: it is given the gradient at that one's output, and returns that at its input."""

    def __init__(self, call: RecordedCall, grad: Tensor, shape: torch.Size, receive: Receive) -> None:
        self.call, self.grad, self.receive = call, grad, receive
        self.known, self.entry = grad.reshape(shape), Entry(shape)

    def attach(self, out: Tensor, shape: torch.Size) -> Tensor:
        """What the call returns, with a hook where gradient comes to it.  shape: as formulas know it"""
        graph, way = Graph(), self.call.way
        inner, of_input = (way.way, not way.of_input) if isinstance(way, ByTurning) else (way, False)
        call = replace(
            self.call,
            way=ByTurning(inner, self.known.detach(), of_input),
            edges={local: self.call.edges[local] for local in self.call.turns},
            versions=[(self.grad.detach(), version_of(self.grad))],
            entry=self.entry,
            outputs=(),
            order=self.call.order + 1,
            graph=weakref.ref(graph),
        )
        alias, at = out.view_as(out), AtNode(call, graph, self.receive, 0, 0, shape, ((self.known,), {}))
        if call.skipped:
            parameters = [edge.parameter for edge in call.edges.values()]
            return anchored(alias if out.requires_grad else alias.clone(), at, parameters)
        assert alias.grad_fn is not None
        alias.grad_fn.register_prehook(at)
        return alias


@dataclass(frozen=True, eq=False)
class ByTurning:
    """The way of a call that a pass has made of another: the other's, with what came to it in the place of what it lacks."""

    way: Way
    known: Tensor  # of a form of three: the input, or the gradient at the output
    of_input: bool  # which of the two

    def _turned(self, call: RecordedCall, grads: OutputGrads) -> tuple[RecordedCall, OutputGrads]:
        x, g = (self.known, grads.first) if self.of_input else (grads.first, self.known)
        return self.way.with_input(replace(call, way=self.way), (x,), {}), OutputGrads([g], [version_of(g)], grads.reached)

    def rows(self, call: RecordedCall, grads: OutputGrads) -> int:
        call, grads = self._turned(call, grads)
        return call.way.rows(call, grads)

    def forms(self, call: RecordedCall, grads: OutputGrads) -> Mapping[str, Form]:
        call, grads = self._turned(call, grads)
        return call.way.forms(call, grads)

    def with_input(self, call: RecordedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall:
        return replace(call, way=replace(self, known=args[0]))


def turning(
    linear_in: str | None, edges: Mapping[str, Edge], inputs: Sequence[Tensor], entry: tuple[Entry, Tensor] | None
) -> dict[str, Any]:
    """What a record says of passes of which a graph is made, of a call by rule.

    linear_in: as the rule says    entry: of the call, and what it was to be given
    """
    if not any(x.requires_grad for x in inputs) or (linear_in is not None and linear_in not in edges):
        return {"is_lost": False}  # there is nothing to differentiate by, or no weight that trains
    if linear_in is None or len(inputs) > 1:
        return {}
    at = Entry() if entry is None or inputs[0] is not entry[1] else entry[0]
    if entry is None or inputs[0] is not entry[1]:  # a hook of the user's stands between
        if inputs[0].grad_fn is None:
            return {}
        at.hear_at(inputs[0])
    return {"entry": at, "turns": (linear_in,), "is_lost": False}
