"""Parameters that no layer's rule covers, read where they meet the batch: rows are those of each loss alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from rarely import crossed
from steps import check_hooked, check_losses
from torch import Tensor
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from twin import Bare, check_right

import autograd_hacks

Body = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    """Two layers, bare parameters, and what a test does with them between the layers: N T 4 in and out."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.into, self.out, self.body = nn.Linear(3, 4), nn.Linear(4, 2), body
        self.token, self.scale, self.weight = (nn.Parameter(torch.randn(*s)) for s in ((1, 1, 4), (4,), (4, 4)))
        self.stack, self.table = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.randn(9, 4))
        self.normed = parametrizations.weight_norm(nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(self, self.into(x)).tanh())


def positions(net: Net, h: Tensor) -> Tensor:
    ids = torch.arange(h.shape[1], device=h.device).expand(len(h), -1)
    return h + net.table[ids] + F.embedding(ids[:1], net.table)


def normalised(net: Net, h: Tensor) -> Tensor:
    h = F.layer_norm(h, (4,), net.scale, net.table[0])
    return F.rms_norm(h, (4,), net.table[1]) + (1 + net.scale) * h


def broadcast(net: Net, h: Tensor) -> Tensor:
    h = torch.where(h > 0, h, net.scale * 2) + torch.maximum(h, net.table[3])
    return torch.addcmul(h, net.scale, h).lerp(net.token.expand_as(h), 0.3) / (net.scale.square() + 1)


def in_place(net: Net, h: Tensor) -> Tensor:
    h = h.clone()
    h *= net.scale
    h += net.token
    return h.mul_(net.table[2])


def time_first(net: Net, h: Tensor) -> Tensor:
    h = h.transpose(0, 1)
    return (h * net.scale + net.token.transpose(0, 1) + net.table[: len(h), None]).transpose(0, 1)


def folded(net: Net, h: Tensor) -> Tensor:
    rows = (h.flatten(0, 1) * net.scale) @ net.weight + net.table[0]
    others = (h.transpose(0, 1).flatten(0, 1) * net.table[1]).unflatten(0, (h.shape[1], len(h))).transpose(0, 1)
    return rows.view_as(h) + others


def repeated(net: Net, h: Tensor) -> Tensor:
    heads = net.stack.repeat(len(h), 1, 1)  # (N · 3) 4 4
    queries = h[:, None].expand(-1, 3, -1, -1).flatten(0, 1)
    return torch.bmm(queries, heads).unflatten(0, (len(h), 3)).sum(1)


def attending(net: Net, h: Tensor) -> Tensor:
    h = h.transpose(0, 1)
    found, _ = F.multi_head_attention_forward(
        h, h, h, 4, 2, net.table[:3].repeat(4, 1), None, net.token, net.token, False, 0.0, net.weight, net.scale,
    )  # fmt: skip
    return found.transpose(0, 1)


def routed(net: Net, h: Tensor) -> Tensor:
    """Three experts, one for each position."""
    rows = h.reshape(-1, 4)
    chosen, out = (rows[:, :3] @ net.table[:3, :3]).argmax(1), torch.zeros_like(rows)
    for expert in range(3):
        places = (chosen == expert).nonzero()[:, 0]
        out = out.index_add(0, places, F.silu(F.linear(rows[places], net.stack[expert])) * net.table[expert])
    return out.view_as(h)


BODIES: dict[str, Body] = {
    "a token": lambda net, h: torch.cat([net.token.expand(len(h), -1, -1), h], 1),
    "positions": positions,
    "merged": lambda net, h: F.linear(h, net.stack[0] @ net.weight + net.stack[2]) + h @ net.stack[1].mT,
    "a table read by what is in the batch": lambda net, h: h * net.table[(h[..., 0].detach() > 0).long()],
    "normalised": normalised,
    "broadcast": broadcast,
    "in place": in_place,
    "contracted": lambda net, h: (
        torch.bmm((h := torch.einsum("ntd,de->nte", h, net.weight)), net.weight.expand(len(h), 4, 4))
        + torch.tensordot(h, net.stack[0], 1)
    ),
    "weight-normed": lambda net, h: (
        net.normed(h) + F.linear(h, net.into.weight.new_ones(4, 1) * net.out.weight[0], net.out.weight[1])
    ),
    "dropped": lambda net, h: F.linear(h, F.dropout(net.weight, 0.5)) + F.dropout(h * net.scale, 0.3),
    "time first": time_first,
    "folded": folded,
    "repeated": repeated,
    "drawn": lambda net, h: h + F.linear(torch.randn(len(h), 4).to(h), net.weight, net.scale)[:, None],
    "attending": attending,
    # A module that is made anew in each forward: its path is unknown, and its parameters are the net's.
    "checkpointed": lambda net, h: checkpoint(Bare(lambda m, h: h @ m.held[0].weight, held=[net]), h, use_reentrant=False),
    "routed": routed,
}


@crossed(body=BODIES, param_grad=[True, False])
def test_rows(body: str, param_grad: bool) -> None:
    model = Net(BODIES[body]).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for samples, length in ((4, 5), (4, 5), (3, 6), (5, 5), (2, 3), (1, 3)):
            x = torch.randn(samples, length, 3).double()
            check_losses(model, lambda x=x: squares(model(x)))
            for parameter in model.parameters():
                parameter.grad = None if parameter.grad1 is None else parameter.grad1.sum(0)
            optimizer.step()


def test_one_position_first_and_as_many_as_samples_later() -> None:
    for body in ("positions", "folded", "time first", "merged"):
        shapes = (4, 1), (4, 4), (4, 2), (2, 4), (8, 4)
        check_right(Net(BODIES[body]).double(), *[(torch.randn(*own, 3).double(),) for own in shapes], total="each")


# Values that follow from parameters alone, and the way back from their rows


def conjugated() -> nn.Module:
    """A view of its weight whose numbers are others."""
    return Bare(
        lambda m, x: torch.view_as_real(x * m.weight.conj() + x * x * m.weight).flatten(1),
        weight=torch.randn(4, dtype=torch.complex128),
    )


def counted() -> nn.Module:
    """A lookup without a batch whose gradient is no sum over positions."""
    return Bare(
        lambda m, x: x * F.embedding(torch.tensor([0, 1, 1, 0, 1]), m.table, scale_grad_by_freq=True),
        table=torch.randn(3, 4).double(),
    )


@pytest.mark.parametrize(
    ("model", "x"),
    [(conjugated(), torch.randn(3, 4, dtype=torch.complex128)), (counted(), torch.randn(4, 5, 4).double())],
)
def test_what_looks_like_the_parameter_and_is_not(model: nn.Module, x: Tensor) -> None:
    check_right(model, (x,), (x,), total="each")


@pytest.mark.parametrize("more", [1, 2])
def test_an_index_that_leaves_entries_beside_samples(more: int) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.cat([x, x.new_ones(more, 4)]) + m.places[: len(x) + more, None]
        return h.gather(1, torch.tensor([[3, 2, 1, 0]]).expand(len(x), 4)).tanh()

    model: Any = Bare(forward)
    model.places = nn.Parameter(torch.randn(8, dtype=torch.float64))
    batches = torch.randn(2, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    check_hooked(model, *[partial(lambda x: squares(model(x)), x) for x in batches])
