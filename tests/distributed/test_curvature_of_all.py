"""Products of rows, and curvature, where processes share a batch."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from processes import Both
from rarely import crossed
from spread import batch, made, own, rows_of, spread_out, squares, whole, wrapped
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.attribution import Metric
from autograd_hacks.errors import NotReduced, UnsupportedLayer

SIZES = (5, 3)
WAYS = ["replicas", "shards"]


def products(way: str, name: str) -> None:
    (x, y), model = batch(0, sum(SIZES)), spread_out(made(name), way)
    rows = rows_of(made(name), x, y)
    autograd_hacks.add_hooks(model)
    squares(model(x[own(SIZES)]), y[own(SIZES)]).mean().backward()
    grads = autograd_hacks.per_sample_grads(model)
    assert_close(grads.gram_of_all(), rows[own(SIZES)] @ rows.mT)
    assert_close(grads.local().gram_of_all(), rows[own(SIZES)] @ rows[own(SIZES)].mT)
    v = {n: torch.randn(form.shape, generator=torch.Generator().manual_seed(3)).double() for n, form in grads.items()}
    flat = torch.cat([x.flatten() for x in v.values()])
    expected = rows.mT @ (rows @ flat) / len(rows)
    found = autograd_hacks.curvature.matvec(grads, v)
    assert_close(torch.cat([whole(x).flatten() for x in found.values()]), expected)
    if way == "shards":  # a direction that lies as the weights do
        assert_close(grads.dot(found), rows[own(SIZES)] @ expected)
    rooms = autograd_hacks.curvature
    for verb, given in ((rooms.natural_gradient, (v, 0.1)), (rooms.linear_operator, ())):
        with pytest.raises(NotReduced, match=r"2 processes share the batch.*grads\.local\(\)"):
            verb(grads, *given)


@crossed(way=WAYS, name=["mlp", "Attends"])
def test_products(both: Both, way: str, name: str) -> None:
    both(products, way, name)


def twins(way: str) -> tuple[nn.Module, nn.Module]:
    """A model in one process, and over both."""
    torch.manual_seed(1)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return twin, spread_out(copy.deepcopy(twin), way)


def curvature(way: str) -> None:
    for kind, attribute in {"diag": "hess_diag", "full": "hess", "kfac": "kfac"}.items():
        (x, _), twin, model = batch(0, sum(SIZES)), *twins(way)
        for m, part in ((twin, slice(None)), (model, own(SIZES))):
            autograd_hacks.add_hooks(m)
            autograd_hacks.backprop_hess(m(x[part]), "LeastSquares")
            autograd_hacks.compute_hess(m, kind=kind)
        for p, q in zip(model.parameters(), twin.parameters()):
            assert_close(getattr(p, attribute), getattr(q, attribute))
        batches = x[own(SIZES)].split(2) if dist.get_rank() else x[own(SIZES)].split(3)
        autograd_hacks.curvature.compute_hess_over(model, list(batches), kind=kind, hess_type="LeastSquares")
        for p, q in zip(model.parameters(), twin.parameters()):
            assert_close(getattr(p, attribute), getattr(q, attribute))


def corrected(way: str) -> None:
    (x, _), found, twin, model = batch(0, sum(SIZES)), [], *twins(way)
    batches = x[own(SIZES)].split(2) if dist.get_rank() else x[own(SIZES)].split(3)
    for m, parts in ((twin, [x]), (model, list(batches))):
        autograd_hacks.add_hooks(m)
        autograd_hacks.curvature.compute_hess_over(m, parts, kind="ekfac", hess_type="LeastSquares")
        v = {name: torch.ones(p.shape).double() for name, p in m.named_parameters()}
        found.append(Metric.from_ekfac(m, 0.1)(v))
    for mine, theirs in zip(found[0].values(), found[1].values()):
        assert_close(mine, theirs)


@pytest.mark.parametrize("way", WAYS)
def test_corrected_eigenvalues(both: Both, way: str) -> None:
    both(corrected, way)


@pytest.mark.parametrize("way", WAYS)
def test_curvature(both: Both, way: str) -> None:
    both(curvature, way)


def switches(m: Any, x: Tensor) -> Tensor:
    """Reads a weight by its layer in training, and else in a way that needs its value."""
    w, b = m.inner.weight, m.inner.bias
    return m.inner(x) if m.training else nn.functional.linear(x, w * w, b)


def read_apart() -> None:
    """One process's weight is a layer's, and the other's is read by its value, so its factors have other shapes."""
    model = wrapped(Bare(switches, inner=nn.Linear(3, 2)).double(), "inner")[2].train(dist.get_rank() == 0)
    autograd_hacks.add_hooks(model)
    autograd_hacks.backprop_hess(model(batch(0, 4)[0]), "LeastSquares")
    with pytest.raises(UnsupportedLayer, match=r"weight of .*: it is read in other ways on another process"):
        autograd_hacks.compute_hess(model, "kfac")
    assert [name.split(".")[-1] for name in autograd_hacks.compute_hess(model, "kfac", skip=True).covered] == ["bias"]


