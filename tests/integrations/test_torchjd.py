"""TorchJD's aggregations: those of its own Jacobians, for every aggregator that weights by the Gramian."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import one_loss_at_a_time
from torch import Tensor
from torch.testing import assert_close
from trained import needed, of_many

import autograd_hacks

needed("torchjd.aggregation", "torchjd.autojac", "quadprog", "qpsolvers")

from torchjd import aggregation, autojac  # noqa: E402
from torchjd.aggregation import UPGrad, UPGradWeighting  # noqa: E402

from autograd_hacks.integrations.torchjd import jacobian_descent  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
AGGREGATORS = ["UPGrad", "DualProj", "MGDA", "AlignedMTL", "PCGrad", "IMTLG", "Mean", "Sum", "Random"]


def conv() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3)).double()


def losses_of(model: nn.Module) -> Tensor:
    draws = torch.Generator().manual_seed(2)
    x, y = torch.randn(6, 1, 6, 6, generator=draws), torch.randint(3, (6,), generator=draws)
    return F.cross_entropy(model(x.to(next(model.parameters()).dtype)), y, reduction="none")


@pytest.mark.parametrize("name", AGGREGATORS)
def test_gradients_and_weights_are_torchjds_own(name: str) -> None:
    model, kind = conv(), getattr(aggregation, name)
    other = copy.deepcopy(model)
    autojac.backward(losses_of(other))
    torch.manual_seed(3)
    theirs = autojac.jac_to_grad(other.parameters(), kind())
    autograd_hacks.add_hooks(model, param_grad=False)
    autograd_hacks.backward(losses_of(model))
    torch.manual_seed(3)
    weights = jacobian_descent(model, kind())
    assert_close(weights, theirs)
    assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    torch.manual_seed(3)
    assert_close(jacobian_descent(model, kind(), losses=losses_of(model)), theirs)  # of one task
    assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_rows_of_tasks_and_halves() -> None:
    model, tasks = conv().bfloat16(), torch.tensor([0, 0, 1, 1, 2, 2])
    autograd_hacks.add_hooks(model)
    autograd_hacks.backward(losses_of(model))
    grads = autograd_hacks.per_sample_grads(model).group(tasks)
    weights = jacobian_descent(model, UPGrad(), grads)
    assert weights.shape == (3,)
    rows = torch.cat([rows.flatten(1) for rows in grads.dense().values()], 1).double()
    found = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
    expected = UPGrad()(rows)
    assert (found - expected).norm() < 0.05 * expected.norm()


def tasks_of(model: nn.Module) -> Tensor:
    """Losses of 6 samples in two tasks, which share the trunk: 6 2."""
    draws = torch.Generator().manual_seed(2)
    x = torch.randn(6, 1, 6, 6, generator=draws).double()
    y, z = torch.randint(3, (6,), generator=draws), torch.randn(6, 3, generator=draws).double()
    out = model(x)
    return torch.stack([F.cross_entropy(out, y, reduction="none"), (out - z).square().sum(1)], 1)


@pytest.mark.parametrize("param_grad", [True, False])
def test_losses_of_samples_in_several_tasks(param_grad: bool) -> None:
    model = conv()
    other = copy.deepcopy(model)
    by_name = one_loss_at_a_time(other, lambda: tasks_of(other).flatten()).values()
    rows = torch.cat([own.flatten(1) for own in by_name if own is not None], 1)
    expected = UPGrad()(rows)
    autograd_hacks.add_hooks(model, param_grad=param_grad)
    for _ in range(2):
        weights = jacobian_descent(model, UPGrad(), losses=tasks_of(model))
        assert weights.shape == (6, 2)
        assert_close(torch.cat([p.grad.flatten() for p in model.parameters()]), expected)
        assert_close(weights.flatten() @ rows, expected)
    autojac.backward(tasks_of(other))
    assert_close(weights.flatten(), autojac.jac_to_grad(other.parameters(), UPGrad()).flatten())
    other.zero_grad()
    autojac.backward(tasks_of(other).mean(0))
    theirs = autojac.jac_to_grad(other.parameters(), UPGrad())
    assert_close(jacobian_descent(model, UPGrad(), losses=tasks_of(model), task_means=True), theirs)
    assert_close([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])


def test_a_parameter_that_was_not_reached_and_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = conv()
    model.register_parameter("unused", nn.Parameter(torch.ones(2).double()))
    autograd_hacks.add_hooks(model)
    losses_of(model).mean().backward()
    jacobian_descent(model, UPGradWeighting())
    assert model.unused.grad is None
    monkeypatch.setattr("autograd_hacks.integrations.torchjd.per_sample_grads", of_many)
    many = of_many(model).spread
    monkeypatch.setattr("autograd_hacks.integrations.torchjd.spread_of", lambda *_: many)
    for losses in (lambda _: None, tasks_of):
        with pytest.raises(NotImplementedError, match=r"jacobian_descent: the sum would cover one process.*gram_of_all"):
            jacobian_descent(model, UPGrad(), losses=losses(model))


def test_what_is_refused() -> None:
    model = conv()
    autograd_hacks.add_hooks(model)
    losses_of(model).mean().backward()
    grads, losses, up = autograd_hacks.per_sample_grads(model), tasks_of(model), UPGrad()
    parts = r"losses=(list|tuple); expected one tensor.*torch\.stack\(losses, dim=1\)"
    refused: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
        *(((wrong,), {}, TypeError, "UPGrad")
          for wrong in (aggregation.ConFIG(), aggregation.TrimmedMean(1), aggregation.Krum, None)),
        ((up, grads, "mean"), {}, ValueError, "expected only one of them"),
        ((up, grads), {"losses": losses}, ValueError, "losses and grads"),
        ((up,), {"losses": losses, "loss_type": "mean"}, ValueError, "losses and loss_type='mean'"),
        ((up,), {"losses": list(losses.unbind(1))}, TypeError, parts),
        ((up,), {"losses": losses.unbind(1)}, TypeError, parts),
        ((up,), {"losses": losses[:, :, None]}, ValueError, r"shape \(6, 2, 1\).*losses.mean"),
        ((up,), {"task_means": True}, ValueError, r"losses of shape None; expected \(N, K\)"),
    ]  # fmt: skip
    for given, options, error, words in refused:
        with pytest.raises(error, match=words):
            jacobian_descent(model, *given, **options)
