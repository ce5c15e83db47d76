"""Labels all nodes of a joint graph: the forward's, the outputs' gradients, and what follows from them."""

from __future__ import annotations

import operator

from torch import Tensor, fx

from autograd_hacks.compiled.labels import RULES, Found, Joint, Label, Labels, behind, name_of, tensors_of
from autograd_hacks.compiled.operations import by_law
from autograd_hacks.graph.label import SUM, At
from autograd_hacks.graph.tape_laws import UNIFORM, UNWRITTEN
from autograd_hacks.support.internals import tree_leaves, without_dispatch_modes

LINEAR = frozenset(
    """view _unsafe_view reshape slice select diagonal unbind stack flip roll cat split split_with_sizes unsafe_split
    unsafe_split_with_sizes constant_pad_nd slice_scatter select_scatter add sub neg permute transpose t clone alias sum mean expand unsqueeze squeeze _to_copy where
    index_put index gather scatter scatter_add diagonal_scatter as_strided copy detach index_add
    index_select unfold unfold_backward repeat cumsum real imag complex view_as_real view_as_complex _conj
    lift_fresh_copy tril triu _fft_r2c _fft_c2r _fft_c2c""".split()  # noqa: SIM905 to be read
)
"""Operations that are linear in all of their tensors together, so each may be a sum over samples."""
MULTIPLE = {
    "mul": "0 1", "mm": "0 1", "bmm": "0 1", "convolution": "0 1", "addmm": "01 02", "baddbmm": "01 02", "div": "0",
    "linalg_lu_solve": "2", "linalg_solve_triangular": "1",
}  # fmt: skip
"""{an operation: the numbers of the tensors in which it is linear together}"""


def labelled(joint: Joint) -> Labels:
    """The labels of all nodes that parameters' gradients depend on; with ``joint.left`` also of outputs and buffers.

    Raises SamplesMixed, with the operation and its line, if samples mix; UnsupportedOperation for an operation without a
    rule.
    """
    with without_dispatch_modes():  # laws make tensors, which no compiler is to trace
        return _labelled(joint)


def _labelled(joint: Joint) -> Labels:
    seen = [] if joint.left is None else [*joint.outputs, *joint.left.values()]
    labels, needed = Labels(joint.samples), behind([*joint.gradients.values(), *joint.tangents.values(), *seen])
    labels.after_gradients.update(joint.tangents)
    nodes = [node for node in joint.graph.nodes if node in needed]
    for node in nodes:
        if not labels.after_gradients.isdisjoint(node.all_input_nodes):
            labels.after_gradients.add(node)
    for node in nodes:  # the forward's nodes
        if node not in labels.after_gradients:
            axis = joint.axes.get(node)
            labels.found[node] = _label(labels, node) if node.op == "call_function" else None if axis is None else At(axis)
    for tangent, output in joint.tangents.items():
        if not isinstance(labels[output], At):
            labels.mixed(output, "an output of the model has no batch axis")
        labels.found[tangent] = labels[output]
    for node in nodes:
        if node not in labels.found:
            labels.found[node] = _label(labels, node) if node.op == "call_function" else None
    for name, gradient in joint.gradients.items():
        if isinstance(labels[gradient], At):
            labels.mixed(gradient, f"the gradient of {name} has a batch axis")
    for name, node in (joint.left or {}).items():
        if labels[node] is not None:
            labels.mixed(node, f"the forward writes a value to {name} that depends on samples")
    return labels


def _label(labels: Labels, node: fx.Node) -> Found:
    if node.target is operator.getitem:
        found = labels[node.args[0]]
        part = found[node.args[1]] if isinstance(found, list) else found  # type: ignore[index]
        if isinstance(part, Exception):
            raise part
        return part
    given = [labels[x] for x in node.all_input_nodes]
    if all(label is None or (isinstance(label, list) and not any(label)) for label in given):
        return None
    name = name_of(node)
    if name in UNIFORM | UNWRITTEN or not any(isinstance(x, Tensor) for x in tree_leaves(node.meta.get("val"))):
        return None
    if not hasattr(node.target, "_schema"):
        return labels.unsupported(node, f"there is no rule for the operation {name!r}, a loop or a custom function")
    if SUM in given:
        return _after_sum(labels, node, name)
    return (RULES.get(name) or by_law)(labels, node, *node.args, **node.kwargs)


def _after_sum(labels: Labels, node: fx.Node, name: str) -> Label:
    """The label of an operation on a sum over samples, which must be linear in it."""
    if any(isinstance(labels[x], At) for x in node.all_input_nodes):
        labels.mixed(node, "the operation combines a sum over samples with samples")
    if name in LINEAR:
        return SUM
    sums = {place for place, x in enumerate(tensors_of(node)) if labels[x] is SUM}
    alternatives = [{int(place) for place in together} for together in MULTIPLE.get(name, "").split()]
    is_torchs = "::" not in name and name != "_cdist_backward"  # of which torch's vmap is wrong
    if is_torchs and node.target._schema.arguments[0].name.startswith("grad"):  # type: ignore[union-attr]
        alternatives = [{0}]  # a derivative, which is linear in what it is multiplied by
    if not any(sums <= together for together in alternatives):
        labels.unsupported(node, "the operation is not known to be linear in the sums over samples that it gets")
    return SUM
