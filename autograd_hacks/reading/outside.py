"""Parameters that a model returns, ``log_std`` say, meet the batch in the loss: what `backward(losses)` is given is read as
a forward is, from the losses down to what the model has returned."""

from __future__ import annotations

import torch
from torch import Tensor

from autograd_hacks.capture.arrivals import RETURNED, returned_in
from autograd_hacks.capture.off_graph import OffGraph, Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.probe.plan import Plan
from autograd_hacks.reading.labelling import Hypothesis, Passes
from autograd_hacks.reading.proof import fill
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.switch import Switch

OUTSIDE = ("losses",)
"""What uses of parameters in losses are known by."""


def read_losses(losses: Tensor) -> None:
    """Has the uses of parameters in losses read in the backward pass that comes.  losses: N"""
    if not RETURNED or losses.grad_fn is None or not Switch.on():
        return
    marks = [(edge, mark) for edge, mark in returned_in(losses) if mark.plan.returns_parameters]
    recorders = {id(own): (own, mark.forward) for _, mark in marks if isinstance(own := mark.recorder(), Recorder)}
    for recorder, forward in recorders.values():
        _read(recorder, forward, losses, frozenset(edge.node for edge, mark in marks if mark.recorder() is recorder))


def _read(recorder: Recorder, forward: int, losses: Tensor, ends: frozenset[object]) -> None:
    record, samples = recorder.record, len(losses)
    ran = Ran(list(recorder.layers), {}, (), [losses], given_nodes=ends)  # type: ignore[arg-type]
    ran.parameters = {
        record.name_of(leaf.variable): leaf.variable for leaf in ran.graph.leaves if record.is_parameter(leaf.variable)
    }
    if not ran.parameters or not samples:
        return
    plan = record.plan.created.get(OUTSIDE)
    off = None if plan is None else OffGraph(ran, plan, samples, OUTSIDE).find()
    if off is None or not off.is_known or not off.is_told:
        draws = torch.Generator().manual_seed(samples)
        record.plan.created[OUTSIDE] = plan = Plan(pending=False)
        with Switch.paused_here():
            fill(plan, ran, Passes(ran, [], Hypothesis(None, samples, {0: Layout()}), draws).run(), [])
        off = OffGraph(ran, plan, samples, OUTSIDE).find()
    off.attach(ran.edge_of, forward, recorder.backward.receive)
