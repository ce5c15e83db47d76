"""Several losses, forwards and models: which backward passes belong together."""

import gc

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from steps import assert_right, batch, mlp, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.capture.records import Visit


def test_autograd_grad_before_the_training_step_is_not_added_to_it(model: nn.Sequential) -> None:
    x, y = batch()
    loss = squares(model(x), y).mean()
    torch.autograd.grad(loss, model[2].weight, retain_graph=True)
    loss.backward()
    assert_right(model, x, y)
    for p in model.parameters():
        assert_close(p.grad1.mean(0), p.grad)


class Methods(nn.Module):
    """Run through a method of its own, never called itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def encode(self, x: Tensor) -> Tensor:
        return self.layers[2](torch.tanh(self.layers[0](x)))


def test_forwards_and_backwards_of_a_model_that_is_run_through_methods() -> None:
    model = Methods()
    (x, y), (z, t) = batch(4), batch(4, 1)
    with autograd_hacks.add_hooks(model):
        first, second = squares(model.encode(x), y).mean(), squares(model.encode(z), t).mean()
        first.backward()
        second.backward()
        autograd_hacks.compute_grad1(model)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, z, t, model.encode))
        with autograd_hacks.accumulate(model):
            first, second = squares(model.encode(x), y).mean(), squares(model.encode(z), t).mean()
            first.backward()
            second.backward()
        autograd_hacks.compute_grad1(model)
        both = torch.cat([x, z]), torch.cat([y, t])
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, squares, *both, model.encode))


def test_batched_gradients_are_no_record(model: nn.Module) -> None:
    x, y = batch(4)
    parameters = list(model.parameters())
    losses = squares(model(x), y)
    torch.autograd.grad(losses, parameters, torch.eye(4, dtype=torch.float64), is_grads_batched=True)
    step(model, x, y)
    assert_right(model, x, y)


def test_heads_with_backward_passes_of_their_own() -> None:
    """Each is called after the backward of the one before; all come through the same trunk."""
    model = nn.ModuleDict({"trunk": nn.Linear(3, 4), "left": nn.Linear(4, 2), "right": nn.Linear(4, 2)}).double()
    for seed in range(2):
        x, _ = batch(5, seed)
        model.zero_grad()
        with autograd_hacks.add_hooks(model):
            features = model["trunk"](x).tanh()
            for head in (model["left"], model["right"]):
                head(features).pow(2).sum(1).mean().backward(retain_graph=True)
            autograd_hacks.compute_grad1(model)
            for p in model.parameters():
                assert_close(p.grad1.mean(0), p.grad)


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_losses_at_several_steps_of_an_unrolled_cell(order: tuple[int, int]) -> None:
    cell, x = nn.GRUCell(2, 3).double(), torch.randn(4, 3, 2).double()
    with autograd_hacks.add_hooks(cell):
        h, losses = None, []
        for t in range(3):
            h = cell(x[:, t], h)
            losses.append(h.pow(2).sum(1).mean())
        for t in order:
            losses[t].backward(retain_graph=True)
        autograd_hacks.compute_grad1(cell)
        for p in cell.parameters():
            assert_close(p.grad1.mean(0), p.grad)


def test_a_loss_and_then_the_sum_of_it_and_a_later_ones(model: nn.Module) -> None:
    (x, y), (z, t) = batch(), batch(seed=1)
    first = squares(model(x), y).mean()
    first.backward(retain_graph=True)
    (first + squares(model(z), t).mean()).backward()
    autograd_hacks.compute_grad1(model)
    for p in model.parameters():
        assert_close(p.grad1.mean(0), p.grad)


def test_micro_batches_with_two_losses_each_in_any_order(model: nn.Module) -> None:
    (x, y), (z, t) = batch(4), batch(3, 1)
    with autograd_hacks.accumulate(model):
        one, other = squares(model(x), y), squares(model(z), t)
        autograd_hacks.backward(one, retain_graph=True)
        autograd_hacks.backward(other)
        autograd_hacks.backward(one)
    autograd_hacks.compute_grad1(model)
    twice = torch.cat([torch.full((4, 1), 2.0), torch.ones(3, 1)]).double()
    with autograd_hacks.pause_hooks():
        expected = one_backward_per_sample(
            model,
            lambda out, y: squares(out, y[:, :2]) * y[:, 2],
            torch.cat([x, z]),
            torch.cat([torch.cat([y, t]), twice], 1),
        )
    assert_rows(model, expected)


def test_unrelated_forwards_of_layers_that_are_called_by_themselves() -> None:
    parts = nn.ModuleDict({"encode": nn.Linear(4, 5), "read": nn.Linear(5, 2), "other": nn.Linear(5, 2)}).double()

    def loss(out: Tensor) -> Tensor:
        return out.square().sum(1).mean()

    with autograd_hacks.add_hooks(parts):
        hidden = [parts["encode"](torch.randn(n, 4).double()) for n in (6, 3)]
        outs = [parts["read"](h) for h in hidden]
        late = parts["other"](hidden[0])
        loss(outs[0]).backward(retain_graph=True)
        for out, samples in ((outs[1], 3), (late, 6)):
            parts.zero_grad()
            loss(out).backward()
            autograd_hacks.compute_grad1(parts)
            for p in parts.parameters():
                assert (p.grad1 is None) == (p.grad is None)
                if p.grad is not None:
                    assert p.grad1.shape[0] == samples
                    assert_close(p.grad1.mean(0), p.grad)


def test_losses_that_are_kept_do_not_keep_the_inputs() -> None:
    def visits() -> int:
        gc.collect()
        return sum(type(thing) is Visit for thing in gc.get_objects())

    model, kept, before = mlp(), [], visits()
    with autograd_hacks.add_hooks(model):
        for seed in range(4):
            x, y = batch(seed=seed)
            kept.append(squares(model(x), y).mean())
            kept[-1].backward()
            assert_right(model, x, y)
        assert visits() == before + 2  # the last step's two layers


def test_two_hooked_models_that_share_layers() -> None:
    encoder = mlp()
    actor, critic = nn.Sequential(encoder, nn.Linear(2, 3).double()), nn.Sequential(encoder, nn.Linear(2, 1).double())
    autograd_hacks.add_hooks(actor)
    autograd_hacks.add_hooks(critic)
    x, _ = batch()
    for model in (actor, critic, actor):
        model.zero_grad()
        model(x).pow(2).sum(1).mean().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert_close(p.grad1.mean(0), p.grad)
