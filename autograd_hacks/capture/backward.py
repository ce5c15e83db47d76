"""How the records of a hooked model receive what backward passes bring.  No mathematics."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from autograd_hacks.capture.graph import CAPTURED, way_to
from autograd_hacks.capture.param_grad import Skipper
from autograd_hacks.capture.passes import ANNOUNCED, Pass, Segment
from autograd_hacks.capture.records import Received, Visit
from autograd_hacks.capture.wrappers import Reduction
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import Plan
from autograd_hacks.support.by_tensor import ByTensor
from autograd_hacks.support.switch import Switch, current_task
from autograd_hacks.support.trees import tensors_of, version_of
from autograd_hacks.support.untouched import RandomState

if TYPE_CHECKING:
    from autograd_hacks.verbs.streaming import Stream


class Receiver:
    """Which backward passes there are to read, and what they have brought to which visits and parameters."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.strays: dict[
            int, tuple[int, Tensor]
        ] = {}  # by id, after which forward gradient came past the hooks, and the parameter
        self.why_empty = ""  # why there is nothing to read, where that isn't plain
        self.accumulating = False
        self.attached = True
        self.watched: ByTensor[tuple[RemovableHandle, ...]] = ByTensor()  # the parameters' hooks
        self.forwards = 0
        self.comparing = False  # whether a created graph may lead to the parameters past the hooks
        self.skipper = Skipper()
        self.reduction = Reduction()
        self.stream: Stream | None = None  # takes the rows while the pass runs
        self.plan = self.static = Plan()  # the running forward's, and that of layers that are called by themselves
        # Of the model's last forward with gradients, with the random state before it.
        self.arguments: tuple[tuple[Any, ...], dict[str, Any], RandomState] | None = None
        self.returned: list[
            tuple[torch.Size, Layout | None]
        ] = []  # what the model returned last, and where samples are in it
        self._superseded: list[Segment] = []  # which the running pass may yet come through
        self._superseded_strays: dict[int, tuple[int, Tensor]] = {}
        self._running: Pass | None = None
        self._visited: set[int] = set()  # layers since the last forward began
        self._answered = False  # whether a backward has come since the last forward began
        self._unanswered = 0  # forwards since the last backward

    def clear(self, why: str = "") -> None:
        self.segments, self.strays, self.why_empty, self.arguments = [], {}, why, None
        self._superseded, self._superseded_strays = [], {}

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A context that leaves the records as they are."""
        names = ("segments", "strays", "why_empty", "comparing", "arguments", "_superseded", "_superseded_strays")
        kept = {name: getattr(self, name) for name in names}
        self.clear()
        try:
            yield
        finally:
            vars(self).update(kept)

    def watch_outputs(self, output: Any) -> None:
        """Asks the graph for word of gradient that comes by an output of the model in which samples mix."""
        outputs = tensors_of(output)
        for slot in self.plan.blind:
            node = outputs[slot].grad_fn if slot < len(outputs) else None
            if node is not None:
                node.register_prehook(partial(self._note_blind, slot, tuple(outputs[slot].shape)))

    def _note_blind(self, slot: int, shape: tuple[int, ...], grads: tuple[Tensor | None, ...]) -> None:
        if Switch.on() and self.attached and any(grad is not None for grad in grads):
            self._enter(current_task()).blind = slot, shape

    def watch(self, parameter: Tensor) -> None:
        """Asks for word of each gradient that arrives at the parameter, whichever way it came."""
        if parameter in self.watched or is_lazy(parameter) or not parameter.is_leaf:
            return
        if parameter.requires_grad:
            # Weakly: a parameter's hooks are held in C++, where no garbage collector looks.
            self.watched[parameter] = (
                parameter.register_hook(partial(_arrive, weakref.ref(self), weakref.ref(parameter))),
                parameter.register_post_accumulate_grad_hook(self.skipper.put_back),
            )

    def _enter(self, task: int) -> Pass:
        """The pass that runs now; a task within another one is part of that one's pass."""
        if self._running is None:
            losses = ANNOUNCED.get(task)
            self._running = Pass(task, losses, forwards_before=self._unanswered)
            if losses is not None and self._running.is_hess:
                self._running.arrived = losses.arrived.setdefault(id(self), {})
            self._superseded, self._superseded_strays = [], {}
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, self._running))
        return self._running

    def _finish(self, ended: Pass) -> None:
        ended.finished = True
        ended.let_go()
        # Until a pass is read, and its plan unchecked; but other passes of backprop_hess are still to come.
        self.plan.watched &= ended.is_hess
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
        if visit.skipped or not self.skipper.param_grad:
            self.skipper.check_graph()
        ways = {name: way for name, (_, node) in visit.parameters.items() if (way := way_to(node))}
        if grad is None or not ways:  # a gradient on its way to an input alone is none of ours
            return
        captured = [visit.parameters[name][0] for name, way in ways.items() if way == CAPTURED]
        announced = ANNOUNCED.get(current_task())
        if announced is None or announced.hess_type is None:  # which asks for the parameters' gradients and takes none
            self.skipper.check_captured(captured)
        if visit.recomputed_in is None and self._running is not None and self._running.task != current_task():
            self._running = None  # left by a pass that failed
        current = visit.recomputed_in or self._enter(current_task())
        current.captures |= bool(captured)
        current.higher_order |= torch.is_grad_enabled()
        current.ambiguous |= visit.recomputed_in is not None and current.forwards_before > 1
        self._file(current, visit)
        received = current.received.get(visit)
        if received is None:
            received = current.received[visit] = Received([None] * visit.outputs)
        received.grads[slot] = grad = grad.detach()
        received.versions.append((grad, version_of(grad)))
        received.reached.update(ways)
        ids = {id(visit.parameters[name][0]) for name in ways}
        if visit.is_own:
            current.owned |= ids
        current.skipped |= ids & visit.skipped
        current.reached |= ids - visit.skipped
        self._answered = True

    def _file(self, current: Pass, visit: Visit) -> None:
        """Puts the pass into a segment.

        A pass through a forward that a segment holds adds to it.  One through other forwards alone replaces all, or begins
        a segment of its own while accumulating.  What it replaces is kept until its end if there is still a graph by which
        it could come there: several losses of one forward, some with layers that were called later.
        """
        home = next((segment for segment in self.segments if current in segment.passes), None)
        if home is not None and len(self.segments) == 1 and not self._superseded:
            home.forwards.add(visit.forward)  # the usual case: there is no other that it could add to
            return
        target = next((s for s in (*self.segments, *self._superseded) if s is not home and s.takes(current, visit)), None)
        for segment in self.segments if current.is_hess and home is None else ():
            if segment is target or not (self.accumulating or segment.read):
                segment.check_takes(current)
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
                self.strays = {key: stray for key, stray in self.strays.items() if stray[0] == self.forwards}
        home.forwards.add(visit.forward)

    def _note_lost(self, parameters: Sequence[Tensor], grads: tuple[Tensor | None, ...]) -> None:
        """Hears of gradient at the output of a call that was not noted, and whose parameters were switched off."""
        if Switch.on() and self.attached and grads[0] is not None:
            self._enter(current_task())
            self.strays |= {id(p): (self.forwards, p) for p in parameters}

    def arrive(self, parameter: Tensor, grad: Tensor | None) -> None:
        """Hears of the gradient that a pass brings to a parameter, after all visits that it came through."""
        if not (Switch.on() and self.attached):
            return
        if self.stream is not None and self._running is not None:
            self.stream.arrived(self._running, parameter, grad)
        if grad is None:
            return
        if self._running is None or id(parameter) not in self._running.reached:
            self.strays[id(parameter)] = self.forwards, parameter
            return
        if not self._running.captures and id(parameter) in self._running.owned:
            self.skipper.keep(parameter)
        if grad.is_meta:
            return
        if id(parameter) in self._running.skipped:
            return  # a part of it was not computed
        elif self.stream is None and (self.comparing or self.plan.is_watched(parameter)):
            before = self._running.arrived.get(parameter)
            self._running.arrived[parameter] = grad.detach().clone() if before is None else before + grad


def _arrive(receiver: weakref.ref[Receiver], parameter: weakref.ref[Tensor], grad: Tensor | None) -> None:
    heard_by, at = receiver(), parameter()
    if heard_by is not None and at is not None:
        heard_by.arrive(at, grad)
