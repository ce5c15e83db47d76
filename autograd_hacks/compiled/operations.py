"""Where the samples are in the result of an operation: the laws of `graph/`, read forwards, and rules for indices.

A law says with which axis of a result each axis of an argument is walked in step.  Backwards, for autograd's nodes, it gives
the label of an argument's gradient; forwards, for the operations of a graph, that of the result.  Operations that move
entries are the derivatives of others, their adjoints, so the law of the one read backwards is that of the other forwards.

Laws of operations that move entries by an index are asked with zeros for its values, since labels hold for all values.
Rules by name are for derivatives without a derivative, which have no node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from autograd_hacks.compiled.labels import (
    RULES,
    Found,
    Label,
    Labels,
    by_name,
    name_of,
    number,
    results_of,
    shape,
    size,
    tensors_of,
)
from autograd_hacks.compiled.labels import register_operation as rule
from autograd_hacks.errors import PerSampleGradientError
from autograd_hacks.graph.axes import AXES, Axes, axis
from autograd_hacks.graph.label import ALONE, MIX, At, Entries, Sizes, tidied, viewed
from autograd_hacks.graph.moves import MOVES
from autograd_hacks.graph.tape_laws import TAKING
from autograd_hacks.graph.values import MASKS, Indexed
from autograd_hacks.probe.tape import READ

ADJOINTS = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape"), "view"), "slice": "slice_backward", "select": "select_backward",
    "diagonal": "diagonal_backward", "unbind": "stack", "stack": "unbind", "flip": "flip", "roll": "roll", "cat": "split",
    **dict.fromkeys(("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes"), "cat"),
    "constant_pad_nd": "constant_pad_nd", "slice_scatter": "slice", "select_scatter": "select",
}  # fmt: skip
"""{an operation that moves entries: its derivative's name}"""
BESIDE = {"cat", "constant_pad_nd", "slice_scatter", "select_scatter"}
"""Those that may put samples beside others."""
SUMS = {"sum", "mm", "bmm", "convolution_backward"}
"""Operations that add up along an axis of which their law says that it is lost."""
ATTENTION = "_scaled_dot_product"
INTEGERS = (ATTENTION, "max_pool", "adaptive_max_pool", "max_unpool", "linalg_lu")
"""The first parts of the names of operations that read integers of each sample for this sample alone."""


def rule_of(node: fx.Node) -> Any:
    """The rule of an operation: one by its name, or its law; None if it has neither."""
    name, target = name_of(node), node.target
    if (own := RULES.get(name)) is not None:
        return own
    if name in ADJOINTS:
        return _moved
    entry = AXES.get(name)
    if entry is None and torch.Tag.pointwise in target.tags:  # type: ignore[union-attr]  # rules are of operations alone
        entry = Axes()
    # The law knows nothing of the scales of channels.
    return None if entry is None or "_per_channel_" in name else _by_law


def _moved(labels: Labels, node: fx.Node, *_: Any, **__: Any) -> Found:
    name, given, made = name_of(node), by_name(node), results_of(node)
    move, outs = MOVES[ADJOINTS[name]], [[size(s) for s in y.shape] for y in made]
    tensors: list[Any] = tensors_of(node)
    if name == "cat":  # where an empty vector may stand beside anything
        tensors = [x for x in tensors if shape(x) != [0]]
    ins, found = [shape(x) for x in tensors], list[Any]()
    if move is MOVES["view"] and prod(outs[0]) != prod(ins[0]):
        return labels.unsupported(node, "reads numbers of another kind from memory")
    numbers = {name: number(given[name]) for name in move.reads}
    if "pad" in numbers:  # the derivative takes off what is put on
        numbers["pad"] = [-k for k in numbers["pad"]]
    for k, x in enumerate(tensors):
        if (at := labels[x]) is not None:  # the tensor into which a scatter writes keeps its entries' places
            found.append(
                [at]
                if name.endswith("_scatter") and k == 0
                else [
                    _tidied(own, size, labels.samples)
                    for own, size in zip(move.law(at, Sizes(k, ins, outs), labels.samples, **numbers), outs)  # type: ignore[arg-type]
                ]
            )
    if not all(at is None or isinstance(at, At) for own in found for at in own):
        if move is MOVES["view"]:
            return labels.unsupported(node, "a view cuts the axis of samples")
        return labels.mixed(node, "takes or writes some of the samples, or turns their order")
    merged = [labels.same(node, own) for own in zip(*found)]
    at, sources = merged[0], tensors[-1:]
    if name in BESIDE and at is not None and axis(given.get("dim", at.dim), len(outs[0])) == at.dim:
        # Sizes that fit this batch, such as as many rows of padding as samples, needn't fit another.
        if name == "cat":
            sources = [x for x in tensors if labels[x] is not None]
        if sum(s[at.dim] for s in map(shape, sources) if len(s) == len(outs[0])) != outs[0][at.dim]:
            return labels.mixed(node, "puts samples beside what is of none, along their axis")
    return merged if isinstance(node.meta["val"], tuple | list) else merged[0]


def _by_law(labels: Labels, node: fx.Node, *_: Any, **__: Any) -> Found:
    made, axes, found = results_of(node), AXES.get(name_of(node), Axes()), list[Label | Exception]()
    is_one = not isinstance(node.meta["val"], tuple | list)
    if axes.rule is None:  # entry by entry
        most = made[0].ndim
        given = [labels[x].moved(most - len(x.meta["val"].shape) + labels[x].dim) for x in node.all_input_nodes if labels[x]]
        return labels.same(node, given) if is_one else [labels.same(node, given)] * len(made)
    outs = [[size(s) for s in y.shape] if isinstance(y, Tensor) else None for y in made]  # attention also returns lengths
    for o, out in enumerate(outs):
        try:
            found.append(None if out is None or 0 in out else _of_output(labels, node, axes, o, outs))
        except PerSampleGradientError as error:
            if is_one:
                raise
            found.append(error)  # nobody may want this one
    return found[0] if is_one else found  # type: ignore[return-value]


def _of_output(labels: Labels, node: fx.Node, axes: Axes, o: int, outs: Sequence[Any]) -> Label:
    """The label of output number o, by a law of axes."""
    name, given, ins = name_of(node), by_name(node), tensors_of(node)
    if name.startswith(ATTENTION) and o > 1:  # seeds, which depend on sizes alone
        return None
    kinds = {x: x.meta["val"].dtype for x in ins if x is not None}
    others: list[Any] = [x for x in ins if x is not None and not (kinds[x].is_floating_point or kinds[x].is_complex)]
    if name.startswith(ATTENTION) or len(others) == len(ins) - ins.count(None):
        others = []
    ins = [x for x in ins if x not in others]  # laws are of what may have a gradient
    numbers = {key: number(given[key]) for key in axes.reads if key in given}
    links = axes.links(o, outs, [None if x is None else shape(x) for x in ins], numbers) or []
    owned, lost = list[At](), dict[fx.Node, At]()
    for k, x in enumerate(ins):
        if x is None or (at := labels[x]) is None:
            continue
        to = links[k][at.dim] if k < len(links) and at.dim < len(links[k]) else MIX
        if to == MIX and name == "sort":
            return labels.unsupported(node, "positions of several samples are sorted, as for experts that they are sent to")
        if to == MIX:
            what = " (BatchNorm in training mode)" if "batch_norm" in name else ""
            return labels.mixed(node, f"the operation works along the samples' axis{what}")
        if to == ALONE:
            lost[x] = at
        elif outs[o][to : to + 1] != [shape(x)[at.dim]]:
            return labels.unsupported(node, "the result has no axis of samples")
        else:
            owned.append(at.moved(to))
    if lost:
        return _summed(labels, node, links, ins, lost, owned, o)
    found = labels.same(node, owned)
    if any(labels[x] is not None and (labels[x] != found or not name.startswith(INTEGERS)) for x in others):
        return labels.mixed(node, "numbers of samples say what is read of others")
    return found


def _summed(
    labels: Labels,
    node: fx.Node,
    links: Sequence[Any],
    ins: Sequence[Any],
    lost: Mapping[fx.Node, At],
    owned: list[At],
    o: int,
) -> Label:
    """The label of an operation that adds up along the samples' axis."""
    if owned:
        return labels.mixed(node, "multiplies samples with each other")
    if name_of(node) not in SUMS:
        return labels.mixed(node, "takes samples together")
    at: Any = labels.same(node, [own.moved(0) for own in lost.values()])
    along = {x: at.moved(own.index(ALONE)) for x, own in zip(ins, links) if list(own).count(ALONE) == 1}
    return labels.contract(node, {**along, **lost}, output=o if isinstance(node.meta["val"], tuple | list) else None)


# Copies of memory.


@rule("as_strided", "as_strided_scatter")
def _(labels: Labels, node: fx.Node, x: fx.Node, *given: Any) -> Found:
    """The label of a whole tensor's memory in another shape, or with other strides of the same shape."""
    source = given[0] if isinstance(given[0], fx.Node) and isinstance(given[0].meta["val"], Tensor) else x
    sizes, strides, *offset = number(given if source is x else given[1:])
    at, memory = labels[source], x.meta["val"]
    if not any(offset) and prod(shape(source)) == prod(shape(x)) == prod(sizes):
        if shape(source) == shape(x) == sizes and strides == [size(s) for s in memory.stride()]:
            return at
        if memory.is_contiguous() and all(
            n == 1 or s == prod(sizes[d + 1 :]) for d, (n, s) in enumerate(zip(sizes, strides))
        ):
            found = at and viewed(at, shape(source), shape(node), labels.samples)
            if found is None or isinstance(found, At):
                return found
    return labels.unsupported(node, "reads or writes memory by strides")


# Parts of an axis.


@rule("unfold", "index_fill")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int, *others: Any) -> Found:
    if any(labels[y] is not None for y in others):
        return labels.mixed(node, "writes to places of samples' own")
    return labels.along(node, x, dim)


