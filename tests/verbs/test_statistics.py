"""Noise, signal, directions and functions of rows against their formulas on rows of one backward pass per sample."""

import json
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn
from nets import perceptron, with_spare
from oracle import joined, squares
from rarely import crossed
from steps import rows_of, stepped
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.attribution import NoiseScales
from autograd_hacks.verbs.statistics import NoiseScale

pytestmark = pytest.mark.usefixtures("double")

Rows = dict[str, Tensor]


def rows_and_grads() -> tuple[Rows, autograd_hacks.PerSampleGrads]:
    model, x = perceptron(), torch.randn(6, 4)
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
    with pytest.raises(ValueError, match="variance over samples is ambiguous"):
        of_outputs()[1].noise_scale()


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


def test_scaled_rows() -> None:
    rows, grads = rows_and_grads()
    w, users = torch.randn(6, requires_grad=True), torch.tensor([0, 1, 0, 1, 2, 2])
    grads.scaled(w).norms().sum().backward()
    assert_close(w.grad, w.detach().sign() * joined(rows).norm(dim=1))
    w = w.detach()
    found, expected = grads.scaled(w), {n: own * w.view(-1, *[1] * (own.ndim - 1)) for n, own in rows.items()}
    flat = joined(expected)
    assert_close(found.dense(), expected)
    assert_close(found.norms(), flat.norm(dim=1))
    assert_close(found.gram(grads), flat @ joined(rows).mT)
    mean = {name: own.mean(0) for name, own in expected.items()}
    variance = {name: own / 5 for name, own in found.second_moment(about=mean).items()}
    assert_close(variance, {name: own.var(0) for name, own in expected.items()})
    assert_close(found.group(users).norms(), torch.zeros(3, flat.shape[1]).index_add(0, users, flat).norm(dim=1))
    with pytest.raises(ValueError, match="N = 6"):
        grads.scaled(torch.ones(5))


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
    scales, model = NoiseScales(BETA), perceptron()
    assert "no step yet" in repr(scales)
    grads = stepped(model, torch.randn(4, 4))
    scales.update(grads)
    kept = scales.noise_scale()
    for wrong in (grads.select(slice(1)), grads.scaled(torch.tensor([1.0, torch.inf, 1, 1]))):
        with pytest.raises(ValueError, match=r"two samples|not finite"):
            scales.update(wrong)
    assert_close(scales.noise_scale(), kept)


# Sums of functions of rows against a loop over samples, and what is refused as no elementwise function


Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, Function] = {
    "sign": torch.sign,
    "abs": torch.abs,
    "clamp": lambda g: g.clamp(-0.1, 0.2),
    "square": torch.square,
    "itself": lambda g: g,
    "a constant": torch.ones_like,
    "tanh": lambda g: torch.tanh(3 * g),
    "how many": lambda g: g > 0.05,
    "numbers that aren't finite": torch.log,
}


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Conv1d(3, 3, 2), nn.Flatten(), nn.Linear(9, 2))


def looped(model: nn.Module, x: Tensor, f: Function, ids: Tensor | None = None) -> dict[str, Tensor]:
    """f of each row, or of the sum of each group's, one after the other."""
    total = {}
    for name, rows in rows_of(model, x).items():
        parts = rows if ids is None else [rows[ids == own].sum(0) for own in ids.unique()]
        total[name] = sum(f(part).double() for part in parts)
    return total


@crossed(max_bytes=[1, 2**26], what=FUNCTIONS)
def test_sums_are_those_of_a_loop(what: str, max_bytes: int) -> None:
    model, x, f = convolutions(), torch.randn(7, 2, 5), FUNCTIONS[what]
    expected = looped(model, x, f)
    found = stepped(model, x).reduce(f, max_bytes)
    assert list(found) == list(expected)
    assert_close(found, expected, equal_nan=True)  # double


@pytest.mark.parametrize("max_bytes", [1, 2**26])
def test_groups_are_added_up_first(max_bytes: int) -> None:
    model, x, ids = convolutions(), torch.randn(7, 2, 5), torch.tensor([4, 1, 1, 4, 9, 1, 4])
    expected = looped(model, x, torch.sign, ids)
    grads = stepped(model, x)
    assert_close(grads.group(ids).reduce(torch.sign, max_bytes), expected)
    each = grads.reduce(torch.sign)
    assert any(not torch.equal(each[name], expected[name]) for name in expected)


def test_of_no_samples_the_sum_is_zero() -> None:
    none = stepped(perceptron(), torch.randn(6, 4)).select(slice(0))
    for name, total in none.reduce(torch.cos).items():
        assert total.shape == none[name].shape
        assert not total.any()
    (empty,) = none.group(torch.zeros(0, dtype=torch.long), 2).select(slice(1)).reduce(torch.cos)["0.bias"].unique()
    assert empty == 1  # a group without samples has a row of zeros


def test_complex_parameters() -> None:
    model, x = nn.Linear(3, 2, dtype=torch.complex128), torch.randn(5, 3, dtype=torch.complex128)
    rows, grads = rows_of(model, x), stepped(model, x)
    for f in (torch.abs, torch.sgn):
        assert_close(grads.reduce(f), {name: f(own).sum(0) for name, own in rows.items()})


def test_half_precision_is_added_up_in_single() -> None:
    model, x = nn.Linear(3, 2).bfloat16(), torch.rand(300, 3).bfloat16() + 1
    autograd_hacks.add_hooks(model)
    model(x).sum(1).mean().backward()
    found = autograd_hacks.per_sample_grads(model).reduce(torch.sign)
    expected = {name: torch.full(p.shape, 300, dtype=torch.float32) for name, p in model.named_parameters()}
    assert_close(found, expected)  # which bfloat16 doesn't have


def test_sums_can_be_differentiated() -> None:
    torch.manual_seed(0)
    grads = stepped(perceptron(), torch.randn(6, 4))
    w = torch.rand(6, requires_grad=True)
    sum(total.sum() for total in grads.scaled(w).reduce(torch.abs).values()).backward()
    assert_close(w.grad, sum(own.flatten(1).abs().sum(1) for own in grads.dense().values()))


MIXING: dict[str, Function] = {
    "rows of length one": lambda g: g / g.norm(dim=1, keepdim=True),
    "about the mean": lambda g: g - g.mean(0),
    "over the largest": lambda g: g / g.abs().max(),
    "ranks": lambda g: g.flatten().argsort().argsort().view_as(g).to(g.dtype),
    "softmax": lambda g: g.softmax(1),
    "the largest of each row": lambda g: g == g.amax(1, keepdim=True),
    "noise": lambda g: g + torch.randn_like(g),
}


@crossed(max_bytes=[1, 2**26], what=MIXING)
def test_what_mixes_numbers_is_refused(what: str, max_bytes: int) -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=r"changes with the other numbers .* elementwise one"):
        stepped(convolutions(), torch.randn(7, 2, 5)).reduce(MIXING[what], max_bytes)


def test_a_function_that_overwrites_rows_is_refused_and_changes_none() -> None:
    grads = stepped(perceptron(), torch.randn(6, 4))
    kept = grads.dense()
    with pytest.raises(ValueError, match="overwrote"):
        grads.reduce(lambda g: g.clamp_(-1, 1))
    assert_close(grads.dense(), kept, rtol=0, atol=0)
