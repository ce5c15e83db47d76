"""Rows of a view of a parameter as the parameter's own: what each node of views does to a form."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from autograd_hacks.forms import Dense, Form, Outer, Placed
from autograd_hacks.support.graph import kept_by, number_of

Step = Callable[[Form], Form]


def _transposed(form: Form, dims: tuple[int, int], shape: torch.Size) -> Form:
    """The form of a parameter of which the other is the transpose.  dims: the axes that were exchanged"""
    if isinstance(form, Outer) and len(form.shape) == 2 and form.shape == (form.fan_out, form.fan_in):
        return Outer(form.right, form.left)
    first, second = (dim % len(shape) + 1 for dim in dims)
    return Dense(form.dense().transpose(first, second))


def _reshaped(form: Form, shape: torch.Size) -> Form:
    if isinstance(form, Outer):
        return Outer(form.left, form.right, shape)
    return Dense(form.dense().reshape(form.samples, *shape))


def _placed(form: Form, start: int, stop: int, shape: torch.Size) -> Form:
    return Placed({(start, stop): _reshaped(form, torch.Size((stop - start, *shape[1:])))}, shape)


def _swap(node: Any, number: int, shape: torch.Size) -> Step:
    dims = (0, 1) if node.name() == "TBackward0" else (number_of(node, "dim0") or 0, number_of(node, "dim1") or 0)
    return partial(_transposed, dims=dims, shape=shape)


def _reshape(node: Any, number: int, shape: torch.Size) -> Step:
    return partial(_reshaped, shape=shape)


def _select(node: Any, number: int, shape: torch.Size) -> Step | None:
    index = (number_of(node, "index") or 0) % shape[0]
    return partial(_placed, start=index, stop=index + 1, shape=shape) if number_of(node, "dim") == 0 else None


def _slice(node: Any, number: int, shape: torch.Size) -> Step | None:
    if number_of(node, "dim") != 0 or number_of(node, "step") != 1:
        return None
    start, stop, _ = slice(number_of(node, "start"), number_of(node, "end")).indices(shape[0])
    return partial(_placed, start=start, stop=stop, shape=shape)


def _split(node: Any, number: int, shape: torch.Size) -> Step | None:
    if number_of(node, "dim") != 0:
        return None
    size = kept_by(node, "split_size")
    return partial(_placed, start=number * size, stop=min(shape[0], (number + 1) * size), shape=shape)


STEPS: dict[str, Callable[[Any, int, torch.Size], Step | None]] = {
    **dict.fromkeys(("TBackward0", "TransposeBackward0"), _swap),
    **dict.fromkeys(
        (
            "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
            "SqueezeBackward1", "AliasBackward0",
        ),
        _reshape,
    ),
    "ToCopyBackward0": lambda node, number, shape: lambda form: form,  # formulas compute in the parameter's dtype
    "SelectBackward0": _select,
    "SliceBackward0": _slice,
    "SplitBackward0": _split,
}  # fmt: skip
"""{a node's name: ``step(node, number, shape)`` of one that views a tensor; None for a case that isn't covered}"""
