"""What backward passes bring, and to which calls and parameters.  No mathematics."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from autograd_hacks.capture.calls import OutputGrads, RecordedCall, Turning
from autograd_hacks.capture.graph import ANNOUNCED, CAPTURED, Live, hear_at, reach_of
from autograd_hacks.capture.param_grad import ParamGrad
from autograd_hacks.capture.records import NO_GRAD, Pass, Record, Segment
from autograd_hacks.capture.wrappers import Reduction
from autograd_hacks.errors import HigherOrderError
from autograd_hacks.probe.plan import EXPAND, HOOKS
from autograd_hacks.support.by_tensor import ByTensor
from autograd_hacks.support.restored import restored
from autograd_hacks.support.switch import Switch, current_task
from autograd_hacks.support.trees import tensors_of, version_of


class Backward:
    """Hears of gradients, at the outputs of calls and at parameters, and files them in a record."""

    def __init__(self, record: Record, param_grad: ParamGrad, reduction: Reduction) -> None:
        self.record, self.param_grad, self.reduction = record, param_grad, reduction
        self.attached = True  # whether the hooks are there; graphs may outlive them
        self.watched: ByTensor[tuple[RemovableHandle, ...]] = ByTensor()  # the parameters' hooks
        self.running: Pass | None = None
        self.answered = False  # whether a pass has come since the last forward began
        self.unanswered = 0  # forwards since the last pass
        self.called: set[int] = set()  # layers (id) that were called since the last forward or pass
        self._left: tuple[str, tuple[int, int] | None] | None = None  # a parameter, and the state of its .grad
        self._turned: list[Turning] = []  # what the running pass has made calls of
        # What hears of gradients in the record's place.
        self.listener: Callable[[RecordedCall, int, Tensor | None], None] | None = None
        # ``settle(record, pass, name, grad)``: whether rows add up to what has arrived, so that it need not be kept.
        self.settle: Callable[[Record, Pass, str, Tensor], bool] | None = None

    def detach(self) -> None:
        self.attached = False
        for handle in (handle for pair in self.watched.values() for handle in pair):
            handle.remove()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which other passes come, and leave this as it is."""
        names = ("running", "answered", "unanswered", "called", "_left", "listener", "settle")
        with restored(partial(vars(self).update, {name: getattr(self, name) for name in names})):
            self.running, self._left, self.called = None, None, set()
            self.settle = lambda *_: True  # who runs them compares
            yield

    def own_hooks(self) -> set[int]:
        """The numbers that torch knows this one's hooks on parameters by."""
        return {handle.id for pair in self.watched.values() for handle in pair}

    def watch(self, parameter: Tensor) -> None:
        """Asks for word of each gradient that arrives at the parameter, whichever way it came."""
        if parameter in self.watched or is_lazy(parameter) or not parameter.is_leaf:
            return
        if parameter.requires_grad:
            # Weakly: a parameter's hooks are held in C++, where no garbage collector looks.
            self.watched[parameter] = (
                parameter.register_hook(partial(_arrive, weakref.ref(self), weakref.ref(parameter))),
                parameter.register_post_accumulate_grad_hook(partial(_accumulated, self.param_grad, self.reduction)),
            )

    def watch_outputs(self, output: Any) -> None:
        """Asks the graph for word of gradient that comes by an output of the model in which samples mix."""
        outputs = tensors_of(output)
        for slot in self.record.plan.mixed_outputs:
            node = outputs[slot].grad_fn if slot < len(outputs) else None
            if node is not None:
                node.register_prehook(partial(self._note_mixed, slot, tuple(outputs[slot].shape)))

    def note_door(self, where: str, grads: tuple[Tensor | None, ...]) -> None:
        """Hears of gradient that comes by something that the model keeps."""
        if Switch.on() and self.attached and self.listener is None and any(grad is not None for grad in grads):
            self.enter(current_task()).side_door = where

    def _note_mixed(self, slot: int, shape: tuple[int, ...], grads: tuple[Tensor | None, ...]) -> None:
        if Switch.on() and self.attached and any(grad is not None for grad in grads):
            self.enter(current_task()).mixed_output = slot, shape

    def enter(self, task: int) -> Pass:
        """The pass that runs now; a task within another one is part of that one's pass."""
        if self.running is None:
            losses = ANNOUNCED.get(task)
            self.running = Pass(task, losses, forwards_before=self.unanswered)
            if losses is not None and self.running.is_hess:
                self.running.arrived = losses.arrived.setdefault(self.record, {})
            self.record.superseded, self.record.superseded_unseen = [], {}
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish, self.running))
        return self.running

    def _finish(self, ended: Pass) -> None:
        ended.finished, ended.reader = True, None
        # backprop_hess has other passes to come, and so has `accumulate`.
        self.record.plan.unread |= not ended.is_hess and not self.record.accumulating
        self.running, self.unanswered, self._left = None, 0, None
        self.record.superseded, self.record.superseded_unseen = [], {}
        self.called.clear()
        # Behind what wrappers do with gradients at a pass's end.
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._note_left, ended))

    def _note_left(self, ended: Pass) -> None:
        own = (call.edges[local] for call, grads in ended.received.items() if call.is_own for local in grads.reached)
        leaves = (edge for edge in own if edge.parameter.is_leaf and not ended.captures)
        states = ((edge.name, self.record.state_of_grad(edge.name, edge.parameter)) for edge in leaves)
        left = ((name, s) for name, s in states if s is not None and (s != NO_GRAD or not self.param_grad.wanted))
        self._left = next(left, None)

    def receive(self, call: RecordedCall, slot: int, grad: Tensor | None, raw: Tensor | None, live: Live) -> Tensor | None:
        """Notes the gradient that the running pass brings to one of a call's outputs; see `Receive`."""
        if not (Switch.on() and self.attached) or torch._C._functorch.peek_interpreter_stack() is not None:
            return None
        makes_graph = torch.is_grad_enabled()
        if grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad):  # is_grads_batched: many passes in one
            if makes_graph and call.entry is not None:
                raise HigherOrderError(
                    "a backward pass with is_grads_batched=True and create_graph=True has run through a model that was "
                    'hooked in mode="derivatives". Ask for one row after the other, or use add_hooks(model, mode="expand").'
                )
            return None
        if self.listener is not None:
            self.listener(call, slot, grad)
            return None
        other = self._turn(call, grad, raw) if makes_graph else None
        self._note(call, slot, grad, live if makes_graph and self.record.plan.mode != HOOKS else None)
        return other

    def _turn(self, call: RecordedCall, grad: Tensor | None, raw: Tensor | None) -> Tensor | None:
        """Has a pass of which a graph is made noted as a call of its own."""
        if call.entry is None or grad is None or raw is None:
            return None
        if not self._turned:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_turns)
        self._turned.append(call.entry)
        return call.entry.turn(call, raw, grad.shape, self.receive)

    def _end_turns(self) -> None:
        for entry in self._turned:
            entry.forget()
        self._turned.clear()

    def _note(self, call: RecordedCall, slot: int, grad: Tensor | None, live: Live) -> None:
        if makes_graph := torch.is_grad_enabled():
            self.record.comparing = True
            mode, is_skipped = self.record.plan.mode, bool(call.skipped) or not self.param_grad.wanted
            if mode == HOOKS and is_skipped:
                self.param_grad.check_graph()
            elif call.is_lost and mode != HOOKS and (is_skipped or mode == EXPAND):  # else sums are compared
                self.record.lost[call.forward] = call.what
        # Autograd is asked, for each parameter: a gradient on its way to an input alone is none of ours.
        ways = {local: way for local, edge in call.edges.items() if (way := reach_of(edge.node))}
        if grad is None or not ways:
            return
        task, captures = current_task(), CAPTURED in ways.values()
        announced = ANNOUNCED.get(task)
        if captures and (announced is None or announced.hess_type is None):  # which asks for gradients and takes none
            self.param_grad.check_captured([call.edges[local].parameter for local in ways if ways[local] == CAPTURED])
        # A call that checkpointing makes again inside a pass belongs to that pass, in whatever task its gradient comes.
        outer = None if call.recomputed_in is None else call.recomputed_in()
        outer = None if outer is None or outer.finished else outer
        if outer is None and self.running is not None and self.running.task != task:
            self.running = None  # left by a pass that failed
        current = outer or self.enter(task)
        current.captures |= captures
        current.higher_order |= makes_graph
        current.ambiguous |= outer is not None and current.forwards_before > 1
        self._file(current, call)
        received = current.received.get(call)
        if received is None:
            received = current.received[call] = OutputGrads([None] * call.slots, [0] * call.slots)
        received.at[slot] = grad = grad.detach() if live is None else grad
        received.live = live
        received.versions[slot] = version_of(grad)
        new = [local for local in ways if local not in received.reached]
        received.reached += tuple(new)
        for local in new:
            current.calls_of.setdefault(call.edges[local].name, []).append(call)
        self.answered = True

    def _file(self, current: Pass, call: RecordedCall) -> None:
        """Puts the pass into a segment.

        A pass through a forward that a segment holds adds to it.  One through other forwards alone replaces all, or begins
        a segment of its own while accumulating.
        """
        record = self.record
        # 1. The usual case: the pass has its place, and there is no other segment that it could add to.
        home = next((segment for segment in record.segments if current in segment.passes), None)
        if home is not None and len(record.segments) == 1 and not record.superseded:
            home.forwards.add(call.forward)
            return
        # 2. Does the call belong to the forward of another segment, one that was replaced included?
        target = next((s for s in (*record.segments, *record.superseded) if s is not home and s.takes(current, call)), None)
        # 3. A second backprop_hess may not replace what the first has left unread.
        for segment in record.segments if current.is_hess and home is None else ():
            if segment is target or not (record.accumulating or segment.read):
                segment.check_takes(current)
        if home is not None and target is not None:
            # 4. The pass has begun elsewhere and comes here too: both are one segment, among those that target was of.
            target.passes += home.passes
            target.forwards |= home.forwards
            others = record.superseded if target in record.superseded else record.segments
            current.replaces_unread = False
            record.segments, home = [segment for segment in others if segment is not home], target
            record.unseen = record.superseded_unseen | record.unseen
        elif home is None:
            # 5. Its first call: it adds to the segment that was found, or begins one.
            home = target or Segment(forwards={call.forward})
            home.passes.append(current)
            if current.losses and record not in current.losses.heard_by:
                current.losses.heard_by.append(record)
            if target is None and record.accumulating:
                record.add(home)
            elif target is None:
                current.replaces_unread = not current.is_hess and any(not segment.read for segment in record.segments)
                # What it replaces is kept until its end where a graph is left by which it may yet come there: several
                # losses of one forward, some with layers that were called later.
                if any(s.can_be_run_again() for s in record.segments):
                    record.superseded, record.superseded_unseen = record.segments, record.unseen
                record.segments = [home]
                record.unseen = {name: after for name, after in record.unseen.items() if after == record.forwards}
        home.forwards.add(call.forward)

    def note_lost(self, names: Sequence[str], grads: tuple[Tensor | None, ...]) -> None:
        """Hears of gradient at the output of a call that was not noted, and whose parameters were switched off."""
        if Switch.on() and self.attached and grads[0] is not None:
            self.enter(current_task())
            self.record.unseen |= dict.fromkeys(names, self.record.forwards)

    def arrive(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        """Hears of the gradient that a pass brings to a parameter, after all calls that it came through.  Returns what is
        to take its place, or None."""
        self._hear(parameter, grad)
        if grad is None or grad.grad_fn is None or not torch.is_grad_enabled() or self.record.plan.mode == HOOKS:
            return None
        return hear_at(grad.view_as(grad), self._note_sum)

    def _note_sum(self, grads: tuple[Tensor | None, ...]) -> None:
        if Switch.on() and self.attached and self.listener is None and grads[0] is not None:
            self.enter(current_task()).mixes = True

    def _hear(self, parameter: Tensor, grad: Tensor | None) -> None:
        if not (Switch.on() and self.attached) or self.listener is not None:
            return
        record, running, name = self.record, self.running, self.record.name_of(parameter)
        calls = () if running is None else running.calls_of.get(name, ())
        if record.on_arrival is not None and running is not None:
            record.on_arrival(running, name, grad)
        skips = [name in call.skipped for call in calls]
        left, own = self._left, running is not None and not running.captures and any(call.is_own for call in calls)
        if running is not None and own and left is not None and left[0] == name:
            running.adds_to_left = left[1] == self.record.state_of_grad(name, parameter)
        if grad is None:
            return
        if running is None or all(skips):
            record.unseen[name] = record.forwards
            return
        if not running.captures:
            running.fills_grad |= self.param_grad.wanted or not own
            if own and not self.param_grad.wanted:
                self.param_grad.keep(parameter, name)
        if grad.is_meta or any(skips):
            return  # a part of it was not computed
        if record.on_arrival is not None or not (record.comparing or record.plan.keeps_arrived(name)):
            return
        if self.settle is None or not self.settle(record, running, name, grad):
            so_far = running.arrived.get(name)
            running.arrived[name] = grad.detach().clone() if so_far is None else so_far + grad


def _accumulated(param_grad: ParamGrad, reduction: Reduction, parameter: Tensor) -> None:
    if param_grad.keeps:
        param_grad.put_back(parameter)
    if reduction.reducing:
        reduction.accumulated()


def _arrive(backward: weakref.ref[Backward], parameter: weakref.ref[Tensor], grad: Tensor | None) -> Tensor | None:
    heard_by, at = backward(), parameter()
    return None if heard_by is None or at is None else heard_by.arrive(at, grad)
