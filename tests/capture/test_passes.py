"""Several losses, forwards and models: which backward passes belong together."""

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from steps import assert_means, assert_right, batch, mlp, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import NothingRecorded


@pytest.mark.parametrize("by", ["a weight", "the input"])
def test_autograd_grad_before_the_training_step_is_not_added_to_it(model: nn.Sequential, by: str) -> None:
    x, y = batch()
    x.requires_grad_()
    loss = squares(model(x), y).mean()
    torch.autograd.grad(loss, model[2].weight if by == "a weight" else x, retain_graph=True)
    torch.autograd.grad(squares(model(x), y).mean(), x)
    loss.backward()
    assert_right(model, x, y)
    assert_means(model)


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
                squares(head(features)).mean().backward(retain_graph=True)
            autograd_hacks.compute_grad1(model)
            assert_means(model)


@pytest.mark.parametrize("order", [(0, 2), (2, 0)])
def test_losses_at_several_steps_of_an_unrolled_cell(order: tuple[int, int]) -> None:
    cell, x = nn.GRUCell(2, 3).double(), torch.randn(4, 3, 2).double()
    with autograd_hacks.add_hooks(cell):
        h, losses = None, []
        for t in range(3):
            h = cell(x[:, t], h)
            losses.append(squares(h).mean())
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
    assert_means(model)


def test_unrelated_forwards_of_layers_that_are_called_by_themselves() -> None:
    parts = nn.ModuleDict({"encode": nn.Linear(4, 5), "read": nn.Linear(5, 2), "other": nn.Linear(5, 2)}).double()

    with autograd_hacks.add_hooks(parts):
        hidden = [parts["encode"](torch.randn(n, 4).double()) for n in (6, 3)]
        outs = [parts["read"](h) for h in hidden]
        late = parts["other"](hidden[0])
        squares(outs[0]).mean().backward(retain_graph=True)
        for out, samples in ((outs[1], 3), (late, 6)):
            parts.zero_grad()
            squares(out).mean().backward()
            autograd_hacks.compute_grad1(parts)
            assert_means(parts)
            assert {len(p.grad1) for p in parts.parameters() if p.grad1 is not None} == {samples}


def test_two_hooked_models_that_share_layers() -> None:
    encoder = mlp()
    actor, critic = nn.Sequential(encoder, nn.Linear(2, 3).double()), nn.Sequential(encoder, nn.Linear(2, 1).double())
    autograd_hacks.add_hooks(actor)
    autograd_hacks.add_hooks(critic)
    x, _ = batch()
    for model in (actor, critic, actor):
        model.zero_grad()
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert_close(p.grad1.mean(0), p.grad)


def test_autograd_grad_to_some_parameters_records_those(model: nn.Sequential) -> None:
    x, y = batch()
    (expected,) = torch.autograd.grad(squares(model(x), y).mean(), [model[0].weight])
    autograd_hacks.compute_grad1(model)
    assert_close(model[0].weight.grad1.mean(0), expected)
    assert model[0].bias.grad1 is None
    assert model[2].weight.grad1 is None

    squares(model(x), y).mean().backward(inputs=[model[2].bias])
    autograd_hacks.compute_grad1(model)
    assert model[0].weight.grad1 is None
    assert_close(model[2].bias.grad1.mean(0), model[2].bias.grad)


def test_two_forwards_in_one_loss_add(model: nn.Module) -> None:
    (x, y), (z, _) = batch(), batch(seed=1)
    (squares(model(x), y) + squares(model(z), y)).mean().backward()
    autograd_hacks.compute_grad1(model)
    both = torch.cat([x, z], 1)

    def run(pairs: Tensor) -> Tensor:
        return torch.cat([model(pairs[:, :3]), model(pairs[:, 3:])], 1)

    expected = one_backward_per_sample(model, lambda out, y: squares(out[:, :2], y) + squares(out[:, 2:], y), both, y, run)
    assert_rows(model, expected)


def test_a_backward_from_a_later_forward_replaces(model: nn.Module) -> None:
    first, second = squares(model(batch()[0]), batch()[1]), squares(model(batch(seed=1)[0]), batch(seed=1)[1])
    first.mean().backward()
    model.zero_grad()
    second.mean().backward()
    assert_right(model, *batch(seed=1))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_passes_that_add_up_in_grad_and_not_in_rows_are_refused(model: nn.Module, set_to_none: bool) -> None:
    """As a trainer accumulates gradients, without ``accumulate``."""
    for read in (autograd_hacks.compute_grad1, lambda model: autograd_hacks.clip_grad1_norm_(model, 1.0)):
        model.zero_grad(set_to_none=set_to_none)
        for seed in range(3):
            step(model, *batch(seed=seed))
        with pytest.raises(NothingRecorded, match=r"an earlier backward pass was not read.*accumulate\(model\).*zero_grad"):
            read(model)
        model.zero_grad(set_to_none=set_to_none)
        step(model, *batch())
        assert_right(model, *batch())
    # Each pass was read, or thrown away, or both are of one forward.
    for seed in range(2):
        step(model, *batch(seed=seed))
        assert_right(model, *batch(seed=seed))
    step(model, *batch())
    autograd_hacks.clear_backprops(model)
    step(model, *batch(seed=1))
    assert_right(model, *batch(seed=1))
    with autograd_hacks.pause_hooks():
        model[0].weight.square().sum().backward()
    step(model, *batch())
    assert_right(model, *batch())


def test_alternating_gan_steps() -> None:
    generator, critic = mlp(), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    autograd_hacks.add_hooks(generator)
    autograd_hacks.add_hooks(critic)

    for seed in range(2):
        noise, real = batch(seed=seed)
        fake = generator(noise).detach()
        squares(critic(torch.cat([real, -fake]))).mean().backward()
        autograd_hacks.compute_grad1(critic)
        both = torch.cat([real, -fake])
        with autograd_hacks.pause_hooks():
            assert_rows(critic, one_backward_per_sample(critic, squares, both))

        squares(critic(generator(noise))).mean().backward()
        autograd_hacks.compute_grad1(generator)
        with autograd_hacks.pause_hooks():
            rows = one_backward_per_sample(generator, lambda out: squares(critic(out)), noise)
        assert_rows(generator, rows)
