"""Reads what a reentrant checkpoint computes again inside a backward pass, as a forward is read.

The checkpoint's node keeps the function and its arguments, but no graph.  The graph exists while the pass is at the node:
the function runs again, and a separate pass starts at its outputs.  The samples lie there as in the gradients at the node.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from autograd_hacks.capture.off_graph import OffGraph, Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.probe.plan import AXES, Plan
from autograd_hacks.reading.labelling import Hypothesis, Passes, Where
from autograd_hacks.reading.proof import fill
from autograd_hacks.support.graph import Value
from autograd_hacks.support.layout import Layouts
from autograd_hacks.support.restored import restored
from autograd_hacks.support.sweep import outside_passes
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import made_by, tensors_of


class Inside(NamedTuple):
    """A reentrant checkpoint of a forward."""

    key: tuple[Hashable, ...]  # its key in the plan
    forward: int
    samples: int
    layouts: Layouts  # of its outputs
    modules: list[weakref.ref[nn.Module]]  # the modules whose parameters and buffers it may use


def look_inside(recorder: Recorder, ran: Ran, plan: Plan, samples: int, key: tuple[Hashable, ...] = ()) -> None:
    """Lets the checkpoints of a forward report what they compute again."""
    modules = [weakref.ref(module) for module in ran.modules]
    for number, (node, place) in enumerate(zip(ran.checkpoints, plan.checkpoints)):
        if place.kind == AXES:
            inside = Inside((*key, "inside", number), recorder.record.forwards, samples, place.layouts, modules)
            node.run_function = partial(_again, weakref.ref(recorder), inside, node.run_function)


def _again(recorder: weakref.ref[Recorder], inside: Inside, function: Callable[..., Any], *args: Any) -> Any:
    """Runs a checkpoint's function again."""
    own = recorder()
    if own is None or not own.backward.hears() or current_task() == NO_TASK or not torch.is_grad_enabled():
        return function(*args)
    forward = own.forward
    with restored(partial(vars(forward).update, running=forward.running, noted=forward.noted)):
        forward.running, forward.noted = "", []
        output = function(*args)
        counts: Counter[str] = Counter()
        noted = []
        for call in forward.noted:
            noted.append(call._replace(number=counts[call.call.path]))
            call.call.key = (*inside.key, call.call.path, counts[call.call.path])
            counts[call.call.path] += 1
    outputs = tensors_of(output)
    if any(x.grad_fn is not None for x in outputs):
        modules = [m for module in inside.modules if (m := module()) is not None]
        _read(own, inside, Ran(modules, dict, args, outputs, noted, made_by(args)))
    return output


def _read(recorder: Recorder, inside: Inside, ran: Ran) -> None:
    record, samples, created = recorder.record, inside.samples, recorder.record.plan.created
    ran.parameters = {
        record.name_of(leaf.variable): leaf.variable for leaf in ran.graph.leaves if record.is_parameter(leaf.variable)
    }
    plan = created.get(inside.key)
    if plan is None or not recorder.place(ran, plan, samples)[0]:
        plan = created[inside.key] = outside_passes(partial(_proven, ran, inside))
        recorder.place(ran, plan, samples)
    off, running = OffGraph(ran, plan, samples, inside.key).find(), recorder.backward.enter(current_task())
    off.attach(ran.edge_of, inside.forward, recorder.backward.receive, running)
    look_inside(recorder, ran, plan, samples, inside.key)


def _proven(ran: Ran, inside: Inside) -> Plan:
    plan, draws = Plan(pending=False), torch.Generator().manual_seed(inside.samples)
    places: dict[int | Value, Where] = {
        slot: at for slot, (x, at) in enumerate(zip(ran.outputs, inside.layouts)) if x.grad_fn is not None and at is not None
    }
    with Switch.paused_here():
        fill(plan, ran, Passes(ran, [], Hypothesis(None, inside.samples, places), draws).run(), [])
    return plan
