"""The private step against rows of one backward pass per sample, clipped and added up by hand."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import perceptron, with_spare
from oracle import clipped, squares
from rarely import crossed
from refused import check_each
from steps import backward, rows_of
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, ProbeFailed, SamplesMixed
from autograd_hacks.private import PrivateStep

pytestmark = pytest.mark.usefixtures("double")

EXPECTED, BOUND = 10.0, 2.0


def hooked(param_grad: bool = False) -> nn.Module:
    model = perceptron()
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    return model


def expected(model: nn.Module, x: Tensor, groups: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Norms, and the sum of the clipped rows over the expected number, without noise."""
    rows = rows_of(model, x)
    if groups is not None:
        rows = {name: torch.stack([own[groups == u].sum(0) for u in groups.unique()]) for name, own in rows.items()}
    norms, sums = clipped(rows, BOUND, EXPECTED)
    assert (norms > BOUND).any()
    return norms, sums


def assert_grads(model: nn.Module, sums: dict[str, Tensor]) -> None:
    assert_close({name: p.grad for name, p in model.named_parameters()}, sums)


def whole(model: nn.Module, multiplier: float = 0.0, **options: Any) -> PrivateStep:
    return autograd_hacks.private.clip_and_noise_(model, BOUND, multiplier, EXPECTED, **options)


def step(model: nn.Module, multiplier: float = 0.0, **options: Any) -> Tensor:
    return whole(model, multiplier, **options).norms


def test_noise_is_normal_and_drawn_parameter_by_parameter() -> None:
    """As Opacus draws it: `torch.normal` of noise · bound for each parameter in order, then divided."""
    model, x = hooked(), torch.randn(6, 4)
    _, sums = expected(model, x)
    backward(model, x)
    step(model, 1.5, noise=torch.Generator().manual_seed(3))
    draws = torch.Generator().manual_seed(3)
    for name, p in model.named_parameters():
        assert_close(p.grad, sums[name] + torch.normal(0.0, 1.5 * BOUND, p.shape, generator=draws) / EXPECTED)


