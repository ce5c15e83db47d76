"""Where one process fails all raise, and the next step works."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from processes import in_both
from spread import BOUND, batch, made, own, sharded, spread_out, squares, train_one, wrapped
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks import PerSampleGrads, curvature
from autograd_hacks.errors import (
    BatchSizeError,
    NothingRecorded,
    NotReduced,
    ProbeFailed,
    ProcessesDisagree,
    SamplesMixed,
    StaleRecord,
)


def hooked(way: str) -> nn.Module:
    model = spread_out(made("Recurs" if way == "shards that rows need" else "mlp"), way)
    autograd_hacks.add_hooks(model)
    return model


@pytest.mark.parametrize("way", ["replicas", "shards"])
@in_both
def test_where_one_process_can_not_read_all_raise(way: str) -> None:
    model = spread_out(made("mlp"), way)
    autograd_hacks.add_hooks(model, param_grad=False)
    (x, y), rank = batch(0, 8), dist.get_rank()
    for _step in range(2):
        here, theirs = x[own((4, 4))].clone(), y[own((4, 4))]
        squares(model(here), theirs).mean().backward()
        if rank == 1:
            here.zero_()  # what the first layer was given
        for verb in (
            lambda: autograd_hacks.clip_grad1_norm_(model, BOUND),
            lambda: autograd_hacks.compute_grad1(model, set_grad=True),
        ):
            with pytest.raises(StaleRecord if rank == 1 else ProcessesDisagree, match="overwritten"):
                verb()
        train_one(model)


@pytest.mark.parametrize("way", ["replicas", "shards", "shards that rows need"])
@in_both
def test_where_one_process_has_nothing_to_read_all_raise(way: str) -> None:
    model = hooked(way)
    (x, y), rank = batch(0, 8), dist.get_rank()
    for bad in ("record", "number", "losses", "count", *(["weights"] if way == "shards that rows need" else [])):
        losses = squares(model(x[own((4, 4))]), y[own((4, 4))])
        autograd_hacks.backward({"losses": losses * losses.mean(), "count": losses[:3]}.get(bad, losses) if rank else losses)
        if rank and bad == "record":
            autograd_hacks.clear_backprops(model)
        if rank and bad == "weights":
            with torch.no_grad():
                model.head.bias.to_local().add_(0)  # type: ignore[operator, union-attr]
        mine = {"number": ValueError, "weights": StaleRecord, "losses": SamplesMixed, "count": BatchSizeError}
        with pytest.raises(mine.get(bad, NothingRecorded) if rank else ProcessesDisagree):
            autograd_hacks.clip_grad1_norm_(model, -1.0 if rank and bad == "number" else BOUND)
        model.zero_grad()
        if way != "shards that rows need":
            train_one(model)


@in_both
def test_uneven_numbers_of_steps_are_refused_by_name() -> None:
    hooked, run, ddp = wrapped(made("mlp"), "inner")
    autograd_hacks.add_hooks(hooked)
    (x, y) = (part[own((4, 4))] for part in batch(0, 8))
    with ddp.join():
        squares(run(x), y).mean().backward()
        with pytest.raises(NotReduced, match=r"within ddp\.join\(\)"):
            autograd_hacks.clip_grad1_norm_(hooked, BOUND)


@in_both
def test_parts_that_are_called_by_themselves() -> None:
    """What layers had in the place of shards is missed with an error, and never taken for what the loss didn't reach."""
    model, (x, _) = sharded(made("mlp"), each=True), batch(0, 8)
    model(x[own((4, 4))])  # so that all know who is whose
    autograd_hacks.add_hooks(model)
    model[0](x[own((4, 4))]).square().sum(1).mean().backward()
    for read in (autograd_hacks.compute_grad1, autograd_hacks.per_sample_grads):
        with pytest.raises(NothingRecorded, match="gathered parameters that the hooks don't know"):
            read(model)
    with pytest.raises(NothingRecorded, match="don't know"):
        autograd_hacks.clip_grad1_norm_(model, BOUND)
    with pytest.raises(NothingRecorded, match="don't know"), autograd_hacks.during_backward(model, "norms"):
        model[0](x[own((4, 4))]).square().sum(1).mean().backward()
    model.zero_grad()
    train_one(model)
    autograd_hacks.add_hooks(model)
    train_one(model)
    model[0](x[own((4, 4))]).square().sum(1).mean().backward()
    autograd_hacks.compute_grad1(model)
    rows = model[0].weight.grad1
    assert rows.shape == (4, 5, 3)
    assert model[3].weight.grad1 is None


