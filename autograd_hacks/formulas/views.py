"""What the nodes between a parameter and a use do to rows: from those of the value that a node made to those of its input.

The rows are linear in what a use gave them, so a step is a view, a sum, an index or a product with what the node saves."""

from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from autograd_hacks.forms import Dense, Elementwise, Form, Outer, Placed, Sides, mapped, scale
from autograd_hacks.forms.mapped import times
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.formulas.embedding import entry_of, lookup
from autograd_hacks.formulas.met import Kept
from autograd_hacks.support.graph import signed

Step = Callable[[Form], Form]


class Before(NamedTuple):
    """A way through a node between a parameter and a use.  Steps must not hold it, since what it asks is the node."""

    kept: Kept  # what the node saves, by name
    kind: str  # its name
    number: int  # of the output whose rows are known
    place: int  # of the input whose rows are wanted
    made: torch.Size  # the output's shape
    given: Sequence[torch.Size | None]  # the inputs' shapes; None for an input without a graph

    @property
    def shape(self) -> torch.Size:
        """The input's shape."""
        return self.given[self.place] or torch.Size()

    def axis(self, name: str = "dim", axes: int | None = None) -> int:
        """An axis that the node saves, counted from the front."""
        return int(signed(self.kept(name)) % (len(self.made) if axes is None else axes))


def transposed(form: Form, dims: tuple[int, int], shape: torch.Size) -> Form:
    """The form of a parameter, from the form of its transpose.  dims: the axes that were exchanged"""
    first, second = sorted(dim % len(shape) for dim in dims)
    is_last = (first, second) == (len(shape) - 2, len(shape) - 1) and form.shape.numel() == form.shape[-2:].numel()
    if isinstance(form, Outer) and is_last and form.shape[-2:] == (form.fan_out, form.fan_in):
        return form.transposed(shape)
    if isinstance(form, Placed) and first:
        turned = {b: transposed(own, dims, torch.Size((own.shape[0], *shape[1:]))) for b, own in form.entries.items()}
        return Placed(turned, shape)
    return Dense(rows_of(form).transpose(first + 1, second + 1))


def reshaped(form: Form, shape: torch.Size) -> Form:
    return form.viewed(shape) if isinstance(form, Outer) else Dense(rows_of(form).reshape(form.samples, *shape))


def rows_of(form: Form) -> Tensor:
    """The rows, which may be the form's own memory."""
    return form.values if type(form) is Dense else form.dense()


def _summed(form: Form, shape: torch.Size) -> Form:
    """Each entry is added to the entry of the value that was broadcast there."""
    if form.shape == shape:
        return form
    rows = rows_of(form)
    rows = rows.flatten(1, more).sum(1) if (more := len(form.shape) - len(shape)) > 0 else rows
    return Dense(rows.sum_to_size(len(rows), *shape))


def _times(form: Form, factor: Tensor, shape: torch.Size) -> Form:
    """The rows times a tensor that can be broadcast to them."""
    if form.shape != shape or isinstance(form, Dense):
        return _summed(Dense(times(rows_of(form), factor)), shape)
    whole = factor.expand(shape) if factor.dtype == torch.bool else form.like.new_ones(shape) * factor
    return mapped(form, Elementwise(whole))


def _swap(b: Before) -> Step:
    dims = (0, 1) if b.kind == "TBackward0" else (b.axis("dim0"), b.axis("dim1"))
    return partial(transposed, dims=dims, shape=b.shape)


def _placed(form: Form, start: int, stop: int, shape: torch.Size) -> Form:
    return Placed({(start, stop): reshaped(form, torch.Size((stop - start, *shape[1:])))}, shape)


def _part(b: Before) -> Step:
    """A part of an axis: one entry, a slice, or one of several pieces."""
    shape, dim, step = b.shape, b.axis(axes=len(b.shape)), 1
    size = shape[dim]
    if b.kind == "SliceBackward0":
        first, step = b.kept("start"), b.kept("step")
        start, *_ = slice(None if first is None else signed(first), None).indices(size)
        stop = start + step * b.made[dim]
    elif b.kind == "SplitWithSizesBackward0":
        start = sum(b.kept("split_sizes")[: b.number])
        stop = start + b.made[dim]
    else:
        each = b.kept("split_size") if b.kind == "SplitBackward0" else 1
        start = signed(b.kept("index")) % size if b.kind == "SelectBackward0" else b.number * each
        stop = min(size, start + each)
    if not dim and step == 1 and start < stop:
        return partial(_placed, start=start, stop=stop, shape=shape)
    cut = [*shape[:dim], len(range(start, stop, step)), *shape[dim + 1 :]]

    def put(form: Form) -> Form:
        rows = rows_of(form).reshape(form.samples, *cut)
        return Dense(torch.ops.aten.slice_backward(rows, [form.samples, *shape], dim + 1, start, stop, step))

    return put


