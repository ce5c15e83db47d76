"""The records of one hooked model, and how its own forward begins and ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.by_part import check_forward
from autograd_hacks.capture.doors import doors_of, watch_doors
from autograd_hacks.capture.forward import Forward
from autograd_hacks.capture.graph import mark_returned
from autograd_hacks.capture.param_grad import ParamGrad
from autograd_hacks.capture.records import Record
from autograd_hacks.capture.stages import running_stage
from autograd_hacks.capture.wrappers import Reduction, check_whole, counts_passes
from autograd_hacks.errors import ParamGradSkipped
from autograd_hacks.probe.plan import HOOKS, Plan
from autograd_hacks.probe.planner import Asked, Planner
from autograd_hacks.support.memory import Pool
from autograd_hacks.support.restored import restored
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import map_tensors, tensors_of, version_of, weakly
from autograd_hacks.support.untouched import cuda_devices_of, random_state

Prove = Callable[[nn.Module, "Recorder", tuple[Any, ...], dict[str, Any]], None]
"""``prove(model, recorder, args, kwargs)`` notes in the running forward's plan what is wrong with it."""

Known = Asked | tuple[Plan, int | None]
"""What is known as a forward begins: that its plan is to be made, or the plan, and N."""

Together = Callable[[nn.Module, "Recorder", Known], AbstractContextManager[None]]
"""``together(model, recorder, known)`` is a context in which the plan of a forward is made and proven, by all processes that
must run it at once."""


