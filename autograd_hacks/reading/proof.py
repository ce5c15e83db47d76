"""Proves how a forward is read, by backward passes through its own graph: which sample each gradient belongs to, where
parameters meet the batch, and whether the rows add up to what arrives."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice, product
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.off_graph import Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.uses import LayerCall
from autograd_hacks.probe.batch import Batch
from autograd_hacks.probe.owners import NOBODY
from autograd_hacks.probe.plan import AXES, MIXING, NOT_OF_BATCH, ROWS, Place, Plan
from autograd_hacks.probe.planner import NESTED, Known, is_time_first
from autograd_hacks.probe.routes import Routes, kinds_in, places_left
from autograd_hacks.reading.adding_up import check_documents, check_totals
from autograd_hacks.reading.independence import show_independent
from autograd_hacks.reading.inner_losses import frontier, sums_samples
from autograd_hacks.reading.labelling import Found, Hypothesis, Passes, Where, usual_layouts
from autograd_hacks.rules.table import rule_for
from autograd_hacks.support.graph import Value, is_users, made, shape_of
from autograd_hacks.support.layout import Layout, candidates
from autograd_hacks.support.philox import random_like
from autograd_hacks.support.restored import restored
from autograd_hacks.support.trees import is_packed

TRIES = 6
"""How many hypotheses about the samples' places in the outputs are tried."""


def prove(recorder: Recorder, known: Known, ran: Ran) -> int | None:
    """Fills in the plan of a finished forward.  Returns N, or None if nothing shows it."""
    plan = known.plan
    plan.pending, plan.created = False, {}
    plan.summed.clear()
    plan.shown.clear()
    draws = torch.Generator().manual_seed(1000 * plan.forwards + (known.samples or 0))
    if any(x.is_nested_tensor for node in ran.graph.nodes for x in made(node)):
        place_by_sizes(plan, ran, known.samples)
        plan.refused = dict.fromkeys(ran.parameters, NESTED)
        return None
    with grads_kept(ran):
        return _prove(recorder, known, ran, draws)


def _prove(recorder: Recorder, known: Known, ran: Ran, draws: torch.Generator) -> int | None:
    plan = known.plan
    best: tuple[Found, Passes] | None = None
    # First try what an earlier batch has shown: a batch of zeros or NaN doesn't contradict it.
    for hypothesis in sorted(hypotheses(known, ran), key=lambda own: not is_known(plan, own)):
        is_same = best is not None and best[0].hypothesis.axis == hypothesis.axis
        if best is not None and not best[0].mixed and (is_same or hypothesis.samples == 1):
            continue
        passes = Passes(ran, batch_axes(ran, known, hypothesis), hypothesis, draws)
        found = past_zeros(ran, passes, passes.run(), draws)
        # If two axes of the arguments fit, prefer one for which it isn't doubtful whether samples mix.
        if best is None or (not found.mixed and (best[0].mixed or not found.is_doubtful)):
            best = found, passes
        if not (found.mixed or (found.is_doubtful and len(known.axes) > 1)):
            break
    if best is None:
        place_by_sizes(plan, ran, known.samples)
        return known.samples
    found, passes = best
    mixed_outputs: list[int] = []
    if found.mixed:
        found, passes, mixed_outputs = leave_out_mixed(ran, found, passes, draws)
    fill(plan, ran, found, mixed_outputs)
    if not found.mixed:
        check_losses_inside(recorder, plan, ran, found, passes, draws)
        check_totals(plan, ran, found, passes)
        check_documents(plan, ran, found, draws)
    if recorder.planner.independent and known.batch is not None and (model := next(iter(ran.modules), None)) is not None:
        show_independent(recorder, model, known.aside, known.batch, ran, plan, found.hypothesis.samples)
    return found.hypothesis.samples


def is_known(plan: Plan, hypothesis: Hypothesis) -> bool:
    """Whether samples are where an earlier proof found them."""
    places = [
        (plan.outputs[slot], at)
        for slot, at in hypothesis.places.items()
        if isinstance(slot, int) and slot < len(plan.outputs)
    ]
    return bool(places) and hypothesis.axis == plan.axis and all(before == at for before, at in places)


