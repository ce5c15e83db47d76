"""Verbs over samples that processes share: sums are everyone's, `local` ones a process's own."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from oracle import one_backward_per_sample
from processes import Both
from rarely import crossed
from spread import BOUND, assert_grads, batch, clipped, made, own, spread_out, squares, whole
from spread import rows_of as matrix_of
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import PerSampleGrads
from autograd_hacks.errors import NotReduced

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


def verbs(way: str, name: str) -> None:
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


@crossed(name=["mlp", "Attends", "Recurs"], way=["replicas", "shards", "shards of layers"])
def test_verbs(both: Both, way: str, name: str) -> None:
    both(verbs, way, name)


def set_grad(way: str) -> None:
    expected = {n: r.mean(0) for n, r in rows_of("mlp", slice(None)).items()}
    for param_grad in (True, False):
        model = read(way, "mlp", param_grad)
        autograd_hacks.compute_grad1(model, set_grad=True)
        check({n: p.grad for n, p in model.named_parameters()}, expected)


@pytest.mark.parametrize("way", ["replicas", "shards", "shards of layers"])
def test_compute_grad1_sets_the_whole_batchs_gradient(both: Both, way: str) -> None:
    both(set_grad, way)


def streams(way: str, name: str) -> None:
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


@crossed(name=["mlp", "Saves", "Attends", "Recurs"], way=["replicas", "shards", "shards of layers"])
def test_streaming_is_the_first_of_two_passes(both: Both, way: str, name: str) -> None:
    both(streams, way, name)


def private(way: str, groups: list[int] | None) -> None:
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


@pytest.mark.parametrize(("way", "groups"), [("replicas", None), ("shards", [0, 1, 1, 0, 2, 3, 3, 4])])
def test_a_private_step_is_that_of_one_process(both: Both, way: str, groups: list[int] | None) -> None:
    both(private, way, groups)


def verifies(way: str, name: str) -> None:
    model = spread_out(made(name), way)
    autograd_hacks.add_hooks(model)
    x, y = (part[own(SIZES)] for part in batch(0, sum(SIZES)))
    for step in range(2):
        squares(model(x), y).sum().backward()
        autograd_hacks.verify(model, rows=2 * step)
        model.zero_grad()


@crossed(name=["mlp", "Attends"], way=["replicas", "shards", "shards of layers"])
def test_verify(both: Both, way: str, name: str) -> None:
    both(verifies, way, name)


def jacobians(way: str, name: str) -> None:
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


@crossed(name=["mlp", "Attends"], way=["replicas", "shards", "shards of layers"])
def test_rows_of_outputs(both: Both, way: str, name: str) -> None:
    both(jacobians, way, name)


def weights_refused() -> None:
    model, (x, y) = spread_out(made("mlp"), "replicas"), batch(0, sum(SIZES))
    autograd_hacks.add_hooks(model, param_grad=False)
    w = torch.ones(len(x[own(SIZES)]))
    with pytest.raises(NotReduced, match="weighted_sum"), autograd_hacks.during_backward(model, weights=w):
        squares(model(x[own(SIZES)]), y[own(SIZES)]).mean().backward()
    assert all(p.grad is None for p in model.parameters())


def test_sums_while_backward_runs_are_refused(both: Both) -> None:
    both(weights_refused)


def loss(model: nn.Module, given: Any) -> Tensor:
    return squares(model(given[0]), given[1])


def over_loaders(way: str) -> None:
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


@pytest.mark.parametrize("way", ["replicas", "shards"])
def test_over_processes(both: Both, way: str) -> None:
    both(over_loaders, way)
