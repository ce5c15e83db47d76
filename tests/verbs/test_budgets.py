"""The memory that the verbs of a whole model take."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from measuring import Held
from nets import language
from rarely import rarely
from steps import at_most, stepped
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.forms import RandomMap, SparseMap


def test_a_tied_embedding_of_fifty_thousand_words_in_a_few_bytes() -> None:
    model, x, max_bytes = language(50_000, 64), torch.randint(50_000, (4, 3)), 2**26
    row = 50_000 * 64 * 4  # 12.8 MB, and 51 for all
    grads = stepped(model, x)
    w = torch.rand(4)
    with at_most(max_bytes):
        norms = grads.norms()
    with at_most(max_bytes):
        gram = grads.gram()
    with at_most(row + 2**20):
        total = grads.weighted_sum(w)["embed.weight"]
    with at_most(2**20):
        along = grads.dot({"embed.weight": total})
    assert_close(gram.diagonal().sqrt(), norms)
    assert_close(gram @ w, along)
    with at_most(2 * row + 3 * max_bytes):
        autograd_hacks.clip_grad1_norm_(model, 1.0)


def test_groups_of_many_samples_keep_to_the_budget() -> None:
    grads = stepped(nn.Linear(256, 256), torch.randn(200, 4, 256)).group(torch.zeros(200, dtype=torch.long))
    activations, max_bytes = 2 * 200 * 4 * 256 * 4, 2**18
    for verb in (grads.norms, grads.second_moment):
        with at_most(2 * activations + 4 * max_bytes + 256 * 257 * 4):
            verb(max_bytes=max_bytes)


def wide() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(200, 300), nn.Tanh(), nn.Linear(300, 100)), torch.randn(64, 20, 200)


def images() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Conv2d(8, 32, 3), nn.Tanh(), nn.Conv2d(32, 16, 3)), torch.randn(800, 8, 12, 12)


@pytest.mark.parametrize(
    ("build", "max_bytes", "in_metric"),
    [
        (wide, 2**24, False),
        (wide, 2**23, True),
        *rarely((wide, 2**23, False), (images, 2**23, False), (images, 2**24, False), (images, 2**23 + 2**22, True)),
    ],
)
def test_no_verb_takes_more_than_its_budget(
    build: Callable[[], tuple[nn.Module, Tensor]], max_bytes: int, in_metric: bool
) -> None:
    """In the metric of Adam rows are written some at a time, and beside the budget comes D of each parameter."""
    model, x = build()
    optimizer = torch.optim.Adam(model.parameters())
    if in_metric:
        model(x[:4]).square().sum().backward()
        optimizer.step()
        metric = autograd_hacks.attribution.Metric.from_optimizer(optimizer)
    grads = stepped(model, x)
    numbers, samples = sum(4 * form.shape.numel() for form in grads.values()), len(x)
    # Vectors of N, norms of each parameter; and the windows that a convolution cuts at a time.
    small = 2**19 + 2**22 + 2 * numbers * in_metric
    assert samples * numbers > max_bytes + small  # which J written out would take
    grads = grads.preconditioned(metric) if in_metric else grads
    v, w = {name: torch.randn(form.shape) for name, form in grads.items()}, torch.rand(3, samples)
    several = [("weighted_sum", 3 * numbers, lambda: grads.weighted_sum(w, max_bytes))] * (not in_metric)
    for what, result, verb in [
        ("norms", 0, lambda: grads.norms(max_bytes=max_bytes)),
        ("dot", 0, lambda: grads.dot(v, max_bytes)),
        ("gram", 4 * samples**2, lambda: grads.gram(max_bytes=max_bytes)),
        ("weighted_sum", numbers, lambda: grads.weighted_sum(w[0], max_bytes)),
        ("second_moment", numbers, lambda: grads.second_moment(max_bytes=max_bytes)),
        ("about a mean", numbers, lambda: grads.second_moment(max_bytes=max_bytes, about=v)),
        ("reduce", numbers, lambda: grads.reduce(lambda g: g.abs().clamp(max=1).sqrt(), max_bytes)),
        ("project", 0, lambda: grads.project(8, max_bytes=max_bytes)),
        ("project, sparse", 0, lambda: grads.project(64, max_bytes=max_bytes, kind="sjlt")),
        *several,
    ]:
        with at_most(max_bytes + result + small, what):
            verb()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_never_have_a_gradient_for_each_entry(mode: str) -> None:
    table, samples, length, features, max_bytes = 300, 256, 400, 64, 2**21
    model = nn.Sequential(nn.EmbeddingBag(table, features, mode=mode), nn.Tanh(), nn.Linear(features, 2))
    x, row = torch.randint(table, (samples, length)), 4 * table * features
    indices = 5 * 8 * x.numel()  # and the bag of each, in the order of the entries
    assert 4 * x.numel() * features > 2 * (indices + max_bytes)  # a gradient for each
    form = stepped(model, x)["0.weight"]
    assert sum(held.nbytes for leaf in form.leaves() for held in leaf.held) <= indices
    v, w = torch.randn(table, features), torch.rand(samples)
    for what, result, verb in [
        ("norms", 0, lambda: form.norms(max_bytes)),
        ("dot", 0, lambda: form.dot(v, max_bytes)),
        ("weighted_sum", row, lambda: form.weighted_sum(w, max_bytes)),
        ("second_moment", row, lambda: form.second_moment(w, max_bytes=max_bytes)),
        ("gram", 4 * samples**2, lambda: form.gram(form, max_bytes)),
        ("project", 0, lambda: form.project(RandomMap("", form.shape, 8, 0), max_bytes)),
        ("project, sparse", 0, lambda: form.project(SparseMap("", form.shape, 8, 0), max_bytes)),
    ]:
        with at_most(indices + result + 3 * max_bytes, what):
            verb()


def test_rows_of_a_table_of_relative_positions_are_written_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, length, max_bytes = 128, 96, 2**20
    places = torch.arange(length)[:, None] - torch.arange(length) + length

    def attention(m: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 2)).transpose(1, 2) for y in m.maps(x).chunk(3, -1))
        bias = m.table[places.view(-1)].view(*places.shape, 2).permute(2, 0, 1)
        return ((q @ k.mT + bias).softmax(-1) @ v).flatten(1)

    model, x = Bare(attention, maps=nn.Linear(4, 12), table=torch.randn(2 * length, 2)), torch.randn(samples, length, 4)
    scores = 4 * samples * 2 * length**2
    with autograd_hacks.add_hooks(model):
        model(x[:4]).sum().backward()
        autograd_hacks.compute_grad1(model)
        model(x).square().sum().backward()
        form = autograd_hacks.per_sample_grads(model, "sum")["table"]
        monkeypatch.setitem(type(form).dense.__globals__, "BUDGET", max_bytes)
        result = 4 * samples * form.shape.numel()
        assert scores > 5 * max_bytes + result
        with at_most(2 * max_bytes + result):
            rows = form.dense()
        for what, verb in [
            ("norms", form.norms),
            ("weighted_sum", lambda max_bytes: form.weighted_sum(torch.ones(samples), max_bytes)),
        ]:
            with at_most(2 * max_bytes, what):
                verb(max_bytes=max_bytes)
    assert_close(rows.flatten(1).norm(dim=1), form.norms())


# Activation checkpointing: what a step of each way to norms and clipped gradients holds at the most


BLOCKS = 8


def deep() -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for block in m.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x

    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)) for _ in range(BLOCKS)]
    return Bare(forward, blocks=nn.ModuleList(blocks))


def test_what_checkpointing_has_freed_stays_freed_where_norms_are_taken_on_the_way() -> None:
    torch.manual_seed(0)
    base, x, peaks = deep(), torch.randn(16, 32, 64, requires_grad=True), dict[str, int]()
    for way in ("plain", "hooks", "streaming"):
        model = copy.deepcopy(base)
        if way != "plain":
            autograd_hacks.add_hooks(model)
        for _ in range(3):
            model.zero_grad()
            around: Any = autograd_hacks.during_backward(model, "norms") if way == "streaming" else nullcontext()
            with Held() as held:
                with around:
                    model(x).square().flatten(1).mean(1).mean().backward()
                kept = autograd_hacks.per_sample_grads(model).norms() if way == "hooks" else None
        peaks[way] = held.most
    assert kept is None
    assert peaks["hooks"] > 4 * peaks["plain"]
    assert peaks["streaming"] < 0.6 * peaks["hooks"]  # the hooks keep the layers' inputs from the forward on