def kept_where_open(places: Sequence[Place], before: Sequence[Place | None]) -> list[Place]:
    """The places, replaced by earlier ones if zero or NaN gradients of this batch left them open."""
    if len(places) != len(before):
        return list(places)
    pairs = zip(places, before)
    is_open = [own.kind == AXES and not own.is_decided for own in places]
    return [
        old if left and old is not None and old.kind == AXES and old.is_decided else own
        for left, (own, old) in zip(is_open, pairs)
    ]


@contextmanager
def grads_kept(ran: Ran) -> Iterator[None]:
    """A context that restores ``.grad``, because a user's function may run its own backward pass inside backward."""
    has_functions = any(map(is_users, ran.graph.nodes))
    every = [*ran.parameters.values(), *(p for module in ran.modules for p in module.parameters())]
    grads = {p: p.grad for p in every if p.is_leaf} if has_functions else {}

    def undo() -> None:
        for p, grad in grads.items():
            p.grad = grad

    with restored(undo):
        for p in grads:
            p.grad = None
        yield


def past_zeros(ran: Ran, passes: Passes, found: Found, draws: torch.Generator) -> Found:
    """Runs the same passes with noise in all-zero parameters, which hide what is behind them."""
    if found.mixed or not found.unsure:
        return found
    zeros = {name: p for name, p in ran.parameters.items() if p.numel() and not bool(p.detach().any())}
    for noted in ran.noted if zeros else ():  # a layer's bias hides nothing
        names = [edge.name for edge in noted.call.edges.values()]
        for name in names if not all(other in zeros for other in names) else ():
            zeros.pop(name, None)
    if not zeros:
        return found
    before = {p: p.detach().clone() for p in zeros.values()}

    def undo() -> None:
        for p, x in before.items():
            p.data.copy_(x)

    with restored(undo):
        for p in before:
            p.data.copy_(random_like(p, draws))  # this doesn't count as a change of the parameter
        return Passes(ran, passes.batch, passes.hypothesis, draws).run()


def place_by_sizes(plan: Plan, ran: Ran, samples: int | None) -> None:
    """Fills in a plan by sizes, if no output has samples."""
    for noted in ran.noted:
        plan.set_place(noted.call.path, noted.number, Place(AXES, usual_layouts(noted, samples or 0), is_decided=False))


def batch_axes(ran: Ran, known: Known, hypothesis: Hypothesis) -> list[tuple[Tensor, int]]:
    """The arguments that have samples if a hypothesis is true, with their axes."""
    batch = known.batch
    if batch is None or known.samples is None or hypothesis.counted_at is not None:
        return [(x, 0) for x in ran.tensors]
    found = zip(batch.leaves, batch.axes_of_samples(hypothesis.axis, hypothesis.samples))
    return [(x.data if is_packed(x) else x, at) for x, at in found if at is not None]


def hypotheses(known: Known, ran: Ran) -> Iterator[Hypothesis]:
    """Possible places of the samples in the arguments and outputs, the likeliest first."""
    batch = known.batch
    assert batch is not None
    outputs = {slot: x for slot, x in enumerate(ran.outputs) if x.grad_fn is not None}
    # The arguments may not show N, or show it wrongly, as for a list of samples: then use the first output's size.
    first = next((slot for slot, x in outputs.items() if x.ndim and x.shape[0] and slot not in ran.packed), None)
    by_output: Hypothesis | None = None
    if first is not None and not (batch.axes is not None and any(axis is not None for axis in batch.axes)):
        samples = outputs[first].shape[0]
        places: dict[int | Value, Where] = {
            slot: Layout() for slot, x in outputs.items() if x.ndim and x.shape[0] == samples
        }
        by_output = Hypothesis(known.axes[0], samples, places, first)
        if samples in batch.lists and known.samples != samples:
            yield by_output
    found = [hypothesis for axis in known.axes for hypothesis in on_axis(batch, axis, ran, outputs)]
    if len(known.axes) > 1:  # first an axis that outputs have too, that most arguments have, and that has several samples
        declared = time_first_sizes(ran)
        if declared or not runs_time_first(ran):
            fits = (own for own in found if (own.samples in declared if declared else own.axis == known.axes[0]))
            found = list(fits) or found
        found.sort(key=lambda own: (not own.keeps_axis, -batch.agreeing(own.axis), own.samples == 1))
    yield from found
    if by_output is not None and (known.samples is None or batch.lists):
        yield by_output


