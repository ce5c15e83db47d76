"""What newcomers do wrong, and the section that each error names."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_errors import POINTER

import autograd_hacks
from autograd_hacks import errors
from autograd_hacks.support.pages import explained

X, Y = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1])


def net(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Linear(4, 2))


def hooked(*layers: nn.Module) -> nn.Module:
    autograd_hacks.add_hooks(model := net(*layers))
    return model


def no_hooks() -> None:
    autograd_hacks.compute_grad1(net())


def no_model() -> None:
    autograd_hacks.add_hooks(lambda x: x)


def no_backward() -> None:
    model = hooked()
    model(X)
    autograd_hacks.per_sample_grads(model)


def hooks_after_the_forward() -> None:
    loss = (model := net())(X).sum()
    autograd_hacks.add_hooks(model)
    loss.backward()
    autograd_hacks.compute_grad1(model)


def without_gradients() -> None:
    model = hooked()
    with torch.no_grad():
        model(X)
    autograd_hacks.compute_grad1(model)


def hooks_off() -> None:
    model = hooked()
    with autograd_hacks.pause_hooks():
        model(X).sum().backward()
    autograd_hacks.compute_grad1(model)


def read_twice() -> None:
    model = hooked()
    model(X).sum().backward()
    autograd_hacks.compute_grad1(model)
    model(X)
    autograd_hacks.compute_grad1(model)


def batch_norm() -> None:
    model = hooked(nn.BatchNorm1d(4))
    F.cross_entropy(model(X), Y).backward()
    autograd_hacks.compute_grad1(model)


def overwritten() -> None:
    model, x = hooked(), X.clone()
    model(x).sum().backward()
    x.zero_()
    autograd_hacks.compute_grad1(model)


def read_after_overwriting() -> None:
    model, x = hooked(), X.clone()
    model(x).sum().backward()
    grads = autograd_hacks.per_sample_grads(model)
    x.zero_()
    grads.norms()


def two_passes() -> None:
    model = hooked()
    for x in X.split(2):
        model(x).sum().backward()
    autograd_hacks.compute_grad1(model)


def accumulate_within() -> None:
    model = hooked()
    with autograd_hacks.accumulate(model), autograd_hacks.accumulate(model):
        pass


def another_reduction() -> None:
    model = hooked()
    model(X).sum().backward()
    autograd_hacks.compute_grad1(model, loss_type="average")


def a_mean_that_is_called_a_sum() -> None:
    model = hooked()
    autograd_hacks.backward(model(X).sum(1))
    autograd_hacks.compute_grad1(model, loss_type="sum")


def a_scalar() -> None:
    autograd_hacks.backward(hooked()(X).sum())


def losses_that_are_too_few() -> None:
    autograd_hacks.backward(hooked()(X)[:2].sum(1))


def a_penalty() -> None:
    model = hooked()
    (model(X).sum() + model[0].weight.square().sum()).backward()
    autograd_hacks.compute_grad1(model)


def a_gradient_by_a_function_of_ones_own() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, weight = ctx.saved_tensors
            return grad @ weight.T, x.T @ grad

    class Own(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Product.apply(x, self.weight).tanh() + self.bias

    model, x = Own(3, 3), X.clone().requires_grad_()
    autograd_hacks.add_hooks(model)
    torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].square().sum().backward()
    autograd_hacks.compute_grad1(model)


def a_model_of_one_batch_alone() -> None:
    class Picky(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.equal(x, X):
                raise KeyError("another batch")
            return super().forward(x)

    model = nn.Sequential(Picky(3, 2))
    autograd_hacks.add_hooks(model, independent=True)
    model(X)


def nothing_to_step_by() -> None:
    model = net()
    autograd_hacks.add_hooks(model, param_grad=False)
    model(X).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def a_bias_that_is_no_input() -> None:
    model = hooked(nn.Sequential(nn.Unflatten(1, (4, 1)), nn.ConvTranspose1d(4, 4, 1), nn.Flatten()))
    autograd_hacks.backprop_hess(model(X))
    autograd_hacks.compute_hess(model, kind="kfac", kfac_bias="joint")


def a_block_too_large() -> None:
    model = hooked()
    autograd_hacks.backprop_hess(model(X))
    autograd_hacks.compute_hess(model, kind="full", limit=8)


def a_scale() -> None:
    model = hooked()
    model(X).sum().backward()
    autograd_hacks.clip_grad1_norm_(model, 1.0, scale=2.0)


def gradients() -> autograd_hacks.PerSampleGrads:
    model = hooked()
    model(X).sum().backward()
    return autograd_hacks.per_sample_grads(model)


def a_direction_that_is_a_list() -> None:
    gradients().dot([X])  # type: ignore[call-overload]


def too_few_weights() -> None:
    gradients().weighted_sum(torch.ones(3))


def groups_of_floats() -> None:
    gradients().group(torch.ones(4))


def a_variance_of_outputs() -> None:
    model = hooked()
    autograd_hacks.per_sample_jacobian(model, model(X)).variance()


def chunks_of_none() -> None:
    model = hooked()
    autograd_hacks.per_sample_jacobian(model, model(X), chunk_size=0)


def clipping_to_nothing() -> None:
    model = hooked()
    model(X).sum().backward()
    autograd_hacks.clip_grad1_norm_(model, max_norm=0.0)


def another_curvature() -> None:
    model = hooked()
    autograd_hacks.backprop_hess(model(X), hess_type="Cross")


MISTAKES: list[tuple[Callable[[], None], type[Exception], str]] = [
    (no_hooks, errors.NothingRecorded, "The model has no hooks"),
    (no_model, TypeError, "The model has no hooks"),
    (no_backward, errors.NothingRecorded, "Nothing was recorded"),
    (hooks_after_the_forward, errors.UnseenGradient, "Gradient by another way"),
    (without_gradients, errors.NothingRecorded, "Nothing was recorded"),
    (hooks_off, errors.NothingRecorded, "Nothing was recorded"),
    (read_twice, errors.NothingRecorded, "Nothing was recorded"),
    (batch_norm, errors.SamplesMixed, "Samples that mix"),
    (overwritten, errors.StaleRecord, "Something was overwritten"),
    (read_after_overwriting, errors.StaleRecord, "Something was overwritten"),
    (two_passes, errors.NothingRecorded, "Several backward passes"),
    (accumulate_within, RuntimeError, "Several backward passes"),
    (another_reduction, ValueError, "How the loss is reduced"),
    (a_mean_that_is_called_a_sum, ValueError, "How the loss is reduced"),
    (a_scalar, ValueError, "How the loss is reduced"),
    (losses_that_are_too_few, errors.BatchSizeError, "Another number of samples"),
    (a_penalty, errors.UnseenGradient, "Gradient by another way"),
    (a_gradient_by_a_function_of_ones_own, errors.HigherOrderError, "What is refused"),
    (a_model_of_one_batch_alone, errors.ProbeFailed, "A model that can't be probed"),
    (nothing_to_step_by, errors.ParamGradSkipped, "No ordinary gradients"),
    (a_bias_that_is_no_input, errors.UnsupportedLayer, "No rule for a layer"),
    (a_block_too_large, errors.BlockTooLarge, "What can be had"),
    (a_direction_that_is_a_list, TypeError, "What verbs are given"),
    (too_few_weights, ValueError, "What verbs are given"),
    (groups_of_floats, TypeError, "What verbs are given"),
    (a_variance_of_outputs, ValueError, "Noise and signal"),
    (chunks_of_none, ValueError, "Rows of outputs"),
    (clipping_to_nothing, ValueError, "Clipping"),
    (another_curvature, ValueError, "What can be had"),
    (a_scale, ValueError, "A GradScaler"),
]


@pytest.mark.parametrize(("mistake", "kind", "section"), MISTAKES, ids=lambda x: getattr(x, "__name__", None))
def test_what_newcomers_meet_names_its_page(mistake: Callable[[], None], kind: type[Exception], section: str) -> None:
    with pytest.raises(kind) as raised:
        mistake()
    [name] = POINTER.findall(str(raised.value))
    assert errors.EXPLAINED[name][0] == section
    assert explained(name).startswith(f"{section}\n")


def sums(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).sum(1)


def test_files_of_other_rows_name_their_page(tmp_path: Path) -> None:
    model, out = hooked(), tmp_path / "rows.npy"
    autograd_hacks.over(model, X.split(2), sums, autograd_hacks.PerSampleGrads.norms, out=out)
    with pytest.raises(ValueError, match="in another order") as raised:
        autograd_hacks.over(model, X.flip(0).split(2), sums, autograd_hacks.PerSampleGrads.norms, out=out)
    assert POINTER.findall(str(raised.value)) == ["a-whole-data-set"]