@crossed(first=[True, False], wrong=[torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_contributes_nothing(first: bool, wrong: float) -> None:
    model, x = hooked(), torch.randn(6, 4)
    if not first:
        backward(model, x)
        step(model)
    _, sums = expected(model, x[[0, 1, 3, 4, 5]])
    bad = x.clone()
    bad[2, 1] = wrong
    backward(model, bad)
    norms = step(model)
    assert norms.isfinite().tolist() == [True, True, False, True, True, True]
    assert_grads(model, sums)
    users = torch.tensor([0, 1, 0, 1, 2, 2])
    _, sums = expected(model, x[[0, 1, 3, 4, 5]], users[[0, 1, 3, 4, 5]])
    backward(model, bad)
    assert step(model, groups=users).isfinite().all()
    assert_grads(model, sums)


@pytest.mark.parametrize("first", [True, False])
def test_an_empty_batch_is_noise(first: bool) -> None:
    model, x = hooked(), torch.randn(6, 4)
    if not first:
        backward(model, x)
        step(model)
    for groups in (None, torch.zeros(0, dtype=torch.long)):
        backward(model, x[:0])
        assert step(model, 1.0, groups=groups, noise=torch.Generator().manual_seed(1)).shape == (0,)
        draws = torch.Generator().manual_seed(1)
        for p in model.parameters():
            assert_close(p.grad, torch.normal(0.0, BOUND, p.shape, generator=draws) / EXPECTED)


def test_a_parameter_that_no_loss_reached_has_noise() -> None:
    model = with_spare(nn.Linear(4, 2), nn.Linear(2, 2))
    autograd_hacks.add_hooks(model, independent=True)
    backward(model, torch.randn(5, 4))
    step(model, 1.0)
    assert model.spare.weight.grad is not None
    assert model.spare.weight.grad.all()
    assert model.frozen.weight.grad is None


def test_micro_batches() -> None:
    model, x = hooked(), torch.randn(6, 4)
    norms, sums = expected(model, x)
    found = None
    for part in x.split(4):
        backward(model, part)
        found = whole(model, add=found)
    assert found is not None
    assert_close(found.norms, norms)
    assert_grads(model, sums)
    with autograd_hacks.accumulate(model):
        for part in x.split(4):
            backward(model, part)
    step(model)
    assert_grads(model, sums)


def test_refusals() -> None:
    model, eager, x = hooked(), hooked(param_grad=True), torch.randn(6, 4)
    earlier = []
    for own in (model, eager):
        backward(own, x)
        earlier.append(whole(own))
        backward(own, x)
    check_each(
        (ValueError, r"expected \(6,\), one for each sample",
         lambda: step(model, groups=torch.zeros(5, dtype=torch.long))),
        (ValueError, "unclipped gradient", lambda: step(eager, add=earlier[1])),
        (ValueError, "clipped to max_norm=2.0",
         lambda: autograd_hacks.private.clip_and_noise_(model, 1, 1, 9, add=earlier[0])),
    )  # fmt: skip
    assert step(model, 1.0).isfinite().all()
    check_each((NothingRecorded, "spend privacy budget that the accountant", lambda: step(model, 1.0)))


def test_a_user_without_finite_samples_is_among_the_norms() -> None:
    model, x = hooked(), torch.randn(6, 4)
    users, kept = torch.tensor([7, 7, 2, 2, 9, 7]), torch.tensor([True, True, False, False, False, True])
    norms, sums = expected(model, x[kept], users[kept])
    x[~kept] = float("nan")
    backward(model, x)
    assert_close(step(model, groups=users), torch.tensor([float("nan"), norms[0], float("nan")]), equal_nan=True)
    assert_grads(model, sums)
    x[:] = float("nan")
    backward(model, x)
    assert step(model, groups=users).isnan().tolist() == [True] * 3
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_both_parts_of_complex_numbers_have_the_noise() -> None:
    """One sample moves the sum by max_norm, all of it in one part if it likes."""
    model = nn.Linear(60, 50, dtype=torch.complex64)
    autograd_hacks.add_hooks(model, param_grad=False)
    autograd_hacks.backward(squares(model(torch.zeros(2, 60, dtype=torch.complex64))) * 0)
    autograd_hacks.private.clip_and_noise_(model, 2.0, 3.0, 5.0, noise=torch.Generator().manual_seed(3))
    draws = torch.Generator().manual_seed(3)
    for p in model.parameters():
        assert p.grad is not None
        noise = torch.normal(0.0, 6.0, (*p.shape, 2), generator=draws, dtype=torch.float32) / 5
        assert_close(torch.view_as_real(p.grad), noise)


@crossed(independent=[True, False], param_grad=[True, False])
def test_samples_that_know_of_each_other_are_refused_before_noise_is_drawn(param_grad: bool, independent: bool) -> None:
    """By a way that has no gradient."""
    centred = Bare(lambda m, h: h - h.mean(0).detach())
    model, x = nn.Sequential(nn.Linear(4, 3), centred, nn.Linear(3, 2)), torch.randn(6, 4)
    with autograd_hacks.add_hooks(model, param_grad=param_grad, independent=independent):
        for _ in range(3):
            model.zero_grad()
            backward(model, x)
            before = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
            state = torch.get_rng_state()
            with pytest.raises(SamplesMixed, match=r"by the laws of operations .* at sub .*test_private.py"):
                step(model, 1.0)
            assert torch.equal(torch.get_rng_state(), state)
            assert_close([p.grad for p in model.parameters()], before, rtol=0, atol=0)


class Divided(torch.autograd.Function):
    """x, whose gradient is divided by a statistic of the batch."""

    is_on = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g / (1 + ctx.saved_tensors[0].abs().mean()) if Divided.is_on else g * 1


BACKWARDS: dict[str, Any] = {
    "function": lambda h, mean: Divided.apply(h),
    "hook on a tensor": lambda h, mean: [h.register_hook(lambda g: g / (1 + mean)), h][1],
    "hook on a node": lambda h, mean: [h.grad_fn.register_prehook(lambda g: (g[0] / (1 + mean),)), h][1],
}


@pytest.mark.parametrize("how", BACKWARDS)
def test_a_backward_that_knows_of_other_samples_is_refused_in_each_kind_of_forward(how: str) -> None:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        return m.b(BACKWARDS[how](h, h.detach().abs().mean()).tanh().sum(1))

    model = Bare(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2))
    with autograd_hacks.add_hooks(model, independent=True):
        for length in (5, 5, 6, 7):
            backward(model, torch.randn(6, length, 4))
            with pytest.raises(SamplesMixed):
                step(model)


def test_what_begins_to_know_of_other_samples_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Function that was harmless before, or by a number that Python had read for a log."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        h = checkpoint(Divided.apply, h, use_reentrant=False) if m.is_checkpointed else Divided.apply(h)
        mean = h.detach().abs().mean().item()
        return m.b(h / (1 + mean) if m.divides else h)

    model = Bare(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2))
    for begins in ("function", "checkpointed", "number"):
        model.is_checkpointed = begins == "checkpointed"  # type: ignore[assignment]
        with autograd_hacks.add_hooks(model, independent=True):
            for n in range(5):
                monkeypatch.setattr(Divided, "is_on", n > 2 and begins != "number")
                model.divides = n > 2 and begins == "number"  # type: ignore[assignment]
                backward(model, torch.randn(6, 4))
                with pytest.raises(SamplesMixed) if n > 2 else nullcontext():
                    step(model)


