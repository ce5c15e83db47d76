"""Reads graphs beyond a model's forward: where parameters meet the batch there, and which sample each gradient belongs to.

A loss is computed on a model's outputs.  It may use parameters that the model returns, for example ``log_std``.

A pass with ``create_graph=True`` uses a parameter again at the node where it met the batch: y = x W gives ∂L/∂x = g Wᵀ.
This computation is read like a forward.  Its inputs are g and the node's saved tensors.  Its outputs are the gradients of
the node's inputs, whose samples the node's own law tells; and a later pass goes through its graph to W.
"""

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.arrivals import AtNode, AtOutput, Behind, Returned, on_node, own_hook, returned_in
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.calls import LayerCall, packed_into
from autograd_hacks.capture.gradient_hooks import Labels
from autograd_hacks.capture.kinds import Within
from autograd_hacks.capture.ran import Ran, packed_rows
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.uses import NodeUse, Use
from autograd_hacks.formulas.table import rule_for
from autograd_hacks.graph.label import NOBODY, Entries, Label, Owned, Shape, entries, viewed
from autograd_hacks.graph.memo import KEPT, told
from autograd_hacks.graph.roots import judged, label_of
from autograd_hacks.graph.trace import Nested, Trace
from autograd_hacks.reading.reader import Reader, agree, grads_kept
from autograd_hacks.support.contexts import plainly_saved
from autograd_hacks.support.graph import Value, is_users, leaves_behind, line_of, made, nodes_behind, shape_of
from autograd_hacks.support.internals import current_node, sequence_number
from autograd_hacks.support.layout import Layout, samples_of_rows
from autograd_hacks.support.switch import Switch

BETWEEN = (
    "samples mix, or may, between two calls: an argument of {} was computed from an earlier call's outputs, not sample by "
    "sample, at {}. Or independence is asked for, which is shown of each call by itself. Compute it within one model's "
    "forward, or give the later call such outputs as they are, or detached."
)
MIXING = (
    "samples mix in the loss, or may, as in a contrastive loss or one with statistics of the batch, so there are no "
    "per-sample gradients. Samples mix at {}{}. If each sample has a loss of its own, and only this node doesn't show it, "
    "give the N losses to autograd_hacks.backward(losses). If two samples share a loss, run the model once for each half of "
    "such pairs."
)


def _ran_behind(
    recorder: Recorder, outputs: Sequence[Tensor], ends: Collection[Node], forward: int, samples: int,
    roots: Sequence[Node] = (),
) -> Ran:  # fmt: skip
    """A computation outside of a model's forward.  ends: nodes at which it begins    forward: the number of that forward"""
    record, stops = recorder.record, frozenset(ends)
    roots = [*roots, *(x.grad_fn for x in outputs if x.grad_fn is not None)]
    own = record.own_among(leaves_behind(roots, stops), record.others)
    parameters = record.asked({record.name_of(p): p for p in own})
    within = Within(forward, samples=samples)
    return Ran(within, recorder.backward, stops, modules=list(recorder.layers), trained=lambda: parameters, outputs=outputs)


def read_outside(x: Tensor) -> str:
    """Prepares the next backward pass from x to read uses of parameters that no forward has seen.

    x: N ..., computed from outputs of models
    Returns the node at which samples mix, so that x[n] depends on outputs for other samples; "" if none does
    """
    if x.grad_fn is None or not (len(x) and Switch.on()):
        return ""
    behind = returned_in([Value(x.grad_fn, x.output_nr)])
    found = [mark.recorder() for mark in behind.marks.values()] + [receiver.owner() for receiver in behind.receivers]
    return next(filter(None, [_read_loss(own, x, behind) for own in dict.fromkeys(found) if isinstance(own, Recorder)]), "")


