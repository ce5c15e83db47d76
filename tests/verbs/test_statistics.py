"""Noise, signal and directions of rows against their formulas on rows of one backward pass per sample."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import perceptron, with_spare
from oracle import joined, squares
from refused import check_each
from steps import rows_of, stepped
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.attribution import NoiseScales
from autograd_hacks.verbs.statistics import NoiseScale

pytestmark = pytest.mark.usefixtures("double")

Rows = dict[str, Tensor]


def rows_and_grads(samples: int = 6) -> tuple[Rows, autograd_hacks.PerSampleGrads]:
    model, x = perceptron(), torch.randn(samples, 4)
    return rows_of(model, x), stepped(model, x)


def of_outputs() -> tuple[nn.Module, autograd_hacks.PerSampleGrads]:
    model = nn.Linear(3, 2)
    autograd_hacks.add_hooks(model)
    return model, autograd_hacks.per_sample_jacobian(model, model(torch.randn(4, 3)))


def test_noise_scale() -> None:
    rows, grads = rows_and_grads()
    found = grads.noise_scale()
    covariance = joined(rows).T.cov()
    assert_close(found.noise, covariance.trace())
    assert_close(found.signal, joined(rows).mean(0).square().sum() - covariance.trace() / 6)
    assert_close(found.scale, found.noise / found.signal)
    each = grads.noise_scale(per_parameter=True)
    assert list(each) == list(rows)
    for name, own in rows.items():
        noise = own.var(0).sum()
        assert_close(each[name].noise, noise)
        assert_close(each[name].signal, own.mean(0).square().sum() - noise / 6)


def test_noise_scale_is_unbiased_over_pairs() -> None:
    """Over all pairs of six samples, drawn with replacement, both numbers have the six samples' own in the mean."""
    rows, grads = rows_and_grads()
    pairs = [grads.select(torch.tensor([a, b])).noise_scale() for a in range(6) for b in range(6)]
    mean = joined(rows).mean(0)
    assert_close(sum(own.noise for own in pairs) / 36, (joined(rows) - mean).square().sum() / 6)
    assert_close(sum(own.signal for own in pairs) / 36, mean.square().sum())


def test_next_to_no_noise_keeps_its_digits() -> None:
    """Rows that differ in the sixth digit: Σ‖gₙ‖² - N‖ḡ‖² has nothing left in single precision."""
    model = nn.Linear(40, 3).float()
    x = torch.randn(1, 40).float() + 1e-6 * torch.randn(8, 40).float()
    autograd_hacks.add_hooks(model)
    model(x).sum(1).mean().backward()
    found = autograd_hacks.per_sample_grads(model).noise_scale()
    assert_close(found.noise, 3 * x.double().var(0).sum(), rtol=1e-2, atol=0)


def test_a_parameter_that_no_loss_reaches_has_no_noise() -> None:
    each = stepped(with_spare(nn.Linear(4, 2)), torch.randn(5, 4)).noise_scale(per_parameter=True)
    assert each["spare.weight"].noise == each["spare.weight"].signal == 0
    assert each["used.weight"].noise > 0


def test_signal_to_noise() -> None:
    rows, grads = rows_and_grads()
    assert_close(grads.snr(), {name: own.mean(0).square() / own.var(0) for name, own in rows.items()})
    model = nn.Linear(2, 1)
    autograd_hacks.add_hooks(model)
    model(torch.tensor([[0.0, 1.0], [0.0, 2.0]])).sum(1).mean().backward()
    ratios = autograd_hacks.per_sample_grads(model).snr()
    assert_close(ratios["weight"], torch.tensor([[0.0, 4.5]]))
    assert ratios["bias"].isinf().all()


def test_cosines() -> None:
    rows, grads = rows_and_grads()
    unit = joined(rows) / joined(rows).norm(dim=1, keepdim=True)
    assert_close(grads.cosine(), unit @ unit.mT)
    assert_close(grads.cosine(grads.select(slice(2))), unit @ unit[:2].mT)
    v = {name: torch.randn(own.shape[1:]) for name, own in rows.items()}
    direction = torch.cat([x.flatten() for x in v.values()])
    assert_close(grads.cosine(v), unit @ direction / direction.norm())
    silent = grads.scaled(torch.tensor([1.0, 0, 1, 1, 1, 1]))
    assert not silent.cosine()[1].any()
    assert not silent.cosine({name: torch.zeros_like(x) for name, x in v.items()}).any()


