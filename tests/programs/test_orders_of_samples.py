"""Samples that a model puts in an order of their values' and back, each time by other operations.  In the first batches,
which are proven, they are in their order by chance: later ones must not be read so."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from twin import Bare, check_right

Way = Callable[[Tensor, Tensor], Tensor]


def matrix(order: Tensor) -> Tensor:
    """A permutation, N N."""
    return F.one_hot(order, len(order)).to(torch.get_default_dtype())


def spread(order: Tensor, like: Tensor) -> Tensor:
    return order[:, None].expand_as(like)


def written(h: Tensor, order: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[order.argsort()] = h
    return out


def filled(h: Tensor, order: Tensor) -> Tensor:
    rows = [torch.where((order == n)[:, None], h[n][None], torch.zeros_like(h)) for n in range(len(order))]
    return torch.stack(rows).sum(0)


WAYS: dict[str, Way] = {
    "index": lambda h, order: h[order],
    "embedding": lambda h, order: F.embedding(order, h),
    "embedding_bag": lambda h, order: F.embedding_bag(order[:, None], h, mode="sum"),
    "take": lambda h, order: torch.take(h, order[:, None] * h.shape[1] + torch.arange(h.shape[1])),
    "gather": lambda h, order: h.gather(0, spread(order, h)),
    "index_select": lambda h, order: h.index_select(0, order),
    "scatter": lambda h, order: torch.zeros_like(h).scatter(0, spread(order.argsort(), h), h),
    "scatter_add": lambda h, order: torch.zeros_like(h).scatter_add(0, spread(order.argsort(), h), h),
    "scatter_reduce": lambda h, order: torch.zeros_like(h).scatter_reduce(0, spread(order.argsort(), h), h, "sum"),
    "index_add": lambda h, order: torch.zeros_like(h).index_add(0, order.argsort(), h),
    "index_copy": lambda h, order: torch.zeros_like(h).index_copy(0, order.argsort(), h),
    "index_reduce": lambda h, order: torch.ones_like(h).index_reduce(0, order.argsort(), h, "prod"),
    "index_put": lambda h, order: torch.zeros_like(h).index_put((order.argsort(),), h),
    "written": written,
    "filled": filled,
    "stack": lambda h, order: torch.stack([h[n] for n in order.tolist()]),
    "cat": lambda h, order: torch.cat([h[n : n + 1] for n in order.tolist()]),
    "unbind": lambda h, order: torch.stack([h.unbind(0)[n] for n in order.tolist()]),
    "as_strided": lambda h, order: torch.stack([h.contiguous().as_strided((3,), (1,), 3 * n) for n in order.tolist()]),
    "mm": lambda h, order: matrix(order) @ h,
    "addmm": lambda h, order: torch.addmm(torch.zeros_like(h), matrix(order), h),
    "baddbmm": lambda h, order: torch.baddbmm(torch.zeros_like(h)[None], matrix(order)[None], h[None])[0],
    "mv": lambda h, order: torch.stack([matrix(order) @ h[:, n] for n in range(h.shape[1])], 1),
    "sparse": lambda h, order: torch.sparse.mm(matrix(order).to_sparse(), h),
    "product": lambda h, order: (matrix(order)[:, :, None] * h[None]).sum(1),
    "convolution": lambda h, order: F.conv1d(h[None], matrix(order)[:, :, None])[0],
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning", "ignore:index_reduce")
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_an_order_that_was_as_given_by_chance(way: str, scaled: bool) -> None:
    put = WAYS[way]

    def how(m: Bare, x: Tensor) -> Tensor:
        order = (x[:, 0] > 0).long().argsort(stable=True)
        h = put(x * m.scale if scaled else x, order)
        return put((m.layer(h) @ m.w).tanh(), order.argsort())

    batches = []
    for signs in ([1, 1, 1, 1], [1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [-1, 1, 1, -1]):
        x = torch.randn(4, 3)
        x[:, 0] = x[:, 0].abs() * torch.tensor(signs)
        batches.append((x,))
    own = {"scale": torch.randn(3)} if scaled else {}
    check_right(Bare(how, layer=nn.Linear(3, 3), w=torch.randn(3, 3), **own), *batches)
