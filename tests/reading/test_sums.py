"""Rows add up to the gradients that arrive, relative to their terms: at first, again later, and streamed."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from mixing import check_refused
from oracle import assert_rows, one_backward_per_sample, squares
from steps import at_most, batch, check, mlp
from strategies import pull_along
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import PerSampleGradientError, UnseenGradient
from autograd_hacks.forms import Chained, Dense, Form, Outer, Scaled
from autograd_hacks.formulas import RULES, Call
from autograd_hacks.reading.certificate import agree


def wrong_by(factor: float, kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    rule = RULES[kind]

    def wrong(layer: nn.Module, call: Call) -> dict[str, Form]:
        return {name: Scaled(form, factor) for name, form in rule.formula(layer, call).items()}

    monkeypatch.setitem(RULES, kind, dataclasses.replace(rule, formula=wrong))


def norms(model: nn.Module, losses: Callable[[], Tensor]) -> Tensor:
    with autograd_hacks.during_backward(model, "norms") as streamed:
        autograd_hacks.backward(losses())
    return streamed.norms


@pytest.mark.parametrize("kind", [nn.Linear, nn.LayerNorm, nn.Embedding, nn.Conv1d, nn.GroupNorm])
@pytest.mark.parametrize(("dtype", "factor"), [(torch.double, 1.0009), (torch.double, 1 + 1e-9), (torch.float, 1.0009)])
def test_a_rule_that_is_off_by_little_is_refused(
    kind: type[nn.Module], dtype: torch.dtype, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_by(factor, kind, monkeypatch)
    across = nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4))
    turned = Bare(lambda m, x: m.across(x.mT).mT, across=across)
    model = nn.Sequential(nn.Embedding(7, 4), turned, nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)
    x = torch.randint(7, (8, 5))
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            squares(model(x)).mean().backward()
            with pytest.raises(PerSampleGradientError, match="rule is wrong"):
                autograd_hacks.compute_grad1(model)
        with pytest.raises(PerSampleGradientError):
            autograd_hacks.verify(model)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_a_converged_model_on_raw_features_is_read(size: float, bias: bool) -> None:
    """Its gradients all but cancel over the batch, and their terms are as large as the features."""
    x = size * (1 + torch.rand(64, 3, dtype=torch.double))
    design = torch.cat([x, torch.ones(64, 1, dtype=torch.double)], 1) if bias else x
    y = x @ torch.tensor([1.0, -2.0, 0.5], dtype=torch.double) / size + 0.1 * torch.randn(64, dtype=torch.double)
    best = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    model = nn.Sequential(nn.Linear(3, 1, bias=bias))
    with torch.no_grad():
        model[0].weight.copy_(best[None, :3])
        if bias:
            model[0].bias.copy_(best[3:])
    x, y = x.float(), y.float()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            (model(x)[:, 0] - y).square().mean().backward()
            autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            alone = one_backward_per_sample(model, lambda out, y: (out[:, 0] - y).square(), x, y)
        assert_rows(model, alone)
        autograd_hacks.verify(model)


# Streamed


def test_streaming_of_a_layer_that_checkpoints_share() -> None:
    """Its rows are complete when the second checkpoint has been run again: cross terms are not lost."""

    def twice(m: nn.Module, x: Tensor) -> Tensor:
        h = m.first(x)
        for _ in range(2):
            h = checkpoint(lambda z: m.shared(z).tanh(), h, use_reentrant=False)
        return m.last(h)

    x, layers = torch.randn(5, 3).double(), {"first": (3, 4), "shared": (4, 4), "last": (4, 2)}
    model = Bare(twice, **{name: nn.Linear(*sizes) for name, sizes in layers.items()}).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            model.zero_grad()
            squares(model(x)).mean().backward()
            expected = autograd_hacks.per_sample_grads(model).norms()
            model.zero_grad()
            torch.testing.assert_close(norms(model, lambda: squares(model(x))), expected)


def test_a_number_that_is_none_hides_no_wrong_one() -> None:
    """Entries that overflow can't be compared; the others are."""
    rows = torch.tensor([[1.0, float("inf")], [2.0, 1.0]])
    assert agree(Dense(rows), torch.ones(2), torch.tensor([3.0, float("inf")]), (), lambda: 0.0)
    assert not agree(Dense(rows), torch.ones(2), torch.tensor([3.1, float("inf")]), (), lambda: 0.0)


def test_the_way_back_from_a_value_is_a_sum_that_may_cancel() -> None:
    theta = torch.randn(2, 1, requires_grad=True)
    inner = Outer(torch.ones(3, 1, 2), torch.ones(3, 1, 2))
    form = Chained(inner, pull_along(theta @ torch.tensor([[1e4, -1e4]]), theta), theta.shape, theta)
    expected = torch.full((2, 1), 1e-3)  # of terms of 1e4
    assert agree(form, torch.ones(3), expected, (), lambda: 1e4)
    assert not agree(form, torch.ones(3), expected, (), lambda: 1.0)


# They are compared as gradients arrive, and none is kept for that; what is wrong is told when rows are read


@pytest.mark.parametrize("param_grad", [True, False])
def test_first_steps_hold_no_second_set_of_gradients(param_grad: bool) -> None:
    """Gradients that arrived are compared one parameter at a time, and later ones are what ``.grad`` gets, not copies."""
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())))
    x, size = torch.randn(4, 256), sum(4 * p.numel() for p in model.parameters())
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for n in range(4):
            with at_most(int(1.5 * size), f"step {n + 1}"):
                squares(model(x)).mean().backward()
                autograd_hacks.per_sample_grads(model).norms()
                model.zero_grad()


@pytest.mark.parametrize("penalised", [0, 1, 2])
@pytest.mark.parametrize("accumulated", [True, False])
def test_a_penalty_in_one_of_several_passes_is_told_at_reading(penalised: int, accumulated: bool) -> None:
    model, (x, _) = mlp(), batch()
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.accumulate(model):
            losses = squares(model(x))
            for n in range(3):
                losses = squares(model(x)) if accumulated else losses
                penalty = model[2].weight.square().sum() if n == penalised else 0.0
                (losses.mean() + penalty).backward(retain_graph=True)
        with pytest.raises(UnseenGradient, match=r"2\.weight: the rows don't add up"):
            autograd_hacks.compute_grad1(model)
        check(model, x)


@pytest.mark.parametrize("param_grad", [True, False])
def test_what_a_rule_raises_is_raised_at_reading(param_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(layer: nn.Module, call: Call) -> dict[str, Form]:
        raise ZeroDivisionError("no such form")

    monkeypatch.setitem(RULES, nn.Linear, dataclasses.replace(RULES[nn.Linear], formula=fails))
    model, (x, _) = mlp(), batch()
    check_refused(model, (x,), error=ZeroDivisionError, match="no such form", param_grad=param_grad)