def test_cosines_of_an_outputs_entries() -> None:
    _, jacobian = of_outputs()
    kernel = jacobian.gram()
    lengths = kernel.flatten(2).flatten(0, 1).diagonal().view(4, 2).sqrt()
    assert_close(jacobian.cosine(), kernel / lengths[:, :, None, None] / lengths)
    for verb in (jacobian.noise_scale, jacobian.snr, jacobian.variance):
        with pytest.raises(ValueError, match="variance over samples is ambiguous"):
            verb()


def test_scaled_rows() -> None:
    rows, grads = rows_and_grads()
    w, users = torch.randn(6), torch.tensor([0, 1, 0, 1, 2, 2])
    found, expected = grads.scaled(w), {n: own * w.view(-1, *[1] * (own.ndim - 1)) for n, own in rows.items()}
    flat = joined(expected)
    assert_close(found.dense(), expected)
    assert_close(found.norms(), flat.norm(dim=1))
    assert_close(found.gram(grads), flat @ joined(rows).mT)
    assert_close(found.variance(), {name: own.var(0) for name, own in expected.items()})
    assert_close(found.group(users).norms(), torch.zeros(3, flat.shape[1]).index_add(0, users, flat).norm(dim=1))
    with pytest.raises(ValueError, match="N = 6"):
        grads.scaled(torch.ones(5))


def test_weights_of_rows_can_be_differentiated() -> None:
    rows, grads = rows_and_grads()
    w = torch.randn(6, requires_grad=True)
    grads.scaled(w).norms().sum().backward()
    assert_close(w.grad, w.detach().sign() * joined(rows).norm(dim=1))


def test_per_parameter() -> None:
    rows, grads = rows_and_grads()
    v = {name: torch.randn(own.shape[1:]) for name, own in rows.items()}
    along, products = grads.dot(v, per_parameter=True), grads.gram(grads.select(slice(2)), per_parameter=True)
    assert list(along) == list(products) == list(rows)
    for name, own in rows.items():
        assert_close(along[name], own.flatten(1) @ v[name].flatten())
        assert_close(products[name], own.flatten(1) @ own[:2].flatten(1).mT)
    model, jacobian = of_outputs()
    assert_close(sum(jacobian.gram(per_parameter=True).values()), jacobian.gram())
    w = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    assert_close(sum(jacobian.dot(w, per_parameter=True).values()), jacobian.dot(w))


