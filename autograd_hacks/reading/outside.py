"""Computations on a model's outputs outside of the model: whether samples stay separate, and where parameters that the
model returns, for example ``log_std``, meet the batch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autograd_hacks.capture.arrivals import RETURNED, Returned, returned_in
from autograd_hacks.capture.off_graph import OffGraph, Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.probe.owners import Weights, judged
from autograd_hacks.probe.plan import Plan
from autograd_hacks.reading.labelling import Hypothesis, Passes, over
from autograd_hacks.reading.proof import fill
from autograd_hacks.support.graph import Graph, Value, made
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.parts import undivided
from autograd_hacks.support.philox import random_like
from autograd_hacks.support.sweep import Grads, sweep
from autograd_hacks.support.switch import Switch

OUTSIDE = ("losses",)
"""The first part of the keys of uses in losses."""


def read_losses(losses: Tensor) -> None:
    """Prepares the next backward pass to read uses of parameters in losses.  losses: N"""
    if not RETURNED or losses.grad_fn is None or not Switch.on():
        return
    marks = [(edge, mark) for edge, mark in returned_in(losses) if mark.plan.returns_parameters]
    recorders = {id(own): (own, mark.forward) for _, mark in marks if isinstance(own := mark.recorder(), Recorder)}
    for recorder, forward in recorders.values():
        _read(recorder, forward, losses, frozenset(edge.node for edge, mark in marks if mark.recorder() is recorder))


def _read(recorder: Recorder, forward: int, losses: Tensor, ends: frozenset[object]) -> None:
    record, samples = recorder.record, len(losses)
    ran = Ran(list(recorder.layers), dict, (), [losses], ends=ends)  # type: ignore[arg-type]
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


def come_apart(x: Tensor, returned: Sequence[tuple[GradientEdge, Returned]]) -> list[bool]:
    """For each marked output: whether each sample's loss sends gradient to that sample's entries only.

    x: N ..., computed from the outputs
    """
    root, ends = x.grad_fn, {edge.node for edge, _ in returned}
    assert root is not None  # else no output would be marked
    graph = Graph([root], ends)
    draws, dtypes = torch.Generator().manual_seed(len(x)), {y.dtype for node in graph.nodes for y in made(node)}
    weights, g = Weights(len(x), draws, dtypes), random_like(x, draws)
    given = [g, *(g * over(g, weights.of_pass(n).to(g), Layout()) for n in range(weights.passes))]
    found: dict[Node, list[Grads]] = {}
    with torch.no_grad():  # skips wrappers' hooks, which may wait for other processes
        sweep({Value(root, x.output_nr): given}, found.__setitem__, ends, graph.above(ends))
    verdicts = []
    for edge, mark in returned:
        own, *others = (grads[edge.output_nr] for grads in found.get(edge.node, [[None] * (edge.output_nr + 1)]))
        if own is not None:
            parts = [None if y is None else undivided(y) for y in others]
            verdicts.append(bool(judged(undivided(own), parts, weights, [mark.layout]).layouts))
    return verdicts


def check_losses(losses: Tensor) -> None:
    """Raises SamplesMixed if a sample's loss depends on outputs for other samples, in forwards that were just proven.

    losses: N
    """
    marks = returned_in(losses) if RETURNED else []
    returned = [(edge, mark) for edge, mark in marks if mark.is_proven and mark.samples == len(losses) > 0]
    if returned and not all(come_apart(losses, returned)):
        for _, mark in returned:
            mark.plan.pending = True  # so that the next forward's losses are checked too
        raise SamplesMixed(
            "samples mix in the losses given to backward: a sample's loss depends on the model's outputs for other "
            "samples, as in a contrastive loss or a loss with statistics of the batch. Such losses have no per-sample "
            "gradients."
        )
