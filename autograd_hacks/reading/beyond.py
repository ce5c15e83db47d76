"""Reads graphs beyond a model's forward: where parameters meet the batch there, and which sample each gradient belongs to.

A loss is computed on a model's outputs.  It may use parameters that the model returns, for example ``log_std``.

A pass with ``create_graph=True`` uses a parameter again at the node where it met the batch: y = x W gives ∂L/∂x = g Wᵀ.
This computation is read like a forward.  Its inputs are g and the node's saved tensors.  Its outputs are the gradients of
the node's inputs, whose samples the node's own law tells; and a later pass goes through its graph to W.
"""

import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.arrivals import AtNode, AtOutput, Returned, on_node, own_hook, returned_in
from autograd_hacks.capture.calls import LayerCall, packed_into
from autograd_hacks.capture.kinds import Within
from autograd_hacks.capture.ran import Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.uses import NodeUse, Use
from autograd_hacks.graph.label import Entries, Label, Owned, Shape, entries, viewed
from autograd_hacks.graph.trace import END, LEAF
from autograd_hacks.reading.reader import Reader, label_of
from autograd_hacks.support.graph import Graph, Value, made, shape_of
from autograd_hacks.support.internals import current_node
from autograd_hacks.support.layout import Layout, samples_of_rows
from autograd_hacks.support.switch import Switch


def _ran_behind(
    recorder: Recorder, outputs: Sequence[Tensor], ends: Collection[Node], forward: int, samples: int,
    roots: Sequence[Node] = (),
) -> Ran:  # fmt: skip
    """A computation outside of a model's forward.  ends: nodes at which it begins    forward: the number of that forward"""
    record, stops = recorder.record, frozenset(ends)
    roots = [*roots, *(x.grad_fn for x in outputs if x.grad_fn is not None)]
    own = record.own_among(leaf.variable for leaf in Graph(roots, stops).leaves)
    parameters = record.asked({record.name_of(p): p for p in own})
    within = Within(forward, samples=samples)
    return Ran(within, stops, modules=list(recorder.layers), trained=lambda: parameters, outputs=outputs)


def read_outside(x: Tensor) -> str:
    """Prepares the next backward pass from x to read uses of parameters that no forward has seen.

    x: N ..., computed from outputs of models
    Returns the node at which samples mix, so that x[n] depends on outputs for other samples; "" if none does
    """
    marks = returned_in(x) if len(x) and Switch.on() else []
    recorders = {id(own): own for _, mark in marks if isinstance(own := mark.recorder(), Recorder)}
    mixed = [_read_loss(own, x, [pair for pair in marks if pair[1].recorder() is own]) for own in recorders.values()]
    return next(filter(None, mixed), "")


def _read_loss(recorder: Recorder, x: Tensor, marks: list[tuple[GradientEdge, Returned]]) -> str:
    assert x.grad_fn is not None  # else it would come from no output
    samples, forward = len(x), max(mark.forward for _, mark in marks)
    ends, at = [edge.node for edge, _ in marks], dict[Value, Label]()
    while True:
        ran = _ran_behind(recorder, [x], ends, forward, samples)
        reader = Reader(ran, samples, {Value(x.grad_fn, x.output_nr): Layout()}, memo=recorder.kinds.memo)
        found, hooked = reader.read(), _hooked(recorder, reader)
        nodes = reader.trace.nodes
        found.uses = {k: own for k, own in found.uses.items() if nodes[k] not in hooked}
        # Of a value that a derivative takes once more, the forward's own use gets the gradient: there, the walk ends.
        taken = reader.trace.behind([j for values, _ in found.uses.values() for j, *_ in values])
        hooks = [(node, hook) for j in taken if (node := nodes[j]) not in ends for hook in on_node(node)]
        again = {node: own.use for node, own in hooks if isinstance(own, AtNode) and own.receiver is recorder.backward}
        if not again:
            break
        ends += again
        for node, use in again.items():
            at |= _labels(use, node, None)[1]
    reader.follow(found)
    ran.attach(recorder.backward)
    if recorder.record.documents is not None:
        return ""
    for edge, mark in marks:
        if mark.samples == samples:
            value = Value(edge.node, edge.output_nr)
            at[value] = label_of(mark.layout, shape_of(value), samples)
    is_apart = all(is_in_order(reader, value, label) for value, label in at.items())
    if is_apart and not found.mixed:
        return ""
    return reader.mixing(reader.walk)[0] or "the order of the samples"


