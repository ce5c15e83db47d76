"""What a record is and how long it lives: training loops of every kind read the rows they should."""

import threading

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, squares
from steps import assert_means, assert_right, batch, mlp, step
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks


def test_an_evaluation_between_backward_and_reading_changes_nothing(model: nn.Module) -> None:
    step(model, *batch())
    model(batch(7)[0])
    with torch.no_grad():
        model(batch(8)[0])
    with torch.inference_mode():
        model(batch(9)[0])
    assert_right(model, *batch())


def test_an_exception_in_the_middle_of_a_forward(model: nn.Sequential) -> None:
    x, y = batch()
    step(model, *batch(seed=1))
    with pytest.raises(RuntimeError, match="shape"):
        model[2](model[0](x)[:, :3])
    model.zero_grad()
    step(model, x, y)
    assert_right(model, x, y)


def test_two_models_in_two_threads() -> None:
    models, wrong = [mlp(), mlp()], []

    def train(model: nn.Module, offset: int) -> None:
        try:
            for seed in range(offset, offset + 20):
                x, y = torch.full((4, 3), seed, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
                model.zero_grad()
                step(model, x, y)
                autograd_hacks.compute_grad1(model)
                assert_means(model)
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
        assert all(p.grad1.shape == (n, *p.shape) for p in model.parameters())


def test_samples_that_are_not_finite_or_not_there_through_a_convolution() -> None:
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), torch.randn(4, 1, 4, 4)
    x[2] = torch.nan
    with autograd_hacks.add_hooks(model):
        for samples in (x, x[:0]):
            squares(model(samples)).mean().backward()
            autograd_hacks.compute_grad1(model)
            for p in model.parameters():
                assert p.grad1.flatten(1).isnan().any(1).tolist() == [False, False, True, False][: len(samples)]
            model.zero_grad()


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
    assert_rows(model, rows)


def test_a_refusal_leaves_no_older_rows_behind(model: nn.Module) -> None:
    x, y = batch()
    step(model, x, y)
    autograd_hacks.compute_grad1(model)
    step(model, x, y)
    x.zero_()
    with pytest.raises(autograd_hacks.errors.StaleRecord):
        autograd_hacks.compute_grad1(model)
    assert not any(hasattr(p, "grad1") for p in model.parameters())
