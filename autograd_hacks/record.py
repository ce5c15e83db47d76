"""What the hooks leave behind: who saw which input and which gradient, in which backward pass.  No mathematics.

A `Visit` is one call of one layer in a forward pass; a `Pass` is one backward pass, with what it brought to each visit; a
`Segment` holds the passes whose rows belong to the same samples.  `Recorder` decides what lives how long.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from autograd_hacks.rules.table import covered, rule_for
from autograd_hacks.trees import map_tensors, tensors_of, version_of

NO_TASK = -1
"""What torch calls the current backward pass where none runs."""

Versions = list[tuple[Tensor, int]]
RandomState = dict[str, Tensor]
"""The generators' states by device."""


class Graph:
    """What only a graph holds on to."""


def current_task() -> int:
    """The backward pass that is running, by autograd's own count, or `NO_TASK`."""
    return torch._C._current_graph_task_id()


class Switch:
    """Whether hooks record, everywhere in the process."""

    enabled = True
    pauses = 0  # contexts that are open, in whatever thread

    @classmethod
    def on(cls) -> bool:
        return cls.enabled and not cls.pauses


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
    recomputed_in: Pass | None  # the backward pass that makes this call again, for checkpointing
    versions: Versions
    training: bool
    state: dict[str, tuple[Tensor, int]]  # the parameters that its rule covers, and its own buffers
    random_state: RandomState | None  # before the call, for a layer that draws random numbers in it
    results: list[Tensor]  # what came out, for a layer that is recomputed
    precision: torch.dtype | None  # autocast's, where the call ran under it
    is_first: bool  # whether no other forward hook came before ours
    graph: weakref.ref[Graph]  # dead when no backward pass can come through this call any more


@dataclass(eq=False)
class Received:
    """What one backward pass brought to one visit."""

    grads: list[Tensor | None]
    reached: set[str] = field(default_factory=set)
    versions: Versions = field(default_factory=list)


@dataclass(eq=False)
class Losses:
    """What `backward(losses)` knows of its pass."""

    samples: int
    loss_type: str
    recorders: list[Recorder] = field(default_factory=list)


@dataclass(eq=False)
class Pass:
    """One backward pass, with those that checkpointing runs inside it."""

    task: int
    losses: Losses | None
    received: dict[Visit, Received] = field(default_factory=dict)
    captures: bool = False  # torch.autograd.grad, which leaves .grad alone
    forwards_before: int = 0  # since the pass before it
    higher_order: bool = False
    ambiguous: bool = False  # recomputed, and it can't be known which of several forwards
    finished: bool = False
    reached: set[int] = field(default_factory=set)  # the ids of the parameters that its visits lead to
    arrived: dict[Tensor, Tensor] = field(default_factory=dict)  # parameters' gradients, while they are to be compared

    def let_go(self) -> None:
        """Or its visits and it would hold each other."""
        for visit in self.received:
            visit.recomputed_in = None


@dataclass(eq=False)
class Segment:
    """Passes that add, since they come through a forward that others have come through."""

    passes: list[Pass] = field(default_factory=list)
    forwards: set[int] = field(default_factory=set)

    def takes(self, current: Pass, visit: Visit) -> bool:
        """Whether a pass that comes through a visit adds to these.  torch.autograd.grad adds nothing to ``.grad``."""
        return visit.forward in self.forwards and all(other.captures == current.captures for other in self.passes)

    def can_be_run_again(self) -> bool:
        return any(visit.graph() is not None for earlier in self.passes for visit in earlier.received)


ANNOUNCED: dict[int, Losses] = {}
"""The losses of the passes that `backward` runs just now, by graph task: hooks may run in another thread than it."""