@pytest.fixture
def tower() -> Iterator[nn.Module]:
    """Three layers after a step, the first frozen, the last two tied."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[2].weight = model[1].weight
    model[0].requires_grad_(False)
    with autograd_hacks.add_hooks(model):
        squares(model(torch.randn(5, 3))).mean().backward()
        yield model


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("*", ["1.weight", "1.bias", "2.bias"]),
        ("2.*", ["1.weight", "2.bias"]),
        ("2", ["1.weight", "2.bias"]),
        (["*.bias"], ["1.bias", "2.bias"]),
        (("2.bias", "?.weight"), ["1.weight", "2.bias"]),
    ],
)
def test_some_parameters(tower: nn.Module, only: object, names: list[str]) -> None:
    whole, some = autograd_hacks.per_sample_grads(tower), autograd_hacks.per_sample_grads(tower, only=only)  # type: ignore[arg-type]
    assert list(some) == names
    norms = whole.norms(per_parameter=True)
    assert isinstance(norms, dict)
    assert_close(some.norms(), torch.stack([norms[name] for name in names]).norm(dim=0))


def test_patterns_that_match_nothing(tower: nn.Module) -> None:
    def read(only: Any) -> Any:
        return autograd_hacks.per_sample_grads(tower, only=only)

    check_each(
        (ValueError, r"'2\.wieght' matches no parameter; expected .*'1\.weight'", lambda: read(["*.bias", "2.wieght"])),
        (ValueError, r"'0\.\*' matches only frozen parameters", lambda: read("0.*")),
        (TypeError, "expected names of parameters", lambda: read([tower[1].weight])),  # type: ignore[index]
    )


@pytest.mark.parametrize("factor", [1e-25, 1e25, 1e-33, 1e33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_cosine_and_snr_where_squares_leave_the_range_of_numbers(factor: float, dtype: torch.dtype) -> None:
    """Neither changes with a factor of the loss."""
    model, x = nn.Sequential(nn.Linear(4, 5, dtype=dtype), nn.Linear(5, 3, dtype=dtype)), torch.randn(6, 4, dtype=dtype)
    v = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    autograd_hacks.add_hooks(model)

    def grads(factors: Tensor) -> autograd_hacks.PerSampleGrads:
        autograd_hacks.backward(squares(model(x)) * factors, "sum")
        return autograd_hacks.per_sample_grads(model)

    plain, scaled = grads(torch.ones(6).float()), grads(torch.full((6,), factor).float())
    rows = joined(plain.dense())
    along = torch.cat([own.flatten() for own in v.values()])
    expected = rows @ rows.mH / rows.norm(dim=1) / rows.norm(dim=1)[:, None]
    for found in (scaled.cosine(), scaled.cosine(budget=100), scaled.cosine(plain), plain.cosine(scaled)):
        assert_close(found, expected, rtol=1e-4, atol=1e-5)
    expected_along = rows @ along.conj() / rows.norm(dim=1) / along.norm()
    for size in (1, factor):
        assert_close(scaled.cosine({name: own * size for name, own in v.items()}), expected_along, rtol=1e-4, atol=1e-5)
    variances = {name: (own - own.mean(0)).abs().square().sum(0) / 5 for name, own in plain.dense().items()}
    snr = {name: own.mean(0).abs().square() / variances[name] for name, own in plain.dense().items()}
    for grads_of in (plain, scaled):
        assert_close(grads_of.snr(), snr, rtol=1e-3, atol=1e-4)
    mixed = grads(torch.tensor([1, factor, 1, 1, factor, 1]).float())  # some samples
    rows = joined(mixed.dense()).to(torch.complex128)
    expected = rows @ rows.mH / rows.norm(dim=1) / rows.norm(dim=1)[:, None]
    assert_close(mixed.cosine().to(torch.complex128), expected, rtol=1e-4, atol=1e-5)


def test_cosines_of_zeros_are_zeros_beside_small_ones() -> None:
    model = nn.Linear(3, 1, bias=False).float()
    autograd_hacks.add_hooks(model)
    x = torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 0]]).float()
    (model(x) * 1e-25).sum().backward()
    grads = autograd_hacks.per_sample_grads(model, loss_type="sum")
    half = 0.5**0.5
    assert_close(grads.cosine(), torch.tensor([[1, 0, half], [0, 0, 0], [half, 0, 1]]).float())
    assert_close(grads.cosine({"weight": torch.zeros(1, 3).float()}), torch.zeros(3).float())
    assert not any(own.any() for own in grads.scaled(torch.zeros(3)).snr().values())


def test_cosine_keeps_to_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    _, grads = rows_and_grads()
    told = []
    for verb in ("norms", "gram", "dot"):
        own = getattr(autograd_hacks.PerSampleGrads, verb)

        def spied(self: object, *given: object, own: object = own, budget: int = 0, **options: object) -> Tensor:
            told.append(given[1] if len(given) > 1 else budget)
            return own(self, *given, **options)  # type: ignore[no-any-return, operator]

        monkeypatch.setattr(autograd_hacks.PerSampleGrads, verb, spied)
    grads.cosine(budget=1000)
    grads.cosine(dict(grads.weighted_sum(torch.ones(6))), budget=1000)
    assert len(told) >= 4
    assert set(told) == {1000}


# Noise and signal over training against exponential means made by hand, from rows of one backward pass per sample


BETA = 0.9


def trained(scales: NoiseScales, steps: int = 4, seed: int = 0) -> list[Rows]:
    """Steps of another batch size each.  Returns each step's rows."""
    torch.manual_seed(seed)
    model, rows = perceptron(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(5 + step, 4)
        rows.append(rows_of(model, x))
        optimizer.zero_grad()
        scales.update(stepped(model, x))
        optimizer.step()
    return rows


def by_hand(steps: list[Tensor], beta: float = BETA) -> tuple[Tensor, Tensor]:
    """Adam's means of noise and of signal, elementwise.  steps: a parameter's rows in each step"""
    noise = signal = torch.zeros(steps[0].shape[1:], dtype=torch.float64)
    for rows in steps:
        noise = beta * noise + (1 - beta) * rows.var(0)
        signal = beta * signal + (1 - beta) * (rows.mean(0) ** 2 - rows.var(0) / len(rows))
    return noise / (1 - beta ** len(steps)), signal / (1 - beta ** len(steps))


def test_means_of_noise_and_signal_are_those_by_hand() -> None:
    scales = NoiseScales(BETA)
    steps = trained(scales)
    expected = {name: tuple(own.sum() for own in by_hand([rows[name] for rows in steps])) for name in steps[0]}
    each = scales.noise_scale("parameter")
    assert list(each) == list(expected)
    for name, (noise, signal) in expected.items():
        assert_close((each[name].noise, each[name].signal, each[name].scale), (noise, signal, noise / signal))
    layers = scales.noise_scale("layer")
    assert list(layers) == ["0", "2"]
    of_second = tuple(expected["2.weight"][k] + expected["2.bias"][k] for k in (0, 1))
    assert_close((layers["2"].noise, layers["2"].signal), of_second)
    noise, signal = (sum(own[k] for own in expected.values()) for k in (0, 1))
    assert_close(scales.noise_scale().scale, noise / signal)
    for line in ("0", "2", "all"):
        assert f"\n{line} " in repr(scales)


def test_a_signal_below_zero_has_an_infinite_scale() -> None:
    scales = NoiseScales(BETA)
    scales._take({"0.weight": (4.0, -0.5), "2.weight": (1.0, 0.1), "4.weight": (0.0, 0.0)})
    table = str(scales)
    lines = {line.split("  ")[0].strip(): line for line in table.split("\n")}
    assert all(lines[own].rstrip().endswith("signal not seen yet") for own in ("0", "all"))
    assert lines["2"].rstrip().endswith(" 10")
    assert "not seen" not in lines["4"]
    found = scales.noise_scale("layer")
    assert found["0"].scale == found["4"].scale == torch.inf
    assert found["0"].signal == -0.5
    unknown = torch.tensor(torch.nan)
    assert NoiseScale(unknown, unknown).scale.isnan()


def test_one_step_is_that_steps_own_whatever_the_smoothing() -> None:
    scales = NoiseScales(0.999)
    (rows,) = trained(scales, steps=1)
    assert_close(scales.noise_scale().noise, joined(rows).var(0).sum())


def test_signal_to_noise_is_the_ratio_of_both_means() -> None:
    scales = NoiseScales(BETA, elementwise=True)
    steps = trained(scales)
    means = {name: by_hand([rows[name] for rows in steps]) for name in steps[0]}
    assert_close(scales.snr(), {name: signal / noise for name, (noise, signal) in means.items()})
    with pytest.raises(ValueError, match="elementwise=True"):
        NoiseScales().snr()


def test_a_checkpoint_goes_on() -> None:
    whole, before, after = NoiseScales(BETA), NoiseScales(BETA), NoiseScales(BETA)
    trained(whole, steps=2, seed=1)
    trained(before, steps=2, seed=1)
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    for scales in (whole, after):
        trained(scales, steps=2, seed=2)
    assert_close(after.noise_scale(), whole.noise_scale())


def test_a_parameter_that_comes_later_has_means_of_its_own() -> None:
    scales = NoiseScales(BETA)
    scales._take({"a": (1.0, 2.0)})
    scales._take({"a": (3.0, 4.0), "b": (5.0, 6.0)})
    found = {name: own.noise for name, own in scales.noise_scale("parameter").items()}
    assert_close(found, {"a": torch.tensor((0.9 + 3) / 1.9), "b": torch.tensor(5.0)})


def test_gradients_that_are_refused_change_no_mean() -> None:
    scales, model = NoiseScales(BETA, elementwise=True), perceptron()
    assert "no step yet" in repr(scales)
    grads = stepped(model, torch.randn(4, 4))
    scales.update(grads)
    kept = scales.noise_scale(), scales.snr()
    for wrong in (grads.select(slice(1)), grads.scaled(torch.tensor([1.0, torch.inf, 1, 1]))):
        with pytest.raises(ValueError, match=r"two samples|not finite"):
            scales.update(wrong)
    assert_close((scales.noise_scale(), scales.snr()), kept)
