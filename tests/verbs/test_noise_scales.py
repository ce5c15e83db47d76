"""Noise and signal over training against exponential means made by hand, from rows of one backward pass per sample."""

import copy
import json

import pytest
import torch
from nets import perceptron
from oracle import one_backward_per_sample, squares
from steps import stepped
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks import NoiseScales
from autograd_hacks.verbs.statistics import NoiseScale

BETA = 0.9
Rows = dict[str, Tensor]


def trained(scales: NoiseScales, steps: int = 4, seed: int = 0) -> list[Rows]:
    """Steps of another batch size each.  Returns each step's rows."""
    torch.manual_seed(seed)
    model, rows = perceptron().double(), []
    plain = copy.deepcopy(model)
    autograd_hacks.add_hooks(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        x = torch.randn(5 + step, 4, dtype=torch.float64)
        plain.load_state_dict(model.state_dict())
        rows.append({n: own for n, own in one_backward_per_sample(plain, squares, x).items() if own is not None})
        optimizer.zero_grad()
        squares(model(x)).mean().backward()
        scales.update(autograd_hacks.per_sample_grads(model))
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
        assert_close(each[name].noise, noise)
        assert_close(each[name].signal, signal)
        assert_close(each[name].scale, noise / signal)
    layers = scales.noise_scale("layer")
    assert list(layers) == ["0", "2"]
    assert_close(layers["2"].noise, expected["2.weight"][0] + expected["2.bias"][0])
    assert_close(layers["2"].signal, expected["2.weight"][1] + expected["2.bias"][1])
    noise, signal = (sum(own[k] for own in expected.values()) for k in (0, 1))
    assert_close(scales.noise_scale().scale, noise / signal)
    for line in ("0", "2", "all"):
        assert f"\n{line} " in repr(scales)


def test_a_signal_below_zero_has_an_infinite_scale() -> None:
    scales = NoiseScales(BETA)
    scales._take({"0.weight": (4.0, -0.5), "2.weight": (1.0, 0.1), "4.weight": (0.0, 0.0)})
    table = str(scales)
    lines = {line.split("  ")[0].strip(): line for line in table.split("\n")}
    assert lines["0"].rstrip().endswith("signal not seen yet")
    assert lines["all"].rstrip().endswith("signal not seen yet")
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
    noise = sum(own.var(0).sum() for own in rows.values())
    assert_close(scales.noise_scale().noise, noise)


def test_signal_to_noise_is_the_ratio_of_both_means() -> None:
    scales = NoiseScales(BETA, elementwise=True)
    steps = trained(scales)
    for name, found in scales.snr().items():
        noise, signal = by_hand([rows[name] for rows in steps])
        assert_close(found, signal / noise)
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
    assert_close(scales.noise_scale("parameter")["b"].noise, torch.tensor(5.0, dtype=torch.float64))
    assert_close(scales.noise_scale("parameter")["a"].noise, torch.tensor((0.9 + 3) / 1.9, dtype=torch.float64))


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