@rule("repeat")
def _(labels: Labels, node: fx.Node, x: fx.Node, times: Sequence[int]) -> Found:
    at, dim = labels[x], labels[x].dim + len(times) - len(shape(x))
    return At(dim, at.outer * number(times[dim]), at.inner)


# Derivatives that have none of their own, so no node of autograd has their law.


@rule(
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward",
    "_cdist_backward",
)  # fmt: skip
def _(labels: Labels, node: fx.Node, *_: Any, **__: Any) -> Found:
    """The samples are on the first axis of all tensors.  Only attention has some with fewer axes, its logsumexp."""
    at, tensors = (
        labels.same(node, [labels[x] for x in node.all_input_nodes]),
        [x for x in tensors_of(node) if x is not None],
    )
    most = max(len(shape(x)) for x in tensors) - name_of(node).startswith(ATTENTION)
    if at is not None and (at.dim != 0 or any(labels[x] is not None and len(shape(x)) < most for x in tensors)):
        return labels.unsupported(node, "the samples are not on the first axis of all tensors")
    return [at] * len(results_of(node)) if isinstance(node.meta["val"], tuple | list) else at


# Tables and indices.


@rule("embedding_dense_backward")
def _(labels: Labels, node: fx.Node, g: fx.Node, index: fx.Node, entries: int, padding: int, by_frequency: bool) -> Found:
    if by_frequency:
        return labels.mixed(node, "gradients are divided by how often the whole batch reads an entry (scale_grad_by_freq)")
    at = labels.same(node, [labels[g], labels[index]])
    return labels.contract(node, {g: at, index: at}, 0) if at is not None else None


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _(labels: Labels, node: fx.Node, w: fx.Node, index: fx.Node, offsets: fx.Node, *more: Any) -> Found:
    """The label of bags of equal length, one for each sample."""
    at, length = labels[index], shape(index)[0] // labels.samples
    counts = name_of(offsets) == "arange" and offsets.args[:1] == (0,) and shape(offsets) == [labels.samples]
    step = offsets.args[2] if counts and len(offsets.args) > 2 else 1
    aligned = labels[w] is None and all(labels[x] in (None, at) for x in node.all_input_nodes)
    if not aligned or at != At(0, 1, length) or not counts or number(step) != length or more[:1] == (True,):
        return labels.unsupported(node, "bags that begin anywhere, or are scaled by how often an entry occurs")
    return [At(0), at, At(0), At(0)]