def time_first_sizes(ran: Ran) -> set[int]:
    """The numbers of samples that layers with a rule show which ran with samples on axis 1."""
    calls = (noted for noted in ran.noted if is_time_first(noted.call.layer))
    return {hook.shape[1] for noted in calls for _, hook in noted.hooks if len(hook.shape) > 2}


def runs_time_first(ran: Ran) -> bool:
    """Whether a layer with samples on axis 1 ran: if it trains, one of its parameters is in the graph."""
    reached = {id(leaf.variable) for leaf in ran.graph.leaves}
    layers = (module for model in ran.modules for module in model.modules() if is_time_first(module))
    trained = ([id(p) for p in layer.parameters() if p.requires_grad] for layer in layers)
    return any(not own or not reached.isdisjoint(own) for own in trained)


def on_axis(batch: Batch, axis: int | None, ran: Ran, outputs: Mapping[int, Tensor]) -> Iterator[Hypothesis]:
    """Possible places of the samples in the outputs, if they are on a given axis of the arguments."""
    tried: list[Mapping[Any, Layout]] = []
    size = next((x.shape[axis] for x in outputs.values() if axis is not None and x.ndim > axis), 1)
    counted_leaf = batch.told_otherwise(axis, size)
    if samples := batch.samples(axis, counted_leaf):
        axes = dict.fromkeys([0 if axis is None else axis, *range(8)])
        options: dict[int | Value, list[Layout]] = {
            slot: [] if slot in ran.packed else list(dict.fromkeys(candidates(x.shape, samples, axes)))
            for slot, x in outputs.items()
        }
        ends = {x.grad_fn for slot, x in outputs.items() if options[slot] and x.grad_fn is not None}
        losses = [x.grad_fn for slot, x in outputs.items() if not options[slot] and x.numel() == 1 and x.grad_fn is not None]
        for value in frontier(losses, samples, ends | ran.ends) if samples > 1 else ():
            options[value] = candidates(shape_of(value), samples, axes)
        if chosen := chosen_rows(ran, outputs, samples, options):
            by_layout = {slot: found[0] for slot, found in options.items() if found}
            yield Hypothesis(axis, samples, {**by_layout, **chosen}, counted_leaf=counted_leaf)
        options = {slot: found for slot, found in options.items() if found}
        turns = range(max(map(len, options.values()), default=0))
        alike = ([found[min(turn, len(found) - 1)] for found in options.values()] for turn in turns)
        each = product(*options.values()) if options else ()  # outputs may have them on different axes
        for chosen_layouts in chain(alike, islice(each, TRIES)):
            by_layout = dict(zip(options, chosen_layouts))
            if by_layout not in tried and len(tried) < TRIES:
                tried.append(by_layout)
                yield Hypothesis(axis, samples, {**by_layout, **ran.packed}, counted_leaf=counted_leaf)


def chosen_rows(
    ran: Ran, outputs: Mapping[int, Tensor], samples: int, options: Mapping[int | Value, Sequence[Layout]]
) -> dict[int | Value, Where]:
    """For outputs whose rows values selected, from packed tensors or N entries on axis 0: the sample of each row."""
    routes = Routes(ran.graph, {}, samples, by_size=True)
    found: dict[int | Value, Where] = {**ran.packed}
    for slot, x in outputs.items():
        if slot in ran.packed:
            continue
        rows = routes.rows(x.grad_fn) if x.grad_fn is not None and x.ndim and x.shape[0] != samples else None
        axes = [at for at in options[slot] if not at.axis]
        if rows is not None and not any(torch.equal(at.rows(len(rows), samples, rows.device), rows) for at in axes):
            found[slot] = rows
    return found


