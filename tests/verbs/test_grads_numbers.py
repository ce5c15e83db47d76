"""How numbers behave in `PerSampleGrads` and `clip_grad1_norm_`: zeros, overflow, half precision, autocast."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import BareMatrix, perceptron
from oracle import squares
from steps import stepped
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.forms import Outer


def test_no_gradient_at_all_is_not_clipped() -> None:
    model, x = perceptron().double(), torch.randn(3, 4).double()
    with autograd_hacks.add_hooks(model):
        (model(x) * torch.tensor([[0.0], [1.0], [100.0]])).sum().backward()
        norms = autograd_hacks.clip_grad1_norm_(model, 1.0, "sum")
    assert norms[0] == 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_what_is_no_number_stays_with_its_sample() -> None:
    model, x = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4)), torch.randn(5, 2, 4, 4)
    x[3, 0, 0, 0] = torch.nan
    grads = stepped(model, x)
    assert grads.norms().isnan().tolist() == [False, False, False, True, False]
    assert grads.gram().isnan().any(1).tolist() == [True] * 5
    assert not grads.select(torch.tensor([0, 1, 2, 4])).gram().isnan().any()
    with pytest.raises(RuntimeError, match=r"samples \[3\]"):
        autograd_hacks.clip_grad1_norm_(model, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_single(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(64, 64, bias=False).to(dtype), torch.randn(4, 3000, 64).to(dtype)
    with autograd_hacks.add_hooks(model):
        model(x).backward(torch.ones(4, 3000, 64, dtype=dtype))
        grads = autograd_hacks.per_sample_grads(model, "sum")
        norms = grads.norms()
        exact = Outer(torch.ones(4, 3000, 64).double(), x.double()).norms()
        assert norms.dtype == torch.float32
        assert_close(norms, exact.float(), rtol=1e-4, atol=0)
        assert grads.weighted_sum(torch.ones(4))["weight"].dtype == dtype
        autograd_hacks.clip_grad1_norm_(model, 1.0)
        assert model.weight.grad is not None
        assert model.weight.grad.dtype == dtype


def test_norms_leave_the_range_of_numbers_only_where_they_must() -> None:
    for factor in (1e-30, 1e30):
        model, x = perceptron(), torch.randn(4, 4)
        with autograd_hacks.add_hooks(model):
            (model(x) * factor).sum().backward()
            norms = autograd_hacks.per_sample_grads(model, "sum").norms()
        assert ((norms / factor > 0.1) & (norms / factor < 100)).all()


def test_autocast_around_reading_changes_nothing() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    norms = grads.norms()
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(grads.norms(), norms)
        assert grads.gram().dtype == torch.float32


@pytest.mark.parametrize(
    "build", [lambda: nn.Sequential(BareMatrix(4), nn.Linear(4, 2)), lambda: nn.LSTM(4, 3, batch_first=True)]
)
def test_inference_mode_around_reading_changes_nothing(build: Callable[[], nn.Module]) -> None:
    model, x = build().double(), torch.randn(6, 5, 4).double()
    autograd_hacks.add_hooks(model)

    def step() -> None:
        out = model(x)
        squares(out[0] if isinstance(out, tuple) else out).mean().backward()

    step()
    model.zero_grad()
    step()
    expected, variance = [p.grad for p in model.parameters()], autograd_hacks.per_sample_grads(model).variance()
    with torch.inference_mode():
        grads = autograd_hacks.per_sample_grads(model)
        sums = grads.weighted_sum(torch.full((6,), 1 / 6))
        for name, got in grads.variance().items():
            assert_close(got, variance[name])
        autograd_hacks.clip_grad1_norm_(model, 1e9)
    for p, total, g in zip(model.parameters(), sums.values(), expected):
        assert_close(total, g)
        assert_close(p.grad, g)


def test_autocast_around_the_first_reading() -> None:
    for model in (perceptron(), nn.Sequential(BareMatrix(4), nn.Linear(4, 2))):
        x = torch.randn(6, 4)
        autograd_hacks.add_hooks(model)
        for _ in range(2):
            squares(model(x)).mean().backward()
            with torch.autocast("cpu", torch.bfloat16):
                autograd_hacks.clip_grad1_norm_(model, 1e9)
            model.zero_grad()


def test_weights_of_another_precision() -> None:
    grads = stepped(nn.Linear(4, 3), torch.randn(100, 4))
    w = torch.rand(100) * 700
    for dtype, digits in ((torch.float16, 1e-3), (torch.bfloat16, 1e-2), (torch.float64, 1e-5)):
        expected = grads.weighted_sum(w.to(dtype).float())["weight"]
        assert_close(grads.weighted_sum(w.to(dtype))["weight"], expected, rtol=1e-5, atol=digits)
    with pytest.raises(TypeError, match="floating-point"):
        grads.weighted_sum(torch.ones(100, dtype=torch.complex64))
