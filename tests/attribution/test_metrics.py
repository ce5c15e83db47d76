"""Gradients in a metric: rows that a linear map was applied to, against the map of rows written out by plain torch."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import language
from oracle import cross_entropies, joined, of_classes
from refused import check_each
from steps import rows_of, stepped
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks import PerSampleGrads
from autograd_hacks.attribution import Metric
from autograd_hacks.errors import NothingRecorded, StaleRecord

Rows = dict[str, Tensor]


def batch(seed: int = 0, samples: int = 6) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randn(samples, 1, 6, 6).double(), torch.randint(5, (samples,))


def grads_and_rows(model: nn.Module, x: Tensor, y: Tensor) -> tuple[PerSampleGrads, Rows]:
    """By the library, and by one backward pass a sample."""
    autograd_hacks.backward(of_classes(model, x, y), "sum")
    return autograd_hacks.per_sample_grads(model), rows_of(model, x, y, cross_entropies)


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))


def hooked(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = net().double()
    autograd_hacks.add_hooks(model)
    return model


def assert_verbs(found: PerSampleGrads, rows: Rows) -> None:
    """All verbs of preconditioned rows against rows that were preconditioned."""
    flat = joined(rows)
    w, v = torch.randn(len(flat)).double(), {name: torch.randn_like(x[0]) for name, x in rows.items()}
    for max_bytes in (2**26, 1000):
        assert_close(found.norms(max_bytes=max_bytes), flat.norm(dim=1))
        assert_close(found.gram(max_bytes=max_bytes), flat @ flat.mT)
        assert_close(found.dot(v, max_bytes), flat @ torch.cat([x.flatten() for x in v.values()]))
        assert_close(found.weighted_sum(w, max_bytes), {name: torch.einsum("n,n...->...", w, x) for name, x in rows.items()})
        assert_close(found.second_moment(max_bytes=max_bytes), {name: x.square().sum(0) for name, x in rows.items()})
    assert_close(found.dense(), rows)
    assert_close(found.select(slice(1, 3)).dense(), {name: x[1:3] for name, x in rows.items()})


def trained_by(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], steps: int = 3) -> tuple[nn.Module, object]:
    model = hooked()
    optimizer = make(list(model.parameters()))
    with autograd_hacks.pause_hooks():
        for seed in range(steps):
            x, y = batch(seed)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def adam_scaling(optimizer: torch.optim.Optimizer, p: Tensor) -> Tensor:
    """From the definition: the second moments of the gradients that there were, by hand."""
    state, group = optimizer.state[p], optimizer.param_groups[0]
    unbiased = state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["step"]))
    return 1 / (unbiased.sqrt() + group["eps"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_the_metric_of_adam(kind: type[torch.optim.Adam]) -> None:
    model, optimizer = trained_by(lambda ps: kind(ps, lr=0.01))
    grads, rows = grads_and_rows(model, *batch(7))
    scaled = {name: rows[name] * adam_scaling(optimizer, p) for name, p in model.named_parameters()}
    assert_verbs(grads.preconditioned(Metric.from_optimizer(optimizer)), scaled)


def step_of(optimizer: torch.optim.Optimizer, model: nn.Module, row: Rows) -> Rows:
    """One more step of an optimizer without momentum, over its learning rate."""
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.grad = row[name].clone()
    optimizer.step()
    return {name: (before[name] - p.detach()) / optimizer.param_groups[0]["lr"] for name, p in model.named_parameters()}


def test_the_metric_of_rmsprop_and_adagrad_is_what_their_steps_divide_by() -> None:
    for make, small in [
        (lambda ps: torch.optim.RMSprop(ps, lr=0.01, alpha=1.0), 1.0),
        (lambda ps: torch.optim.Adagrad(ps, lr=0.01, initial_accumulator_value=2.0), 1e-6),
    ]:
        model, optimizer = trained_by(make, 2)
        if small == 1.0:
            for state in optimizer.state.values():  # with alpha = 1 nothing is averaged
                state["square_avg"].uniform_(0.5, 2.0)
        grads, rows = grads_and_rows(model, *batch(7))
        found = grads.preconditioned(Metric.from_optimizer(optimizer)).select(slice(2, 3)).dense()
        stepped = step_of(optimizer, model, {name: x[2] * small for name, x in rows.items()})
        assert_close({n: x[0] for n, x in found.items()}, {n: x / small for n, x in stepped.items()}, rtol=1e-4, atol=1e-8)


def test_sides_and_factors_by_pattern() -> None:
    model = hooked()
    grads, rows = grads_and_rows(model, *batch())
    left, right, scale = torch.randn(2, 3).double(), torch.randn(9, 4).double(), torch.rand(3).double()
    columns = None, torch.rand(48).double()
    metric = Metric({"0.weight": (left, right), model[1].weight: scale, "*.bias": None, "4.weight": columns})
    found = grads.preconditioned(metric)
    by_hand = {
        "0.weight": left @ rows["0.weight"].flatten(2) @ right,
        "1.weight": rows["1.weight"] * scale,
        "4.weight": rows["4.weight"] * metric["4.weight"].right,
    }
    assert_verbs(found, {name: by_hand.get(name, x) for name, x in rows.items()})
    assert "Metric of 4 parameters" in str(metric)


def test_a_tied_embedding_in_a_metric() -> None:
    model, x = language(7, 3).double(), torch.randint(7, (5, 4))
    grads, rows = stepped(model, x), rows_of(model, x)
    metric = Metric({name: torch.rand_like(p) for name, p in model.named_parameters()})
    assert_verbs(grads.preconditioned(metric), {name: x * metric[name].scale for name, x in rows.items()})
    sides = Metric({name: (torch.randn(2, len(p)).double(), None) for name, p in model.named_parameters()})
    assert_verbs(
        grads.preconditioned(sides), {name: torch.einsum("po,no...->np...", sides[name].left, x) for name, x in rows.items()}
    )


def test_low_rank_projections() -> None:
    model = hooked()
    grads, rows = grads_and_rows(model, *batch())
    metric = Metric.low_rank(model, 4, seed=3)
    projected = grads.preconditioned(metric).dense()
    for name, by in zip(rows, metric.values()):
        assert_close(projected[name], by.to(rows[name])(rows[name], rows[name].shape[1:]))
    assert projected["4.weight"].shape == (6, 4, 4)
    assert projected["0.weight"].shape == (6, 3, 4)  # a side that is small stays as it is
    assert_close(projected["1.weight"], rows["1.weight"])
    # In expectation inner products stay.
    products = torch.stack([grads.preconditioned(Metric.low_rank(model, 4, seed=s)).gram() for s in range(300)]).mean(0)
    expected = joined(rows) @ joined(rows).mT
    assert_close(products, expected, rtol=0.2, atol=0.2 * float(expected.abs().max()))


def stepped_by_adam(p: nn.Parameter) -> torch.optim.Optimizer:
    optimizer, p.grad = torch.optim.Adam([p]), torch.ones_like(p)
    optimizer.step()
    return optimizer


def test_what_does_not_fit_is_refused() -> None:
    (model, _), (_, theirs), x = trained_by(torch.optim.Adam), trained_by(torch.optim.Adam), torch.ones(3, 2)
    grads, _ = grads_and_rows(model, *batch())
    rest = {"[01].*": None, "4.bias": None}
    check_each(
        (ValueError, "no map for '0", lambda: grads.preconditioned(Metric.from_optimizer(theirs))),
        (NothingRecorded, "has no state", lambda: Metric.from_optimizer(torch.optim.Adam(model.parameters()))),
        (TypeError, r"expected one of Adam.*Shampoo's or SOAP's factors",
         lambda: Metric.from_optimizer(torch.optim.Rprop(model.parameters()))),
        (TypeError, "complex parameter", lambda: Metric.from_optimizer(stepped_by_adam(nn.Parameter(1j * torch.ones(3))))),
        (ValueError, r"no map for '0\.weight'", lambda: grads.preconditioned(Metric({"*.bias": None}))),
        (ValueError, "matches what an earlier", lambda: grads.preconditioned(Metric({"0.*": None, "*.bias": None}))),
        (ValueError, r"'2\.\*' matches none of", lambda: grads.preconditioned(Metric({"2.*": None}))),
        (ValueError, r"'4.weight': the metric has L and R of shapes \(2, 3\)",
         lambda: grads.preconditioned(Metric({"4.weight": (torch.ones(2, 3), None), **rest}))),
        (TypeError, "expected a tensor, a pair", lambda: Metric({"4.weight": 3.0})),
        *[(TypeError, "expected a dense one: to_dense", lambda given=given: Metric({"*": given}))
          for own in (x.to_sparse(), x.to("meta")) for given in (own, (own, None))],
        (TypeError, "expected a Metric", lambda: grads.preconditioned({"4.weight": torch.ones(1)})),
        (NothingRecorded, "no parameter of the model has ekfac", lambda: Metric.from_ekfac(model)),
        (ValueError, r"as here: apply preconditioned\(metric\) to both",
         lambda: grads.gram(grads.preconditioned(Metric.low_rank(model, 2)))),
    )  # fmt: skip


def test_a_metric_that_was_overwritten_is_stale() -> None:
    model = hooked()
    grads, _ = grads_and_rows(model, *batch())
    scale = torch.ones(5).double()
    found = grads.preconditioned(Metric({"[01].*": None, "4.weight": None, "4.bias": scale}))
    scale.mul_(2)
    with pytest.raises(StaleRecord, match=r"4\.bias"):
        found.norms()


def test_a_gradient_of_rounding_stays_small_in_a_metric() -> None:
    """A number that is added to all classes has no gradient but for rounding."""
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        model = Bare(lambda m, x: m.main(x) + m.shift(x), main=nn.Linear(6, 5), shift=nn.Linear(6, 1)).to(dtype)
        x, y = torch.randn(20, 6).to(dtype), torch.randint(5, (20,))
        autograd_hacks.add_hooks(model)
        autograd_hacks.curvature.compute_hess_over(model, [x], "ekfac", "CrossEntropy")
        F.cross_entropy(model(x), y).backward()
        grads = autograd_hacks.per_sample_grads(model)
        found.append(grads.gram(grads.preconditioned(Metric.from_ekfac(model))).double())
    single, double = found
    assert_close(single, double, rtol=1e-3, atol=1e-3 * float(double.abs().max()))


def test_parameters_that_no_step_has_changed() -> None:
    torch.manual_seed(0)
    model = Bare(
        lambda m, x, uses=False: (y := m.net(x)) + (m.unused(y[:, :2]).sum(1, keepdim=True) if uses else 0),
        net=net(), unused=nn.Linear(2, 2), frozen=torch.ones(2),
    ).double()  # fmt: skip
    model.frozen.requires_grad_(False)
    optimizer, (x, y) = torch.optim.Adam(model.parameters()), batch()
    autograd_hacks.add_hooks(model)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        grads = autograd_hacks.per_sample_grads(model, "sum", only="net.*")
        optimizer.step()
    found = grads.preconditioned(metric := Metric.from_optimizer(optimizer)).dense()
    weight = grads["net.4.weight"].dense()
    assert_close(found["net.4.weight"], weight * adam_scaling(optimizer, model.net[4].weight))
    F.cross_entropy(model(x, True), y, reduction="sum").backward()
    grads = autograd_hacks.per_sample_grads(model, "sum")
    check_each(
        (ValueError, r"no map for 'unused\.weight', 'unused\.bias'.*only=", lambda: grads.preconditioned(metric)),
        # which has one from the beginning
        (NothingRecorded, "has no state", lambda: Metric.from_optimizer(torch.optim.Adagrad(model.parameters()))),
    )