def leave_out_mixed(ran: Ran, found: Found, passes: Passes, draws: torch.Generator) -> tuple[Found, Passes, list[int]]:
    """Finds the outputs in which samples mix, one by one, and what the other outputs show together."""
    places, hypothesis = found.hypothesis.places, found.hypothesis
    losses = [slot for slot, x in enumerate(ran.outputs) if slot not in places and x.grad_fn is not None]

    def numbers(slots: Iterable[int | Value]) -> list[int]:
        return list(dict.fromkeys(n for at in slots for n in ([at] if isinstance(at, int) else losses)))

    if len(places) == 1:
        return found, passes, numbers(places)
    mixed: list[int | Value] = []
    for slot, at in places.items():
        alone = Passes(ran, passes.batch, replace(hypothesis, places={slot: at}), draws).run()
        mixed += [slot] if alone.mixed else []
    left = {slot: at for slot, at in places.items() if slot not in mixed}
    if not left or not mixed:
        return found, passes, numbers(places)
    passes = Passes(ran, passes.batch, replace(hypothesis, places=left), draws)
    return passes.run(), passes, numbers(mixed)


FEW = 8
"""How many ways in which nodes leave samples in place are kept for one plan.  They differ if N equals another size, for
example the number of heads."""


def _found_in(plan: Plan) -> object:
    calls = {path: list(own) for path, own in plan.calls.items()}
    is_mixed = bool(plan.mixing), frozenset(plan.refused)
    return plan.axis, plan.outputs, calls, dict(plan.meetings), set(plan.inner), list(plan.checkpoints), is_mixed


def fill(plan: Plan, ran: Ran, found: Found, mixed_outputs: Sequence[int]) -> None:
    """Stores in a plan what passes have shown."""
    hypothesis, meetings, before = found.hypothesis, found.meetings, _found_in(plan)
    assert meetings is not None
    outputs = [hypothesis.places.get(slot) for slot in range(len(ran.outputs))]
    plan.outputs = tuple([at if isinstance(at, Layout) else None for at in outputs])
    of_model = {id(p) for p in ran.parameters.values()}
    plan.returns_parameters = any(
        id(x) in of_model
        or (x.grad_fn is not None and slot not in hypothesis.places and ran.value(slot) in meetings.returned)
        for slot, x in enumerate(ran.outputs)
    )
    plan.axis, plan.counted_at, plan.counted_leaf = hypothesis.axis, hypothesis.counted_at, hypothesis.counted_leaf
    plan.largest, plan.unsure = max(plan.largest, hypothesis.samples), found.unsure
    plan.mixed_outputs = tuple(mixed_outputs)
    plan.mixing = why_mixed(ran, found.mixed, mixed_outputs) if found.mixed or mixed_outputs else ""
    plan.refused = dict.fromkeys(found.mixed, plan.mixing)
    for noted in ran.noted:
        (place,) = kept_where_open([found.calls[noted.call]], [plan.place_of(noted.call.path, noted.number)])
        plan.set_place(noted.call.path, noted.number, place)
        if place.kind == NOT_OF_BATCH:
            noted.call.edges = {}  # its rows come from where its output meets the batch
    plan.checkpoints = found.checkpoints
    keys, places, behind = meetings.keys, dict[Any, list[Place]](), Behind(ran)
    plan.nodes = {}
    for meeting in meetings.found:
        place = found.nodes[meeting.taker.node]
        places.setdefault(keys.of(meeting.value, meeting.taker), []).append(place)
        for name in keys.below(meeting.value.node):
            plan.nodes.setdefault(name, []).append(f"{meeting.taker.node.name()} at {behind.of(meeting.taker.node)}")
    places = {key: kept_where_open(own, plan.meetings.get(key, ())) for key, own in places.items()}
    uses = [(keys.of(value, taker), taker) for value, taker in meetings.inner]
    inner = {key for key, _ in uses if key not in places}
    plan.meetings = {key: known for key, known in plan.meetings.items() if key not in inner} | places
    plan.inner = (plan.inner - places.keys()) | inner
    # A parameter may be used alike with the batch and with parameters only, as in the first of several steps.
    if alike := {key for key, _ in uses if key in places}:
        met = {keys.with_all_behind(key, m.taker) for m in meetings.found if (key := keys.of(m.value, m.taker)) in alike}
        plan.inner |= {keys.with_all_behind(key, taker) for key, taker in uses if key in alike} - met
        plan.alike |= alike
    plan.names |= plan.nodes.keys()
    plan.by_rule |= {
        edge.name for call, place in found.calls.items() if place.kind in (AXES, ROWS) for edge in call.edges.values()
    }
    plan.zeros = dict.fromkeys((n for n, p in ran.parameters.items() if p.numel() and not bool(p.detach().any())), -1)
    ran.labels, routes = {}, ran.routes(plan, hypothesis.samples)
    # After a forward whose samples only a proof can show, nothing tells its way from those that were seen before.
    same = before == _found_in(plan) and len(plan.places_left) < FEW and not plan.is_labelled
    plan.places_left = (plan.places_left if same else frozenset()) | {places_left(ran.graph, hypothesis.samples)}
    plan.kinds = (plan.kinds if same else frozenset()) | kinds_in(ran.graph)
    plan.is_labelled = found.is_chosen
    for use, labels in found.labels.items():
        rows = None
        if labels.ndim == 1 and isinstance(use, LayerCall):
            rows = ran.rows_of(next(noted for noted in ran.noted if noted.call is use), routes)
        elif labels.ndim == 1 and not isinstance(use, LayerCall):
            rows = routes.rows(use)
        is_alive = labels != NOBODY
        if rows is not None and torch.equal(rows.to(labels)[is_alive], labels[is_alive]):
            ran.labels[use] = rows
        else:  # the nodes don't show it: check each forward
            ran.labels[use], plan.is_labelled = labels.clamp(min=0), True