class Recorder:
    """All that belongs to one hooked model.  `add_hooks` makes it, and it lives in the hooks alone."""

    planner: Planner  # `add_hooks` makes it anew with each call

    def __init__(self) -> None:
        self.record, self.pool, self.reduction = Record(), Pool(), Reduction()
        self.param_grad = ParamGrad(self.record.names)
        self.backward = Backward(self.record, self.param_grad, self.reduction)
        self.forward = Forward(self.record, self.param_grad, self.backward)
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # that had their hooks
        self.units: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that are run again, and have hooks for it
        self.frames: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules in which operations are seen, or around them
        self._followed: Plan | None = None  # by the last forward
        self._proven: tuple[Plan, int | None] | None = None  # the plan and N, while that is proven
        self._was_proven = False  # whether it was, before the forward that runs
        self.prove: Prove | None = None
        self.said_uncompiled = False  # whether it was said that compiled parts run as they are written
        self.together: Together = lambda model, recorder, known: nullcontext()
        self._steps: RemovableHandle | None = None  # where optimizers' steps are heard of

    def plan_by(self, planner: Planner) -> None:
        """Takes its plans from a planner from now on."""
        self.planner = planner
        planner.make_room = self.pool.clear
        self.record.plan = self.forward.static = planner.static

    def watch_steps(self) -> None:
        """Asks torch for word of each optimizer's step."""
        if self._steps is None:
            self._steps = register_optimizer_step_post_hook(partial(_stepped, weakref.ref(self)))
            weakref.finalize(self, self._steps.remove)

    def stepped(self, optimizer: Optimizer) -> None:
        """Hears of a step.  Raises where it has moved none of the parameters that a pass has reached, as none has a
        ``.grad``."""
        # torch's own pass over parameters without one; others may read something else.
        if self.param_grad.wanted or not Switch.on() or not type(optimizer).__module__.startswith("torch.optim."):
            return
        ours = [p for group in optimizer.param_groups for p in group["params"] if p in self.record.names]
        if any(p.grad is not None for p in ours):
            return
        passes = (recorded for s in self.record.segments if not s.replaced for recorded in s.passes)
        reached = {name for recorded in passes if not (recorded.is_hess or recorded.captures) for name in recorded.calls_of}
        if missing := [name for p in ours if (name := self.record.names.get(p)) in reached]:
            raise ParamGradSkipped(
                f"{type(optimizer).__name__}.step() has moved nothing: .grad is None for all that it was to move, "
                f"{missing[0]} say. The model was hooked by add_hooks(param_grad=False), so that backward() sets no .grad: "
                "call clip_grad1_norm_(model, max_norm) or compute_grad1(model, set_grad=True) between backward() and "
                "step(), or use param_grad=True."
            )

    def detach(self) -> None:
        """Ends all recording, also by graphs that outlive the hooks."""
        self.backward.detach()
        self.record.clear()
        self.pool.clear()
        self.param_grad.switch_on()
        if self._steps is not None:
            self._steps.remove()

    def interrupt(self, layer: nn.Module) -> None:
        """A layer was left by what is no Exception, of which its hooks don't hear."""
        self.param_grad.end_layer(layer)
        self.forward.leave_maps(layer)
        self.forward.reads.leave_all()
        self.reduction.release()

    @property
    def is_proving(self) -> bool:
        """Whether the forward that runs is one of a proof."""
        return self._proven is not None

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        """The model's forward begins.  Returns what is known of its plan, if it is recorded."""
        if self._proven is not None:
            self.forward.begin(True)
            return self._proven
        check_whole(model)
        if not Switch.on():
            self.begin_passes(model)
            return None
        # Checkpointing runs a model without gradients at first, and its input asks for them all the same.
        self.forward.begin(torch.is_grad_enabled() or any(x.requires_grad for x in tensors_of((args, kwargs))))
        if not self.forward.records():
            self.begin_passes(model)
            self.forward.is_running = True
            return None
        check_forward(model, (args, kwargs), self.planner.mode)
        self.record.plan, self.forward.samples = self.planner.static, None
        return self.planner.look(model, args, kwargs, current_task() != NO_TASK)

    def begin_passes(self, model: nn.Module) -> None:
        """The model's own code begins, and its gradients may be reduced over processes."""
        self.reduction.begin(model, self.record.forwards, self.param_grad.wanted)
        self.record.stage = running_stage()

    def take_plan(self, model: nn.Module, known: Known, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan:
        """Returns the plan of the forward that begins, before anything of it runs."""
        if self._proven is not None:
            self.record.plan, self.forward.samples = self._proven
            self.param_grad.skips, self.forward.is_running = False, True
            return self._proven[0]
        plan, samples = self.planner.make(model, args, kwargs, known) if isinstance(known, Asked) else known
        self.forward.samples = samples
        if plan is not self._followed:  # since the last one modules may have been put elsewhere in the model
            self._followed = plan
            for name, parameter in model.named_parameters():
                if parameter in self.record.names:
                    self.record.names[parameter] = name
        state = random_state(cuda_devices_of(model))
        self.record.plan, self.record.arguments = plan, (weakly(args), weakly(kwargs), state)
        if current_task() == NO_TASK:  # what checkpointing runs again must save what it saved before
            self.param_grad.skips = not self.param_grad.wanted
            # Not before the sum of its rows was once compared with the gradient that arrived.
            names = self.record.names.values() if self.param_grad.skips else ()
            awaited = [n for n in names if plan.awaits_derivatives or plan.awaits_sum(n)]
            self.param_grad.awaited = frozenset(awaited)
        self.forward.is_running = True
        return plan

    def prove_plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Has the plan of the forward that begins proven, where that is due."""
        plan, self._was_proven = self.record.plan, False
        if self.prove is None or self._proven is not None or current_task() != NO_TASK or counts_passes():
            return
        if plan.pending:
            self.pool.clear()  # the proof takes as much memory as the step, and not on top of it
            self.prove(model, self, args, kwargs)
            self._was_proven = True

    @contextmanager
    def proving(self) -> Iterator[None]:
        """A context in which the model runs for a proof; then the forward that has begun goes on from its beginning."""
        record, forward, forwards = self.record, self.forward, self.record.forwards
        plan, samples, arrival, unread = record.plan, forward.samples, record.on_arrival, record.plan.unread

        def undo() -> None:
            record.plan, forward.samples, record.on_arrival, plan.unread = plan, samples, arrival, unread
            self._proven, record.forwards, forward.is_running = None, forwards, True
            forward.restart()

        with restored(undo), record.set_aside(), self.backward.aside(), self.param_grad.aside():
            self._proven, record.on_arrival = (plan, samples), None
            yield

    def end(self, path: str, model: nn.Module, args: object, kwargs: object, output: Any, is_first: bool) -> Any:
        """The model's forward has ended.  Returns what its caller is to get, or None.  output: None where it has failed"""
        if not Switch.on():
            return None
        self.forward.is_running = False
        self.forward.reads.leave_all()
        if output is None:
            self.reduction.release()
        marks, other = self._was_proven and self._proven is None and self.forward.samples is not None, None
        if marks and self.record.gathered and output is not None:
            # Behind what fully_shard has hooked, where processes would wait for each other; unless it hooks these, too.
            output = other = map_tensors(lambda x: x if x.grad_fn is None else x.view_as(x), output)
            last = list(model._forward_hooks.values())[-1]
            marks = not getattr(last, "__module__", "").startswith("torch.distributed.fsdp")
        outputs = [x for x in tensors_of(output) if not x.is_nested]
        layouts = self.record.plan.layouts_of_model(model, outputs)
        self.record.returned = list(zip([x.shape for x in outputs], layouts))
        for x, layout in zip(outputs, layouts):
            self.record.outputs[x] = layout, self.forward.samples, version_of(x)
        if self._proven is not None or not self.forward.records():
            return other
        for x, layout in zip(outputs, layouts) if marks else ():
            if layout is not None and layout.fits(x, self.forward.samples or 0):
                mark_returned(x, layout, self.forward.samples or 0, self.record.plan)
        if self.record.plan.mixed_outputs:
            self.backward.watch_outputs(output)
        # A copy in its place would be no part of the graph of the loss, which may be differentiated by it.
        if self.record.plan.has_doors and self.record.plan.mode == HOOKS:
            watch_doors(doors_of(model, output), self.backward.note_door)
        return other


def _stepped(recorder: weakref.ref[Recorder], optimizer: Optimizer, *_: object) -> None:
    if (heard_by := recorder()) is not None:
        heard_by.stepped(optimizer)
