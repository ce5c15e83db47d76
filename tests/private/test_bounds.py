"""What a private step promises: no sample moves `.grad` further than it says, by whatever rule it is clipped; its noise."""

import sys
from collections.abc import Callable
from math import exp, inf, sqrt
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import perceptron
from oracle import joined, squares
from refused import check_each
from steps import rows_of
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.private import SecureNoise
from autograd_hacks.support.draws import Secret, normal

pytestmark = pytest.mark.usefixtures("double")

EXPECTED, BOUND = 10.0, 2.0


def step(model: nn.Module, x: Tensor, max_norm: Any = BOUND, multiplier: float = 0.0, **options: Any) -> Any:
    autograd_hacks.backward(squares(model(x)))
    return autograd_hacks.private.clip_and_noise_(model, max_norm, multiplier, EXPECTED, **options)


def hooked() -> nn.Module:
    model = perceptron()
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)
    return model


WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda n: (BOUND / n).clamp(max=1),
    "automatic": lambda n: BOUND / (n + 0.01),
    "psac": lambda n: BOUND / (n + 0.1 / (n + 0.1)),
}
CLIPS: dict[str, Any] = {
    **{name: name for name in WEIGHTS},
    "per_parameter": "per_parameter",
    "a function": lambda norms: BOUND / (norms + 1),
    "a quantile": autograd_hacks.private.QuantileClip(),
}


@pytest.mark.parametrize("clip", WEIGHTS)
def test_rules(clip: str) -> None:
    model, x = hooked(), torch.randn(6, 4)
    rows = rows_of(model, x)
    norms = joined(rows).norm(dim=1)
    w = WEIGHTS[clip](norms)
    found = step(model, x, clip=clip)
    assert_close(found.norms, norms)
    assert_close(found.weights, w)
    assert_close(found.clipped_fraction, (w < 1).double().mean())
    sums = {name: torch.tensordot(w, own, 1) / EXPECTED for name, own in rows.items()}
    assert_close({name: p.grad for name, p in model.named_parameters()}, sums)


@pytest.mark.parametrize("given", ["per_parameter", "patterns"])
def test_parameters_that_are_bounded_apart(given: str) -> None:
    model, x = hooked(), torch.randn(6, 4)
    rows, names = rows_of(model, x), [name for name, _ in model.named_parameters()]
    if given == "patterns":
        bounds = {"*.weight": 1.5, "*.bias": 0.5}
        found, owners = step(model, x, bounds), {name: f"*.{name.split('.')[-1]}" for name in names}
    else:
        bounds = dict.fromkeys(names, BOUND / sqrt(len(names)))
        found, owners = step(model, x, clip="per_parameter"), {name: name for name in names}
    assert found.bound == pytest.approx(sqrt(sum(c**2 for c in bounds.values())))
    assert_close(found.norms, joined(rows).norm(dim=1))
    for name, p in model.named_parameters():
        together = joined({other: rows[other] for other in names if owners[other] == owners[name]}).norm(dim=1)
        w = (bounds[owners[name]] / together).clamp(max=1)
        assert_close(found.weights[owners[name]], w)
        assert_close(p.grad, torch.tensordot(w, rows[name], 1) / EXPECTED)


@pytest.mark.parametrize("clip", CLIPS)
def test_no_sample_moves_the_sum_further_than_is_said(clip: str) -> None:
    model, x = hooked(), torch.randn(6, 4) * torch.tensor([0.01, 0.3, 1, 3, 10, 100])[:, None]
    CLIPS["a quantile"].bound = None
    step(model, x, clip=CLIPS[clip])
    whole = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    far = 0.0
    for n in range(6):
        CLIPS["a quantile"].bound = None
        found = step(model, torch.cat([x[:n], x[n + 1 :]]), clip=CLIPS[clip])
        moved = torch.cat([(p.grad - g).flatten() for p, g in zip(model.parameters(), whole)])
        assert moved.norm() <= found.sensitivity() * (1 + 1e-9)
        far = max(far, float(moved.norm()) / found.sensitivity())
    assert far > 0.9  # it is no idle promise
    assert found.sensitivity("replace_one") == 2 * found.sensitivity("zero_out") == 2 * BOUND / EXPECTED


def test_padding_has_no_part() -> None:
    model, x = hooked(), torch.randn(6, 4)
    real = torch.tensor([True, False, True, True, False, True])
    alone = step(model, x[real])
    sums = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    padded = x.where(real[:, None], torch.tensor([[torch.nan], [7.0]]).repeat(3, 1))
    found = step(model, padded, mask=real)
    assert_close(found.norms[real], alone.norms)
    assert found.norms[~real].isnan().all()
    assert found.weights[~real].tolist() == [0, 0]
    assert_close(found.clipped_fraction, alone.clipped_fraction)
    assert_close([p.grad for p in model.parameters()], sums)
    users = torch.tensor([4, 4, 2, 4, 9, 2])
    found = step(model, padded, mask=real, groups=users)
    by_hand = step(model, x[real], groups=users[real])
    assert_close(found.norms[:2], by_hand.norms)
    assert found.norms[2].isnan()
    assert found.unit == "group"
    nobody = step(model, x, 1.0, 1.0, mask=torch.zeros(6, dtype=torch.bool))
    assert nobody.norms.isnan().all()
    assert nobody.clipped_fraction == 0