@rule("_embedding_bag_backward")
def _(
    labels: Labels, node: fx.Node, g: fx.Node, index: fx.Node, offsets: fx.Node, to_bag: fx.Node, lengths: fx.Node,
    longest: fx.Node, entries: int, by_frequency: bool, mode: int, *_: Any,
) -> Found:  # fmt: skip
    if mode == 2 or labels[index] is None:
        return labels.unsupported(node, "the largest entries of bags, or bags that are the same in each batch")
    return labels.contract(node, {x: labels[x] for x in node.all_input_nodes if isinstance(labels[x], At)}, 0)


_SAME_NUMBERS = ("view", "unsqueeze", "clone", "alias", "_to_copy", "squeeze", "lift_fresh_copy")


def counts_up(node: Any) -> bool:
    """Whether a tensor is 0, 1, 2, ..., in any shape."""
    while isinstance(node, fx.Node) and name_of(node) in _SAME_NUMBERS:
        node = node.args[0]
    if not isinstance(node, fx.Node) or not name_of(node).startswith("arange"):
        return False
    start, step = (node.args[0] if len(node.args) > 1 else 0), (node.args[2] if len(node.args) > 2 else 1)
    return bool(start == 0 and step == 1)


def _known(index: fx.Node | None, samples: int) -> Tensor | None:
    """An index's values if it is the number of each sample; else zeros, with which all that is taken is the first one's."""
    if index is None:
        return None
    sizes, is_number = shape(index), counts_up(index) and prod(shape(index)) == samples
    return (
        torch.arange(samples, device="cpu") if is_number else torch.zeros(prod(sizes), dtype=torch.long, device="cpu")
    ).view(sizes)