class Recorder:
    """The records of one hooked model: `add_hooks` makes it, and it lives in the hooks alone."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.strays: dict[int, tuple[int, Tensor]] = {}  # task and parameter, by id, where gradient came past the layer
        self.why_empty = ""  # why there is nothing to read, where that isn't plain
        self.accumulating = False
        self.attached = True
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.watched = WeakTensorKeyDictionary()  # the parameters' hooks
        self.written = WeakTensorKeyDictionary()  # the grad1 of each parameter, by weak reference
        self.forwards = 0
        self.in_forward = False
        self.comparing = False  # whether a created graph may lead to the parameters past the hooks
        self.random_states: weakref.WeakKeyDictionary[nn.Module, RandomState] = weakref.WeakKeyDictionary()
        self._superseded: list[Segment] = []  # which the running pass may yet come through
        self._superseded_strays: dict[int, tuple[int, Tensor]] = {}
        self._running: Pass | None = None
        self._visited: set[int] = set()  # layers since the last forward began
        self._answered = False  # whether a backward has come since the last forward began
        self._unanswered = 0  # forwards since the last backward

    def clear(self, why: str = "") -> None:
        self.segments, self.strays, self.why_empty = [], {}, why
        self._superseded, self._superseded_strays = [], {}

    def watch(self, parameter: Tensor) -> None:
        """Asks for word of each gradient that arrives at the parameter, whichever way it came."""
        if is_lazy(parameter) or not parameter.is_leaf:
            return
        if parameter.requires_grad and parameter not in self.watched:
            self.watched[parameter] = parameter.register_hook(partial(self._arrive, weakref.ref(parameter)))

    def detach(self) -> None:
        """Ends all recording, also by graphs that outlive the hooks."""
        self.attached = False
        self.clear()
        handles: list[RemovableHandle] = list(self.watched.values())
        for handle in handles:
            handle.remove()

    def begin_forward(self, with_gradients: bool) -> None:
        """Numbers a forward.  with_gradients: whether a backward pass may come to it"""
        if not Switch.on() or current_task() != NO_TASK:  # checkpointing computes something again, which is no forward
            return
        self.comparing &= not self._answered
        self.forwards += 1
        self._unanswered += with_gradients
        self._answered = False

    def begin_layer(self, layer: nn.Module) -> None:
        """Keeps the generator's state for a layer with dropout inside, which may have to be recomputed."""
        if Switch.on() and torch.is_grad_enabled() and layer.training and layer.dropout:
            devices = {p.device for p in layer.parameters() if p.is_cuda}
            states = {str(device): torch.cuda.get_rng_state(device) for device in devices}
            self.random_states[layer] = {"cpu": torch.get_rng_state(), **states}

    def visit(
        self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_first: bool
    ) -> Any:
        """Notes a call of a layer, and asks the graph for the gradients at its outputs.  Returns the output."""
        random_state = self.random_states.pop(layer, None)
        if not Switch.on() or torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state():
            return output  # inside torch.func's transforms tensors are of one transform's making, and end with it
        self._place(layer)
        owned = covered(layer)
        parameters = {name: p for name, p in owned.items() if p.requires_grad}
        outputs = tensors_of(output)
        if not (parameters and torch.is_grad_enabled() and any(x.grad_fn is not None for x in outputs)):
            return output
        if any(x.is_nested for x in outputs):
            return output  # no axis of samples; the gradients are noticed when they arrive
        recomputes = getattr(rule_for(layer), "recomputes", False)
        results = [x.detach() for x in outputs] if recomputes else []
        if len(outputs) > 1 or recomputes or not all(_keeps_its_node(x) for x in outputs):
            # One output may be computed from another, as an LSTM's h from its c.  The gradient at a copy is that of the
            # uses outside the layer alone; and the user may overwrite the copy, where the result is to be compared or a
            # view's node would be lost.
            output = map_tensors(lambda x: x if x.grad_fn is None else x.clone(), output)
            outputs = tensors_of(output)
        device, graph = outputs[0].device.type, Graph()
        for parameter in parameters.values():
            self.watch(parameter)
        args = map_tensors(Tensor.detach, args)
        kwargs = map_tensors(Tensor.detach, kwargs) if kwargs else {}
        visit = Visit(
            path=path,
            layer=layer,
            args=args,
            kwargs=kwargs,
            parameters={name: (p, get_gradient_edge(p).node) for name, p in parameters.items()},
            outputs=len(outputs),
            forward=self.forwards,
            recomputed_in=self._running,
            versions=_versions([*tensors_of(args), *(tensors_of(kwargs) if kwargs else ())]),
            training=layer.training,
            state={name: (x, version_of(x)) for name, x in (*owned.items(), *layer._buffers.items()) if x is not None},
            random_state=random_state,
            results=results,
            precision=torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None,
            is_first=is_first,
            graph=weakref.ref(graph),
        )
        for slot, x in enumerate(outputs):
            if x.grad_fn is not None:
                source = x if x._base is None else x._base
                assert source.grad_fn is not None  # what is no reshaped base has been copied
                hook = AtNode(self, visit, graph, slot, source.output_nr, x.shape)
                source.grad_fn.register_prehook(hook)
        return output

    def _place(self, layer: nn.Module) -> None:
        """Finds out which forward, or which backward, a layer is called in."""
        task = current_task()
        if task != NO_TASK:
            self._enter(task)
            return
        if self._running is not None:  # left by a pass that failed
            self._running.let_go()
            self._running = None
        if not self.in_forward:  # the layer is called by itself, a forward of its own
            again = self._answered or id(layer) in self._visited or not self._visited
            self.begin_forward(torch.is_grad_enabled() and again)
        self._visited.add(id(layer))

    def _enter(self, task: int) -> Pass:
        """The pass that runs now; a task within another one is part of that one's pass."""
        if self._running is None:
            self._running = Pass(task, ANNOUNCED.get(task), forwards_before=self._unanswered)
            self._superseded, self._superseded_strays = [], {}
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, self._running))
        return self._running

    def _finish(self, ended: Pass) -> None:
        ended.finished = True
        ended.let_go()
        self._running, self._unanswered = None, 0
        self._superseded, self._superseded_strays = [], {}
        self._visited.clear()

    def receive(self, visit: Visit, slot: int, grad: Tensor | None) -> None:
        """Notes the gradient that the running pass brings to one of a visit's outputs."""
        if not (Switch.on() and self.attached) or torch._C._functorch.peek_interpreter_stack() is not None:
            return
        if grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad):
            return  # is_grads_batched: many passes in one
        self.comparing |= torch.is_grad_enabled()
        reached = {name for name, (_, node) in visit.parameters.items() if gets_gradient(node)}
        if grad is None or not reached:  # a gradient on its way to an input alone is none of ours
            return
        if visit.recomputed_in is None and self._running is not None and self._running.task != current_task():
            self._running = None  # left by a pass that failed
        current = visit.recomputed_in or self._enter(current_task())
        current.captures |= any(is_captured(visit.parameters[name][1]) for name in reached)
        current.higher_order |= torch.is_grad_enabled()
        current.ambiguous |= visit.recomputed_in is not None and current.forwards_before > 1
        self._file(current, visit)
        received = current.received.setdefault(visit, Received([None] * visit.outputs))
        received.grads[slot] = grad.detach()
        received.versions += _versions([grad.detach()])
        received.reached |= reached
        current.reached |= {id(visit.parameters[name][0]) for name in reached}
        self._answered = True

    def _file(self, current: Pass, visit: Visit) -> None:
        """Puts the pass into a segment.

        A pass through a forward that a segment holds adds to it.  One through other forwards alone replaces all, or begins
        a segment of its own while accumulating.  What it replaces is kept until its end if there is still a graph by which
        it could come there: several losses of one forward, some with layers that were called later.
        """
        home = next((segment for segment in self.segments if current in segment.passes), None)
        target = next((s for s in (*self.segments, *self._superseded) if s is not home and s.takes(current, visit)), None)
        if home is not None and target is not None:
            target.passes += home.passes
            target.forwards |= home.forwards
            others = self._superseded if target in self._superseded else self.segments
            self.segments, home = [segment for segment in others if segment is not home], target
            self.strays = self._superseded_strays | self.strays
        elif home is None:
            home = target or Segment()
            home.passes.append(current)
            if current.losses and self not in current.losses.recorders:
                current.losses.recorders.append(self)
            if target is None and self.accumulating:
                self.segments = [*self.segments, home]
            elif target is None:
                if any(s.can_be_run_again() for s in self.segments):
                    self._superseded, self._superseded_strays = self.segments, self.strays
                self.segments = [home]
                self.strays = {key: stray for key, stray in self.strays.items() if stray[0] == current.task}
        home.forwards.add(visit.forward)

    def _arrive(self, reference: weakref.ref[Tensor], grad: Tensor) -> None:
        """Hears of the gradient that a pass brings to a parameter, after all visits that it came through."""
        parameter = reference()
        if parameter is None or not (Switch.on() and self.attached):
            return
        if self._running is None or id(parameter) not in self._running.reached:
            self.strays[id(parameter)] = self._running.task if self._running else current_task(), parameter
        elif self.comparing:
            before = self._running.arrived.get(parameter)
            self._running.arrived[parameter] = grad.detach() if before is None else before + grad


