"""Labels all nodes of a joint graph: the forward's, the outputs' gradients, and what follows from them.

Where the samples are in an operation's result the laws of `graph/` say, asked backwards.
A law gives the labels of an operation's tensors from that of a result.  So the label of a result is the one from which its
law gives each tensor the label that it has.  Laws that read an index get zeros for it, since labels hold for all values: if
it chose among samples, the law would find all of them in the first one.

What adds up samples has no such label; it is a contraction.  Rules by name are for derivatives that have no law.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from autograd_hacks.compiled.labels import (
    RULES,
    Found,
    Joint,
    Label,
    Labels,
    after,
    behind,
    by_name,
    name_of,
    number,
    shape,
    size,
    tensors_of,
)
from autograd_hacks.compiled.labels import register_operation as rule
from autograd_hacks.errors import PerSampleGradientError
from autograd_hacks.graph.axes import axis
from autograd_hacks.graph.label import ALONE, MIX, SUM, At, Links, tidied, viewed
from autograd_hacks.graph.moves import MOVES
from autograd_hacks.graph.tape_laws import UNIFORM, UNWRITTEN, Step, Unshown, operation
from autograd_hacks.graph.values import MASKS, Indexed
from autograd_hacks.support.internals import tree_leaves, without_dispatch_modes

BESIDE = {"cat", "constant_pad_nd", "slice_scatter", "select_scatter"}
"""Operations that may put samples beside others."""
SUMS = {"sum", "mm", "bmm", "convolution_backward"}
"""Operations that add up along an axis of which their law says that it is lost."""
LINEAR = frozenset(
    """view _unsafe_view reshape slice select diagonal unbind stack flip roll cat split split_with_sizes unsafe_split
    unsafe_split_with_sizes constant_pad_nd slice_scatter select_scatter diagonal_scatter add sub neg permute transpose t
    clone alias sum mean expand unsqueeze squeeze _to_copy where index_put index gather scatter scatter_add as_strided copy
    detach index_add index_select unfold unfold_backward repeat cumsum real imag complex view_as_real view_as_complex _conj
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
    seen = [] if joint.left is None else [*joint.outputs, *joint.left.values()]
    needed = behind([*joint.gradients.values(), *joint.tangents.values(), *seen])
    labels = Labels(joint.samples, after_gradients=after(joint.tangents))
    nodes = [node for node in joint.graph.nodes if node in needed or node in joint.tangents]
    with without_dispatch_modes():  # laws make tensors, which no compiler is to trace
        for node in sorted(nodes, key=labels.after_gradients.__contains__):  # the forward's first
            if (output := joint.tangents.get(node)) is not None:
                labels.found[node] = labels[output]
                if not isinstance(labels[output], At):
                    labels.mixed(output, "an output of the model has no batch axis")
            elif node.op == "call_function":
                labels.found[node] = _label(labels, node)
            else:
                labels.found[node] = None if (d := joint.axes.get(node)) is None else At(d)
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
        part = found[node.args[1]] if isinstance(found, list) else found  # type: ignore[index]  # a number
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
    if is_torchs and node.target._schema.arguments[0].name.startswith("grad"):  # type: ignore[union-attr]  # it is torch's operation
        alternatives = [{0}]  # a derivative, which is linear in what it is multiplied by
    if not any(sums <= together for together in alternatives):
        labels.unsupported(node, "the operation is not known to be linear in the sums over samples that it gets")
    return SUM


# By law.


def by_law(labels: Labels, node: fx.Node, *_: Any, **__: Any) -> Found:
    made, found, index = node.meta["val"], list[Label | Exception](), operation(node.target).read
    masks = [x for x in (_pointers(by_name(node)[index]) if index else ()) if x.meta["val"].dtype in MASKS]
    if any(labels[mask] is not None or len(shape(mask)) > 1 for mask in masks):
        why = "a mask picks as many entries as its values say; torch.where(mask, a, b) keeps sizes"
        return labels.unsupported(masks[0], why)
    is_one = not isinstance(made, tuple | list)
    outs = [[size(s) for s in y.shape] if isinstance(y, Tensor) else None for y in ([made] if is_one else made)]
    step = _step(labels, node, outs)
    is_attention = step.name.startswith("_scaled_dot_product") and not step.name.endswith("backward")
    for o, out in enumerate(outs):
        if out is None or 0 in out or (o > 1 and is_attention):  # lengths and seeds: sizes alone say them
            found.append(None)
            continue
        try:
            found.append(_of_result(labels, node, step, o))
        except PerSampleGradientError as error:
            if is_one:
                raise
            found.append(error)  # nobody may want this one
    return found[0] if is_one else found  # type: ignore[return-value]


