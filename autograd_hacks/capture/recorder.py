"""The recorder of one hooked model: how the model's own forward begins and ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Thread, current_thread
from typing import Any

import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from autograd_hacks.capture import lean
from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.arrivals import Returned, are_new
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.gradient_hooks import Labels, Watch, since
from autograd_hacks.capture.kinds import Kinds, Within
from autograd_hacks.capture.log import Forward, place_by_sizes
from autograd_hacks.capture.ran import Ran, UsersHooks
from autograd_hacks.capture.records import Record
from autograd_hacks.capture.wrappers import Reduction, check_undivided, check_whole, has_processes
from autograd_hacks.formulas.table import rule_for
from autograd_hacks.probe.documents import Segments, documents_of
from autograd_hacks.probe.tape import Tape
from autograd_hacks.support.contexts import plainly_saved, without_collection
from autograd_hacks.support.copies import Marks
from autograd_hacks.support.graph import Value
from autograd_hacks.support.internals import next_node, sequence_number
from autograd_hacks.support.layout import Layout, is_time_first
from autograd_hacks.support.memory import Pool
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import (
    Tree,
    made_by,
    tensors_in,
    tensors_of,
    weakly,
)

KEPT = (
    "samples mix, or may: the loss reads a tensor that a module keeps as an attribute, and not only what the model returns. "
    "Samples can't be distinguished in it, or independence is asked for and was shown of the outputs alone. Let the model "
    "return it, with an axis for the samples."
)


Settings = tuple[Kinds, bool, frozenset[str], Segments | None]
"""The settings of `add_hooks`: the kinds, ``param_grad``, the names of left-out parameters, ``segments``."""


class Recorder:
    """Everything that belongs to one hooked model.  `add_hooks` makes it; only the hooks hold it."""

    kinds: Kinds  # each `add_hooks` makes a new one

    def __init__(self, model: nn.Module) -> None:
        self.record, self.pool, self.reduction = Record(), Pool(), Reduction()
        self.backward = Backward(self.record, self.reduction, weakref.ref(self), ABOVE.created)
        self.forward = Forward(self.record, self.backward)
        self.tree = Tree(model)
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # the layers that got hooks
        self.said_uncompiled = False  # whether the note that compiled parts run uncompiled was printed
        self.segments: Segments | None = None  # how to separate documents packed into samples, if rows are per document
        self.is_aside = False  # whether it belongs to a copy, which the library runs
        self.tape: Tape | None = None  # of the forward that runs or ran last, if its samples must be independent
        self.marks: Marks | None = None  # how that forward began
        self._ran: Ran | None = None  # the running forward
        self.thread: Thread | None = None  # in which the last forward began
        self.is_threaded = False  # whether that was another one than before
        self.bare: tuple[list[nn.Module], list[nn.Module]] | None = None  # these modules' layers that have no hooks
        # All parameters in the last forward, whether each was trainable, and those that were.
        self.trained_before: tuple[Mapping[str, Tensor], list[bool], Mapping[str, Tensor]] | None = None

    @property
    def settings(self) -> Settings:
        return self.kinds, self.backward.wants_grad, self.record.left_out, self.segments

    def set(self, settings: Settings) -> None:
        """Reads forwards by other settings from now on."""
        self.kinds, self.backward.wants_grad, self.record.left_out, self.segments = settings
        self.trained_before = None
        self.record.last = Within(self.record.forwards, self.kinds.static)

    def attach(self) -> None:
        """Starts to record."""
        self.backward.attached = True
        lean.attach(self.backward)
        if not self.backward.wants_grad:
            self.backward.watch_behind()

    def detach(self) -> None:
        """Stops recording, including passes through graphs that outlive the hooks."""
        self.backward.detach()
        self.record.clear()
        self.pool.clear()
        lean.detach(self.backward)

    def unhooked(self) -> list[nn.Module]:
        """The layers with parameters that got no hooks."""
        modules = self.tree.modules()
        if self.bare is None or self.bare[0] is not modules:
            self.bare = modules, [layer for layer in modules if layer._parameters and layer not in self.layers]
        return self.bare[1]

    def interrupt(self) -> None:
        """Cleans up after a forward that ended by an interrupt (not an Exception), for which torch calls no hook."""
        self.forward.running = None
        self.reduction.release()
        self._stop()

    def begin(self, path: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called as a forward begins, of the model or of a part that is called by itself."""
        if current_task() != NO_TASK or (path and self.forward.running is not None):
            return
        self.forward.running = None
        self.backward.is_silent = False  # a Function's backward may have failed
        if (watching := self.backward.watching) is not None and self.backward.has_new_hooks() and not self.backward.answered:
            watching.over(since(self.backward.looked))  # no pass has watched them
        if not path:
            check_whole(model)
        if is_on := Switch.on():
            self.forward.begin()
        ran = self._ran = Ran(self.forward.within, self.backward)
        if is_on and self.forward.records():
            self._look(path, model, args, kwargs, ran)
        # The model's own code runs next, and its gradients may be reduced over processes.
        self.reduction.begin(model, self.record.forwards, self.backward.wants_grad)
        if self.reduction.reducing:
            self.backward.watch_behind()
        self.forward.running = path if is_on else None
        self.is_threaded |= self.thread not in (None, own := current_thread())
        self.thread, ran.is_threaded = own, self.is_threaded
        ran.hooks_before, ran.began = RemovableHandle.next_id, next_node()
        before = self.tape
        self._stop()
        if self.kinds.independent and ran.known is not None:
            self.marks, tapes = Marks(ran.modules), ran.within.kind.tapes
            kept = [] if before is None else before.kept(self.marks.tensors)
            self.tape = Tape(model, ran.known.batch.leaves, tapes.constants, kept, tapes.latest())
            self.tape.goes_on = has_processes() and not self.is_aside
            self.tape.start()

    def _stop(self) -> None:
        if self.tape is not None:
            self.tape.stop()
        self.tape = self.marks = None

    def _look(self, path: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], ran: Ran) -> None:
        """Notes what is known of a forward as it begins."""
        check_undivided(model, (args, kwargs))
        ran.ends = made_by(tensors := tensors_in(args, kwargs))
        if not path and not self.is_aside:
            ABOVE.learn(model, self)
        ran.modules = [*model.modules()] if path else self.tree.modules()
        ran.known = self.kinds.look(ran.within, model, path, args, kwargs, tensors, ran.modules)
        self.record.last = ran.within
        self.record.arguments = None if path else (weakly(args), weakly(kwargs))

    def end(self, path: str, model: nn.Module, args: object, kwargs: object, output: Any, is_first: bool) -> None:
        """Called when a forward has ended.  output: None if it has failed"""
        if self.tape is not None and (not path or self.forward.running == path):
            self.tape.stop()
        if not Switch.on():
            return
        if current_task() != NO_TASK and output is not None and self.forward.records():
            self.forward.refuse_inside(tensors_of(output), [p for p in model.parameters() if p.requires_grad])
        if self.forward.running != path:
            return
        ran, self.forward.running, self._ran = self._ran, None, None
        assert ran is not None
        ran.noted, self.forward.noted = self.forward.noted, []
        if output is None:
            place_by_sizes(ran.noted, ran.within.samples)
            self.reduction.release()
        if output is None or not self.forward.records():
            return
        ran.arguments, ran.returned, ran.outputs = (args, kwargs), output, [x for x in tensors_of(output) if not x.is_nested]
        ran.count = len(ran.outputs)
        ran.modules, parameters = ([*model.modules()], dict(model.named_parameters())) if path else self.tree.all()
        ran.trained = partial(self._trained, parameters, path)
        if not path and not self.is_aside and self.kinds.probes:
            ran.outputs += _kept_by(self.tree, ran.outputs, ran.began)
        ran.users_hooks = since(ran.hooks_before) if are_new(ran.hooks_before) else []
        with plainly_saved():
            self._end(path, model, ran)
        self.marks = None  # they hold the arguments
        self.backward.has_looked()

    def compare(self, layer: nn.Module, within: Within, made_by: frozenset[Node], arguments: Any) -> None:
        """Called when a layer has run by itself, on values with a graph."""
        ABOVE.between(self, layer, Ran(within, self.backward, made_by, arguments=arguments))

    def _trained(self, parameters: Mapping[str, Tensor], path: str) -> Mapping[str, Tensor]:
        """The trainable parameters by name, of the model or of a part: those of the last forward, if nothing has changed."""
        trains, known = [p.requires_grad for p in parameters.values()], self.trained_before
        if path or self.record.gathered or known is None or known[0] is not parameters or known[1] != trains:
            known = self.trained_before = parameters, trains, self.record.trained(parameters, path)
        return known[2]

    def watch_hooks(self, labels: Callable[[], Labels] | None, samples: int, hooks: UsersHooks = ()) -> None:
        """Watches the user's hooks on gradients, and those that come until a pass begins."""
        self.backward.watching = Watch(weakref.ref(self.backward), labels, samples)
        self.backward.watching.over(hooks)

    def watch_loss(self, labels: Callable[[], Callable[[], Labels]], samples: int) -> None:
        """Watches the hooks that have come since then by the labels of a loss, too."""
        before = self.backward.watching.labels if self.backward.watching is not None else dict
        if before is not None and self.backward.has_new_hooks():
            known, own = before, labels()
            self.watch_hooks(lambda: {**known(), **own()}, samples)

    def _end(self, path: str, model: nn.Module, ran: Ran) -> None:
        within = self.record.last = ran.within
        if within.kind is self.kinds.static and not ran.is_covered():  # known by now
            self.kinds.is_covered = False
            args, kwargs = ran.arguments
            ran.known = self.kinds.look(within, model, path, args, kwargs, ran.tensors, ran.modules)
        if not [x for x in ran.outputs if x.grad_fn is not None]:
            ran.known = None
        self.backward.watching = None
        self._read(path, model, ran)
        if self.backward.watching is None:  # nothing was read, as of a layer that is the model: each row is for itself
            rows = max([2, *(len(x) for x in ran.outputs if x.ndim)])
            self.watch_hooks(None if any(map(is_time_first, ran.modules)) else dict, rows, ran.users_hooks)
        if ran.ends:
            ABOVE.between(self, model, ran)
        self.record.documents = within.documents
        if within.kind is self.kinds.static and not ran.is_covered():
            ABOVE.assume(ran)
        if within.facts.calls is None:
            place_by_sizes(ran.noted, within.samples)
        samples = within.samples
        ran.attach()
        # Hooks at outputs of parameters alone note what a loss brings there, so their nodes must run.
        if not (self.backward.wants_grad or within.facts.returns_parameters or ran.users_hooks or ran.is_threaded):
            lean.meet(self.backward, ran)
        places = _places(model, ran)
        layouts = [at if isinstance(at, Layout) else None for at in places]
        marks: dict[Value, tuple[Any, int]] = {value: (at, samples or 0) for value, at in ran.added.items()}
        for n, (x, at, layout) in enumerate(zip(ran.outputs, places, layouts)):
            count = x.shape[layout.axis] if samples is None and layout is not None else samples or 0
            is_known = layout.fits(x, count) if layout is not None else at is not None
            if x.grad_fn is not None and (is_known or n in within.mixed_outputs):
                marks[ran.value(n)] = at if is_known else None, count
        for value, (at, count) in marks.items():
            notes: Any = value.node.metadata
            notes.setdefault(Returned, {})[value.number] = Returned(at, count, weakref.ref(self), self.record.forwards)
        self.record.returned = [(x.shape, at) for x, at in zip(ran.outputs[: ran.count], layouts)]

    def _read(self, path: str, model: nn.Module, ran: Ran) -> None:
        """Reads a forward, and shows that its samples are independent if that is asked."""
        within = ran.within

        def read() -> bool:
            if self.segments is not None and not path:
                within.documents = documents_of(self.segments, *ran.arguments)
            return ran.known is not None and ABOVE.read_forward(self, ran)

        def show() -> None:
            if self.kinds.independent and ran.known is not None and within.samples is not None:
                with without_collection():
                    ABOVE.show(self, model, ran)

        if not self.is_aside:
            ABOVE.together(model, self, read, show)
        elif read():
            show()
        if ran.known is None:
            return
        within.kind.pending = not (within.kind.is_independent or within.mixing)
        ran.watch([n for n in within.mixed_outputs if n < ran.count], within.mixing or within.untold)
        # Nothing shows that what modules keep is independent of other samples' values.
        unsure = range(ran.count, len(ran.outputs)) if self.kinds.independent else within.mixed_outputs
        ran.watch([n for n in unsure if n >= ran.count], KEPT)


def _kept_by(tree: Tree, outputs: Sequence[Tensor], began: int) -> list[Tensor]:
    """Tensors that a forward has left in attributes of modules, for a loss to read: outputs that it doesn't return.

    began: the number of the first node that it could make"""
    known = {*map(id, outputs)}
    found = {id(x): x for value in tree.kept() for x in tensors_of(value) if id(x) not in known and not x.is_nested}
    return [x for x in found.values() if x.grad_fn is not None and sequence_number(x.grad_fn) >= began]


def _places(model: nn.Module, ran: Ran) -> Sequence[Any]:
    """Where the samples are in the outputs, as `Returned` has it; None where nothing says it."""
    if len(ran.within.places) == len(ran.outputs):
        return ran.within.places
    rule = rule_for(model)
    own = rule.axes(model) if rule is not None and rule.axes is not None else ()
    axes = [*own, *[0] * len(ran.outputs)]  # for a layer by itself, or assumed
    return [ran.packed.get(n, Layout(at) if x.ndim > at else None) for n, (x, at) in enumerate(zip(ran.outputs, axes))]
