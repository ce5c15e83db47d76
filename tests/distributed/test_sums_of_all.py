"""Verbs and curvature over samples that processes share: sums are everyone's, `local` ones a process's own."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from oracle import one_backward_per_sample
from processes import in_both
from rarely import crossed
from spread import BOUND, assert_grads, batch, clipped, made, own, spread_out, squares, whole, wrapped
from spread import rows_of as matrix_of
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks import PerSampleGrads
from autograd_hacks.attribution import Metric
from autograd_hacks.errors import NotReduced, UnsupportedLayer

SIZES = (5, 3)


def rows_of(name: str, part: slice) -> dict[str, Tensor]:
    x, y = batch(0, sum(SIZES))
    found = one_backward_per_sample(made(name), squares, x[part], y[part])
    return {
        n: torch.zeros(len(x[part]), *p.shape) if found[n] is None else found[n] for n, p in made(name).named_parameters()
    }


def read(way: str, name: str, param_grad: bool = True, independent: bool = False) -> nn.Module:
    model, (x, y) = spread_out(made(name), way), batch(0, sum(SIZES))
    autograd_hacks.add_hooks(model, param_grad=param_grad, independent=independent)
    squares(model(x[own(SIZES)]), y[own(SIZES)]).mean().backward()
    return model


def check(found: dict[str, Any], expected: dict[str, Tensor]) -> None:
    for (name, total), theirs in zip(found.items(), expected.values()):
        assert_close(whole(total), theirs, msg=lambda m, at=name: f"{at}: {m}")


@crossed(name=["mlp", "Attends", "Recurs"], way=["replicas", "shards", "shards of layers"])
@in_both
def test_verbs(way: str, name: str) -> None:
    everyone, mine = rows_of(name, slice(None)), rows_of(name, own(SIZES))
    model = read(way, name)
    grads = autograd_hacks.per_sample_grads(model)
    w = torch.linspace(-1, 2, sum(SIZES)).double()
    check(grads.dense(), mine)
    assert_close(grads.norms(), torch.stack([r.flatten(1).norm(dim=1) for r in mine.values()]).norm(dim=0))
    v = {n: torch.randn_like(r[0]) for n, r in zip(grads, mine.values())}
    assert_close(grads.dot(v), sum((r * d).flatten(1).sum(1) for r, d in zip(mine.values(), v.values())))
    check(grads.weighted_sum(w[own(SIZES)]), {n: torch.tensordot(w, r, 1) for n, r in everyone.items()})
    two = torch.stack([w, w.square()])
    check(grads.weighted_sum(two[:, own(SIZES)]), {n: torch.tensordot(two, r, 1) for n, r in everyone.items()})
    check(grads.second_moment(w[own(SIZES)]), {n: torch.tensordot(w, r.square(), 1) for n, r in everyone.items()})
    check(grads.reduce(torch.tanh), {n: r.tanh().sum(0) for n, r in everyone.items()})
    check(grads.second_moment(about=v), {n: (r - d).square().sum(0) for (n, r), d in zip(everyone.items(), v.values())})
    flat, noise = torch.cat([r.flatten(1) for r in everyone.values()], 1), grads.noise_scale()
    assert_close(noise.noise, flat.var(0).sum())
    assert_close(noise.signal, flat.mean(0).square().sum() - flat.var(0).sum() / sum(SIZES))
    check(
        grads.scaled(w[own(SIZES)]).weighted_sum(w[own(SIZES)]),
        {n: torch.tensordot(w**2, r, 1) for n, r in everyone.items()},
    )
    some = torch.cat([flat[1:5], flat[6:]])
    assert_close(grads.select(slice(1, None)).noise_scale().noise, some.var(0).sum())
    alone = grads.local()
    check(alone.weighted_sum(w[own(SIZES)]), {n: torch.tensordot(w[own(SIZES)], r, 1) for n, r in mine.items()})
    assert_close(alone.noise_scale().noise, sum(r.var(0).sum() for r in mine.values()))
    if way == "replicas":
        alone = autograd_hacks.per_sample_grads(model, process_group=False)
        check(alone.second_moment(), {n: r.square().sum(0) for n, r in mine.items()})
    autograd_hacks.compute_grad1(model)
    check(
        {n: p.grad1 for n, p in model.named_parameters() if p.grad1 is not None}, {n: r for n, r in mine.items() if r.any()}
    )
    autograd_hacks.describe(model)


@pytest.mark.parametrize("way", ["replicas", "shards", "shards of layers"])
@in_both
def test_compute_grad1_sets_the_whole_batchs_gradient(way: str) -> None:
    expected = {n: r.mean(0) for n, r in rows_of("mlp", slice(None)).items()}
    for param_grad in (True, False):
        model = read(way, "mlp", param_grad)
        autograd_hacks.compute_grad1(model, set_grad=True)
        check({n: p.grad for n, p in model.named_parameters()}, expected)


@crossed(name=["mlp", "Saves", "Attends", "Recurs"], way=["replicas", "shards", "shards of layers"])
@in_both
def test_streaming_is_the_first_of_two_passes(way: str, name: str) -> None:
    x, y = batch(0, sum(SIZES))
    norms, grads = clipped(made(name), x, y)
    for param_grad in (True, False):
        model = spread_out(made(name), way)
        autograd_hacks.add_hooks(model, param_grad=param_grad)
        for _ in range(3):
            with autograd_hacks.during_backward(model, "norms") as streamed:
                squares(model(x[own(SIZES)]), y[own(SIZES)]).mean().backward()
            assert_close(streamed.norms, norms[own(SIZES)])
            model.zero_grad()
            with autograd_hacks.pause_hooks():
                each = squares(model(x[own(SIZES)]), y[own(SIZES)])
                share = 2 / sum(SIZES)  # the engines take the mean over two processes
                (each * (BOUND / streamed.norms).clamp(max=1) * share).sum().backward()
            assert_grads(model, grads)
            model.zero_grad()


@pytest.mark.parametrize(("way", "groups"), [("replicas", None), ("shards", [0, 1, 1, 0, 2, 3, 3, 4])])
@in_both
def test_a_private_step_is_that_of_one_process(way: str, groups: list[int] | None) -> None:
    users = None if groups is None else torch.tensor(groups)
    model, twin = read(way, "mlp", False, independent=True), made("mlp")
    x, y = batch(0, sum(SIZES))
    autograd_hacks.add_hooks(twin, independent=True)
    squares(twin(x), y).mean().backward()
    state = torch.Generator().manual_seed(5 + dist.get_rank())  # the first process's counts
    norms = autograd_hacks.private.clip_and_noise_(
        model, BOUND, 1.0, 4, None if users is None else users[own(SIZES)], state
    ).norms
    state = torch.Generator().manual_seed(5)
    expected = autograd_hacks.private.clip_and_noise_(twin, BOUND, 1.0, 4, users, state).norms
    assert_close(norms, expected[own(SIZES)] if users is None else expected[users[own(SIZES)].unique()])
    for p, q in zip(model.parameters(), twin.parameters()):
        assert_close(whole(p.grad), q.grad)
    # By secret numbers, which differ.
    squares(model(x[own(SIZES)]), y[own(SIZES)]).mean().backward()
    autograd_hacks.private.clip_and_noise_(model, BOUND, 1.0, 4)
    found = torch.cat([whole(p.grad).flatten() for p in model.parameters()])
    theirs = [torch.zeros_like(found) for _ in range(2)]
    dist.all_gather(theirs, found)
    assert_close(theirs[0], theirs[1], rtol=0, atol=0)
    squares(model(x[own(SIZES)]), y[own(SIZES)]).mean().backward()
    with pytest.raises(ValueError, match=r"the samples of groups \[0\] are on several processes"):
        autograd_hacks.private.clip_and_noise_(model, BOUND, 1.0, 4, torch.zeros(SIZES[dist.get_rank()], dtype=torch.long))
    some = torch.zeros(SIZES[0], dtype=torch.long) if dist.get_rank() == 0 else None
    with pytest.raises(ValueError, match="groups on 1 of 2 processes"):
        autograd_hacks.private.clip_and_noise_(model, BOUND, 1.0, 4, some)


@crossed(name=["mlp", "Attends"], way=["replicas", "shards", "shards of layers"])
@in_both
def test_verify(way: str, name: str) -> None:
    model = spread_out(made(name), way)
    autograd_hacks.add_hooks(model)
    x, y = (part[own(SIZES)] for part in batch(0, sum(SIZES)))
    for step in range(2):
        squares(model(x), y).sum().backward()
        autograd_hacks.verify(model, rows=2 * step)
        model.zero_grad()


@crossed(name=["mlp", "Attends"], way=["replicas", "shards", "shards of layers"])
@in_both
def test_rows_of_outputs(way: str, name: str) -> None:
    model = spread_out(made(name), way)
    autograd_hacks.add_hooks(model)
    (x, y), twin = (part[own(SIZES)] for part in batch(0, sum(SIZES))), made(name)
    expected = [
        torch.autograd.grad(out, list(twin.parameters()), retain_graph=True, allow_unused=True)
        for a in x
        for out in twin(a[None])[0]
    ]
    for _ in range(2):
        grads = autograd_hacks.per_sample_jacobian(model, model(x))
        for n, rows in enumerate(zip(*expected)):
            found = list(grads.dense().values())[n]
            assert_close(found.flatten(0, 1), torch.stack([torch.zeros_like(found[0, 0]) if r is None else r for r in rows]))
        squares(model(x), y).mean().backward()
        autograd_hacks.compute_grad1(model)


@in_both
def test_sums_while_backward_runs_are_refused() -> None:
    model, (x, y) = spread_out(made("mlp"), "replicas"), batch(0, sum(SIZES))
    autograd_hacks.add_hooks(model, param_grad=False)
    w = torch.ones(len(x[own(SIZES)]))
    with pytest.raises(NotReduced, match="weighted_sum"), autograd_hacks.during_backward(model, weights=w):
        squares(model(x[own(SIZES)]), y[own(SIZES)]).mean().backward()
    assert all(p.grad is None for p in model.parameters())


def loss(model: nn.Module, given: Any) -> Tensor:
    return squares(model(given[0]), given[1])


@pytest.mark.parametrize("way", ["replicas", "shards"])
@in_both
def test_over_processes(way: str) -> None:
    """Rows of a verb over a loader are a process's own, too."""
    (x, y), mine = batch(0, 12), own((6, 6))
    rows, model = matrix_of(made("mlp"), x, y), spread_out(made("mlp"), way)
    autograd_hacks.add_hooks(model)
    loader = list(zip(x[mine].split(3), y[mine].split(3)))
    assert_close(autograd_hacks.over(model, loader, loss, PerSampleGrads.norms), rows[mine].norm(dim=1))
    found = autograd_hacks.over(model, loader, loss, PerSampleGrads.second_moment, total=True)
    assert_close(torch.cat([whole(part).flatten() for part in found.values()]), rows.square().sum(0))
    influence = autograd_hacks.over(model, loader, loss, PerSampleGrads.gram, against=loader)
    assert_close(influence, rows[mine] @ rows[mine].mT)
    dist.barrier()


