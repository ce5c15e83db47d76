"""What a program may do around a step: precisions, scalers, devices without memory, many steps."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from leaks import live_tensors
from nets import Choosy, Noisy, Patched
from oracle import assert_rows, one_backward_per_sample, squares
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks
from autograd_hacks.forms import Form
from autograd_hacks.reading import gate, replay
from autograd_hacks.rules import RULES, Call


class Scaled(nn.Module):
    """A rule, a replay and a lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale, self.positions = nn.Linear(3, 4), nn.Parameter(torch.randn(4)), nn.Embedding(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.positions(torch.arange(x.shape[1]))) * self.scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_precisions(dtype: torch.dtype) -> None:
    model, x = Scaled().to(dtype), torch.randn(4, 5, 3).to(dtype)
    exact = Scaled().double()
    exact.load_state_dict(model.state_dict())
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
        for (name, p), rows in zip(model.named_parameters(), one_backward_per_sample(exact, squares, x.double()).values()):
            assert p.grad1.dtype == dtype, name
            tolerance = 30 * torch.finfo(dtype).eps
            assert_close(p.grad1.double(), rows, rtol=tolerance, atol=tolerance * float(rows.abs().max()), msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_rules_and_replays(dtype: torch.dtype) -> None:
    model, x = Scaled(), torch.randn(4, 5, 3)
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            with torch.autocast("cpu", dtype):
                out = model(x)
            squares(out.float()).mean().backward()
            autograd_hacks.compute_grad1(model)
            for p in model.parameters():
                assert p.grad1.dtype == torch.float32
                assert_close(p.grad1.mean(0), p.grad, rtol=0.05, atol=0.05 * float(p.grad.abs().max()))
    with torch.autocast("cpu", dtype):  # the probe must not leave weights without gradients in autocast's memory
        with autograd_hacks.add_hooks(Scaled()) as _:
            pass
        fresh = Scaled()
        with autograd_hacks.add_hooks(fresh):
            squares(fresh(x).float()).mean().backward()
            assert all(p.grad is not None for p in fresh.parameters())


def test_the_scale_of_a_grad_scaler_is_divided_out() -> None:
    for model in (Scaled().double(), nn.Sequential(nn.Linear(3, 3), Choosy()).double()):
        x = torch.randn(4, 5, 3).double() if isinstance(model, Scaled) else torch.randn(4, 3).double()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        with autograd_hacks.add_hooks(model):
            for kind in (float, torch.tensor):
                model.zero_grad()
                scaler.scale(squares(model(x)).mean()).backward()
                autograd_hacks.compute_grad1(model, scale=kind(scaler.get_scale()))
                with autograd_hacks.pause_hooks():
                    assert_rows(model, one_backward_per_sample(model, squares, x))


def test_meta_tensors_have_shapes() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(3, 4), Noisy(4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(5, 6, 3)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert p.grad1.is_meta
            assert p.grad1.shape == (5, *p.shape)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_module_that_is_replayed(reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(3, 3), Noisy().eval()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=reentrant)

    model, x = Model().double().eval(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_backward_per_sample(model, squares, x))


@pytest.mark.parametrize(
    ("step", "times"),
    [
        (lambda model, x: squares(model(x)).mean().backward(), 1000),
        (lambda model, x: model(x), 1000),
        (lambda model, x: (squares(model(x)).mean().backward(), autograd_hacks.compute_grad1(model)), 100),
    ],
    ids=["steps", "forwards", "read steps"],
)
def test_many_steps_leave_nothing_behind(step: Callable[[nn.Module, Tensor], object], times: int) -> None:
    model, tokens = Patched(), torch.randint(7, (4, 3))
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            step(model, tokens)
        before = live_tensors()
        for _ in range(times):
            step(model, tokens)
        assert live_tensors() <= before


def test_no_attribute_on_layers_or_parameters_but_grad1() -> None:
    model, tokens = Patched(), torch.randint(7, (4, 3))
    before = [sorted(vars(module)) for module in model.modules()]
    with autograd_hacks.add_hooks(model):
        squares(model(tokens)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert [sorted(vars(module)) for module in model.modules()] == before
        assert {name for p in model.parameters() for name in vars(p)} == {"grad1"}
    assert {name for p in model.parameters() for name in vars(p)} == set()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def swapped(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x[[1, 0, *range(2, len(x))]], g[[1, 0, *range(2, len(g))]]


def permuted_fold(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Positions as T·N where they are N·T, in input and gradient alike: the sum of the rows stays right."""
    return tuple(t.flatten(0, 1).unflatten(0, t.shape[1::-1]).transpose(0, 1).reshape(t.shape) for t in (x, g))


def mixed_pair(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return x, torch.cat([g[:2].mean(0, keepdim=True).expand_as(g[:2]), g[2:]]) if x.ndim == 2 else swapped(x, g)[1]


@pytest.mark.parametrize("mistake", [swapped, permuted_fold, mixed_pair])
def test_verify_fails_what_is_wrong(
    mistake: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(4, 5, 3).double()
    rule = RULES[nn.Linear]

    def wrong(layer: nn.Module, call: Call) -> dict[str, Form]:
        inner, g = mistake(call.args[0], call.grads[0])
        return rule(layer, dataclasses.replace(call, args=(inner,), grads=(g,)))

    vars(wrong)["features"] = vars(rule)["features"]
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        autograd_hacks.compute_grad1(model)
        rows = [p.grad1.clone() for p in model.parameters()]
        autograd_hacks.verify(model, samples=4)
        monkeypatch.setitem(RULES, nn.Linear, wrong)
        monkeypatch.setattr(gate, "check_sum", lambda *_: None)  # which comes first
        with pytest.raises(autograd_hacks.errors.VerificationFailed, match=r"0\.weight +weighted sum of rows"):
            autograd_hacks.verify(model)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))  # as they were
        assert all(torch.equal(p.grad1, own) for p, own in zip(model.parameters(), rows))


def test_verify_of_dropout_and_of_what_was_never_run() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), Noisy(4)).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        with pytest.raises(autograd_hacks.errors.NothingRecorded, match="needs the arguments"):
            autograd_hacks.verify(model)
        squares(model(x)).mean().backward()
        autograd_hacks.verify(model, samples=4)


def test_replays_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = Patched().double(), torch.randint(7, (5, 3))
    monkeypatch.setattr(replay, "BUDGET", 200)
    with autograd_hacks.add_hooks(model):
        squares(model(tokens)).mean().backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, tokens))