def _step(labels: Labels, node: fx.Node, outs: Sequence[Sequence[int] | None]) -> Step:
    known, given, tensors = operation(node.target), by_name(node), tensors_of(node)
    strides = [size(s) for s in tensors[0].meta["val"].stride()] if tensors and tensors[0] is not None else []

    def read(_: bool = True) -> Any:
        x = given[known.read]
        return [_known(y, labels.samples) for y in x] if isinstance(x, list | tuple) else _known(x, labels.samples)

    ins = [None if x is None else shape(x) for x in tensors]
    numbers = {name: x if name in known.tensors else number(x) for name, x in given.items()}
    if tensors and tensors[0] is not None and numbers.get("storage_offset") == size(tensors[0].meta["val"].storage_offset()):
        numbers["storage_offset"] = None  # it begins with the tensor's first entry
    return Step(known, numbers, ins, outs, [labels[x] is not None for x in tensors], strides, read)


def _of_result(labels: Labels, node: fx.Node, step: Step, o: int) -> Label:
    """The label of result number o."""
    tensors, samples = tensors_of(node), labels.samples
    given = {k: labels[x] for k, x in enumerate(tensors) if labels[x] is not None}
    try:
        for label in dict.fromkeys(_candidates(step, o, given, samples)):
            found = list(step.labels(label, o, samples))
            for k, x in enumerate(tensors):
                if k in given and step.name.startswith("linalg_lu") and not x.meta["val"].is_floating_point():  # type: ignore[union-attr]  # a node
                    found[k] = label  # pivots, of which the law knows nothing
            if all(k < len(found) and tidied(found[k], step.ins[k] or (), samples) == at for k, at in given.items()):
                _check_beside(labels, node, step, label)
                return label
        if step.operation.read:
            return _added_up(labels, node, step)
        links = step.links(o)
    except Unshown:
        links = None
    if MOVES.get(step.name) is MOVES["view"]:
        return labels.unsupported(node, "a view cuts the axis of samples")
    if links is None and step.name not in MOVES:
        adds = f"autograd_hacks.compiled.register_operation({step.name!r}) adds one"
        return labels.unsupported(node, f"there is no rule for the operation {step.name!r} ({adds})")
    return _summed(labels, node, links or [], given, o)