class Behind:
    """Where nodes lead, as text for messages: to the next call of a layer with a rule, or to the outputs."""

    def __init__(self, ran: Ran) -> None:
        self.takers: dict[Node, Node] = {}  # by node, one that takes its output
        for value, takers in ran.graph.takers.items():
            self.takers.setdefault(value.node, takers[0].node)
        self.paths = {node: noted.call.path for noted in ran.noted for node in ran.inside(noted)}

    def of(self, node: Node) -> str:
        at: Node | None = node
        while at is not None and at not in self.paths:
            at = self.takers.get(at)
        return "the outputs" if at is None else f"the input of {self.paths[at]!r}"


def check_losses_inside(
    recorder: Recorder, plan: Plan, ran: Ran, found: Found, passes: Passes, draws: torch.Generator
) -> None:
    """Records which of the losses that the model returns are not sums over samples."""
    places = found.hypothesis.places
    behind: dict[Value, Layout] = {}
    for at, where in places.items():
        node = ran.outputs[at].grad_fn if isinstance(at, int) else at.node
        if isinstance(where, Layout) and node is not None:
            behind[Value(node, ran.outputs[at].output_nr if isinstance(at, int) else at.number)] = where
    for slot, x in enumerate(ran.outputs) if found.hypothesis.samples > 1 else ():
        if x.grad_fn is None or slot in places or x.numel() != 1 or not behind:
            continue
        with recorder.backward.silent():
            is_sum, is_scaled = sums_samples(x, behind, passes.weights, draws)
        plan.scaled |= is_scaled
        if is_sum is False:
            plan.mixed_outputs = (*plan.mixed_outputs, slot)
            plan.mixing = (
                f"{MIXING}: output number {slot} of the model is a loss computed inside the model, but not a sum over "
                "samples: its derivative at one sample's values depends on the other samples. Compute a loss of single "
                "samples outside the model instead: backward(losses)."
            )


def why_mixed(ran: Ran, mixed: Mapping[str, str], mixed_outputs: Sequence[int]) -> str:
    """How samples mix, as text for messages."""
    for noted in ran.noted:
        rule = rule_for(noted.call.layer)
        if rule is not None and rule.mixes is not None and (why := rule.mixes(noted.call.layer, noted.call.training)):
            return f"{noted.call.place} {why}"
    slots = ", ".join(f"{slot} (shape {tuple(ran.outputs[slot].shape)})" for slot in mixed_outputs)
    name, node = next(iter(mixed.items()), ("a parameter", "its node"))
    return (
        f"{MIXING}: the gradient at one sample's entries of output number {slots} of the model reaches other samples at "
        f"{node}, before {name}. This holds for every axis that was tried as the batch. If the batch is not axis 0 of the "
        "model's input, name its axis: add_hooks(model, batch_dim=...), with None for an argument that all samples share: "
        "batch_dim=(0, None). Give a sample without a batch axis as a batch of "
        "one: x.unsqueeze(0). Compute a loss of single samples outside the model: backward(losses)."
    )
