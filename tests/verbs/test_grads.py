"""`PerSampleGrads` and `clip_grad1_norm_`: what they refuse, how much memory they take, and how numbers behave."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import BareMatrix, Language, perceptron
from oracle import one_backward_per_sample, squares
from quantities import assert_quantities
from steps import stepped
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, StaleRecord
from autograd_hacks.forms import Outer


@pytest.mark.parametrize("samples", [0, 1, 2, 5])
def test_a_tied_embedding_a_replay_and_few_samples(samples: int) -> None:
    for model, x in [
        (Language(7, 3).double(), torch.randint(7, (samples, 4))),
        (BareMatrix(4).double(), torch.randn(samples, 3, 4).double()),
        (nn.Sequential(BareMatrix(4), nn.Linear(4, 2)).double(), torch.randn(samples, 4).double()),
    ]:
        with autograd_hacks.add_hooks(model):
            if not samples:
                model(x.new_ones(3, *x.shape[1:]))  # a signature that the probe has seen
            squares(model(x)).sum().backward()
            with autograd_hacks.pause_hooks():
                rows = one_backward_per_sample(model, squares, x)
            for budget in (2**26, 1000):
                assert_quantities(model, rows, "sum", budget)


def test_micro_batches_and_frozen_and_unreached_parameters() -> None:
    model = nn.ModuleDict({"used": perceptron(), "spare": nn.Linear(2, 2), "frozen": nn.Linear(3, 3)}).double()
    model["frozen"].requires_grad_(False)
    model.forward = lambda x: model["frozen"](model["used"](x))  # type: ignore[method-assign]  # the model of this test
    x = torch.randn(5, 4).double()
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.accumulate(model):
            for part in (x[:2], x[2:]):
                squares(model(part)).mean().backward()
        with autograd_hacks.pause_hooks():
            rows = one_backward_per_sample(model, squares, x)
        assert rows["spare.weight"] is None
        assert_quantities(model, rows)


def test_several_quantities_of_one_backward_and_later_steps_leave_them() -> None:
    model, x = perceptron().double(), torch.randn(6, 4).double()
    grads = stepped(model, x)
    norms, sums = grads.norms(), grads.weighted_sum(torch.ones(6).double() / 6)
    for name, p in model.named_parameters():
        assert_close(sums[name], p.grad)
    squares(model(x * 2)).mean().backward()
    assert_close(grads.norms(), norms)
    autograd_hacks.clear_backprops(model)
    assert_close(grads.norms(), norms)
    assert "6 samples" in repr(grads)


def test_weights_and_directions_can_be_differentiated() -> None:
    grads = stepped(perceptron().double(), torch.randn(6, 4).double())
    w = torch.rand(6).double().requires_grad_()
    v = {name: torch.randn(form.shape).double() for name, form in grads.items()}
    sum((grads.weighted_sum(w)[name] * v[name]).sum() for name in v).backward()
    assert_close(w.grad, grads.dot(v))


# Errors


def test_weights_that_are_none() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    for verb in (grads.weighted_sum, grads.second_moment):
        with pytest.raises(ValueError, match=r"\(5,\).*N = 6"):
            verb(torch.ones(5))
        for wrong in (torch.ones(6, dtype=torch.long), torch.ones(6, dtype=torch.bool), [1.0] * 6):
            with pytest.raises(TypeError, match="expected a floating-point tensor"):
                verb(wrong)
    with pytest.raises(ValueError, match=r"\(2, 6\); expected \(N,\)"):
        grads.second_moment(torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"\(\)"):
        grads.weighted_sum(torch.tensor(1.0))


def test_directions_that_do_not_fit() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    v = {name: torch.zeros(form.shape) for name, form in grads.items()}
    with pytest.raises(ValueError, match=r"without 0\.bias"):
        grads.dot({name: x for name, x in v.items() if name != "0.bias"})
    with pytest.raises(ValueError, match="with more too much"):
        grads.dot(v | {"more": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'2\.weight'; expected.*\(3, 5\)"):
        grads.dot(v | {"2.weight": torch.zeros(5, 3)})
    with pytest.raises(TypeError, match="dictionary"):
        grads.dot(torch.zeros(3))


def test_gradients_of_two_models() -> None:
    one, other = (stepped(perceptron(), torch.randn(6, 4)) for _ in range(2))
    with pytest.raises(ValueError, match="another model"):
        one.gram(other)
    with pytest.raises(TypeError, match="expected the PerSampleGrads"):
        one.gram(one.dense())


@pytest.mark.parametrize("max_norm", [0, -1, float("nan")])
def test_a_norm_that_is_none(max_norm: float) -> None:
    model = perceptron()
    stepped(model, torch.randn(6, 4))
    with pytest.raises(ValueError, match="max_norm"):
        autograd_hacks.clip_grad1_norm_(model, max_norm)


def test_ids_and_samples_that_are_none() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    with pytest.raises(TypeError, match="N integers"):
        grads.group(torch.ones(6))
    with pytest.raises(ValueError, match=r"\(5,\); expected \(6,\)"):
        grads.group(torch.ones(5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[0, 2\)"):
        grads.group(torch.arange(6), 2)
    with pytest.raises(IndexError):
        grads.select(torch.tensor([6]))
    with pytest.raises(IndexError):
        grads.select(torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="dim=0"):
        grads.project(0)
    with pytest.raises(ValueError, match="two of them"):
        grads.select(slice(1)).variance()


def test_selecting() -> None:
    grads = stepped(perceptron().double(), torch.randn(6, 4).double())
    norms = grads.norms()
    mask = torch.tensor([True, False, True, True, False, False])
    for index in (slice(1, 5), slice(None, None, 2), mask, torch.tensor([-1, 0, 0])):
        assert_close(grads.select(index).norms(), norms[index])
    assert_close(grads.group(torch.tensor([7, 3, 7, 3, 9, 9])).samples, 3)


def test_reading_too_late() -> None:
    model, x = nn.Sequential(BareMatrix(4), nn.Linear(4, 2)), torch.randn(6, 4)
    grads = stepped(model, x)
    assert grads.norms().shape == (6,)
    with torch.no_grad():
        model[0].token.add_(1)
    with pytest.raises(StaleRecord, match="changed since"):
        grads.norms()
    model = perceptron()
    grads = stepped(model, x)
    x.zero_()
    with pytest.raises(StaleRecord, match=r"'0\.weight'.*overwritten"):
        grads.norms()
    autograd_hacks.clear_backprops(model)
    with pytest.raises(NothingRecorded, match="cleared"):
        autograd_hacks.per_sample_grads(model)
    with pytest.raises(NothingRecorded, match="cleared"):
        autograd_hacks.clip_grad1_norm_(model, 1.0)


# Numbers


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
    step()
    # The gradients of two equal steps have been added up.
    expected, variance = [p.grad / 2 for p in model.parameters()], autograd_hacks.per_sample_grads(model).variance()
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


def test_several_sums_can_be_differentiated() -> None:
    for model, x in [
        (perceptron(), torch.randn(6, 4)),
        (Language(7, 3), torch.randint(7, (6, 2))),
        (BareMatrix(4), torch.randn(6, 4)),
    ]:
        grads = stepped(model, x)
        w = torch.rand(3, 6, requires_grad=True)
        sum(total[1].sum() for total in grads.weighted_sum(w).values()).backward()
        ones = {name: torch.ones(form.shape) for name, form in grads.items()}
        assert_close(w.grad, torch.stack([torch.zeros(6), grads.dot(ones), torch.zeros(6)]))


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_layers_without_entries() -> None:
    model, x = nn.Sequential(nn.Linear(4, 0), nn.Linear(0, 3)), torch.randn(6, 4)
    grads = stepped(model, x)
    assert grads.norms().shape == (6,)
    assert grads.weighted_sum(torch.ones(0, 6))["1.bias"].shape == (0, 3)


def test_copies_are_refused() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    for copies in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"take dense\(\)"):
            copies(grads)


@pytest.mark.parametrize(
    ("read", "error"),
    [
        (lambda m, g: g.select(0), TypeError),
        (lambda m, g: g.select(torch.tensor([[0, 1]])), TypeError),
        (lambda m, g: g.project(1.5), TypeError),
        (lambda m, g: g.group(torch.zeros(6, dtype=torch.long), 2.5), TypeError),
        (lambda m, g: autograd_hacks.clip_grad1_norm_(m, "1"), TypeError),
        (lambda m, g: autograd_hacks.per_sample_grads(m, scale=0), ValueError),
        (lambda m, g: autograd_hacks.per_sample_grads(m, scale=float("nan")), ValueError),
        (lambda m, g: autograd_hacks.per_sample_grads(m, scale=torch.ones(2)), TypeError),
        (lambda m, g: autograd_hacks.per_sample_grads(3), TypeError),
        (lambda m, g: g.dot({name: torch.ones(form.shape, dtype=torch.long) for name, form in g.items()}), ValueError),
    ],
)
def test_arguments_that_are_none(read: Callable[..., Any], error: type[Exception]) -> None:
    model = perceptron()
    grads = stepped(model, torch.randn(6, 4))
    with pytest.raises(error, match="expected"):
        read(model, grads)
    assert_close(grads.select(slice(None, None, -1)).norms(), grads.norms().flip(0))


# Projection
