"""A noisy gradient that something changes before the optimizer's step, or that is stepped by twice, is refused."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn as nn
from private_steps import LR, STEPS, assert_by_hand, by_hand, dataset, losses, net, train, training
from private_steps import data as numbers
from rarely import crossed
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.private.stepping import PART, NoisyGrads

CHANGED = "is not the one of private step"
Change = Callable[[Iterable[nn.Parameter]], object]


def epoch(
    change: Change = lambda _: None,
    model: nn.Sequential | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> nn.Sequential:
    """The documentation's loop, with something between the private step and the optimizer's."""
    model = net() if model is None else model
    train(training(), model, optimizer, between=lambda: change(model.parameters()), **options)
    return model


def changed_if(clips: bool) -> AbstractContextManager[Any]:
    return pytest.raises(RuntimeError, match=CHANGED) if clips else nullcontext()


def of_all(change: Callable[[nn.Parameter], object]) -> Change:
    return lambda parameters: [change(p) for p in parameters]


def replaced(p: nn.Parameter, factor: float) -> None:
    assert p.grad is not None
    p.grad = p.grad * factor


def first_entry(parameters: Iterable[nn.Parameter]) -> None:
    next(iter(parameters)).grad.flatten()[:1].mul_(1 + 1e-6)  # type: ignore[union-attr]


CHANGES: dict[str, Change] = {
    "clip_grad_norm_": lambda own: torch.nn.utils.clip_grad_norm_(own, 0.1),
    "clip_grad_value_": lambda own: torch.nn.utils.clip_grad_value_(own, 0.01),
    "clamped data": of_all(lambda p: p.grad.data.clamp_(-0.01, 0.01)),  # type: ignore[union-attr]
    "another tensor": of_all(lambda p: replaced(p, 0.5)),
    "another sign": of_all(lambda p: p.grad.neg_()),  # type: ignore[union-attr]
    "another order": of_all(lambda p: p.grad.copy_(p.grad.flip(0))),  # type: ignore[union-attr, arg-type]
    "noise taken off one number": first_entry,
}


@crossed(name=CHANGES, options=[{}, {"parts": 3}])
def test_a_noisy_gradient_that_something_changes_is_refused(name: str, options: dict[str, Any]) -> None:
    model, before = net(), net()
    with pytest.raises(RuntimeError, match=CHANGED) as raised:
        epoch(CHANGES[name], model, **options)
    assert "clip_grad_norm_" in str(raised.value)
    assert "'0.weight'" in str(raised.value)
    assert_close(model.state_dict(), before.state_dict(), rtol=0, atol=0)  # before anything was changed by it


SAME: dict[str, Change] = {
    "its norm is measured, as trainers do": lambda own: torch.nn.utils.clip_grad_norm_(own, float("inf")),
    "a copy": of_all(lambda p: replaced(p, 1.0)),
}


@pytest.mark.parametrize("name", SAME)
def test_a_noisy_gradient_that_stays_is_stepped_by(name: str) -> None:
    assert_by_hand(epoch(SAME[name]))


def test_two_steps_by_one_noisy_gradient_are_refused() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(RuntimeError, match=r"a second time .* private step 0"):
        epoch(lambda _: optimizer.step(), model, optimizer)


def test_two_optimizers_share_a_noisy_gradient_if_they_share_no_parameters() -> None:
    private, model = training(), net()
    optimizers = [torch.optim.SGD(layer.parameters(), lr=LR) for layer in (model[0], model[2])]
    with private.attach(model, *optimizers):
        for x, y in private.loader(dataset()):
            private.backward(losses(model, x, y))
            private.step()
            for optimizer in optimizers:
                optimizer.step()
    assert_by_hand(model)


def test_a_gradient_without_noise_is_refused() -> None:
    """Of the parameters' optimizer, whether or not it was attached, and until the model is detached."""
    private, model = training(), net()
    optimizer, other = torch.optim.SGD(model.parameters(), lr=LR), nn.Linear(2, 2)
    with private.attach(model):
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with pytest.raises(RuntimeError, match=r"without noise, of '0\.weight'"):
            optimizer.step()
        other(torch.randn(3, 2)).sum().backward()
        torch.optim.SGD(other.parameters(), lr=LR).step()  # another model's
    optimizer.step()


def test_an_old_gradient_of_a_frozen_parameter_is_refused() -> None:
    private, model = training(), net()
    model(torch.randn(4, model[0].in_features)).sum().backward()
    model[2].requires_grad_(False).zero_grad()
    model[0].requires_grad_(False)
    model[2].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with private.attach(model, optimizer):
        x, y = next(iter(private.loader(dataset())))
        private.backward(losses(model, x, y))
        private.step()
        with pytest.raises(RuntimeError, match=r"without noise, of '0\.weight'"):
            optimizer.step()