def is_in_order(reader: Reader, value: Value, expected: Label) -> bool:
    """Whether what arrives at a value is of the samples whose entries these are."""
    k = reader.number[value.node]
    label, shape = reader.walk.labels[k][value.number], reader.trace.shapes[k][value.number] or ()
    if label is None or label == expected:
        return True
    if not isinstance(label, Owned) or not isinstance(expected, Owned):
        return False
    at = entries(label, shape, reader.samples)
    return bool(((at == entries(expected, shape, reader.samples, at.device)) | (at < 0)).all())


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
                taken.update((k, value.place) for value in hook.use.plan.values)
            elif hook.call is not None and hook.call.edges:
                found.update(Graph([node], hook.inputs).nodes.keys() - hook.inputs)
    below = set[int]()
    for k in trace.order() if taken else ():
        takers = reader.takers.get(k, ())
        if takers and all(other in below or (other, place) in taken for other, place, _ in takers):
            below.add(k)
    return found | {trace.nodes[k] for k in below}


class Met(NamedTuple):
    """A node at which parameters met the batch.

    forward: the number of that forward
    inputs: by number, the shape of each input that isn't made of parameters, and the label of the gradient there
    """

    forward: int
    samples: int
    inputs: Mapping[int, tuple[Shape, Label]]


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
        taken = {value.place for value in use.plan.values}
        ends = {ahead for n, (ahead, _) in enumerate(node.next_functions) if ahead is not None and n not in taken}
    reader = Reader(_ran_behind(own, (), ends, use.within.forward, samples, [node]), samples, labels)
    trace, walk = reader.trace, reader.walk
    places: dict[int, set[int]] = {}
    for k, place, *_ in walk.uses:
        if k >= 0:
            places.setdefault(k, set()).add(place)
    if isinstance(use, LayerCall) and _leads_inside(reader, places):
        # A graph made inside leads to inner values, around the output.  From now on the call's nodes give the rows.
        _attach(own, reader)
        use.edges = {}
    for k, taken in places.items():
        at = trace.nodes[k]
        if Met in at.metadata:
            continue
        at.metadata[Met] = True
        edges = {n: edge for n, edge in enumerate(trace.edges[k]) if edge is not None and n not in taken}
        inputs = {n: (trace.shapes[j][number] or (), walk.labels[j][number]) for n, (j, number) in edges.items()}
        own_hook(at.register_hook(partial(_computed, recorder, Met(use.within.forward, samples, inputs))))


def _labels(use: Use, node: Node, hook: AtOutput | None) -> tuple[int, dict[Value, Label]]:
    """N, and where the samples are in a node's outputs."""
    values = [Value(node, n) for n in range(len(made(node)))] if hook is None else [Value(node, hook.number)]
    shape = shape_of(values[0]) if hook is None else hook.shape
    samples, found = use.samples or (shape[0] if shape else 1), dict[Value, Label]()
    packed = packed_into(use) if isinstance(use, LayerCall) and hook is not None and not hook.slot else None
    for n, value in enumerate(values) if samples else ():
        slot, sizes = (n, shape_of(value)) if hook is None else (hook.slot, hook.shape)
        if packed is not None:
            label = label_of(samples_of_rows(packed), sizes, samples)
        elif use.labels is not None:
            label = Entries(use.labels) if use.labels.ndim > 1 else label_of(use.labels, sizes, samples)
        else:
            at = use.layouts[slot] if slot < len(use.layouts) else Layout() if hook is not None else None
            label = None if at is None or not at.fits_shape(sizes, samples) else label_of(at, sizes, samples)
        if isinstance(label, Owned):
            found[value] = label if sizes == shape_of(value) else viewed(label, sizes, shape_of(value), samples)
        if use.labels is not None:
            break
    return samples, found


def _leads_inside(reader: Reader, uses: Collection[int]) -> bool:
    """Whether nodes that save values take what comes from the uses."""
    trace, above = reader.trace, set(uses)
    for k in reversed(trace.order()):
        if trace.kinds[k] is END or trace.kinds[k] is LEAF:
            continue
        if any(edge is not None and edge[0] in above for edge in trace.edges[k]):
            if trace.kinds[k].has_operands:
                return True
            above.add(k)
    return False


def _attach(own: Recorder, reader: Reader) -> None:
    reader.follow(reader.read())
    reader.ran.attach(own.backward)


def _computed(
    recorder: weakref.ref[Recorder], met: Met, computed: Sequence[Tensor | None], grads: Sequence[Tensor | None]
) -> None:
    """Called when a node has computed gradients from those that arrived."""
    own = recorder()
    if own is None or not own.backward.hears():
        return
    roots: dict[Value, Label] = {}
    outputs: list[Tensor] = []
    for n, (shape, label) in met.inputs.items():
        x = computed[n]
        if x is not None and x.grad_fn is not None and isinstance(label, Owned) and x.shape == shape:
            roots[Value(x.grad_fn, x.output_nr)] = label
            outputs.append(x)
    if not roots:
        return
    node: Any = current_node()
    ends = {node, *(x.grad_fn for x in grads if x is not None and x.grad_fn is not None)}
    ends |= {node.next_functions[n][0] for n in met.inputs}
    ran = _ran_behind(own, outputs, ends, met.forward, met.samples)
    if ran.parameters:
        _attach(own, Reader(ran, met.samples, roots))


ABOVE.created = follow