# Products of rows, and curvature


WAYS = ["replicas", "shards"]


@crossed(way=WAYS, name=["mlp", "Attends"])
@in_both
def test_products(way: str, name: str) -> None:
    (x, y), model = batch(0, sum(SIZES)), spread_out(made(name), way)
    rows = matrix_of(made(name), x, y)
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


def twins(way: str) -> tuple[nn.Module, nn.Module]:
    """A model in one process, and over both."""
    torch.manual_seed(1)
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    return twin, spread_out(copy.deepcopy(twin), way)


@pytest.mark.parametrize("way", WAYS)
@in_both
def test_curvature(way: str) -> None:
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


@pytest.mark.parametrize("way", WAYS)
@in_both
def test_corrected_eigenvalues(way: str) -> None:
    (x, _), found, twin, model = batch(0, sum(SIZES)), [], *twins(way)
    batches = x[own(SIZES)].split(2) if dist.get_rank() else x[own(SIZES)].split(3)
    for m, parts in ((twin, [x]), (model, list(batches))):
        autograd_hacks.add_hooks(m)
        autograd_hacks.curvature.compute_hess_over(m, parts, kind="ekfac", hess_type="LeastSquares")
        v = {name: torch.ones(p.shape).double() for name, p in m.named_parameters()}
        found.append(Metric.from_ekfac(m, 0.1)(v))
    for mine, theirs in zip(found[0].values(), found[1].values()):
        assert_close(mine, theirs)


