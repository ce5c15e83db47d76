"""Converts the rows of a view of a parameter to the parameter's own rows: what each view node does to a form."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.forms import Chained, Dense, Form, Outer, Placed
from autograd_hacks.formulas.embedding import lookup
from autograd_hacks.support.graph import is_packed_by_hooks, kept_by, number_of, signed

Step = Callable[[Form], Form]


def transposed(form: Form, dims: tuple[int, int], shape: torch.Size) -> Form:
    """The form of a parameter, from the form of its transpose.  dims: the axes that were exchanged"""
    first, second = sorted(dim % len(shape) for dim in dims)
    if isinstance(form, Placed) and first:
        cut = {at: torch.Size((at[1] - at[0], *shape[1:])) for at in form.entries}
        return Placed({at: transposed(part, dims, cut[at]) for at, part in form.entries.items()}, shape)
    is_last = (first, second) == (len(shape) - 2, len(shape) - 1) and form.shape.numel() == form.shape[-2:].numel()
    if isinstance(form, Outer) and is_last and form.shape[-2:] == (form.fan_out, form.fan_in):
        return form.transposed(shape)
    return Dense(form.dense().transpose(first + 1, second + 1))


def reshaped(form: Form, shape: torch.Size) -> Form:
    if isinstance(form, Outer):
        return form.viewed(shape)
    return Dense(form.dense().reshape(form.samples, *shape))


def _placed(form: Form, start: int, stop: int, shape: torch.Size) -> Form:
    return Placed({(start, stop): reshaped(form, torch.Size((stop - start, *shape[1:])))}, shape)


def _swap(node: Any, number: int, shape: torch.Size) -> Step:
    dims = (0, 1) if node.name() == "TBackward0" else (number_of(node, "dim0") or 0, number_of(node, "dim1") or 0)
    return partial(transposed, dims=dims, shape=shape)


def _part(node: Any, number: int, shape: torch.Size) -> Step | None:
    """A part of the first axis: one entry, a slice, or one of several pieces."""
    if number_of(node, "dim") != 0:
        return None
    if node.name() == "SelectBackward0":
        start = (number_of(node, "index") or 0) % shape[0]
        stop = start + 1
    elif node.name() == "SplitBackward0":
        size = kept_by(node, "split_size")
        start, stop = number * size, min(shape[0], (number + 1) * size)
    elif number_of(node, "step") == 1:
        start, stop, _ = slice(number_of(node, "start"), number_of(node, "end")).indices(shape[0])
    else:
        return None
    return partial(_placed, start=start, stop=stop, shape=shape)


def _looked_up(node: Any, number: int, shape: torch.Size) -> Step | None:
    """Entries of a table, by an index that is the same for all samples, such as positions."""
    if is_packed_by_hooks(node, "indices") or kept_by(node, "scale_grad_by_freq"):
        return None
    index, padding_idx = kept_by(node, "indices").clone(), number_of(node, "padding_idx")
    padding_idx = None if padding_idx is None or padding_idx < 0 else padding_idx
    return lambda form: lookup(index.expand(form.samples, *index.shape), form.dense(), shape, padding_idx)


def _indexed(node: Any, number: int, shape: torch.Size) -> Step | None:
    """The same by ``table[index]``, such as relative positions."""
    if is_packed_by_hooks(node, "indices"):
        return None
    index, *others = kept_by(node, "indices")
    if others or index is None or index.is_floating_point() or index.dtype in (torch.bool, torch.uint8):
        return None
    places = index.remainder(shape[0]).flatten()  # a copy, in which numbers from the end are counted from the beginning

    def pull(rows: Tensor, batched: bool) -> Tensor:
        entries = rows.reshape(len(rows) if batched else 1, len(places), *shape[1:])
        own = entries.new_zeros(len(entries), *shape).index_add(1, places.to(rows.device), entries)
        return own if batched else own[0]

    return lambda form: Chained(form, pull, shape, form.like)


def _permuted(node: Any, number: int, shape: torch.Size) -> Step:
    dims = [signed(dim) % len(shape) for dim in kept_by(node, "dims")]
    back = [1 + dims.index(at) for at in range(len(dims))]
    return lambda form: Dense(form.dense().permute(0, *back))


STEPS: dict[str, Callable[[Any, int, torch.Size], Step | None]] = {
    **dict.fromkeys(("TBackward0", "TransposeBackward0"), _swap),
    **dict.fromkeys(
        (
            "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
            "SqueezeBackward1", "AliasBackward0",
        ),
        lambda node, number, shape: partial(reshaped, shape=shape),
    ),
    # Formulas compute in the parameter's dtype.
    **dict.fromkeys(("ToCopyBackward0", "CloneBackward0"), lambda node, number, shape: lambda form: form),
    "PermuteBackward0": _permuted,
    **dict.fromkeys(("SelectBackward0", "SliceBackward0", "SplitBackward0"), _part),
    "EmbeddingBackward0": _looked_up,
    "IndexBackward0": _indexed,
}  # fmt: skip
"""{node name: ``step(node, number, shape)``} for nodes that view a tensor; None for a case that isn't covered"""
