"""What a private step promises: no sample moves `.grad` further than it says, by whatever rule it was clipped."""

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
