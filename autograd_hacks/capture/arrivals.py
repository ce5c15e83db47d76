"""Hooks on nodes of the graph: gradients at uses, what a pass does at parameters, and what `backward` announced."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from autograd_hacks.capture.calls import LayerCall
from autograd_hacks.capture.records import Announcement
from autograd_hacks.capture.uses import NodeUse
from autograd_hacks.support.graph import NEW, Value
from autograd_hacks.support.graph import own_hook as own_hook
from autograd_hacks.support.internals import current_node, hooks_after, hooks_before, keeps_graph, will_execute
from autograd_hacks.support.restored import kept
from autograd_hacks.support.switch import current_task
from autograd_hacks.support.trees import like_its_kind, map_tensors, tensors_of, version_of

EXECUTED, SKIPPED, CAPTURED, NOT_REACHED = "executed", "skipped", "captured", ""
"""The cases of a backward pass at a parameter's node.  SKIPPED: it would be executed, but ordinary gradients are off.
CAPTURED: torch.autograd.grad takes the gradient before the node."""


ANNOUNCED: dict[int, Announcement] = {}
"""The announcements of `backward` for the passes that run now, by graph task.  Hooks may run in another thread."""
MIXED: dict[int, dict[Any, str]] = {}
"""By graph task, why passes have no rows whose loss compares samples: by the `Backward` of each model."""
NO_NODES = frozenset[Node]()

ASKED: dict[int, Any] = {}
"""By graph task, what the engine was asked for in passes without ordinary gradients: see `capture/lean.py`."""


def are_new(first: int) -> bool:
    """Whether a user has registered hooks since torch's count was this."""
    return bool(NEW) and NEW[-1].id >= first


_OF_CALLS = "torch.nn.modules.module", "torch.optim.optimizer"
registers = RemovableHandle.__init__
MANY = 1000
"""Those that are gone are dropped from `NEW` when it has so many more."""


def noting(handle: RemovableHandle, hooks: Any, *, extra_dict: Any = None) -> None:
    """Replaces torch's own function, and notes the handle, unless calls of modules or leaves are hooked."""
    registers(handle, hooks, extra_dict=extra_dict)
    for key in [key for key, hook in hooks.items() if isinstance(hook, AtOutput | AtNode | AtParameter)] if hooks else ():
        hooks[handle.id] = None  # torch stores the hook here: before the library's, which see what it makes
        hooks[key] = hooks.pop(key)
    if len(NEW) % MANY == MANY - 1:  # this handle isn't in it yet, whose hook torch hasn't stored
        NEW[:] = [own for own in NEW if own.id in (own.hooks_dict_ref() or ())]
    caller = sys._getframe(1)
    by = caller.f_globals.get("__name__")
    if not (by in _OF_CALLS or (by == "torch._tensor" and caller.f_locals["self"].is_leaf)):
        NEW.append(handle)


BEGAN = SimpleNamespace(reduced=frozenset(), announced=None)
"""How the loss of the pass that runs becomes a number (see `capture/lean.py`); empty if its beginning wasn't seen.

announced: where an announced pass begins, whose losses were looked at"""


def reach_of(node: Node) -> str:
    """The case of the running backward pass at a parameter's node."""
    asked = ASKED.get(current_task())
    if asked is not None and node in asked.skipped:
        return SKIPPED
    try:
        return EXECUTED if will_execute(node) else NOT_REACHED
    except RuntimeError as error:
        # torch.autograd.grad captures this leaf: the engine raises instead of answering.
        if "A leaf node was passed to _will_engine_execute_node" in str(error):
            return CAPTURED
        raise


