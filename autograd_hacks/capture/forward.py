"""What the hooks leave behind: who saw which input and which gradient, in which backward pass.  No mathematics.

`Recorder` decides what of it lives how long, together with `Receiver`, which hears of gradients.  See
`autograd_hacks.capture.records` for a call's record, and `autograd_hacks.capture.passes` for a backward pass's.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.attention import Inside, Map, looks_inside
from autograd_hacks.capture.backward import Receiver
from autograd_hacks.capture.graph import ends_of
from autograd_hacks.capture.param_grad import anchored, asking
from autograd_hacks.capture.records import Replay, Visit, attach, versions_of
from autograd_hacks.probe.layout import Layout, for_each_sample
from autograd_hacks.probe.plan import UNKNOWN, Plan, Unit
from autograd_hacks.rules.attention import count
from autograd_hacks.rules.table import axes_for, covered, rule_for
from autograd_hacks.support.by_tensor import ByTensor
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import map_tensors, tensors_of, version_of
from autograd_hacks.support.untouched import RandomState, autocast_dtype, cuda_devices_of, random_state

if TYPE_CHECKING:
    from autograd_hacks.probe.trace import Survey

Layouts = tuple[Layout | None, ...]


class Recorder(Receiver):
    """The records of one hooked model: `add_hooks` makes it, and it lives in the hooks alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.written: ByTensor[weakref.ref[Tensor]] = ByTensor()  # the grad1 of each parameter, by weak reference
        self.reuse = True  # of rows' memory
        self.memory: dict[str, Tensor] = {}  # that rows were written into for clipping, by the parameter's name
        self.in_forward = False
        self.random_states: weakref.WeakKeyDictionary[nn.Module, RandomState] = weakref.WeakKeyDictionary()
        self.samples: int | None = None  # N of the running forward, where its plan knows it
        self.open: list[tuple[Unit, Replay]] = []  # the calls that are being kept for a replay, the outermost first
        self.survey: Survey | None = None  # of a signature's first forward
        self._inside: dict[nn.Module, Inside] = {}  # the attention layers that run
        self._calls: dict[str, int] = {}

    def detach(self) -> None:
        """Ends all recording, also by graphs that outlive the hooks."""
        self.attached = False
        self.clear()
        self.memory.clear()
        self.skipper.switch_on()
        self.reduction.detach()
        for handle in (handle for pair in self.watched.values() for handle in pair):
            handle.remove()

    def begin_forward(self, with_gradients: bool) -> None:
        """Numbers a forward.  with_gradients: whether a backward pass may come to it"""
        if not Switch.on() or current_task() != NO_TASK:  # checkpointing computes something again, which is no forward
            return
        self.comparing &= not self._answered
        self.skipper.switch_on()  # what a forward that was interrupted has left
        while self._inside:
            self._inside.popitem()[1].__exit__(None, None, None)
        self.open, self._calls = [], {}
        self.forwards += 1
        if with_gradients and not self.accumulating and self.segments:
            self._free_what_was_read()
        self._unanswered += with_gradients
        self._answered = False

    def _free_what_was_read(self) -> None:
        """Makes room for a forward's activations: the peak of a step is then not that of two."""
        if all(segment.read and not segment.can_be_run_again() for segment in self.segments):
            self.segments = []
            self.why_empty = (
                "the last backward pass has been read already, and its record was freed when a forward pass with gradients "
                "began after it. Take all that you need before that, from one per_sample_grads(model); or run the forward "
                "under torch.no_grad."
            )

    def begin_layer(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Where no ordinary gradients are to be computed, switches a layer's parameters off; looks into layers with maps
        inside; and keeps the generator's state for those with dropout inside, which may have to be recomputed."""
        if not self.records():
            return
        if layer.training and getattr(layer, "dropout", None):
            self.random_states[layer] = random_state(cuda_devices_of(layer))
        if self.skipper.skips and path not in self.plan.unplaced and (self.in_forward or current_task() != NO_TASK):
            replayed = self._replayed(path)
            own = [p for p in covered(layer).values() if id(p) not in replayed and self.skipper.may_skip(p)]
            self.skipper.switch_off(layer, own)
        if self.survey is None and path not in self.plan.unplaced and looks_inside(layer, args, kwargs):
            self._place(layer)
            samples = count(layer, args, kwargs) if self.samples is None else self.samples
            off, replayed = self.skipper.off_in(layer), self._replayed(path)
            self._inside[layer] = Inside(self, path, layer, off, replayed, samples).__enter__()

    def end_failed(self, layer: nn.Module) -> None:
        """Puts right what a layer that has raised has left."""
        self.skipper.end_layer(layer)
        inside = self._inside.pop(layer, None)
        if inside is not None:
            inside.__exit__(None, None, None)

    def _replayed(self, path: str) -> set[int]:
        """The parameters by id whose rows a module around gives, or the one at a path, run again."""
        unit = self.plan.units.get(path)
        if unit is None and not self.open:
            return set()
        return {id(p) for u in (unit, *(u for u, _ in self.open)) if u is not None for p in u.parameters.values()}

    def begin_unit(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps what it takes to run a module again, where the forward's plan says so."""
        unit = self.plan.units.get(path)
        if unit is not None and self.records():
            self.open.append((unit, Replay.of(path, module, args, kwargs, unit.copies, unit.buffers)))

    def end_unit(self, path: str, module: nn.Module, output: Any, is_first: bool) -> Any:
        """Notes a call that `begin_unit` has kept.  Returns the output."""
        if not (self.open and self.open[-1][1].path == path and self.records()):
            return output
        unit, replay = self.open.pop()
        self._place(module)
        outer = {id(p) for u, _ in self.open for p in u.parameters.values()}
        parameters = {name: p for name, p in unit.parameters.items() if p.requires_grad and id(p) not in outer}
        layouts = unit.layouts_of(self._count(path), tensors_of(output), self.samples)
        output, visit = self.visit_unit(replay, parameters, output, is_first, layouts)
        if visit is not None:
            visit.is_doubtful, visit.is_doubted = unit.is_doubtful, unit.doubted
        return output

    def visit_unit(
        self, replay: Replay, parameters: dict[str, Tensor], output: Any, is_first: bool, layouts: Layouts
    ) -> tuple[Any, Visit | None]:
        """Notes a call to be run again.  Returns the output and the visit, if gradients can come to it."""
        outputs = tensors_of(output)
        if not (torch.is_grad_enabled() and any(x.grad_fn is not None for x in outputs)):
            return output, None
        visit = self._visit(replay.path, replay.module, replay.args, replay.kwargs, parameters, outputs, is_first, layouts)
        visit.results, visit.random_state, visit.replay = [x.detach() for x in outputs], replay.random_state, replay
        changed = {id(replay.module.get_buffer(name)) for name in replay.buffers}
        everything = (*replay.module.named_parameters(), *replay.module.named_buffers())
        visit.state = {name: (x, version_of(x)) for name, x in everything if id(x) not in changed}
        return attach(self, visit, output, is_compared=True), visit

    def visit(
        self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_first: bool
    ) -> Any:
        """Notes a call of a layer that has a rule.  Returns the output."""
        off = self.skipper.end_layer(layer)
        if self._end_inside(path, layer, output):
            self.random_states.pop(layer, None)
            return output
        noted = self._note(path, layer, args, kwargs, output, is_first, off)
        if noted is None and off:  # which would leave its gradients unnoticed
            return map_tensors(
                lambda x: anchored(x, partial(self._note_lost, off), off) if x.is_floating_point() else x, output
            )
        return output if noted is None else noted

    def _note(
        self,
        path: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        is_first: bool,
        off: Sequence[Tensor],
    ) -> Any:
        """The output, or None where the call is not to be noted.  off: the parameters that were switched off"""
        random_state = self.random_states.pop(layer, None) if len(self.random_states) else None
        if not self._recording():
            return None
        self._place(layer)
        count, rule = self._count(path), rule_for(layer)
        owned, replayed = covered(layer), self._replayed(path)
        parameters = {name: p for name, p in owned.items() if p.requires_grad and id(p) not in replayed}
        outputs = tensors_of(output)
        leads = bool(off) or any(x.grad_fn is not None for x in outputs)
        if not (rule and parameters and torch.is_grad_enabled() and leads):
            return None
        if path in self.plan.unplaced or any(x.is_nested for x in outputs):
            return None  # no axis of samples; the gradients are noticed when they arrive
        if self.samples is not None and path in self.plan.spread:
            # Looked up once for all samples: a copy for each, that gradients may arrive apart.
            output, args, kwargs = (
                map_tensors(partial(for_each_sample, samples=self.samples), x) for x in (output, args, kwargs)
            )
            outputs = tensors_of(output)
        layouts = self.plan.layouts_of(path, count, layer, outputs, self.samples)
        if layouts and layouts[0] is None and self.survey is None:
            self.plan.refused |= dict.fromkeys((id(p) for p in parameters.values()), UNKNOWN)
            return None
        visit = self._visit(path, layer, args, kwargs, parameters, outputs, is_first, layouts)
        recomputes = getattr(rule, "recomputes", False)
        visit.results, visit.random_state = [x.detach() for x in outputs] if recomputes else [], random_state
        visit.state = {name: (x, version_of(x)) for name, x in (*owned.items(), *layer._buffers.items()) if x is not None}
        visit.skipped = frozenset(map(id, off))
        if self.survey is not None:
            self.survey.visited(visit)
        return attach(self, visit, output, recomputes, off)

    def _visit(
        self,
        path: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        parameters: Mapping[str, Tensor],
        outputs: list[Tensor],
        is_first: bool,
        layouts: Layouts,
    ) -> Visit:
        for parameter in parameters.values():
            self.watch(parameter)
        args, kwargs = map_tensors(Tensor.detach, args), map_tensors(Tensor.detach, kwargs) if kwargs else {}
        return Visit(
            state={},
            random_state=None,
            results=[],
            path=path,
            layer=layer,
            args=args,
            kwargs=kwargs,
            parameters=ends_of(parameters),
            outputs=len(outputs),
            forward=self.forwards,
            is_own=self.in_forward or current_task() != NO_TASK,
            recomputed_in=self._running,
            versions=versions_of([*tensors_of(args), *(tensors_of(kwargs) if kwargs else ())]),
            training=layer.training,
            precision=autocast_dtype(outputs[0].device),
            inside=None,
            skipped=frozenset(),
            is_first=is_first,
            samples=self.samples,
            layouts=layouts,
        )

    def visit_inside(
        self,
        path: str,
        layer: nn.Module,
        x: Tensor,
        output: Tensor,
        inside: Map,
        parameters: Mapping[str, Tensor],
        off: Sequence[Tensor],
        layout: Layout,
        samples: int,
    ) -> tuple[Tensor, Visit | None]:
        """Notes a map inside a layer.  Returns its output, and the visit, if gradients can come to it."""
        if not off and output.grad_fn is None:
            return output, None
        with asking(off):
            visit = self._visit(path, layer, (x,), {}, parameters, [output], True, (layout,))
            visit.inside, visit.samples, visit.skipped = inside, samples, frozenset(map(id, off))
            noted: Tensor = attach(self, visit, output, False, [p for p in parameters.values() if id(p) in visit.skipped])
        return noted, visit

    def _end_inside(self, path: str, layer: nn.Module, output: Any) -> bool:
        """Whether a layer's maps have been noted, and are all that there is to note of its call."""
        inside = self._inside.pop(layer, None) if self._inside else None
        if inside is None:
            return False
        inside.__exit__(None, None, None)
        if not inside.visits:
            return False
        layouts = self.plan.layouts_of(path, self._count(path), layer, tensors_of(output), self.samples)
        if inside.covers_all() and (not layouts or layouts[0] == Layout(axes_for(layer, tensors_of(output)[0])[0])):
            return True
        for visit in inside.visits:
            visit.parameters = {}
        self.plan.refused |= dict.fromkeys((id(p) for p in covered(layer).values()), UNKNOWN)
        return False

    def _count(self, path: str) -> int:
        """How many calls there were before this one in the same forward; `Plan.AGAIN` where checkpointing makes it anew."""
        if current_task() != NO_TASK:
            return Plan.AGAIN
        self._calls[path] = self._calls.get(path, -1) + 1
        return self._calls[path]

    def _recording(self) -> bool:
        # Inside torch.func's transforms tensors are of one transform's making, and end with it.
        transformed = torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state()
        return Switch.on() and not transformed

    def records(self) -> bool:
        return self._recording() and torch.is_grad_enabled()

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
            self.plan, self.samples = self.static, None
            again = self._answered or id(layer) in self._visited or not self._visited
            self.begin_forward(torch.is_grad_enabled() and again)
        self._visited.add(id(layer))
