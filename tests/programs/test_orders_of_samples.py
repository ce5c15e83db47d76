"""Samples that a model puts in an order of their values' and back, each time by other operations.  In the first batches,
which are proven, they are as given, or reversed: later ones must not be read so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from rarely import crossed
from torch import Tensor
from twin import Bare, check_right

pytestmark = pytest.mark.usefixtures("double")

Inner = Callable[[Tensor], Tensor]
"""What each sample goes through by itself, N 3 -> N 3."""
Way = Callable[[Tensor, Tensor], Tensor]
"""A batch and an order -> the batch in this order."""


def matrix(order: Tensor) -> Tensor:
    """A permutation, N N."""
    return F.one_hot(order, len(order)).to(torch.get_default_dtype())


def written(h: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[order.argsort()] = h
    return out


def filled(h: Tensor, order: Tensor) -> Tensor:
    rows = [torch.where((order == n)[:, None], h[n][None], torch.zeros_like(h)) for n in range(len(order))]
    return torch.stack(rows).sum(0)


class Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, saves: bool) -> Tensor:
        if saves:
            ctx.save_for_backward(order)
        else:
            ctx.order = order
        ctx.saves = saves
        return x[order]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        order = ctx.saved_tensors[0] if ctx.saves else ctx.order
        return torch.empty_like(g).index_copy(0, order, g), None, None


WAYS: dict[str, Way] = {
    "index": lambda h, order: h[order],
    "written": written,
    "filled": filled,
    "stack": lambda h, order: torch.stack([h[n] for n in order.tolist()]),
    "as_strided": lambda h, order: torch.stack([h.contiguous().as_strided((3,), (1,), 3 * n) for n in order.tolist()]),
    "sparse": lambda h, order: torch.sparse.mm(matrix(order).to_sparse(), h),
    "a function that saves": lambda h, order: Dispatch.apply(h, order, True),
    "a function that keeps": lambda h, order: Dispatch.apply(h, order, False),
}


@crossed(way=WAYS, inside=["bare", "layers", "layers around"])
def test_an_order_that_was_as_given_by_chance(way: str, inside: str) -> None:
    """Of layers their rules read all, and no parameter asks for a walk through the graph."""

    def how(f: Inner, x: Tensor) -> Tensor:
        order, put = x[:, 0].argsort(), WAYS[way]
        return put(f(put(x, order)), order.argsort())

    def run(m: Bare, x: Tensor) -> Tensor:
        if inside == "bare":
            return how(lambda rows: (rows @ m.a).tanh() * m.scale @ m.w, x * m.before)
        return m.last(how(m.inner, m.first(x) if inside == "layers around" else x))

    own: dict[str, Any] = {"a": torch.randn(3, 4), "scale": torch.randn(4), "w": torch.randn(4, 3), "before": torch.ones(3)}
    if inside != "bare":
        own = {"inner": nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)), "last": nn.Linear(3, 2)}
    if inside == "layers around":
        own["first"] = nn.Linear(3, 3)
        nn.init.eye_(own["first"].weight)
    for down in (False, True):
        xs = [torch.randn(6, 3) for _ in range(4)]
        xs[:2] = [x[x[:, 0].argsort(descending=down)] for x in xs[:2]]
        check_right(Bare(run, **own), *[(x,) for x in xs], (xs[2][:3],), (xs[0],))
