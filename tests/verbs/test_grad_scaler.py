"""Clipping a scaled loss's gradients: a GradScaler's steps after it are those without a scale."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from oracle import clipped, squares
from rarely import crossed
from refused import check_each
from steps import mlp, rows_of
from torch import Tensor
from torch.amp import GradScaler
from torch.testing import assert_close

import autograd_hacks

MAX_NORM = 1.0


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "fused Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, fused=True),
}


def stepped_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """By the mean of the clipped gradients, from one backward pass for each sample.  Returns the norms."""
    norms, grads = clipped(rows_of(model, x, y), MAX_NORM, len(x))
    for name, p in model.named_parameters():
        p.grad = grads[name]
    optimizer.step()
    return norms


@crossed(optimizer=OPTIMIZERS, unscales=[False, True], param_grad=[True, False])
@pytest.mark.parametrize("options", [{"init_scale": 2.0**10}, {"init_scale": 2.0**127}, {"enabled": False}])
def test_steps_are_those_without_a_scale(
    options: dict[str, float], optimizer: str, unscales: bool, param_grad: bool
) -> None:
    model = mlp().float()
    plain = copy.deepcopy(model)
    scaler = GradScaler("cpu", growth_interval=3, **options)
    ours, theirs = OPTIMIZERS[optimizer](model), OPTIMIZERS[optimizer](plain)
    skipped = 0
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(12):
            x, y = torch.randn(6, 3), torch.randn(6, 2)
            ours.zero_grad()
            scaler.scale(squares(model(x), y).mean()).backward()
            norms = autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler)
            if unscales:
                scaler.unscale_(ours)
            before = scaler.get_scale()
            scaler.step(ours)
            scaler.update()
            if scaler.get_scale() < before:
                assert not norms.isfinite().all()
                skipped += 1
            else:
                assert_close(norms, stepped_by_hand(plain, theirs, x, y))
            assert_close(list(model.parameters()), list(plain.parameters()))
    assert 0 < skipped < 9 if options.get("init_scale") == 2.0**127 else not skipped


def test_one_overflow_skips_the_steps_of_all_optimizers() -> None:
    model, x = mlp().float(), torch.randn(6, 3)
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    scaler = GradScaler("cpu", init_scale=2.0)
    before = [p.detach().clone() for p in model.parameters()]
    with autograd_hacks.add_hooks(model):
        out = model(x)
        out.register_hook(lambda g: g.index_fill(0, torch.tensor(2), torch.inf))
        scaler.scale(out.sum(1).mean()).backward()
        norms = autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler)
        assert (~norms.isfinite()).nonzero().tolist() == [[2]]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0
    assert all(map(torch.equal, model.parameters(), before))


def stepped(model: nn.Module, scaler: GradScaler) -> None:
    scaler.scale(squares(model(torch.randn(6, 3))).mean()).backward()


def test_clipping_after_unscaling_is_refused() -> None:
    model, other = mlp().float(), mlp().float()
    mine, theirs = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, other))
    scaler = GradScaler("cpu", init_scale=8.0)
    with autograd_hacks.add_hooks(model):
        stepped(model, scaler)
        scaler.unscale_(mine)
        grads = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(RuntimeError, match=r"after scaler\.unscale_\(optimizer\)"):
            autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads))
        scaler.step(mine)
        scaler.update()
        stepped(other, scaler)
        scaler.unscale_(theirs)
        scaler.step(theirs)  # of another model, and done with
        mine.zero_grad()
        stepped(model, scaler)
        autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler)
        scaler.step(mine)
        scaler.update()


def test_a_number_is_refused_where_grad_is_set() -> None:
    model, scaler = mlp().float(), GradScaler("cpu", init_scale=8.0)
    with autograd_hacks.add_hooks(model):
        stepped(model, scaler)
        kept = [p.grad for p in model.parameters()]
        for scale in (8.0, torch.tensor(8.0)):
            with pytest.raises(ValueError, match="Leave scale out"):
                autograd_hacks.compute_grad1(model, scale=scale, set_grad=True)
        check_each((TypeError, "GradScaler", lambda: autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=8.0)))
        assert all(p.grad is grad for p, grad in zip(model.parameters(), kept))
        autograd_hacks.compute_grad1(model, scale=8.0)
        norms = torch.stack([p.grad1.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)
        assert_close(autograd_hacks.clip_grad1_norm_(model, MAX_NORM, scaler=scaler), norms)


def test_grad_as_backward_would_have_left_it() -> None:
    model, scaler = mlp().float(), GradScaler("cpu", init_scale=8.0)
    plain = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain))
    with autograd_hacks.add_hooks(model, param_grad=False):
        for _ in range(3):
            x, y = torch.randn(6, 3), torch.randn(6, 2)
            scaler.scale(squares(model(x), y).mean()).backward()
            autograd_hacks.compute_grad1(model, set_grad=True)
            scaler.step(mine)
            scaler.update()
            theirs.zero_grad()
            squares(plain(x), y).mean().backward()
            theirs.step()
            assert_close(list(model.parameters()), list(plain.parameters()))
