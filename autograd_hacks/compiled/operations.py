"""Rules for views, selections, reductions and operations along axes: where the samples are in the result."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from torch import fx

from autograd_hacks.compiled.labels import LINEAR, RULES, At, Found, Labels, name_of, pointwise, shape, size
from autograd_hacks.compiled.labels import register_operation as rule

Axes = int | Sequence[int] | None

LINEAR.update(
    """mul div add sub neg view _unsafe_view reshape permute transpose t clone alias sum mean expand unsqueeze squeeze slice
    select slice_scatter select_scatter cat constant_pad_nd _to_copy where mm bmm addmm embedding_dense_backward index_put
    index gather scatter_add as_strided split_with_sizes copy detach convolution _weight_norm_interface_backward index_add
    slice_backward select_backward flip roll index_select diagonal unfold_backward repeat cumsum real imag complex
    view_as_real view_as_complex _conj lift_fresh_copy tril triu""".split()  # noqa: SIM905 a list of words to be read
)

for _name in (
    "clone",
    "alias",
    "_to_copy",
    "detach",
    "lift_fresh_copy",
    "where",
    "contiguous",
    "masked_fill",
    "copy",
    "complex",
    "polar",
    "_conj",
    "rrelu_with_noise_backward",
):
    RULES[_name] = lambda labels, node, *_, **__: pointwise(labels, node)


@rule("view_as_real", "view_as_complex")
def _(labels: Labels, node: fx.Node, x: fx.Node) -> Found:
    return labels[x]


@rule("native_dropout", "rrelu_with_noise_functional")
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Found:
    return [labels[x], labels[x]]


@rule(
    "full_like", "zeros_like", "ones_like", "empty_like", "rand_like", "randn_like", "new_zeros", "new_full", "new_empty",
    "new_ones", "new_empty_strided", "randperm", "arange",
)  # fmt: skip
def _(labels: Labels, node: fx.Node, x: Any, *_: Any, **__: Any) -> Found:
    """The label of numbers that don't depend on the argument, such as noise for each entry."""
    is_noise = name_of(node) in ("rand_like", "randn_like")
    return labels[x] if is_noise else None


@rule("bernoulli")
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Found:
    return labels[x]


# Reductions.


def axes_of(dims: Axes, axes: int) -> list[int]:
    """The axes of a reduction.

    dims: as operations have them; empty for all axes
    """
    if dims is None or dims == []:
        return list(range(axes))
    return [d % axes for d in ([dims] if isinstance(dims, int) else dims)]