@rule(*(name for name in MOVES.keys() & READ.keys() if READ[name] != "mask"))
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Found:
    """The label of a result from which the law by values, read backwards, gives the labels that the arguments have.

    Zeros stand for all values: if an unknown index chose among samples, the law would find all of them in the first one.
    """
    name, given, ins = name_of(node), by_name(node), tensors_of(node)
    law, index = MOVES[name], given[READ[name]]
    indices = index if isinstance(index, list | tuple) else [index]
    masks = [y for y in indices if y is not None and y.meta["val"].dtype in MASKS]
    if any(labels[mask] is not None or len(shape(mask)) > 1 for mask in masks):
        return labels.unsupported(
            masks[0], "a mask picks as many entries as its values say; torch.where(mask, a, b) keeps sizes"
        )
    out, values = shape(node), list[Any](_known(y, labels.samples) for y in indices)
    read = values if index is indices else values[0]
    owned = {k: labels[y] for k, y in enumerate(ins) if labels[y] is not None}
    shapes = [None if y is None or (k not in owned and k == 0 and name in TAKING) else shape(y) for k, y in enumerate(ins)]
    label, numbers = next(iter(owned.values())), {key: number(given[key]) for key in law.reads}
    for d, length in enumerate(out):
        if all(shapes[k][at.dim] == length for k, at in owned.items()):  # type: ignore[index]  # it has a shape
            found: Any = law.law(label.moved(d), Sizes(0, [out], shapes), labels.samples, read=lambda *_: read, **numbers)
            if all(_tidied(found[k], shapes[k], labels.samples) == at for k, at in owned.items()):
                return label.moved(d)
    added: Any = given.get("values", given.get("source", given.get("src")))
    if labels[x] is not None or not (name in ("index_add", "scatter_add") or given.get("accumulate")):
        return labels.mixed(node, "samples are taken or written by index, or the last one that is written wins")
    if name == "scatter_add":
        at = labels.same(node, [labels[index], labels[added]])
        if at is None or at.dim != axis(given["dim"], len(out)):
            return labels.mixed(node, "the operation writes to some of the samples")
        return labels.contract(node, {added: at, index: at})
    if name == "index_add":
        values, indices = [*[None] * axis(given["dim"], len(out)), *values], [index]
    return _added_up(labels, node, added, [y for y in indices if y is not None], Indexed(values, out))


def _tidied(found: Any, own: Any, samples: int) -> Any:
    return tidied(found, own, samples) if isinstance(found, Entries) else found


def _added_up(labels: Labels, node: fx.Node, added: fx.Node, indices: Sequence[fx.Node], by: Indexed) -> Label:
    """The label of a tensor to which samples are added by indices."""
    # Each tensor's last axis is before this one of the axes that the indices and the rest of the tensor have together.
    ends = {added: by.axes + len(by.left)} | dict.fromkeys(indices, by.start + by.axes)
    ends = {y: end - len(shape(y)) for y, end in ends.items()}
    at = labels.same(node, [own.moved(own.dim + first) for y, first in ends.items() if (own := labels[y]) is not None])
    if at is None or not by.start <= at.dim < by.start + by.axes:
        return labels.mixed(node, "samples are added to some of the samples")
    # An index that is equal for all samples may be repeated for each.
    there = {y: at.dim - first for y, first in ends.items()}
    return labels.contract(node, {y: at.moved(d) for y, d in there.items() if d >= 0 and shape(y)[d] > 1})
