"""Reads graphs that backward passes make: where parameters meet the batch there, and which sample each gradient belongs to.

A pass with ``create_graph=True`` uses a parameter again at the node where it met the batch: y = x W gives ∂L/∂x = g Wᵀ.
This computation is read like a forward.  Its inputs are g and the node's saved tensors; its outputs are the gradients of the
node's inputs; and a later pass goes through its graph to W.
"""

import weakref
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.arrivals import AtOutput
from autograd_hacks.capture.off_graph import OffGraph, Ran, fit
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.uses import LayerCall, NodeUse, Use, packed_into
from autograd_hacks.probe.owners import Verdict, Weights, judged
from autograd_hacks.probe.plan import AXES, ROWS, Place, Plan
from autograd_hacks.reading.labelling import Hypothesis, Passes, Where, over, rows_of
from autograd_hacks.reading.proof import fill
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.graph import Graph, Leaf, Taker, Value, made
from autograd_hacks.support.internals import current_node
from autograd_hacks.support.layout import Layout, candidates, samples_of_rows
from autograd_hacks.support.philox import random_like
from autograd_hacks.support.sweep import Grads, call_node, is_repeatable, outside_passes, sweep
from autograd_hacks.support.switch import Switch

_PLAIN = frozenset(
    f"{name}Backward{n}"
    for name in ("View", "UnsafeView", "ReshapeAlias", "Transpose", "T", "Add", "Clone", "Unsqueeze", "Squeeze", "Permute")
    for n in (0, 1)
)
"""Nodes that save no values."""


class Met(NamedTuple):
    """A node at which parameters met the batch."""

    key: tuple[Hashable, ...]  # its key in the plan
    forward: int  # the number of that forward
    samples: int
    at: tuple[Where | None, ...]  # where the samples are in the node's outputs
    is_labelled: bool  # whether values showed that, which holds for this forward only


def follow(recorder: weakref.ref[Recorder], use: Use, node: Node, hook: AtOutput | None) -> None:
    """Prepares a node of a running pass with create_graph=True, so that the graph it computes can be read later."""
    own = recorder()
    if own is None or own.forward.running is not None:  # then it belongs to that forward's graph
        return
    own.record.comparing = True
    if isinstance(use, NodeUse):
        _watch(recorder, node, use, use.layouts if use.labels is None else (use.labels,), (), {v.place for v in use.values})
    elif isinstance(use, LayerCall) and hook is not None:
        _follow_call(recorder, own, use, node, hook)


def _follow_call(recorder: weakref.ref[Recorder], own: Recorder, call: LayerCall, node: Node, hook: AtOutput) -> None:
    inside = _inside(node, hook.inputs)
    found = _meetings(own, inside, hook.inputs)
    created, samples = own.record.plan.created, _samples(call, hook.shape)
    if not found or not samples:
        return
    where: Where | None = call.labels
    is_labelled = _is_labelled(call)
    packed = packed_into(call)
    if packed is not None and not hook.slot:
        where = samples_of_rows(packed)
    elif where is None:
        where = call.layouts[hook.slot] if hook.slot < len(call.layouts) else Layout()
    key = *call.key, hook.slot, len(found), samples == 1  # with one sample all layouts fit and show nothing
    known = created.get((*key, "at"), ())
    at: Mapping[Node, tuple[Where | None, ...]] = dict(zip(found, known))
    if not known or is_labelled or not all(fit(own, inner, samples) for inner, own in zip(found, known)):
        at, is_decided = (
            ({}, False) if where is None else outside_passes(partial(_owners, node, hook, where, samples, found.keys()))
        )
        at = {inner: at.get(inner, ()) for inner in found}
        if is_decided and not is_labelled:
            created[(*key, "at")] = tuple(at.values())
    if call.edges and any(above.name() not in _PLAIN for above in _above(inside, found)):
        # A graph made inside leads to inner values, around the output.  From now on the call's nodes give the rows.
        _take_apart(own, call, node, hook.inputs, found, at, samples)
    for number, (inner, places) in enumerate(found.items()):
        _watch(recorder, inner, call, at[inner], (hook.slot, number), places, hook.shape)


def _take_apart(
    own: Recorder,
    call: LayerCall,
    node: Node,
    ends: frozenset[Node],
    found: Mapping[Node, set[int]],
    at: Mapping[Node, tuple[Where | None, ...]],
    samples: int,
) -> None:
    parameters = {edge.name: edge.parameter for edge in call.edges.values()}
    ran = Ran(own.layers, lambda: parameters, (), (), ends=ends, roots=[node])
    off = OffGraph(ran, Plan(pending=False, is_labelled=_is_labelled(call)), samples, (*call.key, "inside"))
    for inner, places in found.items():
        labels = next((where for where in at[inner] if isinstance(where, Tensor)), None)
        layouts = tuple([where if isinstance(where, Layout) else None for where in at[inner]])
        place = Place(AXES if labels is None else ROWS, layouts)
        if labels is not None:
            ran.labels = {**ran.labels, inner: labels}
        for n in sorted(places):
            ahead, number = inner.next_functions[n]
            if ahead is not None and off.keys.below(ahead):
                off.found.setdefault(inner, []).append((Value(ahead, number), Taker(inner, n), place))
    off.attach(ran.edge_of, call.forward, own.backward.receive)
    call.edges = {}