class AtOutput:
    """A hook on the node of a layer's output.  If the output is a view, the hook is on its base's node.

    The hook is on the node and not on the tensor for two reasons.  It sees the gradient that the layer's own backward will
    use, after the user's tensor hooks.  And in-place operations after the layer can't move it: they give a view another
    node but leave its base's node in the graph.
    """

    __slots__ = ("__weakref__", "inputs", "live", "number", "receiver", "shape", "slot", "use")

    def __init__(
        self, call: LayerCall, receiver: Any, slot: int, output: Tensor, live: Any, inputs: frozenset[Node]
    ) -> None:
        self.receiver, self.slot, self.shape, base = receiver, slot, output.shape, output._base
        self.number = (output if base is None else base).output_nr  # the number of this output at its node
        self.live = live  # the call's arguments with their graph, if rows may be differentiated
        self.inputs = inputs  # the nodes that made the arguments
        self.use: LayerCall | None = call  # None when no pass can arrive any more

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        call, grad = self.use, grads[self.number]
        if call is None:
            return
        if grad is not None and grad.shape != self.shape:
            grad = grad.reshape(self.shape)
        if grad is None or not self.receiver.take(call, (grad,)):
            node = current_node() if torch.is_grad_enabled() else None
            self.receiver.receive(call, self.slot, (grad,), node, self)
            if keeps_graph():
                return
        # Autograd frees what it saved.  If the user keeps the loss, that must not keep the inputs alive.
        self.use = self.live = None
        self.inputs = NO_NODES


class Link(NamedTuple):
    """What a node makes for parameters, or for nodes that pass it on to one parameter alone."""

    node: int  # its number in the trace
    made: tuple[tuple[int, str | int], ...]  # the places of inputs, and who receives their gradients: a parameter, or a node
    is_first: bool  # whether its own gradient is a use's, and not another link's
    output: int  # the number of the output at which it receives gradient from another link


