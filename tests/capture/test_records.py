"""What a record is and how long it lives: training loops of every kind read the rows they should."""

import gc
import threading
import weakref

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from steps import assert_right, batch, mlp, step
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks


def test_a_plain_training_loop_needs_no_clearing(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(3):
        optimizer.zero_grad()
        step(model, *batch(seed=seed))
        assert_right(model, *batch(seed=seed))
        for p in model.parameters():
            assert_close(p.grad1.mean(0), p.grad)
        optimizer.step()


def test_reading_every_third_step_reads_that_step(model: nn.Module) -> None:
    for seed in range(6):
        step(model, *batch(4 + seed, seed))
        if seed % 3 == 2:
            assert_right(model, *batch(4 + seed, seed))


def test_reading_twice_gives_the_same(model: nn.Module) -> None:
    step(model, *batch())
    assert_right(model, *batch())
    assert_right(model, *batch())


def test_an_evaluation_between_backward_and_reading_changes_nothing(model: nn.Module) -> None:
    step(model, *batch())
    model(batch(7)[0])
    with torch.no_grad():
        model(batch(8)[0])
    with torch.inference_mode():
        model(batch(9)[0])
    assert_right(model, *batch())


def test_what_was_read_is_freed_when_the_next_forward_begins(model: nn.Module) -> None:
    x, y = batch()
    loss = squares(model(x), y).mean()
    loss.backward()
    del loss
    (record,) = (hook.recorder for hook in model._forward_pre_hooks.values() if hasattr(hook, "recorder"))
    with torch.no_grad():
        model(x)
    model(x)  # not read yet
    autograd_hacks.compute_grad1(model)
    with torch.no_grad():
        model(x)
    autograd_hacks.compute_grad1(model)  # read, but no backward pass can come after a forward like that
    activation = weakref.ref(record.segments[0])
    output = model(x)
    assert activation() is None
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match="has been read already"):
        autograd_hacks.compute_grad1(model)
    squares(output, y).mean().backward()
    autograd_hacks.compute_grad1(model)


def test_what_was_read_is_kept_where_another_pass_may_add_to_it(model: nn.Module) -> None:
    x, y = batch()
    output = model(x)
    squares(output, y).mean().backward(retain_graph=True)
    autograd_hacks.compute_grad1(model)
    once = [p.grad1.clone() for p in model.parameters()]
    model(x)
    squares(output, y).mean().backward()
    autograd_hacks.compute_grad1(model)
    for p, rows in zip(model.parameters(), once):
        assert_close(p.grad1, 2 * rows)


def test_a_retained_graph_run_twice_adds(model: nn.Module) -> None:
    x, y = batch()
    loss = squares(model(x), y).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    autograd_hacks.compute_grad1(model)
    assert_rows(model, one_backward_per_sample(model, lambda out, y: 2 * squares(out, y), x, y))
    for p in model.parameters():
        assert_close(p.grad1.mean(0), p.grad)


def test_two_losses_on_separate_branches_of_one_forward_add() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.left(x), self.right(x)

    model, (x, y) = Branches().double(), batch()
    with autograd_hacks.add_hooks(model):
        left, right = model(x)
        squares(left, y).mean().backward()
        squares(right, y).mean().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert_close(p.grad1.mean(0), p.grad)


def test_an_input_gradient_before_the_training_step_does_not_leak_into_it(model: nn.Module) -> None:
    x, y = batch()
    x.requires_grad_()
    loss = squares(model(x), y).mean()
    torch.autograd.grad(loss, x, retain_graph=True)
    (adversarial,) = torch.autograd.grad(squares(model(x), y).mean(), x)
    loss.backward()
    assert_right(model, x, y)
    step(model, x + adversarial, y)
    assert_right(model, x + adversarial, y)


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
    second.mean().backward()
    assert_right(model, *batch(seed=1))


def test_layers_called_by_themselves(model: nn.Sequential) -> None:
    for seed in range(3):
        x, y = batch(4 + seed, seed)
        hidden = model[1](model[0](x))
        squares(model[2](hidden), y).mean().backward()
    assert_right(model, x, y)


def test_alternating_gan_steps() -> None:
    generator, critic = mlp(), nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    autograd_hacks.add_hooks(generator)
    autograd_hacks.add_hooks(critic)

    def score(out: Tensor) -> Tensor:
        return out.flatten(1).sum(1)

    for seed in range(2):
        noise, real = batch(seed=seed)
        fake = generator(noise).detach()
        score(critic(torch.cat([real, -fake]))).mean().backward()
        autograd_hacks.compute_grad1(critic)
        both = torch.cat([real, -fake])
        with autograd_hacks.pause_hooks():
            assert_rows(critic, one_backward_per_sample(critic, score, both))

        score(critic(generator(noise))).mean().backward()
        autograd_hacks.compute_grad1(generator)
        with autograd_hacks.pause_hooks():
            rows = one_backward_per_sample(generator, lambda out: score(critic(out)), noise)
        assert_rows(generator, rows)