class AtNode:
    """A hook on the node of a layer's output, or of the base that the output is a view of.

    On the node and not on the tensor, since it so sees the gradient that the layer's own backward will use, after the
    user's hooks on the tensor, and since in-place operations after the layer can't move it: they give a view another node,
    but leave its base's in the graph.
    """

    def __init__(self, recorder: Recorder, visit: Visit, graph: Graph, slot: int, output_nr: int, shape: torch.Size) -> None:
        self.recorder, self.slot, self.output_nr, self.shape = recorder, slot, output_nr, shape
        self.held: tuple[Visit, Graph] | None = visit, graph

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        if self.held is None:
            return
        grad = grads[self.output_nr]
        if grad is not None and grad.shape != self.shape:
            grad = grad.reshape(self.shape)
        self.recorder.receive(self.held[0], self.slot, grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.held = None  # autograd frees what it saved, and a loss that is kept must not keep the inputs


def _keeps_its_node(output: Tensor) -> bool:
    """Whether an output is no view, or its base reshaped and nothing else: the gradients at both are the same numbers."""
    if output._base is None or output.grad_fn is None:
        return True
    is_reshaped = output.grad_fn.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
    return is_reshaped and output._base.grad_fn is not None and output.grad_fn.next_functions[0][0] is output._base.grad_fn


def _versions(tensors: list[Tensor]) -> Versions:
    return [(x, version_of(x)) for x in tensors]


def gets_gradient(node: Node) -> bool:
    """Whether the running backward pass will bring a gradient to a parameter, given the parameter's node."""
    return is_captured(node) or torch._C._will_engine_execute_node(node)


def is_captured(node: Node) -> bool:
    """Whether torch.autograd.grad takes the gradient in front of a leaf's node, instead of executing it."""
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError as error:
        # torch's answer for a leaf that autograd.grad captures, given only after it has seen that the gradient is wanted.
        if "A leaf node was passed to _will_engine_execute_node" in str(error):
            return True
        raise
    return False
