"""Computations on a model's outputs outside of the model, such as losses: whether samples stay separate there, and where
parameters meet the batch that the model returns, for example ``log_std``."""

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autograd_hacks.capture.arrivals import AtNode, Returned, on_node, returned_in
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.graph.label import Owned, entries
from autograd_hacks.reading.reader import Reader, label_of, ran_behind
from autograd_hacks.support.graph import Graph, Value
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.switch import Switch


def read_outside(x: Tensor) -> str:
    """Prepares the next backward pass from x to read uses of parameters that no forward has seen.

    x: N ..., computed from outputs of models
    Returns the node at which samples mix, so that x[n] depends on outputs for other samples; "" if none does
    """
    marks = returned_in(x) if len(x) and Switch.on() else []
    recorders = {id(own): own for _, mark in marks if isinstance(own := mark.recorder(), Recorder)}
    mixed = [_read(own, x, [pair for pair in marks if pair[1].recorder() is own]) for own in recorders.values()]
    return next(filter(None, mixed), "")


def _read(recorder: Recorder, x: Tensor, marks: list[tuple[GradientEdge, Returned]]) -> str:
    assert x.grad_fn is not None  # else it would come from no output
    samples, forward = len(x), max(mark.forward for _, mark in marks)
    ran = ran_behind(recorder, [x], [edge.node for edge, _ in marks], forward, samples)
    reader = Reader(ran, samples, {Value(x.grad_fn, x.output_nr): Layout()}, memo=recorder.kinds.memo)
    found = reader.read()
    hooked = _hooked(recorder, reader)
    found.uses = {k: own for k, own in found.uses.items() if reader.trace.nodes[k] not in hooked}
    reader.follow(found)
    ran.attach(recorder.backward)
    if recorder.record.documents is not None:
        return ""
    at = [(Value(edge.node, edge.output_nr), mark.layout) for edge, mark in marks if mark.samples == samples]
    is_apart = all(is_in_order(reader, value, layout) for value, layout in at)
    if is_apart and not found.mixed:
        return ""
    return reader.mixing(reader.walk)[0] or "the order of the samples"


def is_in_order(reader: Reader, value: Value, layout: Layout) -> bool:
    """Whether what arrives at a value is of the samples whose entries these are."""
    k = reader.number[value.node]
    label, shape = reader.walk.labels[k][value.number], reader.trace.shapes[k][value.number] or ()
    expected = label_of(layout, shape, reader.samples)
    if label is None or label == expected:
        return True
    if not isinstance(label, Owned) or not isinstance(expected, Owned):
        return False
    at = entries(label, shape, reader.samples)
    return bool(((at == entries(expected, shape, reader.samples, at.device)) | (at < 0)).all())


def _hooked(recorder: Recorder, reader: Reader) -> set[Node]:
    """The nodes at which hooks see all uses of parameters already: of forwards, of layers and of graphs that passes made."""
    found = set[Node]()
    for node in reader.trace.nodes:
        for hook in on_node(node):
            if hook.receiver is not recorder.backward:
                continue
            if isinstance(hook, AtNode):
                found.add(node)
            elif hook.call is not None and hook.call.edges:
                found.update(Graph([node], hook.inputs).nodes.keys() - hook.inputs)
    return found