class Clips(torch.optim.Optimizer):
    """Gives its step to another optimizer, as ZeroRedundancyOptimizer does, and may clip before."""

    def __init__(self, inner: torch.optim.Optimizer, clips: bool) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.clips = inner, clips

    def step(self, closure: Any = None) -> Any:
        if self.clips:
            torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 0.1)
        return self.inner.step(closure)


@pytest.mark.parametrize("clips", [False, True])
def test_an_optimizer_within_an_optimizer(clips: bool) -> None:
    model = net()
    optimizer = Clips(torch.optim.SGD(model.parameters(), lr=LR), clips)
    with changed_if(clips):
        assert_by_hand(epoch(model=model, optimizer=optimizer))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own, at import
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("how", ["a closure", "a named closure", "compiled"])
def test_a_private_step_within_the_optimizers_closure_or_before_a_compiled_step(clips: bool, how: str) -> None:
    """As Lightning does it."""
    private, model = training(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    step = torch.compile(optimizer.step, backend="aot_eager")
    with private.attach(model, optimizer), changed_if(clips):
        for x, y in private.loader(dataset()):

            def closure(x: Any = x, y: Any = y) -> float:
                own = losses(model, x, y)
                private.backward(own)
                private.step()
                if clips:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                return float(own.detach().sum())

            if how == "compiled":
                _ = closure(), step()
            else:
                assert optimizer.step(closure=closure) if how == "a named closure" else optimizer.step(closure)
        assert_by_hand(model)


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=LR),
    "fused": lambda model: torch.optim.SGD(model.parameters(), lr=LR, fused=True),  # it unscales in its own step
}


WAYS = ["in its step", "before", "before, clipped", "forgotten by the private step", "left out"]
SCALES = [(2.0**10, torch.float32), (1000.0, torch.float32), (1000.0, torch.float64)]


@crossed(way=WAYS, scales=SCALES, kind=KINDS)
def test_a_scaler_divides_once(way: str, scales: tuple[float, torch.dtype], kind: str) -> None:
    (scale, width), private = scales, training()
    model = net().to(width)
    optimizer, scaler = KINDS[kind](model), torch.amp.GradScaler("cpu", init_scale=scale)
    with private.attach(model, optimizer), changed_if(way not in ("in its step", "before")):
        for x, y in private.loader(dataset(), parts=2):
            private.backward(losses(model, x.to(width), y), scaler)
            whole = private.step() if way == "forgotten by the private step" else private.step(scaler=scaler)
            if whole is None:
                continue
            if "before" in way:
                scaler.unscale_(optimizer)
            if "clipped" in way:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            if way == "left out":
                optimizer.step()
            scaler.step(optimizer)
            scaler.update()
        expected = by_hand(net().to(width), numbers()[0].to(width), numbers()[1], STEPS)
        assert_close(model.state_dict(), expected.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("way", ["a sum", "losses"])
def test_a_scaled_backward_pass_of_ones_own_needs_the_scale(way: str, told: bool) -> None:
    private, model = training(loss_type="sum" if way == "a sum" else None), net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=LR), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    refused = nullcontext() if told else pytest.raises(ValueError, match="a backward pass of your own")
    with private.attach(model, optimizer), refused:
        for x, y in private.loader(dataset(), parts=2):
            own = losses(model, x, y)
            scaler.scale(own.sum()).backward() if way == "a sum" else autograd_hacks.backward(scaler.scale(own), "sum")
            if private.step(scaler.get_scale() if told else None, scaler) is not None:
                scaler.step(optimizer)
                scaler.update()
        assert_by_hand(model, rtol=1e-4, atol=1e-5)


def test_it_ends_with_the_training_and_holds_nothing() -> None:
    private, model = training(), net()
    private.attach(model)
    again = copy.deepcopy(private.state_dict())
    kept = weakref.ref(model)
    del private, model  # never detached
    gc.collect()
    assert kept() is None
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    private = training()
    private.load_state_dict(again)
    with private.attach(model, optimizer):
        pass
    model(torch.randn(3, 4)).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.step()


@crossed(kind=[torch.float32, torch.float64, torch.bfloat16, torch.complex64], size=[1, 2, 2 * PART + 3])
def test_any_change_of_any_number_is_seen(size: int, kind: torch.dtype) -> None:
    model = nn.ParameterList([torch.zeros(size, dtype=kind)])
    p, kept = model[0], NoisyGrads(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for n in {0, size // 2, size - 1}:
        p.grad = torch.randn(size, dtype=kind)
        kept.note(0)
        p.grad[n] *= 1.01
        with pytest.raises(RuntimeError, match=CHANGED):
            optimizer.step()
    p.grad = torch.randn(size, dtype=kind)
    kept.note(1)
    optimizer.step()
    kept.close()
