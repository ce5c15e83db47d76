"""Squared norms of rows: an operation in a graph that no compiler traces into, since values decide how it computes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.forms import Convolution, Form, Lookup, Outer
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.support.contexts import without_autocast


def squares(form: Form) -> Tensor:
    """N; can be traced into any graph."""
    if isinstance(form, Outer):
        return _squares("Outer", (form.left, form.right), list(form.shape))
    if isinstance(form, Lookup):
        return _squares("Lookup", (form.g, form.index), [form.entries])
    if isinstance(form, Convolution):
        lists = form.shape, form.stride, form.padding, form.dilation
        return _squares("Convolution", form.held, [form.groups, *(n for numbers in lists for n in numbers)])
    return form.matrix().square().sum(1)


@torch.library.custom_op("autograd_hacks::squares", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _squares(kind: str, held: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    with without_autocast(held[:1]):
        return _made(kind, held, numbers).norms().square()


@_squares.register_fake
def _(kind: str, held: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    return held[0].new_empty(held[0].shape[0], dtype=accumulation_dtype(held[0].dtype))


def _made(kind: str, held: Sequence[Tensor], numbers: Sequence[int]) -> Form:
    if kind == "Outer":
        return Outer(held[0], held[1], torch.Size(numbers))
    if kind == "Lookup":
        return Lookup(held[1], held[0], numbers[0])
    n, lists = held[0].ndim - 2, list(numbers[1:])
    stride, padding, dilation = (lists[2 + n * k : 2 + n * (k + 1)] for k in (1, 2, 3))
    return Convolution(held[0], held[1], torch.Size(lists[: 2 + n]), stride, padding, dilation, numbers[0])