def by_name(node: fx.Node) -> dict[str, Any]:
    """An operation's arguments by name, with defaults."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]  # rules are of operations alone
    given = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return given | dict(zip([a.name for a in arguments], node.args)) | node.kwargs


def reduced(labels: Labels, node: fx.Node, x: fx.Node, dims: Axes, keepdim: bool, adds_up: bool = False) -> Any:
    at, over = labels[x], axes_of(dims, len(shape(x)))
    if at.dim in over:
        return labels.contract(node, {x: at}) if adds_up else labels.mixed(node, "takes samples together")
    return at if keepdim else at.moved(at.dim - sum(d < at.dim for d in over))


@rule("sum")
def _(labels: Labels, node: fx.Node, x: fx.Node, dims: Axes = None, keepdim: bool = False, **_: Any) -> Found:
    return reduced(labels, node, x, dims, keepdim, adds_up=True)


@rule(
    "mean", "any", "all", "amax", "amin", "prod", "var", "std", "argmax", "argmin", "logsumexp", "var_mean", "std_mean",
    "max", "min", "median", "kthvalue", "mode",
)  # fmt: skip
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any, **__: Any) -> Found:
    given = by_name(node)
    if isinstance(given.get("other"), fx.Node):
        return pointwise(labels, node)
    found = reduced(labels, node, x, given.get("dim"), bool(given.get("keepdim")))
    return [found] * len(node.meta["val"]) if isinstance(node.meta["val"], tuple | list) else found


@rule("linalg_vector_norm")
def _(
    labels: Labels, node: fx.Node, x: fx.Node, order: float = 2, dims: Axes = None, keepdim: bool = False, **_: Any
) -> Found:
    return reduced(labels, node, x, dims, keepdim)


# Along an axis.


@rule(
    "_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax", "cumsum", "cumprod", "logcumsumexp", "unfold",
    "index_fill",
    "glu",
)  # fmt: skip
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int, *_: Any, **__: Any) -> Found:
    return labels.along(node, x, dim)


@rule("_softmax_backward_data", "_log_softmax_backward_data")
def _(labels: Labels, node: fx.Node, g: fx.Node, y: fx.Node, dim: int, *_: Any) -> Found:
    at = labels.same(node, [labels[g], labels[y]])
    return labels.along(node, g if labels[g] is not None else y, dim) if at is not None else None


@rule("topk", "cummax", "cummin")
def _(labels: Labels, node: fx.Node, x: fx.Node, *given: Any, **named: Any) -> Found:
    numbers = [y for y in (given[1:] if name_of(node) == "topk" else given) if not isinstance(y, bool)]
    return labels.along(node, x, named.get("dim", numbers[0] if numbers else -1), outputs=2)


@rule("flip", "_fft_r2c", "_fft_c2r", "_fft_c2c")
def _(labels: Labels, node: fx.Node, x: fx.Node, dims: Sequence[int], *_: Any) -> Found:
    for dim in dims:
        labels.along(node, x, dim)
    return labels[x]


@rule("roll")
def _(labels: Labels, node: fx.Node, x: fx.Node, shifts: Sequence[int], dims: Sequence[int] = ()) -> Found:
    for dim in dims or range(len(shape(x))):
        labels.along(node, x, dim)
    return labels[x]


@rule("tril", "triu")
def _(labels: Labels, node: fx.Node, x: fx.Node, *_: Any) -> Found:
    for dim in (-1, -2):
        labels.along(node, x, dim)
    return labels[x]


@rule("constant_pad_nd")
def _(labels: Labels, node: fx.Node, x: fx.Node, pad: Sequence[int], value: float = 0) -> Found:
    for n in range(len(pad) // 2):
        if pad[2 * n] or pad[2 * n + 1]:
            labels.along(node, x, -1 - n)
    return labels[x]


# Axes in another order.


@rule("permute")
def _(labels: Labels, node: fx.Node, x: fx.Node, dims: Sequence[int]) -> Found:
    return labels[x].moved([d % len(dims) for d in dims].index(labels[x].dim))


@rule("transpose")
def _(labels: Labels, node: fx.Node, x: fx.Node, a: int, b: int) -> Found:
    at, axes = labels[x], len(shape(x))
    return at.moved({a % axes: b % axes, b % axes: a % axes}.get(at.dim, at.dim))


@rule("t")
def _(labels: Labels, node: fx.Node, x: fx.Node) -> Found:
    return labels[x].moved(1 - labels[x].dim) if len(shape(x)) == 2 else labels[x]


@rule("diagonal")
def _(labels: Labels, node: fx.Node, x: fx.Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Found:
    for dim in (dim1, dim2):
        labels.along(node, x, dim)
    return labels[x].moved(labels[x].dim - sum(dim % len(shape(x)) < labels[x].dim for dim in (dim1, dim2)))


@rule("expand")
def _(labels: Labels, node: fx.Node, x: fx.Node, sizes: Sequence[int], **_: Any) -> Found:
    return labels[x].moved(labels[x].dim + len(sizes) - len(shape(x)))


@rule("repeat")
def _(labels: Labels, node: fx.Node, x: fx.Node, times: Sequence[int]) -> Found:
    at = labels[x]
    dim = at.dim + len(times) - len(shape(x))
    return At(dim, at.outer * size(times[dim]), at.inner)


@rule("unsqueeze")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int) -> Found:
    return labels[x].moved(labels[x].dim + (dim % (len(shape(x)) + 1) <= labels[x].dim))


@rule("squeeze")
def _(labels: Labels, node: fx.Node, x: fx.Node, dims: Axes = None) -> Found:
    at, sizes = labels[x], shape(x)
    gone = [d for d in axes_of(dims, len(sizes)) if sizes[d] == 1]
    if at.dim in gone:
        return labels.unsupported(node, "the axis of samples is taken away from a batch of one")
    return at.moved(at.dim - sum(d < at.dim for d in gone))


def reshaped(at: At, old: Sequence[int], new: Sequence[int], samples: int) -> At | None:
    """Where the samples are after a view, from strides; None if no axis holds them whole."""
    stride, below = at.inner * prod(old[at.dim + 1 :]), 1
    for dim in range(len(new) - 1, -1, -1):
        if stride % below == 0 and (below * new[dim]) % (stride * samples) == 0:
            return At(dim, below * new[dim] // (stride * samples), stride // below)
        below *= new[dim]
    return None


@rule("view", "_unsafe_view", "reshape")
def _(labels: Labels, node: fx.Node, x: fx.Node, sizes: Sequence[int]) -> Found:
    found = reshaped(labels[x], shape(x), shape(node), labels.samples)
    return labels.unsupported(node, "a view cuts the axis of samples") if found is None else found


def _is_contiguous(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    below = 1
    for own, stride in zip(reversed(sizes), reversed(strides)):
        if size(own) != 1 and size(stride) != below:
            return False
        below *= size(own)
    return True


@rule("as_strided")
def _(labels: Labels, node: fx.Node, x: fx.Node, sizes: Any, strides: Any, offset: int = 0) -> Found:
    given = x.meta["val"]
    if not offset and shape(node) == shape(x) and [size(s) for s in strides] == [size(s) for s in given.stride()]:
        return labels[x]
    is_view = not offset and given.is_contiguous() and _is_contiguous(sizes, strides) and prod(shape(node)) == prod(shape(x))
    found = reshaped(labels[x], shape(x), shape(node), labels.samples) if is_view else None
    return labels.unsupported(node, "reads memory by strides") if found is None else found


@rule("as_strided_scatter")
def _(labels: Labels, node: fx.Node, x: fx.Node, src: fx.Node, sizes: Any, strides: Any, offset: int = 0) -> Found:
    given = x.meta["val"]
    if (
        not offset
        and shape(node) == shape(src) == shape(x)
        and [size(s) for s in strides] == [size(s) for s in given.stride()]
    ):
        return labels.same(node, [labels[src]])
    is_view = not offset and x.meta["val"].is_contiguous() and _is_contiguous(sizes, strides)
    is_view = is_view and isinstance(labels[src], At) and prod(shape(src)) == prod(shape(x))
    found = reshaped(labels[src], shape(src), shape(node), labels.samples) if is_view else None
    return labels.unsupported(node, "writes memory by strides") if found is None else found


# Parts of an axis.


@rule("slice")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Found:
    at, sizes = labels[x], shape(x)
    dim %= len(sizes)
    if dim != at.dim or shape(node)[dim] == sizes[dim]:
        return at
    unit = labels.samples * at.inner
    if step != 1 or size(start or 0) % unit or shape(node)[dim] % unit:
        return labels.mixed(node, "takes some of the samples")
    return At(dim, shape(node)[dim] // unit, at.inner)


@rule("select")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int, index: int) -> Found:
    labels.along(node, x, dim)
    return labels[x].moved(labels[x].dim - (dim % len(shape(x)) < labels[x].dim))


@rule("slice_scatter")
def _(labels: Labels, node: fx.Node, x: fx.Node, src: fx.Node, dim: int = 0, *_: Any, **__: Any) -> Found:
    at = labels.same(node, [labels[x], labels[src]])
    if at is not None and dim % len(shape(x)) == at.dim and shape(src)[at.dim] != shape(x)[at.dim]:
        labels.mixed(node, "the operation writes to some of the samples")
    return at


@rule("select_scatter")
def _(labels: Labels, node: fx.Node, x: fx.Node, src: fx.Node, dim: int, index: int) -> Found:
    dim, own = dim % len(shape(x)), labels[src]
    own = own.moved(own.dim + (dim <= own.dim)) if isinstance(own, At) else own
    at = labels.same(node, [labels[x], own])
    return labels.mixed(node, "writes to one of the samples") if at is not None and dim == at.dim else at


@rule("cat")
def _(labels: Labels, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Found:
    given, dim = [labels[x] for x in tensors], dim % len(shape(node))
    first = next(at for at in given if at is not None)
    if dim != first.dim:
        return labels.same(node, given)
    unit = labels.samples * first.inner  # whole batches one after the other, as from torch.stack
    are_alike = all(at is not None and (at.dim, at.inner) == (dim, first.inner) for at in given)
    if not are_alike or any(shape(x)[dim] % unit for x in tensors):
        return labels.mixed(node, "puts tensors behind each other along the axis of samples")
    return At(dim, shape(node)[dim] // unit, first.inner)


@rule("stack")
def _(labels: Labels, node: fx.Node, tensors: Sequence[fx.Node], dim: int = 0) -> Found:
    at = labels.same(node, [labels[x] for x in tensors])
    return None if at is None else at.moved(at.dim + (dim % len(shape(node)) <= at.dim))


@rule("split", "split_with_sizes", "unsafe_split", "unsafe_split_with_sizes")
def _(labels: Labels, node: fx.Node, x: fx.Node, sizes: Any, dim: int = 0) -> Found:
    at, unit = labels[x], labels.samples * labels[x].inner
    lengths = [size(part.shape[dim]) for part in node.meta["val"]]
    if dim % len(shape(x)) == at.dim and not any(length % unit for length in lengths):
        return [At(at.dim, length // unit, at.inner) for length in lengths]
    return labels.along(node, x, dim, outputs=len(lengths) if len(lengths) > 1 else 1) if len(lengths) > 1 else [at]


@rule("unbind")
def _(labels: Labels, node: fx.Node, x: fx.Node, dim: int = 0) -> Found:
    labels.along(node, x, dim)
    return [labels[x].moved(labels[x].dim - (dim % len(shape(x)) < labels[x].dim))] * len(node.meta["val"])