def switches(m: Any, x: Tensor) -> Tensor:
    """Reads a weight by its layer in training, and else in a way that needs its value."""
    w, b = m.inner.weight, m.inner.bias
    return m.inner(x) if m.training else nn.functional.linear(x, w * w, b)


@in_both
def test_read_apart() -> None:
    """One process's weight is a layer's, and the other's is read by its value, so its factors have other shapes."""
    model = wrapped(Bare(switches, inner=nn.Linear(3, 2)).double(), "inner")[2].train(dist.get_rank() == 0)
    autograd_hacks.add_hooks(model)
    autograd_hacks.backprop_hess(model(batch(0, 4)[0]), "LeastSquares")
    with pytest.raises(UnsupportedLayer, match=r"weight of .*: it is read in other ways on another process"):
        autograd_hacks.compute_hess(model, "kfac")
    assert [name.split(".")[-1] for name in autograd_hacks.compute_hess(model, "kfac", skip=True).covered] == ["bias"]


@in_both
def test_two_batches() -> None:
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


def by_words(m: Any, words: Tensor) -> Tensor:
    """A table, and experts of which a process may see some, or none."""
    x = m.table(words)
    out = x
    for expert in range(3):
        where = torch.where((words == 5).long() + (words == 4).long() * 2 == 1 + expert)
        if len(where[0]):
            out = out.index_put(where, (x[where] @ m.stack[expert].mT).tanh() @ m.turned[expert])
    return m.last(out)


@crossed(kind=["kfac", "ekfac"], last=[[1, 5, 4], [1, 2, 3]])
@in_both
def test_experts_that_few_processes_see(kind: str, last: list[int]) -> None:
    words = [[0, 5, 1], [4, 4, 2], [5, 1, 1], [3, 3, 4], [0, 1, 2], [3, 2, 1], [1, 1, 0], last]
    torch.manual_seed(0)
    plain = Bare(
        by_words, table=nn.Embedding(6, 3), last=nn.Linear(3, 2), stack=torch.randn(3, 4, 3), turned=torch.randn(3, 4, 3)
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
