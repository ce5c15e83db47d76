"""Records the layer calls of the running forward.  No mathematics."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.arrivals import AtOutput, attach, keeps_its_node, node_of, put_on
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.records import Record
from autograd_hacks.capture.uses import Edge, GraphAlive, LayerCall
from autograd_hacks.formulas.table import Rule, rule_for
from autograd_hacks.probe.plan import AXES, Place, Plan
from autograd_hacks.support.contexts import RandomState, autocast_dtype, cuda_devices_of, random_state
from autograd_hacks.support.internals import is_traced, is_transformed
from autograd_hacks.support.layout import Layouts, likeliest
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import map_tensors, plain, tensors_in, tensors_of, version_of, versions_of

_NONE: frozenset[Node] = frozenset()

INSIDE_PASS = (
    "a backward pass runs a part of the forward again, in a reentrant checkpoint or in a Function's backward, and the graph "
    "doesn't show where the samples are there. Call checkpoint(..., use_reentrant=False); in transformers "
    "gradient_checkpointing_enable({'use_reentrant': False}). Give a Function what it needs as arguments, and compute in "
    "its backward without modules. Or, if axis 0 of every layer's input is the batch, add_hooks(model, probe=False)."
)
"""Why there are no rows of what a backward pass runs again."""


class Noted(NamedTuple):
    """A layer call of the running forward, with its place in the graph."""

    call: LayerCall
    number: int  # how many calls of the layer there were before
    hooks: list[tuple[Node, AtOutput]]  # on its outputs' nodes
    inputs: frozenset[Node]  # the nodes that made its arguments
    place: Place | None = None  # its place, if the call repeats a known one

    @property
    def is_empty(self) -> bool:
        """Whether the output has no rows, as for an expert that got no samples."""
        return len(self.hooks) == 1 and self.hooks[0][1].shape[:1] == (0,)


class Repeated(NamedTuple):
    """The parts of a layer call that stay the same from forward to forward: for most calls, all but the tensors."""

    fields: dict[str, Any]  # fields of `LayerCall`
    names: dict[str, str]  # of the parameters that train, in the model, by their names in the layer
    place: Place
    rule: Rule
    shape: torch.Size  # of its output
    owned: tuple[tuple[str, Tensor, bool, tuple[torch.dtype, torch.device]], ...]  # parameters: name, whether they train

    @classmethod
    def of(cls, noted: Noted) -> "Repeated | None":
        """Returns None if anything about the call is unusual."""
        call, place, rule = noted.call, None, rule_for(noted.call.layer)
        if call.plan is not None:
            place = call.plan.place_of(call.path, noted.number)
        if place is None or place.kind != AXES or call.labels is not None or not call.samples:
            return None
        if type(call) is not LayerCall or rule is None or rule.recomputes or rule.covers or len(noted.hooks) != 1:
            return None
        if call.random_state is not None or call.recomputed_in is not None or not call.is_own or not _is_one(call.args):
            return None
        own = call.layer._parameters
        if call.kwargs or call.slots != 1 or not call.edges.keys() <= own.keys():
            return None
        made = ("args", "state", "versions", "graph", "forward", "is_first", "precision", "documents", "edges")
        fields = {name: value for name, value in vars(call).items() if name not in made}
        owned = [(n, p, p.requires_grad, (p.dtype, p.device)) for n, p in own.items() if p is not None]
        names = {local: edge.name for local, edge in call.edges.items()}
        return cls(fields, names, place, rule, noted.hooks[0][1].shape, tuple(owned))

    def holds(self, layer: nn.Module, output: Tensor, samples: int | None) -> bool:
        """Whether a new call is of the same kind."""
        fields = self.fields
        if fields["layer"] is not layer or fields["training"] is not layer.training or fields["samples"] != samples:
            return False
        if output.shape != self.shape or output.grad_fn is None or not keeps_its_node(output):
            return False
        own = layer._parameters
        for name, p, trains, kind in self.owned:
            if own.get(name) is not p or p.requires_grad is not trains or kind != (p.dtype, p.device):
                return False
        return rule_for(layer) is self.rule


def _is_one(args: tuple[Any, ...]) -> bool:
    return len(args) == 1 and type(args[0]) is Tensor


class Forward:
    """The running forward of a hooked model, call by call."""

    def __init__(self, record: Record, backward: Backward) -> None:
        self.record, self.backward = record, backward
        self.static = Plan(pending=False)  # for layers that are called by themselves
        self.running: str | None = None  # the path of the module whose forward runs
        self.samples: int | None = None  # N, if the model's arguments show it
        self.noted: list[Noted] = []
        self._random_states: weakref.WeakKeyDictionary[nn.Module, RandomState] = weakref.WeakKeyDictionary()
        self._task = NO_TASK  # the backward pass in which it began, if checkpointing runs the whole model again
        self._calls: dict[str, int] = {}  # how many calls of each layer there were, by path
        # By parameter (id).  Finding a parameter's node takes 2 µs.  Its node may be another one in the next forward.
        self._edges_now: dict[int, Edge] = {}

    def records(self) -> bool:
        return self.is_on() and torch.is_grad_enabled()

    def is_on(self) -> bool:
        # Inside torch.func's transforms tensors belong to one transform, and end with it.
        transformed = is_transformed()
        self.record.transformed |= transformed
        return Switch.on() and not transformed and not is_traced() and not self.backward.is_silent

    def begin(self, with_gradients: bool) -> None:
        """Gives a forward its number.  with_gradients: whether a backward pass may go through it"""
        self.restart()
        if current_task() != NO_TASK:  # checkpointing computes something again: not a forward
            return
        record, backward = self.record, self.backward
        record.comparing &= not backward.answered
        record.transformed &= not backward.answered
        record.forwards += 1
        if with_gradients and not record.accumulating and record.segments:
            record.free_what_was_read()
        backward.unanswered += with_gradients
        backward.answered = False

    def restart(self) -> None:
        """Forgets the calls so far, and what an interrupted forward has left."""
        self._calls, self.noted, self._task, self._edges_now = {}, [], current_task(), {}

    def begin_layer(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called before a layer.  Keeps the random state if the layer has dropout, because its rule will run it again."""
        if self.records() and layer.training and getattr(layer, "dropout", None):
            self._random_states[layer] = random_state(cuda_devices_of(layer))

    def end_layer(
        self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_first: bool
    ) -> Any:
        """Called after a layer with a rule.  Returns the output for the caller.  output: None if the layer has failed"""
        drew = self._random_states.pop(layer, None) if len(self._random_states) else None
        if output is None or not self.is_on():
            return output
        if drew is None and not kwargs and _is_one(args) and self._note_steadily(path, layer, args, output, is_first):
            return output
        self._locate(path, layer)
        number, rule = self._count(path), rule_for(layer)
        # 1. Is there anything to record: trainable parameters, and a graph that leads to them?
        outputs = tensors_of(output)
        if not rule or not torch.is_grad_enabled() or all(x.grad_fn is None for x in outputs):
            return output
        owned = rule.parameters_of(layer)
        edges = self._edges(path, owned)
        place = self.record.plan.place_of(path, number)
        if not edges or any(x.is_nested for x in outputs):
            return output
        # 2. Where are the samples?  The plan knows, or else it is known when the forward has ended.
        layouts = self._layouts(place, rule, layer, outputs)
        # 3. Record everything that the rule will read, in its present state, and put hooks on the graph.
        live, graph = (args, kwargs), GraphAlive()
        made_of = frozenset([x.grad_fn for x in tensors_in(args, kwargs) if x.grad_fn is not None])
        args, kwargs = map_tensors(plain, args), map_tensors(plain, kwargs) if kwargs else {}
        running = self.backward.running
        call = LayerCall(
            path=path,
            layer=layer,
            args=args,
            kwargs=kwargs,
            training=layer.training,
            state={name: (x, version_of(x)) for name, x in (*owned.items(), *layer._buffers.items()) if x is not None},
            random_state=drew,
            outputs=tuple([x.detach() for x in outputs]) if rule.recomputes else (),
            precision=autocast_dtype(outputs[0].device),
            edges=edges,
            slots=len(outputs),
            forward=self.record.forwards,
            key=(path, number),
            is_own=self.running is not None or current_task() != NO_TASK,
            samples=self.samples,
            layouts=layouts,
            recomputed_in=None if running is None else weakref.ref(running),
            versions=versions_of(tensors_in(args, kwargs)),
            graph=weakref.ref(graph),
            is_first=is_first,
            plan=self.record.plan,
        )
        if self.running is None and current_task() != NO_TASK and self.record.plan is not self.static:
            call.why_refused = INSIDE_PASS
        output, hooks = attach(call, graph, output, self.backward.receive, rule.recomputes, live, made_of)
        if self.running is not None:
            self.noted.append(Noted(call, number, hooks, made_of))
        return output

    def _note_steadily(self, path: str, layer: nn.Module, args: tuple[Any, ...], output: Any, is_first: bool) -> bool:
        """Records a call that repeats a known one, in a third of the time.  Returns False if it doesn't."""
        key = path, self._calls.get(path, -1) + 1
        plan, backward = self.record.plan, self.backward
        steady = plan.steady.get(key)
        if steady is None or self.running is None or type(output) is not Tensor or current_task() != NO_TASK:
            return False
        if not torch.is_grad_enabled() or not steady.holds(layer, output, self.samples):
            return False
        self._calls[path] = key[1]
        backward.running = None  # left over from a pass that failed
        backward.called.add(id(layer))
        x, graph, call = args[0].detach(), GraphAlive(), LayerCall.__new__(LayerCall)
        own = vars(call)
        own.update(steady.fields)
        own["args"], own["versions"], own["graph"] = (x,), [(x, version_of(x))], weakref.ref(graph)
        own["state"] = {name: (p, p._version) for name, p, _, _ in steady.owned}
        own["edges"] = {name: self._edge(p, steady.names[name]) for name, p, _, _ in steady.owned if name in steady.names}
        if layer._buffers:
            own["state"] |= {name: (b, version_of(b)) for name, b in layer._buffers.items() if b is not None}
        own["forward"], own["is_first"], own["precision"] = self.record.forwards, is_first, autocast_dtype(x.device)
        made_of = _NONE if args[0].grad_fn is None else frozenset([args[0].grad_fn])
        hook = AtOutput(call, graph, backward.receive, 0, output, (args, {}), made_of)
        node: Any = output.grad_fn if output._base is None else output._base.grad_fn
        put_on(node, hook)
        self.noted.append(Noted(call, key[1], [(node, hook)], made_of, steady.place))
        return True

    def remember(self, plan: Plan, calls: Sequence[Noted]) -> None:
        """Keeps what the next forward is expected to repeat."""
        for noted in calls:
            if noted.place is None:
                key = noted.call.path, noted.number
                steady = Repeated.of(noted) if noted.call.plan is plan else None
                if steady is not None:
                    plan.steady[key] = steady
                else:
                    plan.steady.pop(key, None)

    def _layouts(self, place: Place | None, rule: Rule, layer: nn.Module, outputs: list[Tensor]) -> Layouts:
        """Where the samples are in a layer's outputs: as the plan says, or else as sizes suggest."""
        if not self.samples:  # without samples there are no rows
            return ()
        if place is not None:
            return place.layouts
        shape = outputs[0].shape
        return (likeliest(shape, self.samples, rule.axes_of(layer, len(shape))),)

    def _edges(self, path: str, parameters: Mapping[str, Tensor]) -> dict[str, Edge]:
        """The edges of those parameters that require gradients, by their names in the module."""
        left_out, name_of = self.record.left_out, self.record.name_of
        trained = {local: p for local, p in parameters.items() if p.requires_grad}
        names = {local: name_of(p, path, local) for local, p in trained.items()}
        return {local: self._edge(p, names[local]) for local, p in trained.items() if names[local] not in left_out}

    def _edge(self, p: Tensor, name: str) -> Edge:
        edge = self._edges_now.get(id(p))
        if edge is None:
            self.backward.watch(p)
            edge = Edge(name, p, node_of(p))
            if p in self.record.names:  # other tensors may get another name
                self._edges_now[id(p)] = edge
        return edge

    def _count(self, path: str) -> int:
        """How many earlier calls of the layer this forward had; `Plan.AGAIN` if checkpointing repeats the call."""
        if current_task() not in (NO_TASK, self._task):
            return Plan.AGAIN
        number = self._calls[path] = self._calls.get(path, -1) + 1
        return number

    def _locate(self, path: str, layer: nn.Module) -> None:
        """Finds the forward, or the backward pass, in which a layer is called."""
        task, backward = current_task(), self.backward
        if task != NO_TASK:
            backward.enter(task)
            return
        backward.running = None  # left over from a pass that failed
        if self.running is None:  # the layer is called by itself: a forward of its own
            self.record.plan, self.samples = self.static, None
            again = backward.answered or id(layer) in backward.called or not backward.called
            self.begin(torch.is_grad_enabled() and again)
        backward.called.add(id(layer))
