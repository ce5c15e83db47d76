"""Losses with derivatives in them: functions of torch itself, other verbs, and every way to meet the batch."""

import pytest
import torch
import torch.nn as nn
from derivatives import gradient_penalty, laplacian, rows_of, step
from oracle import assert_same, joined, one_loss_at_a_time
from rarely import crossed
from test_derivatives import check_loss, found, made
from test_reads import BODIES, Net
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import UnseenGradient


def direct(m: nn.Module, x: Tensor) -> Tensor:
    """torch's own functions where torch.nn.functional has others, and complex numbers."""
    h = torch.layer_norm(x, (4,), m.scale, m.shift)
    h = torch.group_norm(h[:, :, None], 2, m.scale, m.shift)[:, :, 0]
    return m.turn(torch.complex(h, x)).abs()


def test_functions_of_torch_itself_and_complex_numbers() -> None:
    model = Bare(direct, scale=torch.randn(4), shift=torch.randn(4), turn=nn.Linear(4, 2, dtype=torch.complex128)).double()
    x = torch.randn(3, 4).double()
    with autograd_hacks.add_hooks(model):
        for loss in (gradient_penalty, laplacian):
            check_loss(model, loss, x)


@pytest.mark.parametrize("name", ["mlp", "norms", "attention"])
def test_rows_of_residuals(name: str) -> None:
    """An equation's residuals: J Jᵀ, as Gauss-Newton takes it; and what `verify` says."""
    model, x = made(name)

    def residuals(x: Tensor) -> Tensor:
        h = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(h).sin().sum(), h, create_graph=True)
        return slope.flatten(1)[:, :2]

    with autograd_hacks.add_hooks(model):
        rows = autograd_hacks.per_sample_jacobian(model, residuals(x))
        gram = rows.gram()
        autograd_hacks.verify(model, args=(x,))
    expected = joined(one_loss_at_a_time(model, lambda: residuals(x).flatten()))
    torch.testing.assert_close(gram.reshape(len(expected), len(expected)), expected @ expected.T)


def test_torch_func_inside_a_loss_is_noticed() -> None:
    model, x = made("mlp")
    with autograd_hacks.add_hooks(model):
        jacobians = torch.func.vmap(torch.func.jacrev(model))(x)
        jacobians.square().sum().backward()
        with pytest.raises(UnseenGradient, match=r"inside torch.func .* per_sample_jacobian"):
            autograd_hacks.compute_grad1(model, "sum")


def test_describe_says_how_parameters_are_read() -> None:
    model, x = made("recurrent")
    with autograd_hacks.add_hooks(model):
        step(model, gradient_penalty, x)
        told = {row.parameter: row.how for row in autograd_hacks.describe(model).rows}
    assert told["out.weight"].startswith("rule linear")


@crossed(body=BODIES, param_grad=[True, False])
def test_every_way_to_meet_the_batch(body: str, param_grad: bool) -> None:
    torch.manual_seed(0)
    model = Net(BODIES[body]).double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for samples, length in ((4, 5), (5, 5), (1, 3)):
            x = torch.randn(samples, length, 3).double()
            state = torch.get_rng_state()
            step(model, gradient_penalty, x)
            autograd_hacks.compute_grad1(model, "sum")
            torch.set_rng_state(state)
            with autograd_hacks.pause_hooks():
                assert_same(found(model), rows_of(model, gradient_penalty, x))