SUMS: dict[str, Callable[[PerSampleGrads], object]] = {
    "weighted_sum": lambda grads: grads.weighted_sum(torch.ones(grads.samples, dtype=torch.float64)),
    "second_moment": lambda grads: grads.second_moment(),
    "reduce": lambda grads: grads.reduce(torch.sign),
    "noise_scale": lambda grads: grads.noise_scale(),
    "matvec": lambda grads: curvature.matvec(grads, {name: torch.ones(form.shape).double() for name, form in grads.items()}),
    "gram_of_all": lambda grads: grads.gram_of_all(),
}

CHANGED = "(overwritten|has changed since)"


def spoilt(model: nn.Module, x: Tensor) -> None:
    """Overwrites what rows are made of: what the first layer was given, or a weight."""
    with torch.no_grad():
        model.head.bias.to_local().add_(0) if hasattr(model, "head") else x.zero_()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("way", ["replicas", "shards", "shards that rows need"])
@in_both
def test_where_one_process_can_not_add_up_all_raise(way: str) -> None:
    model = hooked(way)
    (x, y), rank = batch(0, 8), dist.get_rank()
    here, theirs = x[own((4, 4))].clone(), y[own((4, 4))]
    squares(model(here), theirs).mean().backward()
    grads = autograd_hacks.per_sample_grads(model)
    for verb in SUMS.values():
        verb(grads)
    if rank:
        spoilt(model, here)
    for verb in SUMS.values():
        with pytest.raises(StaleRecord if rank else ProcessesDisagree, match=CHANGED):
            verb(grads)


@pytest.mark.parametrize(("kind", "way"), [("ekfac", "replicas"), ("ekfac", "shards"), ("diag", "shards that rows need")])
@in_both
def test_where_one_process_has_no_curvature_all_raise(kind: str, way: str) -> None:
    model = hooked(way)
    (x, _), rank = batch(0, 8), dist.get_rank()
    names = [name for name, p in model.named_parameters() if kind == "diag" or p.ndim > 1]
    for fails in (True, False):
        here = x[own((4, 4))].clone()
        autograd_hacks.backprop_hess(model(here), "LeastSquares")
        if fails and rank:
            spoilt(model, here)
        if not fails:
            autograd_hacks.compute_hess(model, kind, parameters=names)
            continue
        with pytest.raises(StaleRecord if rank else ProcessesDisagree, match=CHANGED):
            autograd_hacks.compute_hess(model, kind, parameters=names)
        autograd_hacks.clear_backprops(model)


@in_both
def test_a_private_step_where_one_has_nothing() -> None:
    model = sharded(made("Recurs"))
    autograd_hacks.add_hooks(model, independent=True)
    (x, y), rank = batch(0, 8), dist.get_rank()
    here, theirs = x[own((4, 4))], y[own((4, 4))]
    squares(model(here), theirs).mean().backward()
    if rank:
        autograd_hacks.clear_backprops(model)
    with pytest.raises(NothingRecorded if rank else ProcessesDisagree):
        autograd_hacks.private.clip_and_noise_(model, BOUND, 0.0, 8)
    model.zero_grad()
    squares(model(here), theirs).mean().backward()
    autograd_hacks.private.clip_and_noise_(model, BOUND, 0.0, 8)


def leaves(m: Any, x: Tensor) -> Tensor:
    """Reads samples in Python, on one process alone."""
    if m.begun and dist.get_rank():
        x.tolist()
    return m.layer(x)  # type: ignore[no-any-return]


@in_both
def test_a_private_forward_that_one_refuses() -> None:
    (x, y), rank = batch(0, 8), dist.get_rank()
    for way in ("replicas", "shards"):
        net = Bare(leaves, layer=nn.Linear(3, 2)).double()
        model = spread_out(net, way)
        autograd_hacks.add_hooks(model, param_grad=False, independent=True)
        for net.begun in (False, True, False):
            with pytest.raises(ProbeFailed if rank else ProcessesDisagree, match="tolist") if net.begun else nullcontext():
                squares(model(x[own((4, 4))]), y[own((4, 4))]).mean().backward()
                autograd_hacks.private.clip_and_noise_(model, BOUND, 0.0, 8)