@dataclass(eq=False, slots=True)
class Passed:
    """A hook that runs after a node, and notes what the node has made until that arrives.  See `Pass.made`."""

    backward: Any
    link: Link

    def __call__(self, made: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
        running, link = self.backward.running, self.link
        if running is not None and (link.is_first or running.brings(link.node, given[link.output])):
            for place, receiver in link.made:
                x = None if receiver in running.made else made[place]
                running.made[receiver] = x if x is None else (x, version_of(x))


class AtNode:
    """A hook on a node at which values of parameters meet the batch.  The node holds the hook, so the hook can't hold it."""

    __slots__ = ("__weakref__", "receiver", "use")

    def __init__(self, use: NodeUse, receiver: Any) -> None:
        self.receiver, self.use = receiver, use

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        if not ([g for g in grads if g is not None] and self.receiver.take(self.use, grads, self)):
            self.receiver.receive(self.use, 0, grads, current_node(), self)


class AtParameter:
    """A hook on a parameter."""

    __slots__ = ("backward", "parameter")

    def __init__(self, backward: Any, parameter: Tensor) -> None:
        self.backward, self.parameter = weakref.ref(backward), weakref.ref(parameter)

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        heard_by, at = self.backward(), self.parameter()
        if heard_by is None or at is None or (grad is None and heard_by.record.on_arrival is None):
            return None
        return heard_by.arrive(at, grad)


def may_skip(parameters: Sequence[Tensor]) -> list[bool]:
    """Whether nothing else needs a parameter's gradient, such as a user's hook or another hooked model, for each one."""
    hooks = zip(map(hooks_before, parameters), map(hooks_after, parameters))  # one is this library's own
    return [(before is None or len(before) < 2) and (after is None or len(after) < 2) for before, after in hooks]


def put_on(node: Node, hook: AtOutput | AtNode) -> None:
    """Puts a hook on a node, where `on_node` finds it."""
    own_hook(node.register_prehook(hook))
    notes: Any = node.metadata  # torch's types declare it as a method
    notes[put_on] = (*notes.get(put_on, ()), hook)


def on_node(node: Any) -> tuple[AtOutput | AtNode, ...]:
    return node.metadata.get(put_on, ())


def attach(call: LayerCall, output: Any, receiver: Any, *more: Any) -> tuple[Any, list[tuple[Node, AtOutput]]]:
    """Sends a call's gradients to a receiver.  Returns the output, and the hooks with their nodes.  more: see `AtOutput`"""
    outputs = tensors_of(output)
    if len(outputs) > 1 or call.known.rule.recomputes or not keeps_its_node(outputs[0]):
        # An output may be computed from another one, as an LSTM's h from its c.  The gradient at a copy comes from uses
        # outside the layer only.  A copy is also needed if the user may overwrite an output that is compared later, or a
        # view, whose node would be lost.
        output = map_tensors(lambda x: like_its_kind(x, x.clone()) if x.grad_fn is not None else x, output)
        outputs = tensors_of(output)
    hooked = []
    for slot, x in enumerate(outputs):
        source = x if x._base is None or x.grad_fn is None else x._base
        if source.grad_fn is not None:
            hook = AtOutput(call, receiver, slot, x, *more)
            put_on(source.grad_fn, hook)
            hooked.append((source.grad_fn, hook))
    return output, hooked


def keeps_its_node(output: Tensor) -> bool:
    """Whether the output is not a view, or only a reshaped base, so that both gradients have the same numbers."""
    if output._base is None or output.grad_fn is None:
        return True
    is_reshaped = output.grad_fn.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
    return is_reshaped and output._base.grad_fn is not None and output.grad_fn.next_functions[0][0] is output._base.grad_fn


@dataclass(frozen=True, eq=False)
class Returned:
    """An output of a model, a tensor that it keeps, or one that its own loss adds up.  The node that made it holds it."""

    # Where its samples are: a layout, the sample of each entry on axis 0, or a label.  None if its gradient is refused.
    at: Any
    samples: int  # N
    recorder: weakref.ref[Any]  # of the model
    forward: int


class Behind(NamedTuple):
    """What values were computed from."""

    marks: dict[Value, Returned]  # the marked outputs
    ends: list[Node]  # their nodes, unless something was computed from other outputs of these
    receivers: set[Any]  # of the uses that are reached by other ways than through marked outputs


def returned_in(values: Iterable[Value], stops_at_uses: bool = False) -> Behind:
    """The marked outputs from which values were computed.  stops_at_uses: whether their nodes are ends, too"""
    marks, past, uses, receivers = dict[Value, Returned](), set[Node](), list[Node](), set[Any]()
    waiting: list[Any] = [*values]
    seen = set(waiting)
    while waiting:
        node, number = waiting.pop()
        notes: Any = node.metadata
        if (mark := notes.get(Returned, _NONE).get(number)) is not None:
            marks[Value(node, number)] = mark
            continue
        if (hooks := notes.get(put_on)) is not None:
            receivers.update(hook.receiver for hook in hooks)
            if stops_at_uses:
                uses.append(node)
                continue
        past.add(node)
        ahead = {edge for edge in node.next_functions if edge[0] is not None} - seen
        waiting += ahead
        seen |= ahead
    return Behind(marks, [*uses, *(value.node for value in marks if value.node not in past)], receivers)


_NONE: dict[int, Returned] = {}


@contextmanager
def noted(roots: Sequence[Node], notes: dict[int, Any], note: object) -> Iterator[None]:
    """A context in which hooks find a note on passes, by their numbers.  roots: the nodes that run first"""
    tasks = list[int]()

    def begin(_: object) -> None:
        tasks.append(current_task())
        notes[tasks[-1]] = note

    handles = [own_hook(root.register_prehook(begin)) for root in roots]
    for handle in handles:  # a root may be a use's node
        hooks: Any = handle.hooks_dict_ref()
        for key in [key for key in hooks if key != handle.id]:
            hooks[key] = hooks.pop(key)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for task in tasks:
            notes.pop(task, None)


@contextmanager
def announced(output: Tensor, losses: Announcement) -> Iterator[Tensor]:
    """A context that announces the backward pass to the hooks.  Start the pass at the tensor that it gives."""
    # This node comes before all others, so the recorders know about the pass before any of them records.
    with torch.enable_grad():
        root = output.view_as(output)
    with kept(BEGAN), noted([] if root.grad_fn is None else [root.grad_fn], ANNOUNCED, losses):
        BEGAN.announced = root
        yield root
