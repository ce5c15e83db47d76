"""Rows of outputs: what is refused."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from nets import Checkpointed, LossesInside, perceptron
from torch import Tensor

import autograd_hacks
from autograd_hacks import per_sample_jacobian
from autograd_hacks.errors import BatchSizeError, NothingRecorded, SamplesMixed

pytestmark = pytest.mark.usefixtures("double")


def test_outputs_in_which_samples_have_no_place() -> None:
    model, tokens = LossesInside("mean"), torch.randint(7, (3, 4))
    with autograd_hacks.add_hooks(model):
        out = model(tokens, tokens)
        for number in (out["losses"], out["losses"].view(1), out["logits"].mean()):
            with pytest.raises((SamplesMixed, BatchSizeError)):
                per_sample_jacobian(model, number, retain_graph=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out - out.mean(0),
        lambda out: out.flip(0),
        lambda out: out @ out.mT,
        lambda out: out[:, :3].mT,
        lambda out: out.sum(0).expand(3, -1),
        lambda out: out[[0, 1, 1]],
    ],
)
def test_functions_of_outputs_that_mix_samples(change: Callable[[Tensor], Tensor]) -> None:
    model, x = perceptron(), torch.randn(3, 4)
    with autograd_hacks.add_hooks(model), pytest.raises(SamplesMixed, match="axis 0"):
        per_sample_jacobian(model, change(model(x)))


def test_another_number_of_samples() -> None:
    model, x = perceptron(), torch.randn(4, 4)
    with autograd_hacks.add_hooks(model):
        for change in (lambda out: out[:2], lambda out: out.flatten(), lambda out: out.mT):
            with pytest.raises(BatchSizeError, match="axis 0"):
                per_sample_jacobian(model, change(model(x)))


def test_a_model_that_mixes_samples() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            out = self.inner(x)
            return out - out.mean(0)

    model = Mixes()
    with autograd_hacks.add_hooks(model):
        for change in (lambda out: out, torch.tanh):
            with pytest.raises(SamplesMixed):
                per_sample_jacobian(model, change(model(torch.randn(4, 4))))


def test_outputs_of_no_hooked_forward() -> None:
    model, x = perceptron(), torch.randn(3, 4)
    unhooked = model(x)
    autograd_hacks.add_hooks(model)
    with autograd_hacks.pause_hooks():
        paused = model(x)
    for output in (unhooked, paused, perceptron()(x), model[2](model[1](model[0](x)))):
        with pytest.raises(NothingRecorded, match="does not come from a forward"):
            per_sample_jacobian(model, output)
    other = {name: p.detach().requires_grad_() for name, p in model.named_parameters()}
    with pytest.raises(NothingRecorded, match="does not come from a forward"):
        per_sample_jacobian(model, torch.func.functional_call(model, other, (x,)))
    with torch.no_grad():
        plain = model(x)
    for output in (plain, model(x).detach()):
        with pytest.raises(NothingRecorded, match="without a graph"):
            per_sample_jacobian(model, output)
    with pytest.raises(NothingRecorded, match="has no hooks"):
        per_sample_jacobian(perceptron(), unhooked)


def test_nothing_that_trains_and_reentrant_checkpoints() -> None:
    model, x = perceptron().requires_grad_(False), torch.randn(3, 4, requires_grad=True)
    with autograd_hacks.add_hooks(model), pytest.raises(NothingRecorded, match="trainable parameters"):
        per_sample_jacobian(model, model(x))
    model = Checkpointed(True)
    with autograd_hacks.add_hooks(model), pytest.raises(RuntimeError, match="use_reentrant"):
        per_sample_jacobian(model, model(x))


@dataclass
class Result:
    logits: Tensor


@pytest.mark.parametrize(
    "wrong", [3, None, torch.zeros(3, dtype=torch.long), torch.zeros(3, 2, dtype=torch.complex64), Result]
)
def test_what_is_no_tensor_of_real_numbers(wrong: object) -> None:
    model = perceptron()
    with autograd_hacks.add_hooks(model), pytest.raises(TypeError, match="an output of the model"):
        per_sample_jacobian(model, wrong)  # type: ignore[arg-type]  # which is tested


def test_wrong_numbers() -> None:
    model = perceptron()
    with autograd_hacks.add_hooks(model):
        out = model(torch.randn(3, 4))
        with pytest.raises(ValueError, match="which has no entries"):
            per_sample_jacobian(model, out[:, :0])
        for error, size in ((ValueError, 0), (TypeError, 1.5), (TypeError, True)):
            with pytest.raises(error, match="chunk_size"):
                per_sample_jacobian(model, out, chunk_size=size)  # type: ignore[arg-type]  # which is tested
        rows = per_sample_jacobian(model, out)
        for weights in (torch.ones(3), torch.ones(3, 2), torch.ones(9), torch.ones(2, 2, 3, 3)):
            with pytest.raises(ValueError, match=r"expected \(N, 3\) or \(K, N, 3\)"):
                rows.weighted_sum(weights)
        with pytest.raises(ValueError, match="entries of an output"):
            rows.variance()
        with pytest.raises(NothingRecorded, match="no likelihood"):
            rows.fisher_matvec(dict(model.named_parameters()))