def _joined(b: Before) -> Step | None:
    """One of several values, one behind the other."""
    dim, own = b.axis(), b.shape
    sizes = [None if shape is None else shape[dim] if len(shape) == len(b.made) else 0 for shape in b.given]
    if sizes.count(None) > 1 or len(own) != len(b.made):
        return None
    rest = b.made[dim] - sum(size or 0 for size in sizes)
    first: int = sum(rest if size is None else size for size in sizes[: b.place])
    if not dim:
        return lambda form: form.block(slice(first, first + own[0]))
    return lambda form: Dense(rows_of(form).narrow(dim + 1, first, own[dim]))


def _looked_up(b: Before) -> Step | None:
    """Entries of a table, by an index that is the same for all samples, such as positions."""
    if b.kept("scale_grad_by_freq"):
        return None
    index, padding_idx, shape = b.kept("indices").long().clone(), signed(b.kept("padding_idx")), b.shape
    padded = None if padding_idx < 0 else padding_idx
    return lambda form: lookup(index.expand(form.samples, *index.shape), rows_of(form), shape, padded)


def _indexed(b: Before) -> Step | None:
    """The same by ``table[index]``, such as relative positions."""
    is_select = b.kind == "IndexSelectBackward0"
    is_later = is_select and b.axis(axes=len(b.shape))
    found = None if is_later else entry_of([b.kept("index")] if is_select else b.kept("indices"), b.shape)
    if found is None:
        return None
    (index, flat), shape = found, b.shape

    def put(form: Form) -> Form:
        own = lookup(index.to(form.like.device).expand(form.samples, *index.shape), rows_of(form), flat)
        return own if flat == shape else reshaped(own, shape)

    return put


def _permuted(b: Before) -> Step:
    dims = [signed(dim) % len(b.shape) for dim in b.kept("dims")]
    back = [1 + dims.index(at) for at in range(len(dims))]
    return lambda form: Dense(rows_of(form).permute(0, *back))


def _added(b: Before) -> Step:
    factor, shape = 1, b.shape
    if b.place == (0 if b.kind.startswith("Rsub") else 1):
        factor = b.kept("alpha").conjugate() * (1 if b.kind == "AddBackward0" else -1)
    return lambda form: _summed(scale(form, factor), shape)


def _slope(b: Before, of: Callable[[Kept], Tensor]) -> Step:
    """of: gives the derivative of each entry"""
    return partial(_times, factor=of(b.kept).conj(), shape=b.shape)


def _divided(form: Form, divisor: Tensor, shape: torch.Size) -> Form:
    return _summed(Dense(rows_of(form) / divisor), shape)  # which may be an integer


def _is_inside(kept: Kept) -> Tensor:
    x, low, high = (kept(name) for name in ("self", "min", "max"))
    return torch.logical_and(x >= (-inf if low is None else low), x <= (inf if high is None else high))


def _softplus(kept: Kept) -> Tensor:
    x = kept("self")
    x = x.to(accumulation_dtype(x.dtype)) * kept("beta")  # the threshold is compared in single precision
    return torch.where(x > kept("threshold"), 1, x.sigmoid())


def _normed(b: Before) -> Step:
    """y = g v / |v|, with a norm for each entry of one axis."""
    v, g, norm = (b.kept(name) for name in ("v", "g", "result1"))
    unit, over, place = v / norm, [d + 1 for d in range(v.ndim) if d != b.axis()], b.place

    def put(form: Form) -> Form:
        along = (rows_of(form) * unit).sum(over, keepdim=True)
        return Dense(along if place else (rows_of(form) - along * unit) * (g / norm))

    return put


def _matrices(b: Before, names: Sequence[str], first: int) -> Step:
    """A product of two matrices.  names: under which they are saved    first: the place of the first one"""
    if b.place < first:
        beta, shape = b.kept("beta").conjugate(), b.shape
        return lambda form: _summed(scale(form, beta), shape)
    is_first, alpha = b.place == first, b.kept("alpha") if first else 1
    other = b.kept(names[is_first]).mH if alpha == 1 else b.kept(names[is_first]).mH * alpha.conjugate()
    if is_first:
        return lambda form: Dense(form.values @ other) if isinstance(form, Dense) else mapped(form, Sides(right=other))

    def put(form: Form) -> Form:
        (fan_in, positions), fan_out = other.shape, form.shape[1]
        if not isinstance(form, Dense):
            return mapped(form, Sides(left=other))
        if positions * (fan_in + fan_out) > fan_in * fan_out:
            return Dense(other @ form.values)
        return Outer(other.mT.expand(form.samples, positions, fan_in), form.values, gradient=1)

    return put