def test_a_bound_that_follows_a_quantile() -> None:
    model, x, clip = hooked(), torch.randn(6, 4), autograd_hacks.private.QuantileClip(0.5, 0.3, deviation=4.0)
    bound = BOUND
    for _ in range(4):
        norms = joined(rows_of(model, x)).norm(dim=1)
        found = step(model, x, clip=clip)
        assert found.bound == pytest.approx(bound)
        votes = [0.5 if norm <= bound else -0.5 for norm in norms]
        bound *= exp(-0.3 * (sum(votes) / EXPECTED + 0.5 - 0.5))
        assert clip.bound == pytest.approx(bound)
    other = autograd_hacks.private.QuantileClip(0.5, 0.3, deviation=4.0)
    other.load_state_dict(clip.state_dict())
    assert other.bound == clip.bound
    noisy = step(model, x, multiplier=1.5, clip=clip, noise=torch.Generator().manual_seed(1))
    assert noisy.deviation == pytest.approx((1.5**-2 - 8.0**-2) ** -0.5 * bound / EXPECTED)
    with pytest.raises(ValueError, match="expected a deviation above 4"):
        step(model, x, multiplier=8.0, clip=clip)


@pytest.mark.parametrize("share", [0.999, 1.001])
def test_a_step_that_follows_a_quantile_promises_no_more_than_it_keeps(share: float) -> None:
    """What one sample moves, sum and count, by the noise of each: no more than one mechanism's of that multiplier."""
    model, x, deviations = hooked(), torch.randn(6, 4), dict[str, float]()
    bound = share * float(joined(rows_of(model, x)).norm(dim=1)[5])

    def noise(name: str, shape: torch.Size, deviation: float) -> Tensor:
        deviations[name] = deviation
        return torch.zeros(shape)

    sums, counts = [], []
    for n in (5, 6):
        clip = autograd_hacks.private.QuantileClip(0.5, 0.3, deviation=1.0)
        step(model, x[:n], bound, multiplier=1.2, clip=clip, noise=noise)
        sums.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        counts.append(-torch.tensor((clip.bound or 0.0) / bound).log() / 0.3 * EXPECTED)
    moved = (sums[1] - sums[0]).norm() / deviations["0.weight"]
    counted = (counts[1] - counts[0]) / deviations["the count of QuantileClip"]
    assert moved**2 + counted**2 <= 1.2**-2 * (1 + 1e-9)


@pytest.mark.parametrize("other", [lambda n: BOUND / n.max().expand(len(n)), lambda n: BOUND / n * (n / n.sum())])
def test_weights_that_follow_from_others_norms_are_refused(other: Callable[[Tensor], Tensor]) -> None:
    model = hooked()
    for n in (2, 6):
        with pytest.raises(ValueError, match="depend on its own norm only"):
            step(model, torch.randn(n, 4) * torch.arange(1.0, n + 1)[:, None], clip=other)
    step(model, torch.randn(0, 4), clip=lambda n: BOUND / (n + 1))


def test_the_noise_is_as_is_said() -> None:
    model = nn.Linear(60, 50)
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)
    found = step(model, torch.zeros(2, 60), {"weight": 3.0, "bias": 4.0}, 2.0)
    assert found.deviation == pytest.approx(2.0 * 5.0 / EXPECTED)
    assert model.weight.grad is not None
    assert model.weight.grad.std().item() == pytest.approx(found.deviation, rel=0.1)


def test_without_a_bound_and_noise_the_deviation_is_0() -> None:
    found = step(hooked(), torch.randn(6, 4), inf, 0.0)
    assert (found.bound, found.deviation) == (inf, 0.0)


def test_it_prints_as_a_table() -> None:
    found = step(hooked(), torch.randn(6, 4), multiplier=1.5)
    assert repr(found) == "a private step of 6 samples, bound 2, noise 1.5 of it"
    assert all(part in str(found) for part in ("sensitivity of .grad, replace_one", "0.4", "expected batch size"))
    with pytest.raises(ValueError, match="'swap'; expected one of 'add_remove'"):
        found.sensitivity("swap")


