"""Programs whose parameters are read off autograd's graph, against one backward pass from each loss of the same forward."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from one_graph import check, data
from oracle import squares
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize
from twin import Bare, check_right

import autograd_hacks

How = Callable[[Bare, Tensor], Tensor]

# What the batch meets


class Freeing(torch.autograd.Function):
    """Frees what it kept as its backward runs, which can't run twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.kept = [x, w]
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        w, x = ctx.kept.pop(), ctx.kept.pop()
        return g * w, (g * x).sum(0)


def slots(m: Bare, x: Tensor) -> Tensor:
    own = m.mu + m.sigma * torch.randn(len(x), 2, 4, dtype=x.dtype)
    keys = m.k(x[:, None])
    return (m.q(own) @ keys.mT).softmax(1) @ keys


def hyper(m: Bare, x: Tensor) -> Tensor:
    own = torch.einsum("nij,nj->ni", m.of_sample(x).view(-1, 4, 2), x[:, :2])
    return own @ m.of_all(m.code).view(4, 2)


def solver(m: Bare, x: Tensor) -> Tensor:
    """Of an ordinary differential equation."""

    def slope(t: Tensor, x: Tensor) -> Tensor:
        return m.net(torch.cat([x, t.expand(len(x), 1)], 1)) * m.rate

    t, h = torch.zeros(1, 1, dtype=x.dtype), 0.25
    for _ in range(3):
        one = slope(t, x)
        x, t = x + h * slope(t + h / 2, x + h / 2 * one), t + h
    return x


def ponder(m: Bare, x: Tensor) -> Tensor:
    """Each sample stops when it is sure."""
    h, out, alive = x, torch.zeros_like(x), torch.ones(len(x), dtype=torch.bool)
    for _ in range(5):
        rows = alive.nonzero()[:, 0]
        if not len(rows):
            break
        own = (m.cell(h[rows]) * m.scale).tanh()
        h = h.index_copy(0, rows, own)
        stop = m.halt(own)[:, 0] > 0.2
        out = out.index_add(0, rows, own * m.halt(own).sigmoid())
        alive = alive.index_put((rows[stop],), torch.tensor(False))
    return out


def as_often_as_the_batch_says(m: Bare, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().max() * 3) % 4 + 1):
        x = (x @ m.w).tanh() * m.scale
    return x


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


PROGRAMS: dict[str, tuple[How, Callable[[], dict[str, Any]], Sequence[int]]] = {
    "a parameter times noise": (
        slots, lambda: {"mu": normal(4), "sigma": normal(4), "q": nn.Linear(4, 4), "k": nn.Linear(3, 4)}, (4, 4, 4),
    ),
    "a hypernetwork": (
        hyper, lambda: {"of_sample": nn.Linear(3, 8), "of_all": nn.Linear(2, 8), "code": normal(2)}, (4, 4, 4),
    ),
    "a solver": (
        solver, lambda: {"net": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), "rate": normal()}, (4, 4, 4),
    ),
    "an early exit": (
        ponder, lambda: {"cell": nn.Linear(3, 3), "halt": nn.Linear(3, 1), "scale": normal(3)}, (6, 6, 6, 6, 6),
    ),
    "a loop over samples": (
        lambda m, x: torch.stack([(row @ m.w).tanh() * m.scale for row in x]),
        lambda: {"w": normal(3, 4), "scale": normal(4)}, (4, 4, 2, 6, 1, 5),
    ),
    "a loop of another length for each batch": (
        as_often_as_the_batch_says, lambda: {"w": normal(3, 3), "scale": normal(3)}, (4,) * 6,
    ),
    "a function whose backward frees what it kept": (
        lambda m, x: m.last(Freeing.apply(m.first(x), m.scale).tanh()),
        lambda: {"first": nn.Linear(3, 4), "scale": normal(4), "last": nn.Linear(4, 2)}, (4, 4, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PROGRAMS)
def test_rows_of_a_program(what: str) -> None:
    how, own, sizes = PROGRAMS[what]
    check_right(Bare(how, **own()).double(), *[(data(n, 3),) for n in sizes])


def _parametrised() -> nn.Module:
    layer = nn.Linear(3, 3)
    parametrize.register_parametrization(layer, "weight", Bare(lambda m, w: w.triu() + w.triu(1).mT))
    return nn.Sequential(
        layer, nn.Tanh(), parametrizations.weight_norm(nn.Linear(3, 3)), parametrizations.orthogonal(nn.Linear(3, 3))
    )


def _merged() -> nn.Module:
    """Products of two low ranks, added to a weight; the same weight backwards; a slice of it; several in one stack."""

    def run(m: nn.Module, x: Tensor) -> Tensor:
        merged = m.w + m.a @ m.b
        h = F.linear(x, merged).tanh()
        h = F.linear(h, merged.T) + F.linear(h[:, :2], m.w[:, :2])
        both = torch.stack([m.one.weight, m.two.weight]).mean(0)
        return F.linear(m.one(h), both, torch.cat([m.one.bias[:1], m.two.bias[1:]]))

    bare = {"w": torch.randn(3, 3), "a": torch.randn(3, 1), "b": torch.randn(1, 3)}
    return Bare(run, **bare, one=nn.Linear(3, 3), two=nn.Linear(3, 3))


@pytest.mark.parametrize("build", [_parametrised, _merged])
def test_parameters_that_are_made_of_others(build: Callable[[], nn.Module]) -> None:
    model, x = build().double(), data(4, 3)
    check(model, lambda: squares(model(x)))


def scale_net() -> nn.Module:
    return Bare(lambda m, x: x * m.scale, scale=torch.randn(4))


# Control flow


def test_branches_in_threads() -> None:
    def threads(m: nn.Module, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(3) as pool:
            return sum(pool.map(lambda branch: branch(x), m.branches))

    branches = nn.ModuleList(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), scale_net()) for _ in range(3))
    model, x = Bare(threads, branches=branches).double(), data(4, 3)
    check(model, lambda: squares(model(x)))


# Models of transformers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_loss_inside_under_autocast_with_ignored_labels(dtype: torch.dtype) -> None:
    """Each row is that sample's own mean times its share of all that counts."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model, x = transformers.GPT2LMHeadModel(config), torch.randint(20, (4, 6))
    labels = x.clone()
    labels[0, 3:], labels[2, :4] = -100, -100
    count = (labels[:, 1:] != -100).sum(1)

    def near(own: Tensor, right: Tensor, of: float) -> None:
        torch.testing.assert_close(own, right, rtol=0.05, atol=of * float(right.abs().max()))

    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            with torch.autocast("cpu", dtype):
                whole = model(x, labels=labels).loss
            whole.backward()
            autograd_hacks.compute_grad1(model, loss_type="sum")
            for p in model.parameters():
                near(p.grad1.sum(0), p.grad, 0.02)
            for n, share in enumerate(count / count.sum()):
                with autograd_hacks.pause_hooks(), torch.autocast("cpu", dtype):
                    own = model(x[n : n + 1], labels=labels[n : n + 1]).loss * share
                for p, row in zip(model.parameters(), torch.autograd.grad(own, list(model.parameters()))):
                    near(p.grad1[n], row, 0.05)