def _is_labelled(use: Use) -> bool:
    """Whether values or lengths showed where a use's samples are, so that it may hold for this forward only."""
    is_packed_call = isinstance(use, LayerCall) and packed_into(use) is not None
    return is_packed_call or use.labels is not None or (use.plan is not None and use.plan.is_labelled)


def _samples(use: Use, shape: torch.Size) -> int:
    return use.samples or (shape[0] if shape else 1)


def _inside(node: Node, ends: Collection[Node]) -> dict[Node, None]:
    """The nodes of a call, from its output to its inputs.  The same graph always gives the same order."""
    inside, waiting = dict[Node, None](), [node]
    while waiting:
        at = waiting.pop()
        if at not in inside and at not in ends and type(at) is not Leaf:
            inside[at] = None
            waiting += [ahead for ahead, _ in at.next_functions if ahead is not None]
    return inside


def _meetings(recorder: Recorder, inside: dict[Node, None], ends: Collection[Node]) -> dict[Node, set[int]]:
    """The nodes of a call at which values of parameters meet the batch, with the numbers of these inputs.

    Removes nodes that depend on parameters only from ``inside``."""
    known: dict[Node, bool] = {}
    found: dict[Node, set[int]] = {}
    for at in list(inside):
        ways = [_is_of_parameters(recorder, ahead, ends, known) for ahead, _ in at.next_functions]
        if ways and all(ways):
            del inside[at]
        elif any(ways):
            found[at] = {n for n, own in enumerate(ways) if own}
    return found


def _above(inside: Collection[Node], found: Collection[Node]) -> set[Node]:
    """The nodes inside a call that depend on nodes at which parameters meet the batch."""
    makers: dict[Node, list[Node]] = {}
    for inner in inside:
        for ahead, _ in inner.next_functions:
            if ahead is not None:
                makers.setdefault(ahead, []).append(inner)
    above, waiting = set[Node](), list(found)
    while waiting:
        fresh = [inner for inner in makers.get(waiting.pop(), ()) if inner not in above]
        above.update(fresh)
        waiting += fresh
    return above


def _is_of_parameters(recorder: Recorder, node: Node | None, ends: Collection[Node], known: dict[Node, bool]) -> bool:
    """Whether a value depends on parameters only."""
    waiting = [node]
    while waiting:
        at = waiting[-1]
        if at is None or at in ends or at in known:
            waiting.pop()
            continue
        behind = [ahead for ahead, _ in at.next_functions]
        missing = [ahead for ahead in behind if ahead is not None and ahead not in ends and ahead not in known]
        if missing:
            waiting += missing
            continue
        leaf: Any = at
        is_parameter = type(at) is Leaf and recorder.record.is_parameter(leaf.variable)
        known[at] = is_parameter or (bool(behind) and all(ahead is not None and known.get(ahead, False) for ahead in behind))
    return node is not None and known.get(node, False)


def _owners(
    node: Node, hook: AtOutput, where: Where, samples: int, wanted: Collection[Node]
) -> tuple[dict[Node, tuple[Where | None, ...]], bool]:
    """Where the samples are in the gradients at nodes of a call, found by passes from its output.

    Also returns whether that holds for all forwards."""
    draws = torch.Generator().manual_seed(samples)
    like = made(node)[hook.number]
    weights = Weights(samples, draws, {like.dtype})
    g = random_like(like, draws).reshape(hook.shape)
    passes = [g, *(g * over(g, weights.of_pass(n).to(g), where) for n in range(weights.passes))]
    found: dict[Node, list[Verdict | None]] = {}

    def arrive(at: Node, grads: list[Grads]) -> None:
        if at in wanted:
            found[at] = [_verdict([own[n] for own in grads], weights) for n in range(len(grads[0]))]

    with torch.no_grad(), Switch.paused_here(), without_autocast([g]):
        sweep({Value(node, hook.number): [x.reshape(tuple(like.shape)) for x in passes]}, arrive, hook.inputs)
    verdicts = [own for of_one in found.values() for own in of_one]
    is_decided = samples == 1 or all(own is None or (own.is_decided and own.labels is None) for own in verdicts)
    # If zeros leave it open, the rows have only zeros there.
    return {at: tuple([_where(own) for own in of_one]) for at, of_one in found.items()}, is_decided


def _verdict(passes: Sequence[Tensor | None], weights: Weights) -> Verdict | None:
    """Which sample each entry belongs to.  passes: the gradient without weights, then those with weights"""
    x, *others = passes
    if x is None:
        return None
    return judged(x, others, weights, candidates(x.shape, weights.samples, range(x.ndim)))


