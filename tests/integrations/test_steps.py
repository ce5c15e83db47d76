"""Steps in a loop of one's own: micro-batches, loss scaling, mixed precision, running means, interrupts."""

import copy
from collections.abc import Callable
from functools import partial
from math import isfinite

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from rarely import crossed
from torch.testing import assert_close
from trained import LR, MAX_NORM, N, check, data, net, of_many, rows_of, same
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import NothingRecorded, SamplesMixed
from autograd_hacks.integrations.steps import Steps, mean_of


def trained(
    model: nn.Module,
    steps: Steps,
    parts: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    unscales: bool = False,
    autocast: bool = False,
    summed: bool = False,
) -> nn.Module:
    """Three steps, each of so many micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR / (N if summed else 1))
    steps.attach(model)
    for x, y in zip(*(part.split(N) for part in data())):
        optimizer.zero_grad()
        for part, target in zip(x.split(N // parts), y.split(N // parts)):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = F.cross_entropy(model(part), target, reduction="sum" if summed else "mean")
            loss = loss if summed else loss / parts
            (loss if scaler is None else scaler.scale(loss)).backward()
        if unscales and scaler is not None:
            scaler.unscale_(optimizer)
        steps.read(scaler)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    steps.detach()
    return model


@crossed(max_norm=[MAX_NORM, None], parts=[4, 1])
@pytest.mark.parametrize("scales", [None, "scaled", "unscaled"])
def test_steps_are_those_of_single_samples(scales: str | None, max_norm: float | None, parts: int) -> None:
    model, steps = net(), Steps(max_norm)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2) if scales else None
    after = trained(copy.deepcopy(model), steps, parts, scaler, scales == "unscaled")
    check(model, after, steps.history, steps.norms, max_norm)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_losses_by_backward(dtype: torch.dtype, rtol: float) -> None:
    model, steps, (x, y) = net().to(dtype), Steps(MAX_NORM), data()
    x = x.to(dtype)
    norms = rows_of(model, x[:N], y[:N]).norm(dim=1)
    for sizes, loss_type, share in (([N], "mean", 1), ([4] * 4, "mean", 4), ([6, 10], "sum", N)):
        model.zero_grad()
        steps.attach(model)
        for part, target in zip(x[:N].split(sizes), y[:N].split(sizes)):
            autograd_hacks.backward(F.cross_entropy(model(part), target, reduction="none") / share, loss_type)
        steps.read()
        assert_close(steps.norms, norms)
    model.zero_grad()
    steps.attach(model)
    for part, target in zip(x.split([20, 28]), y.split([20, 28])):  # each is as much of the step as the other
        autograd_hacks.backward(F.cross_entropy(model(part), target, reduction="none") / 2)
    found = steps.read()
    mean = torch.cat([p.grad.flatten() for p in model.parameters()])
    steps.detach()
    rows = rows_of(model, x, y) * torch.tensor([48 / 40] * 20 + [48 / 56] * 28, dtype=dtype)[:, None]
    assert_close(steps.norms, rows.norm(dim=1), rtol=rtol, atol=rtol)
    assert_close(mean, (rows * (MAX_NORM / rows.norm(dim=1)).clamp(max=1)[:, None]).mean(0))
    assert abs(found["grads/noise"] / rows.var(0).sum().item() - 1) < 1e-4


def test_sums() -> None:
    model, steps = net(), Steps(MAX_NORM, loss_type="sum")
    check(model, trained(copy.deepcopy(model), steps, 4, summed=True), steps.history, steps.norms)


def test_mixed_precision() -> None:
    model = net()
    one, four = Steps(MAX_NORM), Steps(MAX_NORM)
    after = trained(copy.deepcopy(model), one, 1, autocast=True)
    same(after, trained(copy.deepcopy(model), four, 4, autocast=True), 1e-2)
    check(model, after, one.history, one.norms, rtol=0.05)


@pytest.mark.parametrize("unscales", [False, True])
def test_an_overflow_is_skipped(unscales: bool) -> None:
    model, steps, scaler = net(), Steps(MAX_NORM), torch.amp.GradScaler("cpu", init_scale=2.0**127)
    before, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=LR)
    steps.attach(model)
    x, y = (part[:N] for part in data())
    scaler.scale(1e3 * F.cross_entropy(model(x), y)).backward()
    if unscales:
        scaler.unscale_(optimizer)
    assert "grads/noise" not in steps.read(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**127
    same(model, before, 0)


def test_the_noise_scale_is_a_ratio_of_running_means() -> None:
    model, steps = net(), Steps(smoothing=0.5, per_parameter=True)
    trained(model, steps, 2)
    noise = signal = 0.0
    for found in steps.history:  # what corrects for the start is in both
        noise, signal = ((old + found[key]) / 2 for old, key in ((noise, "grads/noise"), (signal, "grads/signal")))
        if signal > 0:
            assert abs(found["grads/noise_scale"] / (noise / signal) - 1) < 1e-6
    names = [name for name, _ in model.named_parameters()]
    assert all(f"grads/noise_scale/{name}" in steps.history[0] for name in names)


def test_hooks_of_the_users_stay() -> None:
    model, steps = net(), Steps()
    autograd_hacks.add_hooks(model)
    steps.attach(model)
    model(data()[0]).sum().backward()
    steps.detach()
    model(data()[0]).square().sum(1).mean().backward()
    assert autograd_hacks.per_sample_grads(model).samples == len(data()[0])


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="no model is attached"):
        Steps().read()
    for name, wrong in {"max_norm": 0, "smoothing": 1, "loss_type": "most"}.items():
        with pytest.raises(ValueError, match=name):
            Steps(**{name: wrong})
    with pytest.raises(TypeError, match=r"max_norm='1'; expected a number"):
        Steps("1")  # type: ignore[arg-type]  # what is refused
    steps, model = Steps(), net()
    steps.attach(model)
    with pytest.raises(NothingRecorded):
        steps.read()
    model(data()[0]).square().sum(1).mean().backward()  # goes on
    assert steps.read()["grads/samples"] == len(data()[0])
    monkeypatch.setattr("autograd_hacks.integrations.steps.per_sample_grads", of_many)
    model(data()[0]).square().sum(1).mean().backward()
    with pytest.raises(NotImplementedError, match="a step's gradients: the sum would cover one process"):
        steps.read()


def test_what_would_be_stepped_unclipped() -> None:
    model, head = net(), nn.Linear(3, 3)
    both = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=LR)
    alone = torch.optim.SGD(head.parameters(), lr=LR)
    with pytest.raises(ValueError, match=r"2 parameters outside .*\(3, 3\), \(3,\).*not be clipped"):
        Steps(MAX_NORM).attach(model, both)
    with pytest.raises(ValueError, match="not be clipped"):
        Steps(MAX_NORM).attach(model, torch.optim.SGD(model.parameters()), both)
    assert not any(layer._forward_hooks for layer in model.modules())
    for steps, optimizers in ((Steps(None), [both]), (Steps(MAX_NORM), [torch.optim.SGD(model.parameters()), alone])):
        steps.attach(model, *optimizers)
        steps.detach()
    head.requires_grad_(False)
    steps = Steps(MAX_NORM)
    steps.attach(model, both)
    steps.detach()


def test_means_for_a_logger() -> None:
    logs = mean_of([{"a": 1.0, "grads/norm_max": 3.0, "grads/noise_scale": 5.0}, {"a": 2.0, "grads/norm_max": 2.0}])
    assert logs == {"a": 1.5, "grads/norm_max": 3.0, "grads/noise_scale": 5.0}
    assert mean_of([]) == {}
    assert not isfinite(mean_of([{"a": float("inf")}])["a"])


@pytest.mark.parametrize("max_norm", [MAX_NORM, None])
def test_only_what_is_clipped_must_be_independent(max_norm: float | None) -> None:
    centred, steps = Bare(lambda m, h: h - h.mean(0).detach()), Steps(max_norm)  # of values, by a way without gradient
    model = nn.Sequential(nn.Linear(4, 3), centred, nn.Linear(3, 2))
    steps.attach(model)
    for _ in range(3):
        model.zero_grad()
        model(torch.randn(6, 4)).square().mean().backward()
        if max_norm is None:
            assert steps.read()["grads/samples"] == 6
            continue
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(SamplesMixed, match="by the laws of operations"):
            steps.read()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), before))
    steps.detach()


STEP = "autograd_hacks: no loss_type was given, so a row is a sample's part in the step's gradient"
LOSSES: dict[str, tuple[Callable[..., None], int, str | None, str]] = {
    # how a backward pass runs, the number of micro-batches, the loss_type, and what is said
    "a mean": (lambda losses: losses.mean().backward(), 1, None, STEP),
    "a sum": (lambda losses: losses.sum().backward(), 1, None, STEP),
    "undivided losses": (autograd_hacks.backward, 2, None, STEP),
    "a sum of losses": (partial(autograd_hacks.backward, loss_type="sum"), 1, None, STEP),
    "losses": (autograd_hacks.backward, 1, None, ""),
    "a told mean": (lambda losses: losses.mean().backward(), 2, "mean", ""),
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_assumed_of_losses_is_said_once_a_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (backward, parts, loss_type, said), model, (x, y) = LOSSES[name], net(), data()
    steps, told = Steps(loss_type=loss_type), list[str]()
    for _ in range(2):
        steps.attach(model)
        for _ in range(2):
            for part, target in zip(x.chunk(parts), y.chunk(parts)):
                backward(F.cross_entropy(model(part), target, reduction="none"))
            steps.read()
            told.append(capsys.readouterr().err[: len(STEP)])
        steps.detach()
    assert told == [said, "", said, ""]
