"""What the hooks leave behind: who saw which input and which gradient, in which backward pass.  No mathematics.

A `Visit` is one call of one layer in a forward pass; a `Pass` is one backward pass, with what it brought to each visit; a
`Segment` holds the passes whose rows belong to the same samples.  `Recorder` decides what lives how long.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from autograd_hacks.rules.table import covered
from autograd_hacks.trees import map_tensors, tensors_of

NO_TASK = -1
"""What torch calls the current backward pass where none runs."""


def current_task() -> int:
    """The backward pass that is running, by autograd's own count, or `NO_TASK`."""
    return torch._C._current_graph_task_id()


@dataclass(eq=False)
class Visit:
    """One call of a layer.  It holds detached aliases, which keep memory alive but no graph."""

    path: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: dict[str, tuple[Tensor, Node]]  # those that its rule covers and that train, each with its end of the graph
    outputs: int
    forward: int  # which forward of the model
    task: int  # the backward pass that recomputes this call, or NO_TASK
    versions: list[tuple[Tensor, int]]
    training: bool
    state: dict[str, tuple[Tensor, int]]  # the parameters that its rule covers, and its own buffers
    random_state: Tensor | None  # before the call, for a layer that draws random numbers in it
    results: tuple[tuple[Tensor, int], ...]  # what such a layer returned
    differentiated: bool = False  # whether a pass with create_graph has come through it


@dataclass(eq=False)
class Received:
    """What one backward pass brought to one visit."""

    grads: list[Tensor | None]
    reached: set[str] = field(default_factory=set)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)


@dataclass(eq=False)
class Losses:
    """What `backward(losses)` knows of its pass."""

    samples: int
    loss_type: str
    recorders: list[Recorder] = field(default_factory=list)


@dataclass(eq=False)
class Pass:
    task: int
    losses: Losses | None
    received: dict[Visit, Received] = field(default_factory=dict)
    higher_order: bool = False
    finished: bool = False


@dataclass(eq=False)
class Segment:
    passes: list[Pass] = field(default_factory=list)
    forwards: set[int] = field(default_factory=set)


class Switch:
    """Whether hooks record, everywhere in the process."""

    on = True


ANNOUNCED: dict[int, Losses] = {}
"""The losses of the passes that `backward` runs just now, by graph task: hooks may run in another thread than it."""


class Recorder:
    """The records of one hooked model: `add_hooks` makes it, and it lives in the hooks alone."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.accumulating = False
        self.attached = True
        self.forwards = 0
        self.why_empty = ""  # why there is nothing to read, where that isn't plain
        self.random_states: dict[nn.Module, Tensor] = {}  # of layers that run just now
        self._answered = False  # whether a backward has come since the last forward began

    def clear(self, why: str = "") -> None:
        self.segments, self.why_empty = [], why

    def begin_forward(self) -> None:
        if current_task() == NO_TASK:  # else checkpointing computes something again, which is no forward
            self.forwards += 1
            self._answered = False

    def begin_layer(self, layer: nn.Module) -> None:
        """Keeps the generator's state for a layer with dropout inside, which may have to be recomputed."""
        if Switch.on and torch.is_grad_enabled() and layer.training and layer.dropout:
            self.random_states[layer] = torch.get_rng_state()

    def visit(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Notes a call of a layer, and asks the graph for the gradients at its outputs."""
        if not Switch.on or torch._C._functorch.peek_interpreter_stack() is not None:
            return  # inside torch.func's transforms tensors are of one transform's making, and end with it
        if self._answered:  # the layer was called by itself, not by the model's forward
            self.begin_forward()
        if not torch.is_grad_enabled():
            return
        owned = covered(layer)
        parameters = {name: p for name, p in owned.items() if p.requires_grad}
        outputs = tensors_of(output)
        random_state = self.random_states.pop(layer, None)
        watched = [(slot, x.grad_fn, x.output_nr) for slot, x in enumerate(outputs) if x.grad_fn is not None]
        if not (parameters and watched):
            return
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor):
            args = (args[0].detach(),)
            inputs = [args[0]]
        else:
            args, kwargs = map_tensors(Tensor.detach, (args, kwargs))
            inputs = tensors_of((args, kwargs))
        visit = Visit(
            path,
            layer,
            args,
            kwargs,
            {name: (p, get_gradient_edge(p).node) for name, p in parameters.items()},
            len(outputs),
            self.forwards,
            current_task(),
            [(x, x._version) for x in inputs if not x.is_inference()],
            layer.training,
            {
                name: (x, x._version)
                for name, x in (*owned.items(), *layer._buffers.items())
                if x is not None and not x.is_inference()
            },
            random_state,
            () if random_state is None else tuple((x.detach(), x._version) for x in outputs),
        )
        for slot, node, output_nr in watched:
            # A hook on the node, not on the tensor: it sees the gradient that the layer's own backward will use, after
            # the user's hooks on the tensor, and an in-place operation after the layer can't move it.
            node.register_prehook(partial(self._receive, visit, slot, output_nr))

    def _receive(self, visit: Visit, slot: int, output_nr: int, grads: tuple[Tensor | None, ...]) -> None:
        # The created graph leads to the parameters past this hook, so that a later pass through both would be read wrong.
        visit.differentiated |= torch.is_grad_enabled()
        grad = grads[output_nr]
        reached = {name for name, (_, node) in visit.parameters.items() if _gets_gradient(node)}
        if (
            not (Switch.on and self.attached) or grad is None or not reached
        ):  # a gradient on its way to an input alone is none of ours
            return
        current = self._pass_of(visit)
        current.higher_order |= visit.differentiated
        received = current.received.setdefault(visit, Received([None] * visit.outputs))
        received.grads[slot] = grad = grad.detach()
        received.versions.append((grad, grad._version))
        received.reached |= reached
        self._answered = True

    def _pass_of(self, visit: Visit) -> Pass:
        """The pass that runs now.

        A pass through nothing but forwards that the segment holds adds to it; one from another forward replaces it, or
        begins a segment of its own while accumulating.
        """
        task = current_task() if visit.task == NO_TASK else visit.task
        if not self.segments:
            self.segments = [Segment()]
        segment = self.segments[-1]
        current = next((p for p in segment.passes if p.task == task), None)
        if current is None:
            current = Pass(task, ANNOUNCED.get(task))
            segment.passes.append(current)
            if current.losses:
                current.losses.recorders.append(self)
            torch.autograd.Variable._execution_engine.queue_callback(partial(setattr, current, "finished", True))
        if visit.forward not in segment.forwards and len(segment.passes) > 1:
            segment.passes.remove(current)
            segment = Segment([current])
            self.segments = [*self.segments, segment] if self.accumulating else [segment]
        segment.forwards.add(visit.forward)
        return current


def _gets_gradient(node: Node) -> bool:
    """Whether the running backward pass will bring a gradient to a parameter, given the parameter's node."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # torch.autograd.grad captures the gradient in front of a leaf's node instead of executing it.  torch answers
        # this question with an error, but only after it has seen that the gradient is wanted.
        if "A leaf node was passed to _will_engine_execute_node" in str(error):
            return True
        raise