def test_an_exception_in_the_middle_of_a_forward(model: nn.Sequential) -> None:
    x, y = batch()
    step(model, *batch(seed=1))
    with pytest.raises(RuntimeError, match="shape"):
        model[2](model[0](x)[:, :3])
    step(model, x, y)
    assert_right(model, x, y)


def test_an_exception_in_the_middle_of_a_backward(model: nn.Sequential) -> None:
    x, y = batch()
    hidden = model[0](x)
    hidden.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        squares(model[2](hidden), y).mean().backward()
    with pytest.raises(autograd_hacks.errors.NothingRecorded, match="not run to its end"):
        autograd_hacks.compute_grad1(model)
    step(model, x, y)
    assert_right(model, x, y)


def test_one_hooked_model_while_another_runs(model: nn.Module) -> None:
    other = mlp()
    step(model, *batch())
    step(other, *batch(7, 1))
    assert_right(model, *batch())
    assert not hasattr(next(other.parameters()), "grad1")


def test_two_models_in_two_threads() -> None:
    models, wrong = [mlp(), mlp()], []

    def train(model: nn.Module, offset: int) -> None:
        try:
            for seed in range(offset, offset + 20):
                x, y = torch.full((4, 3), seed, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
                model.zero_grad()
                step(model, x, y)
                autograd_hacks.compute_grad1(model)
                for p in model.parameters():
                    assert_close(p.grad1.mean(0), p.grad)
        except BaseException as error:
            wrong.append(error)
            raise

    for model in models:
        autograd_hacks.add_hooks(model)
    threads = [threading.Thread(target=train, args=(model, 100 * n)) for n, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_batch_of_one_and_of_none(model: nn.Module) -> None:
    for n in (1, 0):
        step(model, *batch(n))
        assert_right(model, *batch(n))
        for p in model.parameters():
            assert p.grad1.shape == (n, *p.shape)


def test_an_empty_batch_through_a_convolution() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2))
    with autograd_hacks.add_hooks(model):
        model(torch.zeros(0, 2, 4, 4)).sum().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert p.grad1.shape == (0, *p.shape)


def test_a_nan_stays_in_its_row() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), torch.randn(4, 1, 4, 4)
    x[2] = torch.nan
    with autograd_hacks.add_hooks(model):
        model(x).pow(2).sum(1).mean().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert p.grad1.flatten(1).isnan().any(1).tolist() == [False, False, True, False]


def test_frozen_parameters_have_no_grad1_and_unreached_ones_none(model: nn.Sequential) -> None:
    x, y = batch()
    step(model, x, y)
    autograd_hacks.compute_grad1(model)
    model[0].weight.requires_grad_(False)
    step(model, x, y)
    autograd_hacks.compute_grad1(model)
    assert not hasattr(model[0].weight, "grad1")
    assert_close(model[0].bias.grad1.mean(0).shape, model[0].bias.shape)
    squares(model[2](torch.ones(5, 4, dtype=torch.float64)), y).mean().backward()
    autograd_hacks.compute_grad1(model)
    assert model[0].bias.grad1 is None
    assert model[2].bias.grad1 is not None


def test_torch_func_on_a_hooked_model_is_no_record(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return squares(torch.func.functional_call(model, parameters, x[None]), y[None]).sum()

    rows = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x, y)
    assert_right(model, x, y)
    for name, p in model.named_parameters():
        assert_close(p.grad1, rows[name])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_recomputes_and_that_is_no_forward(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
            self.block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.block, self.first(x), use_reentrant=use_reentrant))

    model = Checkpointed().double()
    with autograd_hacks.add_hooks(model):
        for seed in range(3):
            x, y = batch(4 + seed, seed)
            step(model, x, y)
        assert_right(model, x, y)


def test_nothing_piles_up_over_steps_or_forwards_without_a_backward(model: nn.Module) -> None:
    def live() -> int:
        gc.collect()
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    def run(times: int) -> None:
        for _ in range(times):
            step(model, *batch())
            model(batch()[0])
        model.zero_grad()

    run(3)
    before = live()
    run(1000)
    assert live() <= before


def test_a_record_goes_with_its_model() -> None:
    model = mlp()
    autograd_hacks.add_hooks(model)
    step(model, *batch())
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("read", ["nothing", "grad1", "clip", "hess"])
def test_a_hooked_model_that_is_dropped_is_freed(read: str, param_grad: bool) -> None:
    """Also with a record that nobody has read, and without remove_hooks."""
    model = mlp()
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    for _ in range(2):
        output = model(batch()[0])
        if read == "hess":
            autograd_hacks.backprop_hess(output)
            autograd_hacks.compute_hess(model)
        else:
            output.sum().backward()
        if read == "grad1":
            autograd_hacks.compute_grad1(model)
        if read == "clip":
            autograd_hacks.clip_grad1_norm_(model, 1.0)
    parameters = [weakref.ref(p) for p in model.parameters()]
    del model, output
    gc.collect()
    assert not any(p() is not None for p in parameters)