def test_what_would_break_the_promise_is_refused() -> None:
    model, x = hooked(), torch.randn(6, 4)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"clip": lambda norms: 2 * BOUND / norms}, "expected at most max_norm"),
        ({"clip": lambda norms: norms[:2]}, "expected 6 weights"),
        ({"clip": "none"}, "expected one of 'flat', 'per_parameter'"),
        ({"clip": 3}, "expected a name or a function"),
        ({"max_norm": {"0.*": 1.0}}, "no bound for"),
        ({"max_norm": {"*": 1.0, "0.*": 1.0}}, "two bounds for"),
        ({"max_norm": {"*": -1.0}}, r"expected a number in \(0, inf\], or a dictionary"),
        ({"mask": torch.ones(6)}, "expected 6 booleans"),
        ({"mask": torch.ones(5, dtype=torch.bool)}, "expected 6 booleans"),
        ({"clip": autograd_hacks.private.QuantileClip(), "add": True}, "whole steps"),
    ]
    for options, told in refused:
        check_each(((ValueError, TypeError), told, lambda options=options: step(model, x, **options)))
        autograd_hacks.clear_backprops(model)
    check_each((ValueError, "quantile=2", lambda: autograd_hacks.private.QuantileClip(2.0)))


# Mechanisms of noise: what they are told and what they return


def hooked_layer(dtype: torch.dtype = torch.float32) -> nn.Module:
    model = nn.Linear(4, 3, dtype=dtype)
    autograd_hacks.add_hooks(model, param_grad=False, independent=True)
    return model


def noise_of(model: nn.Module, multiplier: float, **options: Any) -> Any:
    """With zeros for a batch, so that .grad is noise alone."""
    autograd_hacks.backward(squares(model(torch.zeros(0, 4, dtype=model.weight.dtype))))  # type: ignore[arg-type]
    return autograd_hacks.private.clip_and_noise_(model, BOUND, multiplier, EXPECTED, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
def test_a_mechanism_is_told_names_shapes_and_the_deviation(dtype: torch.dtype) -> None:
    model, told = hooked_layer(dtype), list[Any]()

    def noise(name: str, shape: torch.Size, deviation: float) -> Tensor:
        told.append((name, tuple(shape), deviation))
        return torch.full(shape, 3.0, dtype=torch.float64)

    noise_of(model, 1.5, noise=noise)
    last = (2,) if dtype.is_complex else ()
    deviation = 1.5 * BOUND / EXPECTED
    assert told == [("weight", (3, 4, *last), deviation), ("bias", (3, *last), deviation)]
    for p in model.parameters():
        assert_close(p.grad, torch.full_like(p, 3 + 3j if dtype.is_complex else 3))


def test_noise_of_another_shape_is_refused() -> None:
    check_each(
        *[(ValueError, "released without noise", lambda wrong=wrong: noise_of(hooked_layer(), 1.0, noise=lambda *_: wrong))
          for wrong in (torch.zeros(()), torch.zeros(3, 4, dtype=torch.long), None, torch.zeros(4))],
        (TypeError, r"expected a torch\.Generator, or a function", lambda: noise_of(hooked_layer(), 1.0, noise=7)),
    )  # fmt: skip


def test_numbers_may_be_tensors_without_axes() -> None:
    model = hooked_layer()
    autograd_hacks.backward(squares(model(torch.randn(3, 4, dtype=torch.float32))))
    found = autograd_hacks.private.clip_and_noise_(model, torch.tensor(BOUND), torch.tensor(0), torch.tensor(5))  # type: ignore[arg-type]
    assert (found.bound, found.expected_batch_size, found.deviation) == (BOUND, 5.0, 0.0)
    with pytest.raises(TypeError, match="expected a number"):
        autograd_hacks.private.clip_and_noise_(model, torch.ones(1), 0.0, 5)  # type: ignore[arg-type]


def test_without_numpy_other_bits_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    first, again, other = (normal(Secret.of(n), 2**20, 2.0, torch.device("cpu"), torch.float32) for n in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.unique().numel() > 0.9 * first.numel()
    assert first.mean().abs() < 5 * 2 / sqrt(first.numel())
    assert (first.std() / 2 - 1).abs() < 5 / sqrt(2 * first.numel())


def test_secure_noise_is_normal_and_never_the_same() -> None:
    first, other = (SecureNoise()("weight", torch.Size((300, 401)), 2.0) for _ in range(2))
    assert first.shape == (300, 401)
    assert first.dtype == torch.float64
    assert not (first == other).any()
    standard = torch.distributions.Normal(0.0, 2.0)
    for x in (first, other):  # Kolmogorov and Smirnov: exceeded once in 10,000 times
        ordered = standard.cdf(x.flatten().sort().values)
        steps = torch.arange(1, len(ordered) + 1, dtype=torch.float64) / len(ordered)
        assert (ordered - steps).abs().max() * sqrt(len(ordered)) < 2.23
    assert torch.stack([first.flatten(), other.flatten()]).corrcoef()[0, 1].abs() < 4 / sqrt(first.numel())
    assert SecureNoise()("bias", torch.Size((3,)), 1.0).shape == (3,)
    assert SecureNoise()("none", torch.Size((0, 2)), 1.0).shape == (0, 2)
    with pytest.raises(ValueError, match="draws=0"):
        SecureNoise(0)
    found = noise_of(hooked_layer(), 1.0, noise=SecureNoise(draws=2))
    assert found.deviation == BOUND / EXPECTED