def two_batches() -> None:
    """The rows of one batch need other weights than those of the other."""
    torch.manual_seed(0)
    middle = Bare(switches, inner=nn.Linear(4, 4))
    plain = Bare(
        lambda m, x: m.head(m.middle(m.cell(x)).tanh()), cell=nn.GRUCell(3, 4), middle=middle, head=nn.Linear(4, 2)
    ).double()
    model, found = copy.deepcopy(plain), list[Tensor]()
    for part in (model.cell, model.middle, model):
        fully_shard(part)
    (x, y), (others, labels) = batch(0, 8), batch(1, 8)
    for net in (plain, model):
        autograd_hacks.add_hooks(net)
        grads = []
        for training, given, wanted in ((True, x, y), (False, others, labels)):
            net.train(training)
            squares(net(given[own((4, 4))]), wanted[own((4, 4))]).mean().backward()
            grads.append(autograd_hacks.per_sample_grads(net).local())
            net.zero_grad()
        found += [grads[0].gram(grads[1]), grads[1].gram(grads[0])]
    assert_close(found[2:], found[:2])


@pytest.mark.parametrize("task", [two_batches, read_apart])
def test_weights_that_are_read_in_several_ways(both: Both, task: Any) -> None:
    both(task)


def by_words(m: Any, words: Tensor) -> Tensor:
    """A table, and experts of which a process may see some, or none."""
    x = m.table(words)
    out = x
    for expert in range(3):
        where = torch.where((words == 5).long() + (words == 4).long() * 2 == 1 + expert)
        if len(where[0]):
            out = out.index_put(where, (x[where] @ m.stack[expert].mT).tanh() @ m.turned[expert])
    return m.last(out)


def routed(kind: str, words: list[list[int]]) -> None:
    torch.manual_seed(0)
    plain = Bare(
        by_words,
        table=nn.Embedding(6, 3),
        last=nn.Linear(3, 2),
        stack=torch.randn(3, 4, 3),
        turned=torch.randn(3, 4, 3),
    ).double()
    net, given, found = copy.deepcopy(plain), torch.tensor(words), []
    cut = wrapped(net, "inner", find_unused_parameters=True)[2]
    for model, part in ((plain, slice(None)), (cut, slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4))):
        autograd_hacks.add_hooks(model)
        table = autograd_hacks.curvature.compute_hess_over(model, given[part].split(2), kind, "LeastSquares")
        assert table.share == 1
        found.append([x for p in model.parameters() for x in (p.kfac if kind == "kfac" else [p.ekfac.values])])
    for mine, theirs in zip(*found, strict=True):
        assert_close(mine, theirs)


@crossed(kind=["kfac", "ekfac"], last=[[1, 5, 4], [1, 2, 3]])
def test_experts_that_few_processes_see(both: Both, kind: str, last: list[int]) -> None:
    words = [[0, 5, 1], [4, 4, 2], [5, 1, 1], [3, 3, 4], [0, 1, 2], [3, 2, 1], [1, 1, 0], last]
    both(routed, kind, words)
