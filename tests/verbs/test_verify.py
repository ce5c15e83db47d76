"""`verify`: what it finds wrong, and what it must not."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from nets import Between, Noisy
from oracle import squares
from rarely import crossed, rarely
from steps import batch, mlp, step
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.forms import Form
from autograd_hacks.formulas import RULES, Call
from autograd_hacks.reading import gate


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
    model, x = mlp(), torch.randn(4, 5, 3).double()
    formula = RULES[nn.Linear].formula

    def wrong(layer: nn.Module, call: Call) -> dict[str, Form]:
        inner, g = mistake(call.args[0], call.grads[0])
        return formula(layer, dataclasses.replace(call, args=(inner,), grads=(g,)))

    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        grads = [p.grad.clone() for p in model.parameters()]
        autograd_hacks.compute_grad1(model)
        rows = [p.grad1.clone() for p in model.parameters()]
        autograd_hacks.verify(model, rows=4)
        monkeypatch.setitem(vars(RULES[nn.Linear]), "formula", wrong)  # another rule would be refused
        monkeypatch.setattr(gate.Certificate, "check", lambda _: None)  # which comes first
        with pytest.raises(autograd_hacks.errors.VerificationFailed, match=r"(?s)wrong per-sample gradients.*0\.weight"):
            autograd_hacks.verify(model)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))  # as they were
        assert all(torch.equal(p.grad1, own) for p, own in zip(model.parameters(), rows))


def test_verify_of_dropout_and_of_what_was_never_run() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), Noisy(4)).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        with pytest.raises(autograd_hacks.errors.NothingRecorded, match="needs the arguments"):
            autograd_hacks.verify(model)
        squares(model(x)).mean().backward()
        autograd_hacks.verify(model, rows=4)


def dropped(m: nn.Module, x: Tensor) -> Tensor:
    """Layers are skipped at random."""
    for layer in m.layers:
        x = x if torch.rand(()) < 0.5 else x + layer(x).relu()
    return m.out(x)


def test_verify_runs_the_step_that_was() -> None:
    torch.manual_seed(1)
    model = Bare(dropped, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), out=nn.Linear(8, 2)).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(8):
            model.zero_grad()
            x = torch.randn(16, 5, 8).double()
            model(x).square().sum().backward()
            state = torch.get_rng_state()
            autograd_hacks.verify(model)
            assert torch.equal(torch.get_rng_state(), state)


def test_verify_keeps_no_batch_and_takes_another(model: nn.Sequential) -> None:
    step(model, *batch())
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match=r"no longer exist.*verify\(model, args=\(x,\)\)"):
        autograd_hacks.verify(model)
    x, _ = batch(seed=1)
    autograd_hacks.verify(model, rows=2, args=(x,))
    autograd_hacks.verify(model, rows=2, kwargs={"input": x})


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@crossed(dtype=DTYPES, under_autocast=[False, True])
def test_verify_passes_what_is_right_in_every_precision(dtype: torch.dtype, under_autocast: bool) -> None:
    for samples in (3, 17):
        model = nn.Sequential(
            nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        )
        auto = under_autocast and dtype in (torch.bfloat16, torch.float16)
        model, x = (
            model.to(torch.float32 if auto else dtype),
            torch.randn(samples, 5, 3).to(torch.float32 if auto else dtype),
        )
        with autograd_hacks.add_hooks(model), torch.autocast("cpu", dtype if auto else None, enabled=auto):
            model(x).float().square().mean().backward()
            autograd_hacks.verify(model, rows=2)
            autograd_hacks.verify(model)


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda h: h - h.mean(0),
    "detached": lambda h: h + h.roll(len(h) // 2, 0).detach(),
    "detached a little": lambda h: h + 0.05 * h.flip(0).detach(),
    "attention": lambda h: (h @ h.T).softmax(1) @ h,
}


@pytest.mark.parametrize("dtype", [DTYPES[0], *rarely(*DTYPES[1:])])
@pytest.mark.parametrize("what", MIXING)
def test_verify_refuses_what_mixes_in_every_precision(what: str, dtype: torch.dtype) -> None:
    for samples in (3, 4, 17):
        for auto in (False, True) if dtype in DTYPES[2:] else (False,):
            used = torch.float32 if auto else dtype
            model, x = Between(MIXING[what]).to(used), torch.randn(samples, 3).to(used)
            with autograd_hacks.add_hooks(model), torch.autocast("cpu", dtype if auto else None, enabled=auto):
                model(x).float().square().mean().backward()
                with pytest.raises(autograd_hacks.errors.SamplesMixed):
                    autograd_hacks.verify(model, independent="detached" in what)