def _read_loss(recorder: Recorder, x: Tensor, behind: Behind) -> str:
    assert x.grad_fn is not None  # else it would come from no output
    samples, ends = len(x), [*behind.ends]
    numbers = [mark.forward for mark in behind.marks.values() if mark.recorder() is recorder]
    while True:
        ran = _ran_behind(recorder, [x], ends, max(numbers, default=recorder.record.forwards), samples)
        reader = Reader(ran, samples, {Value(x.grad_fn, x.output_nr): Layout()}, memo=recorder.kinds.memo)
        found, hooked, nodes = reader.read(), _hooked(recorder, reader), reader.trace.nodes
        found.uses = {k: own for k, own in found.uses.items() if nodes[k] not in hooked}
        # Of a value that a derivative takes once more, the forward's own use gets the gradient: there, the walk ends.
        taken = reader.trace.behind([j for values, _ in found.uses.values() for j, *_ in values])
        hooks = [(node, hook) for j in taken if (node := nodes[j]) not in ends for hook in on_node(node)]
        again = {node for node, own in hooks if isinstance(own, AtNode) and own.receiver is recorder.backward}
        if not again:
            break
        ends += again
    reader.follow(found)
    ran.attach()
    recorder.watch_loss(partial(labels_by_node, reader), samples)
    if recorder.record.documents is not None or not (found.mixed or recorder in _misled(reader, _told(reader, behind))):
        return ""
    return reader.mixing(reader.walk)[0] or "the order of the samples"


def labels_by_node(reader: Reader) -> Callable[[], Labels]:
    """Gives the labels of the gradients at nodes, which nothing here may hold."""
    numbers, labels = list(map(sequence_number, reader.trace.nodes)), reader.walk.labels
    return lambda: dict(zip(numbers, labels))


def read_between(recorder: Recorder, model: nn.Module, ran: Ran) -> None:
    """Refuses passes through a forward's arguments to outputs from which these were computed, if samples mix on the way.

    Whose the gradients at the arguments are, the forward's labels say; of layers by themselves, their rules."""
    within, labels, samples = ran.within, dict[Value, Label](), 0
    if ran.labels and within.samples is not None:
        samples, numbers = within.samples, ran.trace.number
        own = ((node, n, x) for node in ran.ends & numbers.keys() for n, x in enumerate(ran.labels[numbers[node]]))
        labels = {Value(node, n): label for node, n, label in own if label is not None}
    elif recorder.kinds.batch_dim == 0:
        rule = rule_for(model)
        axes = rule.axes(model) if rule is not None and rule.axes is not None else ()
        tensors = [x for x in ran.tensors if not x.is_nested]
        given = list(zip(tensors, [*axes, *[0] * len(tensors)]))
        samples = within.samples or next((x.shape[axis] for x, axis in given if x.ndim > axis), 0)
        rows = packed_rows(ran.arguments)
        made = ((x.grad_fn, x, Layout(axis)) for x, axis in given if x.grad_fn is not None)
        fit = ((Value(node, x.output_nr), x, at) for node, x, at in made if id(x) in rows or at.fits(x, samples))
        labels = {value: label_of(rows.get(id(x), at), x.shape, samples) for value, x, at in fit}
    labels = {value: label for value, label in labels.items() if not _is_returned(value, label, samples)}
    if not labels or not samples or within.documents is not None:
        return
    behind = returned_in(labels, stops_at_uses=True)
    if not (behind.marks or behind.receivers):
        return
    made_by = list(dict.fromkeys([value.node for value in labels]))
    between = _ran_behind(recorder, (), behind.ends, within.forward, samples, made_by)
    reader = Reader(between, samples, labels, memo=recorder.kinds.memo)
    told = _told(reader, behind)
    counts = {count for own, count, *_ in told if own is not recorder and count != samples}  # of other models' calls
    # If independence is asked for: values may mix without a gradient, and nothing shows that they don't.
    is_asked = recorder.kinds.independent and max(samples, *counts, 1) > 1
    if not (is_asked or _misled(reader, told)) and all(_has_sources(reader, count, told) for count in counts):
        return
    why = BETWEEN.format(type(model).__name__, reader.mixing(reader.walk)[0] or "the order of the samples")
    heard = {hook.receiver for node in nodes_behind(made_by) for hook in on_node(node)}  # also what is behind these outputs
    for node, receiver in itertools.product(made_by, heard):
        own_hook(node.register_prehook(partial(_refuse, receiver, why)))


