"""Verbs of forms in a graph that is traced: one operation that a compiler doesn't trace into, since values decide the way.

Rows are written out if positions cancel, experts have as many positions as were sent to them, and random maps are drawn."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.forms import Convolution, Dense, Form, Lookup, Outer, RandomMap, put
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.forms.terms import of_experts
from autograd_hacks.support.contexts import without_autocast


@torch.library.custom_op("autograd_hacks::verb", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _verb(
    kind: str, held: Sequence[Tensor], numbers: Sequence[int], verb: str, name: str, seed: int, sizes: Sequence[int]
) -> Tensor:
    """kind, held, numbers: as `_taken` gives them    name, seed: of the map    sizes: the result's"""
    with without_autocast(held[:1]):
        form = _made(kind, held, numbers)
        if verb == "dense":
            return form.dense()
        if verb == "squares":
            return form.norms().square()
        return form.project(RandomMap(name, form.shape, sizes[1], seed)).to(form.like.dtype)


@_verb.register_fake
def _(kind: str, held: Sequence[Tensor], numbers: Sequence[int], verb: str, name: str, seed: int, sizes: Any) -> Tensor:
    dtype = held[0].dtype if verb != "squares" else accumulation_dtype(held[0].dtype)
    return held[0].new_empty(tuple(sizes), dtype=dtype)


def _taken(form: Form) -> tuple[str, Sequence[Tensor], list[int]]:
    """A form as its kind, tensors and numbers, for operations.  The first tensor has the rows' dtype."""
    if isinstance(form, Outer):
        return "Outer", (form.left, form.right), list(form.shape)
    if isinstance(form, Lookup):
        return "Lookup", (form.g, form.index), [form.entries]
    if isinstance(form, Convolution):
        lists = form.shape, form.stride, form.padding, form.dilation
        return "Convolution", form.held, [form.groups, *(number for numbers in lists for number in numbers)]
    if isinstance(form, Experts):
        return "Experts", form.held, [form.samples]
    return "Dense", (form.dense(),), []


def _made(kind: str, held: Sequence[Tensor], numbers: Sequence[int]) -> Form:
    """The form, from what `_taken` returned."""
    if kind == "Outer":
        return Outer(held[0], held[1], torch.Size(numbers))
    if kind == "Lookup":
        return Lookup(held[1], held[0], numbers[0])
    if kind == "Convolution":
        n, lists = held[0].ndim - 2, list(numbers[1:])
        stride, padding, dilation = (lists[2 + n * k : 2 + n * (k + 1)] for k in (1, 2, 3))
        return Convolution(held[0], held[1], torch.Size(lists[: 2 + n]), stride, padding, dilation, numbers[0])
    if kind == "Experts":
        return of_experts(held[1], held[0], held[2], held[3], numbers[0])
    return Dense(held[0])


def _run(form: Form, verb: str, sizes: Sequence[int], name: str = "", seed: int = 0) -> Tensor:
    found: Tensor = _verb(*_taken(form), verb, name, seed, sizes)
    return found


def squares(form: Form) -> Tensor:
    """The rows' squared norms, N; can be traced into any graph."""
    if isinstance(form, Outer | Lookup | Convolution | Experts):
        return _run(form, "squares", [form.samples])
    return form.matrix().square().sum(1)


def projection(form: Form, name: str, dim: int, seed: int) -> Tensor:
    """J R, (N, dim), for the random map of a parameter; can be traced into any graph."""
    return _run(
        form if isinstance(form, Outer | Lookup) else Dense(form.dense()), "project", [form.samples, dim], name, seed
    )


class Experts(Form):
    """`of_experts` in a graph that is traced, where its numbers aren't known.

    samples: N    is_turned: whether the parameter is (E, O, I)
    """

    def __init__(self, x: Tensor, g: Tensor, ends: Tensor, owners: Tensor, samples: int, is_turned: bool = False) -> None:
        self.held, self.samples, self.is_turned = (g, x, ends, owners), samples, is_turned
        sizes = (x.shape[1], g.shape[1])
        self.shape = torch.Size((ends.shape[0], *(sizes[::-1] if is_turned else sizes)))

    @property
    def like(self) -> Tensor:
        return self.held[0]

    def dense(self, out: Tensor | None = None, factor: float | Tensor = 1.0) -> Tensor:
        g, x, ends, _ = self.held
        rows = _run(self, "dense", [self.samples, ends.shape[0], x.shape[1], g.shape[1]])
        return put(rows.mT if self.is_turned else rows, out, factor)

    def turned(self) -> Form:
        """With the parameter's last two axes exchanged."""
        g, x, ends, owners = self.held
        return Experts(x, g, ends, owners, self.samples, is_turned=not self.is_turned)

    def __getitem__(self, index: slice | Tensor) -> Form:
        return Dense(self.dense()[index])
