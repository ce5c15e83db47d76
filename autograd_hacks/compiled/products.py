"""Rules for products, layers' kernels and indices: where the samples are in the result, and what sums over samples."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from autograd_hacks.compiled.labels import RULES, SUM, At, Found, Labels, Rule, name_of, shape, size
from autograd_hacks.compiled.labels import register_operation as rule
from autograd_hacks.compiled.operations import by_name

# Matrices.


def multiplied(labels: Labels, node: fx.Node, left: fx.Node, right: fx.Node, leading: int) -> Any:
    """The label of left · right, which share ``leading`` axes."""
    a, b = labels[left], labels[right]
    if leading and any(at is not None and at.dim == 0 for at in (a, b)):
        return labels.same(node, [a, b])
    inside = [a is not None and a.dim == leading + 1, b is not None and b.dim == leading]
    if any(inside):
        at = labels.same(node, [own.moved(0) for own in (a, b) if own is not None])
        if at is None or any(own is not None and not is_inside for own, is_inside in zip((a, b), inside)):
            return labels.mixed(node, "multiplies samples with each other")
        return labels.contract(node, {left: at.moved(leading + 1), right: at.moved(leading)})
    if a is not None and b is not None:
        return labels.mixed(node, "multiplies samples with each other")
    return b if a is None else a


@rule("mm")
def _(labels: Labels, node: fx.Node, left: fx.Node, right: fx.Node, *_: Any) -> Found:
    return multiplied(labels, node, left, right, 0)


@rule("mv")
def _(labels: Labels, node: fx.Node, left: fx.Node, right: fx.Node) -> Found:
    if labels[right] is not None or labels[left].dim != 0:
        return labels.mixed(node, "multiplies samples with each other")
    return labels[left]


@rule("bmm")
def _(labels: Labels, node: fx.Node, left: fx.Node, right: fx.Node, *_: Any) -> Found:
    return multiplied(labels, node, left, right, 1)


@rule("addmm", "baddbmm")
def _(labels: Labels, node: fx.Node, added: fx.Node, left: fx.Node, right: fx.Node, **_: Any) -> Found:
    axes, own = len(shape(node)), labels[added]
    if labels[left] is None and labels[right] is None:
        found: Any = None
    else:
        found = multiplied(labels, node, left, right, axes - 2)
    if found is not None and not isinstance(found, At):
        return labels.unsupported(node, "adds to a sum over samples")
    return labels.same(node, [found, own.moved(own.dim + axes - len(shape(added))) if isinstance(own, At) else None])


# Convolutions.


@rule("convolution")
def _(labels: Labels, node: fx.Node, x: fx.Node, w: fx.Node, b: fx.Node | None, *_: Any) -> Found:
    if labels[w] is not None or labels[b] is not None:
        return labels.unsupported(node, "each sample has a kernel of its own")
    return _first(labels, node, labels[x], "the samples are channels or places of a convolution")


@rule("convolution_backward")
def _(labels: Labels, node: fx.Node, g: fx.Node, x: fx.Node, w: fx.Node, *more: Any) -> Found:
    at = labels.same(node, [labels[g], labels[x]])
    if labels[w] is not None or at is None:
        return labels.unsupported(node, "each sample has a kernel of its own")
    _first(labels, node, at, "the samples are channels or places of a convolution")
    for output in (1, 2):
        if more[-1][output]:
            labels.contract(node, {g: at, x: at}, 0, output)
    return [at, *(SUM if more[-1][output] else None for output in (1, 2))]


def _first(labels: Labels, node: fx.Node, at: At, why: str) -> At:
    if at.dim != 0:
        labels.mixed(node, why)
    return at


# Norms.


def without_own(labels: Labels, node: fx.Node, x: fx.Node) -> At:
    """The label of x, if no other argument has samples."""
    if any(labels[other] is not None for other in node.all_input_nodes if other is not x) or labels[x] is None:
        labels.unsupported(node, "each sample has its own weights")
    found: At = labels[x]
    return found


@rule("native_layer_norm", "_fused_rms_norm")
def _(labels: Labels, node: fx.Node, x: fx.Node, sizes: Sequence[int], *_: Any) -> Found:
    if without_own(labels, node, x).dim >= len(shape(x)) - len(sizes):
        labels.mixed(node, "normalises over samples")
    return [labels[x]] * len(node.meta["val"])


@rule("native_group_norm")
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any) -> Found:
    if without_own(labels, node, x) != At(0, 1, labels[x].inner):
        labels.mixed(node, "normalises over samples")
    return [labels[x]] * 3


@rule("_native_batch_norm_legit_no_training")
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any) -> Found:
    return [without_own(labels, node, x), None, None]


@rule("_native_batch_norm_legit", "_native_batch_norm_legit_functional", "native_batch_norm", "_batch_norm_with_update")
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any) -> Found:
    if by_name(node).get("training") is False:
        return [without_own(labels, node, x), *[None] * (len(node.meta["val"]) - 1)]
    if labels[x] is None or labels[x].dim != 1:
        return labels.mixed(node, "normalises over samples (BatchNorm in training mode)")
    statistics = labels[x].moved(0)  # InstanceNorm: samples are among the channels of one picture
    if any(labels[other] not in (None, statistics) for other in node.all_input_nodes if other is not x):
        return labels.mixed(node, "samples have the weights of others")
    return [labels[x], *[statistics] * (len(node.meta["val"]) - 1)]


@rule("mkldnn_rnn_layer")
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any) -> Found:
    """x: T N I, and each state ... N H"""
    given = {y: labels[y].dim - len(shape(y)) for y in node.all_input_nodes if labels[y] is not None}
    if any(at != -2 for at in given.values()) or by_name(node)["batch_sizes"]:
        return labels.mixed(node, "the samples are steps or features of a recurrent layer")
    sizes = [made.shape for made in node.meta["val"]]
    return [*(At(len(s) - 2) for s in sizes[:3]), None]


# Windows, resampling, and operations on single matrices: samples are on an axis before the places.


def places(axes: int) -> Rule:
    def within(labels: Labels, node: fx.Node, *_: Any, **__: Any) -> Found:
        at = labels.same(node, [labels[x] for x in node.all_input_nodes])
        given = [x for x in node.all_input_nodes if isinstance(x.meta["val"], Tensor) and x.meta["val"].is_floating_point()]
        if len({len(shape(x)) for x in given}) > 1:
            return labels.unsupported(node, "tensors of several numbers of axes")
        if at is not None and at.dim >= len(shape(node.all_input_nodes[0])) - axes:
            labels.mixed(node, "the samples are places of a window")
        made = node.meta["val"]
        return [at] * len(made) if isinstance(made, tuple | list) else at

    return within


for _axes, _names in (
    (1, "avg_pool1d reflection_pad1d reflection_pad1d_backward upsample_nearest1d upsample_linear1d "
        "max_pool1d_with_indices replication_pad1d replication_pad1d_backward"),
    (2, "max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d avg_pool2d_backward max_pool2d_with_indices_backward "
        "_adaptive_avg_pool2d_backward upsample_bilinear2d upsample_nearest2d upsample_bicubic2d reflection_pad2d "
        "replication_pad2d reflection_pad2d_backward adaptive_max_pool2d grid_sampler_2d replication_pad2d_backward "
        "adaptive_max_pool2d_backward grid_sampler_2d_backward _linalg_svd _linalg_det _linalg_solve_ex linalg_inv_ex "
        "linalg_cholesky_ex linalg_matrix_exp _linalg_eigh linalg_qr linalg_lu_factor_ex linalg_lu linalg_lu_solve "
        "linalg_solve_triangular _cdist_forward _cdist_backward"),
    (3, "reflection_pad3d reflection_pad3d_backward replication_pad3d replication_pad3d_backward adaptive_max_pool3d "
        "adaptive_max_pool3d_backward grid_sampler_3d grid_sampler_3d_backward max_pool3d_with_indices "
        "max_pool3d_with_indices_backward avg_pool3d avg_pool3d_backward"),
):  # fmt: skip
    RULES.update(dict.fromkeys(_names.split(), places(_axes)))


@rule(
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip
def _(labels: Labels, node: fx.Node, *_: Any, **__: Any) -> Found:
    at = labels.same(node, [labels[x] for x in node.all_input_nodes])
    is_mask = any(labels[x] is not None and len(shape(x)) != 4 and not _is_logsumexp(x) for x in node.all_input_nodes)
    if at is not None and (at.dim != 0 or is_mask):
        return labels.unsupported(node, "the samples are not on the first of four axes of attention")
    return [at] * len(node.meta["val"])


def _is_logsumexp(x: fx.Node) -> bool:
    return x.target is operator.getitem and "_scaled_dot_product" in name_of(x.args[0])  # type: ignore[arg-type]


# Tables and indices.


@rule("embedding")
def _(labels: Labels, node: fx.Node, w: fx.Node, index: fx.Node, *_: Any) -> Found:
    if labels[w] is not None:
        labels.mixed(node, "the operation looks up samples in a table")
    return labels[index]


@rule("embedding_dense_backward")
def _(labels: Labels, node: fx.Node, g: fx.Node, index: fx.Node, *_: Any) -> Found:
    at = labels.same(node, [labels[g], labels[index]])
    return labels.contract(node, {g: at, index: at}, 0) if at is not None else None


@rule("_embedding_bag", "_embedding_bag_forward_only")
def _(labels: Labels, node: fx.Node, w: fx.Node, index: fx.Node, offsets: fx.Node, *more: Any) -> Found:
    """The label of bags of equal length, one for each sample."""
    at, own = labels[index], At(0)
    length = shape(index)[0] // labels.samples
    counts = name_of(offsets) == "arange" and offsets.args[:1] == (0,) and shape(offsets) == [labels.samples]
    step = offsets.args[2] if counts and len(offsets.args) > 2 else 1
    aligned = all(labels[x] in (None, at) for x in node.all_input_nodes)
    if (
        labels[w] is not None
        or not aligned
        or at != At(0, 1, length)
        or not counts
        or size(_value(step)) != length
        or more[:1] == (True,)
    ):
        return labels.unsupported(node, "bags that begin anywhere, or are scaled by how often an entry occurs")
    return [own, at, own, own]


@rule("_embedding_bag_backward")
def _(
    labels: Labels, node: fx.Node, g: fx.Node, index: fx.Node, offsets: fx.Node, to_bag: fx.Node, lengths: fx.Node,
    longest: fx.Node, entries: int, by_frequency: bool, mode: int, *_: Any,
) -> Found:  # fmt: skip
    if mode == 2:
        return labels.unsupported(node, "the largest entries of bags")
    given = {x: labels[x] for x in node.all_input_nodes if isinstance(labels[x], At)}
    return labels.contract(node, given, 0)


def _value(x: Any) -> Any:
    return x.meta["val"] if isinstance(x, fx.Node) else x


@rule("index_select")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int, index: fx.Node) -> Found:
    if labels[index] is None:
        return labels.along(node, x, dim)
    if labels[x] is None:
        return labels[index].moved(dim % len(shape(x)))
    return labels.mixed(node, "looks samples up")


_SAME_NUMBERS = ("view", "unsqueeze", "clone", "alias", "_to_copy", "squeeze", "lift_fresh_copy")


def counts_samples(node: fx.Node, samples: int) -> bool:
    """Whether a tensor is arange(N), the number of each sample."""
    while name_of(node) in _SAME_NUMBERS:
        node = node.args[0]  # type: ignore[assignment]
        if node.op != "call_function":
            return False
    if not name_of(node).startswith("arange") or shape(node) != [samples]:
        return False
    start, step = (node.args[0] if len(node.args) > 1 else 0), (node.args[2] if len(node.args) > 2 else 1)
    return bool(start == 0 and step == 1)


class _Indices:
    """The indices of x[i, j, ...]: the place of their axes in the result, and where the samples are among these."""

    def __init__(self, labels: Labels, x: fx.Node, indices: Sequence[fx.Node | None]) -> None:
        self.labels, self.given = labels, [(dim, index) for dim, index in enumerate(indices) if index is not None]
        self.dims = [dim for dim, _ in self.given]
        self.axes = max(len(shape(index)) for _, index in self.given)
        are_neighbours = all(b == a + 1 for a, b in pairwise(self.dims))
        self.start = self.dims[0] if are_neighbours else 0
        self.left = [dim for dim in range(len(shape(x))) if dim not in self.dims]  # axes that aren't indexed

    def own(self) -> list[At]:
        """Where the samples are in the result, from the indices."""
        found = [(labels_of, self.axes - len(shape(index))) for _, index in self.given if (labels_of := self.labels[index])]
        return [at.moved(self.start + missing + at.dim) for at, missing in found]

    def place_of(self, dim: int) -> int:
        """The axis in the result that belongs to an axis of x that isn't indexed."""
        before = sum(other < dim for other in self.dims)
        return dim - before + (self.axes if dim - before >= self.start else 0)

    def counted(self, dim: int) -> At | None:
        """Where the samples are in the result, if x's axis is indexed by arange(N)."""
        index = next(index for own, index in self.given if own == dim)
        if index.op != "call_function" or not counts_samples(index, self.labels.samples):
            return None
        sizes = shape(index)
        longest = max(range(len(sizes)), key=sizes.__getitem__)
        if sizes[longest] != self.labels.samples:  # each of its rows takes several
            return None
        return At(self.start + self.axes - len(sizes) + longest)


