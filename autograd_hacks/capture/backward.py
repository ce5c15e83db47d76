"""Files the gradients of backward passes under uses and parameters.  No mathematics."""

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from autograd_hacks.capture.arrivals import (
    ANNOUNCED,
    ASKED,
    BEGAN,
    CAPTURED,
    MIXED,
    AtNode,
    AtOutput,
    AtParameter,
    are_new,
    may_skip,
    own_hook,
    reach_of,
)
from autograd_hacks.capture.kinds import Within
from autograd_hacks.capture.records import NO_GRAD, Pass, Record
from autograd_hacks.capture.uses import NodeUse, OutputGrads, Use
from autograd_hacks.capture.wrappers import Reduction
from autograd_hacks.errors import ParamGradSkipped
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.graph import is_users
from autograd_hacks.support.internals import (
    call_at_end,
    count_dispatch_modes,
    current_node,
    is_batched,
    is_transformed,
    keeps_graph,
    will_execute,
)
from autograd_hacks.support.restored import kept
from autograd_hacks.support.switch import Switch, current_task
from autograd_hacks.support.trees import ByTensor, version_of

WITHIN = (
    "samples mix, or may: within the model's backward pass a hook asked for parameters' gradients, which replaced the rows "
    "so far. Run the hook's own pass within autograd_hacks.pause_hooks()."
)