def _layer_normed(b: Before) -> Step:
    """y = x̂ · weight + bias, where x̂ is x normalised over its last axes."""
    x, weight, *statistics = (b.kept(name) for name in ("input", "weight", "result1", "result2"))
    axes, shape = len(b.kept("normalized_shape")), b.shape
    if b.place:
        return _slope(b, lambda k: (x - statistics[0]) * statistics[1]) if b.place == 1 else partial(_summed, shape=shape)

    def put(form: Form) -> Form:  # the rows of N samples come as more positions
        y, *more = (own.expand(form.samples, *own.shape).contiguous() for own in (x, *statistics))
        given = y, x.shape[x.ndim - axes :], *more, weight, None, [True, False, False]
        return Dense(torch.ops.aten.native_layer_norm_backward(rows_of(form).contiguous(), *given)[0])

    return put


def _resized(b: Before, back: Callable[..., Tensor]) -> Step:
    """Values between those of a grid: of B images with C channels, of which each is resized alone."""
    scales = ("scales_h", "scales_w") if len(b.made) == 4 else ("scales",)
    settings, shape, made = [b.kept(name) for name in ("align_corners", *scales)], b.shape, b.made
    if made == shape and not any(settings[1:]):  # each value is that of its own place
        return lambda form: form

    def put(form: Form) -> Form:
        images = form.samples * shape[0]
        rows = back(rows_of(form).reshape(images, *made[1:]), list(made[2:]), [images, *shape[1:]], *settings)
        return Dense(rows.view(form.samples, *shape))

    return put


VIEWS: dict[str, Callable[[Before], Step | None]] = {
    **dict.fromkeys(
        (
            "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
            "SqueezeBackward1", "AliasBackward0",
        ),
        lambda b: partial(reshaped, shape=b.shape),
    ),
    # Formulas compute in the parameter's dtype.
    **dict.fromkeys(("ToCopyBackward0", "CloneBackward0"), lambda b: lambda form: form),
    "TBackward0": _swap,
    "TransposeBackward0": _swap,
    "PermuteBackward0": _permuted,
    **dict.fromkeys(
        ("SelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"), _part
    ),
    "EmbeddingBackward0": _looked_up,
    **dict.fromkeys(("IndexBackward0", "IndexSelectBackward0"), _indexed),
}  # fmt: skip
"""{node name: ``step(before)``} for nodes that move entries of one value; None for a case that isn't covered"""

STEPS: dict[str, Callable[[Before], Step | None]] = {
    **VIEWS,
    "CatBackward0": _joined,
    "ExpandBackward0": lambda b: partial(_summed, shape=b.shape),
    **dict.fromkeys(("AddBackward0", "SubBackward0", "RsubBackward0", "RsubBackward1"), _added),
    "NegBackward0": lambda b: lambda form: Dense(-form.values) if isinstance(form, Dense) else scale(form, -1.0),
    "MulBackward0": lambda b: _slope(b, lambda k: k("self" if b.place else "other")),
    "DivBackward0": lambda b: (
        _slope(b, lambda k: -k("self") / k("other").square())
        if b.place
        else partial(_divided, divisor=b.kept("other").conj(), shape=b.shape)
    ),
    "ExpBackward0": partial(_slope, of=lambda k: k("result")),
    "SigmoidBackward0": partial(_slope, of=lambda k: k("result") * (1 - k("result"))),
    "MmBackward0": partial(_matrices, names=("self", "mat2"), first=0),
    "AddmmBackward0": partial(_matrices, names=("mat1", "mat2"), first=1),
    "ReluBackward0": partial(_slope, of=lambda k: k("result") > 0),
    "SoftplusBackward0": partial(_slope, of=_softplus),
    "WhereBackward0": lambda b: _slope(b, lambda k: ~k("condition") if b.place else k("condition").clone()),
    "TanhBackward0": partial(_slope, of=lambda k: 1 - k("result").square()),
    "ClampBackward1": partial(_slope, of=_is_inside),
    "WeightNormInterfaceBackward0": _normed,
    "NativeLayerNormBackward0": _layer_normed,
    "UpsampleLinear1DBackward0": partial(_resized, back=torch.ops.aten.upsample_linear1d_backward),
    "UpsampleBilinear2DBackward0": partial(_resized, back=torch.ops.aten.upsample_bilinear2d_backward),
    "UpsampleBicubic2DBackward0": partial(_resized, back=torch.ops.aten.upsample_bicubic2d_backward),
}
"""The same, with nodes that compute.  Through others rows go one by one."""

KNOWN = {name for name in VIEWS if not name.startswith(("Split", "Embedding", "Index"))}
KNOWN |= {"CatBackward0", "ExpandBackward0", "NegBackward0"}
"""Nodes whose step is a function of shapes and of numbers that laws read too, so that it holds for each equal graph."""