@rule("index", "_unsafe_index")
def _(labels: Labels, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None]) -> Found:
    at, given = labels[x], _Indices(labels, x, indices)
    own = given.own()
    if at is None:
        return labels.same(node, own)
    if at.dim in given.dims:
        counted = given.counted(at.dim) if (at.outer, at.inner) == (1, 1) else None
        if counted is None:
            return labels.mixed(node, "picks samples by index")
        return labels.same(node, [counted, *own])
    if own:
        return labels.mixed(node, "each sample looks up others")
    return at.moved(given.place_of(at.dim))


@rule("index_put", "_unsafe_index_put")
def _(
    labels: Labels, node: fx.Node, x: fx.Node, indices: Sequence[fx.Node | None], values: fx.Node, accumulate: bool = False
) -> Found:
    given = _Indices(labels, x, indices)
    axes, own = given.axes + len(given.left), labels[values]
    written = [own.moved(own.dim + axes - len(shape(values)))] if isinstance(own, At) else []
    at = labels.same(node, [*written, *given.own()])
    if at is None or not given.start <= at.dim < given.start + given.axes:  # on an axis that isn't indexed
        if at is not None:
            at = at.moved(next(dim for dim in given.left if given.place_of(dim) == at.dim))
        return labels.same(node, [at, labels[x]])
    for dim, _ in given.given:
        if shape(x)[dim] == labels.samples and given.counted(dim) == at.moved(at.dim):
            return labels.same(node, [At(dim), labels[x]])
    if labels[x] is not None:
        return labels.mixed(node, "writes to samples by index")
    if not accumulate:
        return labels.mixed(node, "writes by index, where the last sample wins")
    # An index that is equal for all samples may be repeated for each.
    ends = [(values, at.dim - axes), *((index, at.dim - given.start - given.axes) for _, index in given.given)]
    there = [(tensor, len(shape(tensor)) + end) for tensor, end in ends]
    return labels.contract(node, {tensor: at.moved(d) for tensor, d in there if d >= 0 and shape(tensor)[d] > 1})