class Backward:
    """Receives gradients, at uses and at parameters, and files them in a record."""

    def __init__(self, record: Record, reduction: Reduction, owner: Callable[[], Any], created: Callable[..., None]) -> None:
        self.record, self.reduction = record, reduction
        self.owner = owner  # the recorder
        self.created = created  # called when a pass that makes a graph arrives at a node
        self.wants_grad = True  # whether backward passes fill .grad, as add_hooks(param_grad=...) says
        self.attached = True  # whether the hooks are on the model; graphs may outlive them
        self.is_behind = False  # whether parameters also have hooks that run after the accumulation into ``.grad``
        self.watched: ByTensor[tuple[RemovableHandle, ...]] = ByTensor()  # the parameters' hooks
        self.looked = RemovableHandle.next_id  # torch's count of hooks as the last forward ended, or before the first one
        self.watching: Any = None  # over the user's hooks on gradients, once a forward was read: a `Watch`
        self.running: Pass | None = None
        self.answered = False  # whether a pass has arrived since the last forward began
        # A parameter by name, and the state of its .grad when the last pass had ended.
        self._left: tuple[str, weakref.ref[Tensor], tuple[int, int] | None] | None = None
        self.is_silent = False  # whether passes record nothing
        self._keeps: dict[str, Tensor | None] = {}  # the values to restore in .grad, by the parameter's name
        # What forwards have in their graphs, if passes need not compute their parameters' gradients: see `capture/lean.py`.
        self.met: dict[weakref.ref[Within], Any] = {}
        self._newest = 0  # the highest task so far

    def hears(self) -> bool:
        """Whether passes are recorded."""
        return Switch.on() and self.attached and not self.is_silent

    def detach(self) -> None:
        self.attached = False
        for handle in (handle for pair in self.watched.values() for handle in pair):
            handle.remove()
        self.watched, self._left = ByTensor(), None

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context for other passes, which leaves this object unchanged."""
        with kept(self):
            self.running, self._left = None, None
            yield

    @contextmanager
    def silent(self) -> Iterator[None]:
        with kept(self, "is_silent"):
            self.is_silent = True
            yield

    def own_hooks(self) -> set[int]:
        """The numbers under which torch stores the hooks of this object on parameters."""
        return {handle.id for pair in self.watched.values() for handle in pair}

    def watch(self, parameter: Tensor) -> None:
        """Puts a hook on the parameter, which sees every gradient that arrives there."""
        handles = self.watched.get(parameter)
        if handles is None and not is_lazy(parameter) and parameter.is_leaf and parameter.requires_grad:
            # A weak reference: torch holds a parameter's hooks in C++, where no garbage collector looks.
            handles = self.watched[parameter] = (own_hook(parameter.register_hook(AtParameter(self, parameter))),)
        if (
            self.is_behind and handles is not None and len(handles) == 1 and parameter.requires_grad
        ):  # it may be frozen by now
            hook = parameter.register_post_accumulate_grad_hook(partial(_accumulated, weakref.ref(self)))
            self.watched[parameter] = (*handles, own_hook(hook))

    def watch_behind(self) -> None:
        """Puts hooks on parameters that run after ``.grad`` is set, if something must be done there."""
        if not self.is_behind:
            self.is_behind = True
            for parameter in list(self.watched.keys()):
                self.watch(parameter)

    def has_new_hooks(self) -> bool:
        """Whether hooks were registered since the last forward had ended, and weren't looked for yet."""
        return are_new(self.looked)

    def has_looked(self) -> None:
        self.looked = RemovableHandle.next_id

    def enter(self, task: int) -> Pass:
        """The pass that runs now.  A task inside another task belongs to the outer one's pass."""
        if self.running is None:
            losses = ANNOUNCED.get(task)
            self.running = Pass(task, losses, BEGAN.reduced, said=self.record.said, by_modes=count_dispatch_modes() > 0)
            self.running.refused = MIXED.get(task, {}).get(self, "") if losses is None else losses.refused
            if losses is not None and self.record not in losses.heard_by:
                losses.heard_by.append(self.record)
            if task < self._newest and not any(own.task == task for own in self.record.passes):  # another one came between
                self.running.refused = WITHIN
            self._newest = max(task, self._newest)
            if (asked := ASKED.get(task)) is not None:
                skipped = self.record.names.of([leaf.variable for leaf in asked.skipped])  # where no gradient will arrive
                self.running.skipped.update(filter(None, skipped))
                if self.record.on_arrival is not None:
                    self.running.left = asked.counts(self)
            self.record.superseded, self.record.superseded_unseen = [], {}
            call_at_end(partial(self._finish, self.running))
        return self.running

    def refuse(self, why: str) -> None:
        self.enter(current_task()).refused = why

    def _finish(self, ended: Pass) -> None:
        if self.has_new_hooks():
            if self.watching is not None:
                self.watching.late(self.looked)
            self.has_looked()
        ended.finished, ended.made, ended.usual_in, ended.segments = True, {}, None, ()
        self.running, self.record.superseded, self.record.superseded_unseen = None, [], {}
        if not ended.captures:  # else .grad is as it was
            self._left = None
            # After wrappers have changed the gradients at the end of the pass.
            call_at_end(partial(self._note_left, ended))

    def _note_left(self, ended: Pass) -> None:
        edges = (use.edges[local] for use, grads in ended.received.items() if use.is_own for local in grads.reached)
        states = (
            (name, weakref.ref(p), self.record.state_of_grad(name, p))
            for name, p, _ in edges
            if p.is_leaf and self._is_models(p)
        )
        self._left = next((own for own in states if own[2] is not None and (own[2] != NO_GRAD or not self.wants_grad)), None)

    def _is_models(self, parameter: Tensor) -> bool:
        """Whether a parameter is the model's, also if it came after `add_hooks`, and no other tensor of functional_call."""
        owner, names = self.owner(), self.record.names
        if parameter not in names and owner is not None and any(p is parameter for p in owner.tree.all()[1].values()):
            names[parameter] = self.record.name_of(parameter)
        return parameter in names

    def _file(self, current: Pass, forward: int) -> None:
        """Files a pass, and notes whether it adds to what the last one left in ``.grad``, when it arrives first."""
        is_first = not current.received
        self.record.file(current, forward)
        if is_first and current.replaces_unread and not current.captures and self._left is not None:
            name, left, state = self._left
            current.adds_to_left = (p := left()) is not None and state == self.record.state_of_grad(name, p)

    def take(self, use: Any, grads: Sequence[Tensor | None], hook: AtNode | None = None) -> bool:
        """Files the gradients at a usual use, if nothing is left to decide.  Returns whether that is so.

        hook: the one that has them, if it is a node's"""
        current, known = self._usual_in(use.within) if use.is_plain else None, use.known
        if current is None or use in current.received or not use.within.leaves.keys() >= known.ids:
            return False  # it is there if a graph that a pass made led here, too
        grads = [g.detach() if g is not None and g.requires_grad else g for g in grads]
        current.received[use] = found = OutputGrads(grads, [0 if g is None else version_of(g) for g in grads], known.locals)
        for name in known.names:
            current.calls_of.setdefault(name, []).append(use)
        if hook is not None:
            current.hooks.append(weakref.ref(hook))
            found.keep(self._taken(use, current_node(), grads, known.locals))
        if hook is not None or not current.told_by:
            current.told_by[use] = found
        return True

    def _usual_in(self, within: Within) -> Pass | None:
        """The running pass, if it is a usual one through a forward."""
        current = self.running
        if current is None or not current.received:
            current = self._begun(within)
        if current is None or current.usual_in is not within or current.segments is not self.record.segments:
            return None
        return current if current_task() == current.task and self.hears() else None

    def _begun(self, within: Within) -> Pass | None:
        """Begins a usual pass with its first gradient.  None if the pass may do more."""
        if torch.is_grad_enabled() or within.kind.derives is not False or is_transformed():
            return None
        if not (self.hears() and self._is_usual(within)):
            return None
        current = self._entered(current_task())
        if not current.is_hess:
            self._file(current, within.forward)
            current.usual_in, current.segments, self.answered = within, self.record.segments, True
        return current

    def _is_usual(self, within: Within) -> bool:
        """Whether the running pass brings gradients to all parameters of a forward, and keeps no graph."""
        asked = ASKED.get(current_task())
        may_more = within.facts.calls is None or self.record.on_arrival is not None or keeps_graph()
        if may_more or not (asked or self.wants_grad):
            return False
        try:
            return all((asked and leaf in asked.skipped) or will_execute(leaf) for leaf in within.leaves.values())
        except RuntimeError:  # torch.autograd.grad takes some
            return False

    def _entered(self, task: int) -> Pass:
        """The pass of a task, after one that has failed."""
        if self.running is not None and self.running.task != task:
            self.running = None
        return self.enter(task)

    def receive(
        self, use: Use, slot: int, grads: Sequence[Tensor | None], node: Node | None, hook: AtOutput | AtNode
    ) -> None:
        """Records the gradients that the running pass brings to a use, where `take` has left something to decide.

        grads: from output number ``slot`` on    node: where they arrived, if that matters    hook: the one that has them"""
        if not self.hears() or is_transformed() or any(g is not None and is_batched(g) for g in grads):
            return  # of is_grads_batched=True: many passes in one
        makes_graph = torch.is_grad_enabled()
        if isinstance(use, NodeUse) and use.within.samples == 1 and not makes_graph:
            # A parameter may take a view of this memory for its .grad, to which later passes add.
            grads = [None if g is None else g.clone() for g in grads]
        runs_modules = isinstance(use, NodeUse) and node is not None and is_users(node)
        if runs_modules:
            self._speak_after(node)
        kind = use.within.kind
        if makes_graph or kind.derives is None:
            kind.derives = makes_graph
        if makes_graph and node is not None:
            self.created(self.owner, use, node, hook if isinstance(hook, AtOutput) else None)
        received = self._note(use, slot, grads, hook, makes_graph)
        if received is not None and isinstance(use, NodeUse) and node is not None:
            received.keep(self._taken(use, node, grads, received.reached))
        running = self.running
        for edge in use.edges.values() if running is not None and running.left else ():
            if running is not None and edge.name in running.left:
                running.left[edge.name] -= 1
                if not running.left[edge.name]:
                    self.reached(edge.name, None)
        self.is_silent = runs_modules

    def _speak_after(self, node: Any) -> None:
        """Ends the silence after a user's Function, whose backward may run modules and passes of its own.

        The gradients of these come to the parameters by what the Function returns."""
        if _spoken not in node.metadata:
            node.metadata[_spoken] = True
            own_hook(node.register_hook(partial(_spoken, weakref.ref(self))))

    def _taken(self, use: NodeUse, node: Node, grads: Sequence[Tensor | None], reached: Sequence[str]) -> Any:
        """The forms of a node's values, or the exception to raise when they are read."""
        try:
            with without_autocast([g for g in grads if g is not None]):
                return use.take(node, grads, reached)
        except Exception as error:  # the user's own pass must continue
            return error

    def _reached(self, use: Use, makes_graph: bool) -> tuple[Pass, Collection[str]] | None:
        """The running pass, and the parameters of a use to which it leads, by their names there; None if there are none."""
        # Ask autograd about each parameter: a gradient that only passes on to an input is not a parameter's gradient.
        ways = {local: way for local, edge in use.edges.items() if (way := reach_of(edge.node))}
        if not ways:
            return None
        task, captures = current_task(), CAPTURED in ways.values()
        if captures and use.is_own:
            self.check_captured([use.edges[local].parameter for local, way in ways.items() if way == CAPTURED])
        current = self._entered(task)
        current.captures |= captures
        current.higher_order |= makes_graph
        self._file(current, use.within.forward)
        return current, ways

    def _note(
        self, use: Use, slot: int, grads: Sequence[Tensor | None], hook: AtOutput | AtNode, makes_graph: bool
    ) -> OutputGrads | None:
        found = None if all(grad is None for grad in grads) else self._reached(use, makes_graph)
        if found is None:
            return None
        current, reached = found
        is_first, received = not current.received, current.received_at(use)
        current.hooks.append(weakref.ref(hook))
        live = hook.live if makes_graph and isinstance(hook, AtOutput) else None
        for number, grad in enumerate(grads, slot):
            if grad is not None:
                grad = grad.detach() if live is None and not makes_graph and grad.requires_grad else grad
                received.at[number] = grad = grad if (before := received.at[number]) is None else before + grad
                received.versions[number] = version_of(grad)
        received.live = live or received.live
        for local in reached:
            if local not in received.reached:
                received.reached += (local,)
                current.calls_of.setdefault(use.edges[local].name, []).append(use)
        if is_first:
            is_more = current.captures or makes_graph or current.is_hess or not self._is_usual(use.within)
            current.usual_in, current.segments = None if is_more else use.within, self.record.segments
        self.answered = True
        return received

    def arrive(self, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
        """Receives a parameter's gradient, after all uses that it passed through.  Returns what to use instead, or None."""
        self._note_arrival(parameter, grad)
        if grad is None or grad.grad_fn is None or not torch.is_grad_enabled():
            return None
        seen = grad.view_as(grad)
        if seen.grad_fn is not None:
            own_hook(seen.grad_fn.register_prehook(self._note_sum))
        return seen

    def _note_sum(self, grads: tuple[Tensor | None, ...]) -> None:
        if self.hears() and grads[0] is not None:
            self.enter(current_task()).mixes = True

    def _note_arrival(self, parameter: Tensor, grad: Tensor | None) -> None:
        if not self.hears():
            return
        record, running = self.record, self.running
        name = record.names.get(parameter) or record.name_of(parameter)
        uses = () if running is None else running.calls_of.get(name, ())
        is_known = running is not None and grad is not None and running.brings(name, grad) and not running.by_modes
        if running is not None and grad is not None and uses and not (is_known or name in running.beside):
            running.note_along(name, grad)
        self.reached(name, grad)
        if grad is None:
            return
        if running is None or not uses:
            record.unseen[name] = record.forwards
            return
        if not running.captures:
            own = not self.wants_grad and any(use.is_own for use in uses)
            running.fills_grad |= not own
            if own and self._is_models(parameter):
                self._keeps[name], parameter.grad = parameter.grad, None

    def accumulated(self, parameter: Tensor) -> None:
        """Called when a parameter's gradient is in ``.grad``.  Restores the old ``.grad`` if ordinary gradients are off."""
        if self._keeps and (name := self.record.name_of(parameter)) in self._keeps:
            parameter.grad = self._keeps.pop(name)
        if self.reduction.reducing:
            self.reduction.accumulated()

    def check_captured(self, parameters: Sequence[Tensor]) -> None:
        """Raises if ordinary gradients are requested.  parameters: those that torch.autograd.grad captures"""
        # The library's own passes request them only to leave .grad alone, and don't use them.
        if self.wants_grad or current_task() in ANNOUNCED:
            return
        if any(may_skip([p for p in parameters if p in self.record.names])):
            raise ParamGradSkipped(
                "torch.autograd.grad: parameters' gradients were requested, but add_hooks(param_grad=False) turns them off. "
                "Take the gradients from per_sample_grads(model).weighted_sum(w), or hook the model with "
                "param_grad=True."
            )

    def reached(self, name: str, grad: Tensor | None) -> None:
        """Passes a parameter to the function that reads its rows while the pass runs."""
        if self.record.on_arrival is not None and self.running is not None:
            self.record.on_arrival(self.running, name, grad)


def _spoken(backward: weakref.ref[Backward], *_: object) -> None:
    if (own := backward()) is not None:
        own.is_silent = False


def _accumulated(backward: weakref.ref[Backward], parameter: Tensor) -> None:
    if (heard_by := backward()) is not None:
        heard_by.accumulated(parameter)