def _refuse(backward: Backward, why: str, grads: Sequence[Tensor | None]) -> None:
    if backward.hears() and any(grad is not None for grad in grads):
        backward.refuse(why)


def _is_returned(value: Value, label: Label, samples: int) -> bool:
    """Whether a value is an output of a model, with the samples where this label says."""
    notes: Any = value.node.metadata
    mark = notes.get(Returned, {}).get(value.number)
    if mark is None or mark.at is None:
        return mark is not None  # what arrives there is refused
    shape = shape_of(value)
    return mark.samples == samples and agree(label, label_of(mark.at, shape, samples), shape, samples)


# A value of a model's that is read outside of its forward: the model's recorder, N, and the label of a gradient there.
_Read = tuple[Recorder, int, Value, Label]


def _told(reader: Reader, behind: Behind) -> list[_Read]:
    return [own for own in _read_of(reader.trace.nodes, behind.marks) if own[2].node in reader.number]


def _misled(reader: Reader, told: Iterable[_Read]) -> set[Recorder]:
    """The recorders at whose outputs or uses gradients of other samples arrive than are there."""
    return {own for own, n, at, label in told if n == reader.samples and not reader.is_in_order(at, label)}


def _has_sources(reader: Reader, samples: int, told: Iterable[_Read]) -> bool:
    """Whether each of a reader's samples was made of one sample of earlier calls, of which a loop took some, or many each.

    samples: the earlier calls' number"""
    own, there = reader.samples, [label for label in reader.labels.values() if isinstance(label, Owned)]
    expected = {value: label for _, count, value, label in told if count == samples}

    def read(of: Tensor, count: int) -> Reader:
        """Reads the computation again.  of: the new number of each sample    count: how many there are"""
        at = [entries(label, shape_of(value), own, "cpu") for value, label in zip(reader.places, there)]
        return Reader(reader.ran, count, {v: Entries(of[x].where(x >= 0, NOBODY)) for v, x in zip(reader.places, at)})

    # By more samples than any axis has, no label names a sample where nothing arrives.
    many = 1 + max([own, *(size for shapes in reader.trace.shapes for shape in shapes for size in shape or ())])
    numbers = torch.arange(own, device="cpu")
    taken, source = read(numbers, many), torch.zeros_like(numbers)
    for value, label in expected.items():
        found = taken.walk.labels[taken.number[value.node]][value.number]
        if isinstance(found, Entries) and isinstance(label, Owned):
            at, of = torch.broadcast_tensors(found.samples.cpu(), entries(label, shape_of(value), samples, "cpu"))
            source[at[at >= 0]] = of[at >= 0]
    again = (read(of, samples) for of in (source, numbers * samples // own, numbers % samples))
    return len(there) == len(reader.places) and any(
        all(map(each.is_in_order, expected.keys(), expected.values())) for each in again
    )


def _read_of(nodes: Iterable[Node], marks: Mapping[Value, Returned]) -> Iterator[_Read]:
    """What there is at marked outputs, and at uses whose nodes are among some."""
    for value, mark in marks.items():
        if mark.at is not None and isinstance(own := mark.recorder(), Recorder):  # else it is refused as it arrives
            yield own, mark.samples, value, label_of(mark.at, shape_of(value), mark.samples)
    for node, hook in [(own, hook) for own in nodes for hook in on_node(own)]:
        use, own = hook.use, hook.receiver.owner()
        # Of a recurrent layer by itself the rule alone knows where the samples are.
        is_alone = isinstance(use, LayerCall) and use.within.facts.calls is None and use.known.rule.axes is not None
        if use is not None and use.edges and not is_alone and isinstance(own, Recorder):  # else other nodes give the rows
            samples, labels = _labels(use, node, hook if isinstance(hook, AtOutput) else None)
            yield from ((own, samples, *at) for at in labels.items())


def _hooked(recorder: Recorder, reader: Reader) -> set[Node]:
    """The nodes at which hooks see all uses of parameters already: of forwards, of layers and of graphs that passes made.

    With those to which all gradient comes through values of these uses."""
    found, taken, trace = set[Node](), set[tuple[int, int]](), reader.trace
    for k, node in enumerate(trace.nodes):
        for hook in on_node(node):
            if hook.receiver is not recorder.backward:
                continue
            if isinstance(hook, AtNode):
                found.add(node)
                taken.update((k, value.place) for value in hook.use.known.values)
            elif hook.use is not None and hook.use.edges:
                found.update(nodes_behind([node], hook.inputs).keys() - hook.inputs)
    below = set[int]()
    for k in trace.order if taken else ():
        takers = reader.takers.get(k, ())
        if takers and all(other in below or (other, place) in taken for other, place, _ in takers):
            below.add(k)
    return found | {trace.nodes[k] for k in below}


def follow(recorder: weakref.ref[Recorder], use: Use, node: Node, hook: AtOutput | None) -> None:
    """Prepares a node of a running pass with create_graph=True, so that the graph it computes can be read later."""
    own = recorder()
    if own is None or own.forward.running is not None:  # then it belongs to that forward's graph
        return
    own.record.comparing = True
    samples, labels = _labels(use, node, hook)
    if not use.edges or not samples or not labels:  # without edges, other nodes give the rows
        return
    ends: Collection[Node] = () if hook is None else hook.inputs
    if isinstance(use, NodeUse):
        taken = {value.place for value in use.known.values}
        ends = {ahead for n, (ahead, _) in enumerate(node.next_functions) if ahead is not None and n not in taken}
    reader = Reader(_ran_behind(own, (), ends, use.within.forward, samples, [node]), samples, labels)
    trace, walk = reader.trace, reader.walk
    places: dict[int, set[int]] = {}
    for k, place in [own[:2] for own in walk.uses if own.node >= 0]:
        places.setdefault(k, set()).add(place)
    if isinstance(use, LayerCall) and _leads_inside(reader, places):
        # A graph made inside leads to inner values, around the output.  From now on the call's nodes give the rows.
        _attach(own, reader)
        use.edges = {}
    for k, taken in places.items():
        at = trace.nodes[k]
        if follow in at.metadata:
            continue
        at.metadata[follow] = True
        edges = {n: edge for n, edge in enumerate(trace.edges[k]) if edge is not None and n not in taken}
        inputs = {n: (trace.shapes[j][number] or (), walk.labels[j][number]) for n, (j, number) in edges.items()}
        own_hook(at.register_hook(partial(_computed, recorder, use.within.forward, samples, inputs)))


def _labels(use: Use, node: Node, hook: AtOutput | None) -> tuple[int, dict[Value, Label]]:
    """N, and where the samples are in a node's outputs."""
    values = [Value(node, n) for n in range(len(made(node)))] if hook is None else [Value(node, hook.number)]
    shape = shape_of(values[0]) if hook is None else hook.shape
    samples, found = use.within.samples or (shape[0] if shape else 1), dict[Value, Label]()
    packed = packed_into(use) if isinstance(use, LayerCall) and hook is not None and not hook.slot else None
    layouts, of_rows, _ = use.whose
    for n, value in enumerate(values) if samples else ():
        slot, sizes = (n, shape_of(value)) if hook is None else (hook.slot, hook.shape)
        if packed is not None:
            label = label_of(samples_of_rows(packed), sizes, samples)
        elif of_rows is not None:
            label = Entries(of_rows) if of_rows.ndim > 1 else label_of(of_rows, sizes, samples)
        else:
            at = layouts[slot] if slot < len(layouts) else Layout() if hook is not None else None
            label = None if at is None or not at.fits_shape(sizes, samples) else label_of(at, sizes, samples)
        if isinstance(label, Owned):
            found[value] = label if sizes == shape_of(value) else viewed(label, sizes, shape_of(value), samples)
        if of_rows is not None:
            break
    return samples, found


def _leads_inside(reader: Reader, uses: Collection[int]) -> bool:
    """Whether nodes that save values take what comes from the uses."""
    trace = reader.trace
    return any(trace.kinds[k].has_operands for k in trace.above(uses) - {*uses})


def _attach(own: Recorder, reader: Reader) -> None:
    reader.follow(reader.read())
    reader.ran.attach()


def _computed(
    recorder: weakref.ref[Recorder], forward: int, samples: int, inputs: Mapping[int, tuple[Shape, Label]],
    computed: Sequence[Tensor | None], grads: Sequence[Tensor | None],
) -> None:  # fmt: skip
    """Called when a node at which parameters met the batch has computed gradients from those that arrived.

    inputs: by number, the shape of each input that isn't made of parameters, and the label of the gradient there"""
    own = recorder()
    if own is None or not own.backward.hears():
        return
    roots: dict[Value, Label] = {}
    outputs: list[Tensor] = []
    for n, (shape, label) in inputs.items():
        x = computed[n]
        if x is not None and x.grad_fn is not None and isinstance(label, Owned) and x.shape == shape:
            roots[Value(x.grad_fn, x.output_nr)] = label
            outputs.append(x)
    node: Any = current_node()
    ends = {node, *(x.grad_fn for x in grads if x is not None and x.grad_fn is not None)}
    ends |= {node.next_functions[n][0] for n in inputs}
    ran = _ran_behind(own, outputs, ends, forward, samples)
    if ran.parameters:
        _attach(own, Reader(ran, samples, roots))


def mixing_in(roots: Sequence[Value]) -> tuple[dict[Backward, str], frozenset[Any]]:
    """Why passes from some values have no rows, of each model whose samples are compared on the way; and how these become
    numbers."""
    behind, refused, reduced = returned_in(roots, stops_at_uses=True), dict[Backward, str](), frozenset[Any]()
    marked = {value.node for value in behind.marks}
    with suppress(Nested), plainly_saved():
        read = [
            own for own in _read_of([node for node in behind.ends if node not in marked], behind.marks)
            if own[1] > 1 and own[0].kinds.probes and own[0].record.documents is None and own[0].backward.hears()
        ]  # fmt: skip
        if not read:  # as in a pass of other models
            return refused, reduced
        losses = read[0][0].kinds.losses
        trace = Trace(roots, (), frozenset(behind.ends), next((own.plan for own in reversed(losses.values())), None))
        at = [(trace.number[value.node], value.number, samples, told(own)) for _, samples, value, own in read]
        parameters = (p for own, *_ in read for p in own.record.names.keys())  # noqa: SIM118  # it has no iterator
        with grads_kept(parameters) if any(map(is_users, trace.nodes)) else nullcontext():
            total = losses.pop(key := (trace.key, *at), None)
            if total is None or not total.holds(trace):
                total = judged(trace, [own[1:] for own in read])
        losses[key], reduced = total, total.reduced
        for old in [*losses][: -KEPT // 4]:
            del losses[old]
        for n, k in total.mixed.items():
            refused[read[n][0].backward] = MIXING.format(trace.nodes[k].name(), line_of(trace.nodes[k]))
    return refused, reduced


ABOVE.created, ABOVE.between, ABOVE.mixing_in = follow, read_between, mixing_in