def _candidates(step: Step, o: int, given: Mapping[int, At], samples: int) -> Iterator[At]:
    """What the label of a result may be."""
    out = step.outs[o] or ()
    for k, at in given.items():
        own = step.ins[k] or ()
        if MOVES.get(step.name) is MOVES["view"]:
            found = viewed(at, own, out, samples) if prod(own) == prod(out) else None  # else a view of other bits
            if isinstance(found, At):
                yield found
            continue
        for d in range(len(out)):
            for inner in (at.inner, out[d] // samples, 1):
                if out[d] and out[d] % (samples * max(1, inner)) == 0:
                    yield At(d, out[d] // (samples * inner), inner)


def _check_beside(labels: Labels, node: fx.Node, step: Step, at: At) -> None:
    """Sizes that fit this batch, such as as many rows of padding as samples, needn't fit another."""
    out = step.outs[0] or ()
    if step.name in BESIDE and axis(step.given.get("dim", at.dim), len(out)) == at.dim:
        parts = [own for own, has in zip(step.ins, step.reached) if has] if step.name == "cat" else step.ins[-1:]
        if sum(own[at.dim] for own in parts if own and len(own) == len(out)) != out[at.dim]:
            labels.mixed(node, "puts samples beside what is of none, along their axis")


def _summed(labels: Labels, node: fx.Node, links: Sequence[Links], given: Mapping[int, At], o: int) -> Label:
    """The label of an operation that adds up along the samples' axis."""
    tensors, of = tensors_of(node), {k: links[k][at.dim] if k < len(links) else MIX for k, at in given.items()}
    if not links:
        return labels.mixed(node, "takes or writes some of the samples, or turns their order")
    if MIX in of.values() and name_of(node) == "sort":
        return labels.unsupported(node, "positions of several samples are sorted, as for experts that they are sent to")
    if MIX in of.values():
        what = " (BatchNorm in training mode)" if "batch_norm" in name_of(node) else ""
        return labels.mixed(node, f"the operation works along the samples' axis{what}")
    if name_of(node) not in SUMS or set(of.values()) != {ALONE}:
        return labels.mixed(node, "takes samples together, or multiplies them with each other")
    at: Any = labels.same(node, [own.moved(0) for own in given.values()])
    along = {x: at.moved(own.index(ALONE)) for x, own in zip(tensors, links) if x is not None and [*own].count(ALONE) == 1}
    lost = {x: own for k, own in given.items() if (x := tensors[k]) is not None}
    return labels.contract(node, along | lost, output=o if isinstance(node.meta["val"], tuple | list) else None)


# What an index moves.


def _pointers(index: Any) -> list[fx.Node]:
    return [x for x in (index if isinstance(index, list | tuple) else [index]) if x is not None]


_SAME_NUMBERS = ("view", "unsqueeze", "clone", "alias", "_to_copy", "squeeze", "lift_fresh_copy")


def _known(index: fx.Node | None, samples: int) -> Tensor | None:
    """An index's values if it counts samples; else zeros, with which all that is taken is the first one's."""
    if index is None:
        return None
    node, found = index, torch.zeros(prod(shape(index)), dtype=torch.long, device="cpu")
    while name_of(node) in _SAME_NUMBERS:
        node = node.args[0]  # type: ignore[assignment]  # a node
    if name_of(node).startswith("arange") and len(found) == samples:
        given = by_name(node)
        found = number(given.get("start", 0)) + number(given.get("step", 1)) * torch.arange(samples, device="cpu")
    return found.view(shape(index))


def _added_up(labels: Labels, node: fx.Node, step: Step) -> Label:
    """The label of a tensor to which samples are added by indices."""
    given, out = by_name(node), step.outs[0] or ()
    x, added = tensors_of(node)[0], given.get("values", given.get("src"))
    if labels[x] is not None or not (step.name == "scatter_add" or given.get("accumulate")):
        return labels.mixed(node, "samples are taken or written by index, or the last one that is written wins")
    if step.name == "scatter_add":
        indices, first = [given["index"]], axis(given["dim"], len(out))
        ends, last = dict.fromkeys((added, *indices), len(out)), first + 1
    else:  # each tensor's last axis is before this one of the axes that the indices and the rest have together
        indices, by = _pointers(given["indices"]), Indexed(step.read(), out)
        first, last = by.start, by.start + by.axes
        ends = {added: by.axes + len(by.left)} | dict.fromkeys(indices, last)
    before = {y: end - len(shape(y)) for y, end in ends.items()}
    at = labels.same(node, [own.moved(own.dim + before[y]) for y in ends if (own := labels[y]) is not None])
    if at is None or not first <= at.dim < last:
        return labels.mixed(node, "samples are added to some of the samples")
    # An index that is equal for all samples may be repeated for each.
    there = {y: at.dim - n for y, n in before.items()}
    return labels.contract(node, {y: at.moved(d) for y, d in there.items() if d >= 0 and shape(y)[d] > 1})


# Derivatives without one of their own, and tables.


@rule("embedding_dense_backward")
def _(labels: Labels, node: fx.Node, g: fx.Node, index: fx.Node, entries: int, padding: int, by_frequency: bool) -> Found:
    if by_frequency:
        return labels.mixed(node, "gradients are divided by how often the whole batch reads an entry (scale_grad_by_freq)")
    at = labels.same(node, [labels[g], labels[index]])
    return labels.contract(node, {g: at, index: at}) if at is not None else None


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _(labels: Labels, node: fx.Node, w: fx.Node, index: fx.Node, offsets: fx.Node, *more: Any) -> Found:
    """The label of bags of equal length, one for each sample."""
    at, starts = labels[index], torch.arange(0, shape(index)[0], max(1, shape(index)[0] // labels.samples), device="cpu")
    is_aligned = labels[w] is None and all(labels[x] in (None, at) for x in node.all_input_nodes)
    is_regular = at == At(0, 1, shape(index)[0] // labels.samples) and torch.equal(_known(offsets, labels.samples), starts)  # type: ignore[arg-type]  # a node
    if not is_aligned or not is_regular or more[:1] == (True,):
        return labels.unsupported(node, "bags that begin anywhere, or are scaled by how often an entry occurs")
    return [At(0), at, At(0), At(0)]


@rule("_embedding_bag_backward")
def _(labels: Labels, node: fx.Node, g: fx.Node, index: fx.Node, *more: Any) -> Found:
    if more[6] == 2 or labels[index] is None:
        return labels.unsupported(node, "the largest entries of bags, or bags that are the same in each batch")
    return labels.contract(node, {x: labels[x] for x in node.all_input_nodes if isinstance(labels[x], At)})