def _where(verdict: Verdict | None) -> Where | None:
    if verdict is None or verdict.labels is None:
        return None if verdict is None else verdict.layout
    return rows_of(verdict.labels)


def _likeliest(verdict: Verdict, size: int, given: Sequence[Where | None]) -> Where | None:
    """Where the samples are in a gradient that has too many zeros to show it: as in the node's own gradients.

    None if they can't be there.  size: of axis 0"""
    for own in given:
        if own in verdict.layouts if isinstance(own, Layout) else own is not None and len(own) == size:
            return own
    return verdict.layout if len(verdict.layouts) == 1 else None


def _watch(
    recorder: weakref.ref[Recorder],
    node: Node,
    use: Use,
    at: Sequence[Where | None],
    key: tuple[Hashable, ...],
    places: set[int],
    shape: torch.Size | None = None,
) -> None:
    """Puts a hook on a node, once, that sees what the node computes."""
    notes: Any = node.metadata
    if Met not in notes:
        notes[Met] = True
        sizes = torch.Size(made(node)[0].shape) if shape is None else shape
        samples = _samples(use, sizes)
        met = Met((*use.key, *key, samples == 1), use.forward, samples, tuple(at), _is_labelled(use))
        node.register_hook(partial(_computed, recorder, met, frozenset(places)))


def _computed(
    recorder: weakref.ref[Recorder],
    met: Met,
    places: frozenset[int],
    computed: tuple[Tensor | None, ...],
    grads: tuple[Tensor | None, ...],
) -> None:
    """Called when a node has computed gradients from those that arrived."""
    own = recorder()
    if own is None or not torch.is_grad_enabled() or not own.backward.hears():
        return
    node = current_node()
    roots = {n: x for n, x in enumerate(computed) if x is not None and x.grad_fn is not None and n not in places}
    ends = {node, *(x.grad_fn for x in grads if x is not None and x.grad_fn is not None)}
    ends |= {ahead for n, (ahead, _) in enumerate(node.next_functions) if ahead is not None and n not in places}
    if not roots or not met.samples:
        return
    before = Graph([ahead for n in places if (ahead := node.next_functions[n][0]) is not None]).nodes
    leaves: list[Any] = Graph([x.grad_fn for x in roots.values() if x.grad_fn is not None], ends).leaves
    parameters = {
        own.record.name_of(leaf.variable): leaf.variable for leaf in leaves if own.record.is_parameter(leaf.variable)
    }
    if not parameters:
        return
    outputs, known = list(roots.values()), frozenset(before)
    ran = Ran(own.layers, lambda: parameters, (), outputs, ends=frozenset(ends), of_parameters=known)
    plan = None if met.is_labelled else own.record.plan.created.get(met.key)
    off = None if plan is None else OffGraph(ran, plan, met.samples, met.key).find()
    if off is None or not off.is_known or not off.is_told:
        if not is_repeatable(node):
            return  # the check of sums reports it
        plan = outside_passes(partial(_proven, ran, node, met, list(roots)))
        plan.is_labelled |= met.is_labelled
        if not plan.is_labelled and (not plan.unsure or met.samples == 1):
            own.record.plan.created[met.key] = plan
        off = OffGraph(ran, plan, met.samples, met.key).find()
    off.attach(ran.edge_of, met.forward, own.backward.receive)


def _proven(ran: Ran, node: Node, met: Met, roots: Sequence[int]) -> Plan:
    """The plan for the graph of a node's computation.  roots: the numbers of the inputs whose gradients it computed"""
    draws, plan = torch.Generator().manual_seed(met.samples), Plan(pending=False)
    weights = Weights(met.samples, draws, {x.dtype for x in made(node)})
    given: list[Grads] = [[] for _ in range(weights.passes + 1)]
    for like, where in zip(made(node), [*met.at, *[None] * len(made(node))]):
        g = None if where is None else random_like(like, draws)
        factors = (
            [] if g is None or where is None else [over(g, weights.of_pass(n).to(g), where) for n in range(weights.passes)]
        )
        for own, factor in zip(given, [None, *factors] if factors else [None] * len(given)):
            own.append(g if g is None or factor is None else g * factor)
    with torch.no_grad(), Switch.paused_here(), without_autocast(ran.outputs):
        found = [call_node(node, own) for own in given]
    places: dict[int | Value, Where] = {}
    is_open = False
    for slot, place in enumerate(roots):
        verdict = _verdict([None if own is None else own[place] for own in found], weights)
        is_clear = verdict is None or verdict.is_decided or met.samples == 1
        is_open |= not is_clear
        x = ran.outputs[slot]
        where = _where(verdict) if verdict is None or is_clear else _likeliest(verdict, x.shape[0] if x.ndim else 1, met.at)
        if where is not None:
            places[slot] = where
    passes = Passes(ran, [], Hypothesis(None, met.samples, places), draws, assumed=True)
    with Switch.paused_here():
        fill(plan, ran, passes.run(), [])
    plan.unsure |= is_open
    return plan
