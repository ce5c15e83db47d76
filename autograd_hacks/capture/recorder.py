"""The records of one hooked model, and how its own forward begins and ends."""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.nn as nn

from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.forward import Forward
from autograd_hacks.capture.param_grad import ParamGrad
from autograd_hacks.capture.records import Record
from autograd_hacks.capture.wrappers import Reduction, check_unwrapped
from autograd_hacks.probe.plan import Plan, SumCheck
from autograd_hacks.probe.planner import Planner
from autograd_hacks.support.memory import Pool
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import tensors_of, weakly
from autograd_hacks.support.untouched import cuda_devices_of, random_state


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
        self._followed: Plan | None = None  # by the last forward

    def plan_by(self, planner: Planner) -> None:
        """Takes its plans from a planner from now on."""
        self.planner = planner
        self.record.plan = self.forward.static = planner.static

    def detach(self) -> None:
        """Ends all recording, also by graphs that outlive the hooks."""
        self.backward.detach()
        self.record.clear()
        self.pool.clear()
        self.param_grad.switch_on()

    def interrupt(self, layer: nn.Module) -> None:
        """A layer was left by what is no Exception, of which its hooks don't hear."""
        self.param_grad.end_layer(layer)
        self.forward.inside.leave(layer)

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plan | None:
        """The model's forward begins.  Returns its plan, if it is recorded: it is known before anything of it runs."""
        if not Switch.on():
            self.reduction.begin(model, self.record.forwards)
            return None
        # Checkpointing runs a model without gradients at first, and its input asks for them all the same.
        self.forward.begin(torch.is_grad_enabled() or any(x.requires_grad for x in tensors_of((args, kwargs))))
        self.reduction.begin(model, self.record.forwards)
        plan = None
        if self.forward.records():
            self.record.plan, self.forward.samples = self.planner.static, None
            plan, self.forward.samples = self.planner.plan(model, args, kwargs)
            if plan is not self._followed:  # since the last one modules may have been put elsewhere in the model
                self._followed = plan
                for name, parameter in model.named_parameters():
                    if parameter in self.record.names:
                        self.record.names[parameter] = name
            state = random_state(cuda_devices_of(model))
            self.record.plan, self.record.arguments = plan, (weakly(args), weakly(kwargs), state)
            if current_task() == NO_TASK:  # what checkpointing runs again must save what it saved before
                # Not before the sums of a plan's rows were once compared with the gradients that arrived.
                self.param_grad.skips = not (self.param_grad.wanted or plan.sum_check is SumCheck.PENDING)
            if self.param_grad.skips:
                check_unwrapped()
        self.forward.is_running = True
        return plan

    def end(self, path: str, model: nn.Module, args: object, kwargs: object, output: Any, is_first: bool) -> None:
        """The model's forward has ended.  output: None where it has failed"""
        if not Switch.on():
            return
        self.forward.is_running = False
        outputs = [x for x in tensors_of(output) if not x.is_nested]
        layouts = self.record.plan.layouts_of_model(model, outputs)
        self.record.returned = list(zip([x.shape for x in outputs], layouts))
        if self.record.plan.mixed_outputs and self.forward.records():
            self.backward.watch_outputs(output)