@rule("gather")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, *_: Any, **__: Any) -> Found:
    at = labels[x]
    if at is None:
        return labels[index]
    labels.along(node, x, dim)
    if shape(x)[at.dim] != shape(index)[at.dim]:
        labels.mixed(node, "the operation selects some of the samples")
    return labels.same(node, [at, labels[index]])


@rule("scatter_add", "scatter", "scatter_reduce")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, values: Any, *_: Any, **__: Any) -> Found:
    at, dim = labels.same(node, [labels[index], labels[values], labels[x]]), dim % len(shape(x))
    if at is None or dim != at.dim:
        if at is not None and shape(x)[at.dim] != shape(index)[at.dim]:
            labels.mixed(node, "the operation writes to some of the samples")
        return at
    if labels[x] is not None or name_of(node) != "scatter_add":
        return labels.mixed(node, "writes to samples by index")
    return labels.contract(node, {values: at, index: at})


@rule("index_add")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int, index: fx.Node, values: fx.Node, **_: Any) -> Found:
    at, dim = labels[values], dim % len(shape(x))
    if at is None:
        if labels[index] is not None or labels[x].dim == dim:
            return labels.unsupported(node, "adds the same numbers at places of samples' own")
        return labels[x]
    if at.dim != dim:
        return labels.mixed(node, "writes to samples by index") if labels[index] else labels.same(node, [labels[x], at])
    if labels[x] is not None:
        return labels.mixed(node, "writes to samples by index")
    return labels.contract(node, {values: at, index: at.moved(0)})