@crossed(param_grad=[True, False], probe=[True, False])
def test_a_forward_that_was_not_asked_is_shown_independent_afterwards(probe: bool, param_grad: bool) -> None:
    model = perceptron()
    with autograd_hacks.add_hooks(model, probe=probe, param_grad=param_grad):
        for x in torch.randn(4, 6, 4):  # later forwards show it themselves
            norms, sums = expected(model, x)
            backward(model, x)
            assert_close(step(model), norms)
            assert_grads(model, sums)


def test_arguments_that_nobody_has_kept_can_not_be_shown_independent() -> None:
    model = hooked()
    for n in range(2):
        backward(model, torch.randn(6, 4))
        if n:  # the second forward was asked
            step(model)
            continue
        with pytest.raises(ProbeFailed, match=r"clip_and_noise_ .*add_hooks\(model, independent=True\)"):
            step(model)


def test_layers_called_by_themselves_are_not_shown_independent() -> None:
    model, x = hooked(), torch.randn(6, 4)
    for mixes in (True, False):
        h = x
        for layer in model:
            h = layer(h) - layer(h).mean(0).detach() if mixes else layer(h)
        autograd_hacks.backward(squares(h))
        with pytest.raises(ProbeFailed, match="clip_and_noise_ needs" if mixes else "called by itself"):
            step(model)


@pytest.mark.parametrize("parts", [1, 2])
def test_half_precision_is_rounded_after_the_noise(parts: int) -> None:
    """Rounded before it, the sum of many samples would move by many bounds with one sample more."""
    model, x = nn.Linear(4, 2).to(torch.bfloat16), torch.ones(1040, 4, dtype=torch.bfloat16)
    row = {p: own[0].float() for p, own in zip(model.parameters(), rows_of(model, x[:1]).values())}
    row = {p.shape: own * BOUND / torch.stack([g.norm() for g in row.values()]).norm() for p, own in row.items()}
    autograd_hacks.add_hooks(model, param_grad=False)
    for samples in range(1030, 1041):
        # Noise that leaves one sample's part.
        others = {shape: (1 - samples) * own / EXPECTED for shape, own in row.items()}
        own = None
        for n, part in enumerate(x[:samples].chunk(parts)):
            autograd_hacks.backward(squares(model(part)), "sum")
            own = autograd_hacks.private.clip_and_noise_(
                model,
                BOUND,
                float(n == parts - 1),
                EXPECTED,
                add=own,
                noise=lambda _, shape, __, others=others: others[shape],
            )
        for p in model.parameters():
            assert p.grad is not None
            assert_close(p.grad.float(), row[p.shape] / EXPECTED, rtol=0.1, atol=0.02 * BOUND / EXPECTED)
    for dtype in (torch.bfloat16, torch.float32):
        backward(model.to(dtype), x.to(dtype))
        with pytest.raises(ValueError, match="no noise yet"):
            step(model, add=own)
    own = whole(model)
    model.weight.grad += 1
    backward(model, x.float())
    with pytest.raises(ValueError, match="as it was set"):
        step(model, add=own)
