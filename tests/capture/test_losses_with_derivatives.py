"""Programs with losses that have derivatives in them."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as fwd
import torch.nn as nn
from derivatives import LOSSES, gradient_penalty, laplacian, rows_of, step
from hypothesis import given
from oracle import assert_same, joined, one_loss_at_a_time, squares
from rarely import crossed
from steps import batch
from strategies import Case, layers
from test_derivatives import check_loss, check_step, found, made
from test_parts import BODIES, Net
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import HigherOrderError, PerSampleGradientError, UnseenGradient
from autograd_hacks.formulas import RULES, Call, Rule


@given(layers)
def test_second_derivatives_of_every_layer(case: Case) -> None:
    """Behind another layer, so that each has an input that asks for gradients."""
    if not case.x.is_floating_point() or not len(case.x):
        return
    with autograd_hacks.add_hooks(case.layer):
        check_loss(case.layer, gradient_penalty, case.x)


def test_streaming_and_accumulating() -> None:
    model, x = made("norms")
    with autograd_hacks.add_hooks(model):
        with autograd_hacks.pause_hooks():
            rows = rows_of(model, laplacian, x)
        for _ in range(2):
            total = laplacian(model, x.clone().requires_grad_()).sum()
            with autograd_hacks.during_backward(model, "norms", loss_type="sum") as stream:
                total.backward()
            assert_close(stream.norms, joined(rows).norm(dim=1))
            model.zero_grad()
        with autograd_hacks.accumulate(model):
            for part in x.split(2):
                laplacian(model, part.clone().requires_grad_()).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_same(found(model), rows)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, of forward_ad
def test_many_rows_at_once_and_forward_derivatives_are_right_or_refused() -> None:
    """is_grads_batched, and torch.autograd.forward_ad."""
    model, x = made("mlp")

    def batched() -> Tensor:
        h = x.clone().requires_grad_()
        y = model(h)
        ones = torch.eye(2, dtype=y.dtype)[:, None].expand(2, *y.shape)
        (jacobian,) = torch.autograd.grad(y, h, ones, create_graph=True, is_grads_batched=True)
        return jacobian.square().sum((0, 2))

    def forwards() -> Tensor:
        with fwd.dual_level():
            return fwd.unpack_dual(model(fwd.make_dual(x, torch.ones_like(x)))).tangent.square().sum(1)

    for losses in (batched, forwards):
        with autograd_hacks.add_hooks(model):
            for _ in range(2):
                with suppress(HigherOrderError, UnseenGradient):  # no wrong number
                    check_step(model, losses)


def test_a_layer_with_a_rule_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """That isn't linear in what it is given."""

    class Squared(Bare):
        pass

    def rule(layer: nn.Module, call: Call) -> dict[str, autograd_hacks.forms.Form]:
        return {"weight": autograd_hacks.forms.Dense(call.grad * call.args[0].square())}

    monkeypatch.setitem(RULES, Squared, Rule(rule))
    own, x = Squared(lambda m, x: x.square() * m.weight, weight=torch.randn(3)), batch()[0]
    model = nn.Sequential(nn.Linear(3, 3), own, nn.Tanh(), nn.Linear(3, 1)).double()
    with autograd_hacks.add_hooks(model):
        for loss in LOSSES:
            check_loss(model, loss, x)


def test_nothing_is_left_of_a_step() -> None:
    model, x = made("norms")
    with autograd_hacks.add_hooks(model):
        for _ in range(3):
            h = x.clone().requires_grad_()
            alive = weakref.ref(h)
            y = model(h)
            torch.autograd.grad(y.sum(), list(model.parameters()), create_graph=True)  # which goes out by no layer's input
            gradient_penalty(model, h).sum().backward()
            autograd_hacks.compute_grad1(model, "sum")
            model.zero_grad()
            autograd_hacks.clear_backprops(model)
            del h, y
            assert alive() is None or (gc.collect() and alive() is None)


# Other verbs, and every way to meet the batch


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


@crossed(body=BODIES, param_grad=[True, False])
def test_every_way_to_meet_the_batch(body: str, param_grad: bool) -> None:
    torch.manual_seed(0)
    model = Net(BODIES[body]).double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for samples, length in ((4, 5), (5, 5), (1, 3)):
            check_loss(model, gradient_penalty, torch.randn(samples, length, 3).double())


# What programs with losses that have derivatives do between steps; each was once wrong without a word


PARAM_GRAD = pytest.mark.parametrize("param_grad", [True, False], ids=["default", "param_grad=False"])

USERS: dict[str, Callable[[nn.Module], object]] = {
    "a backward hook": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "a hook that scales gradients": lambda layer: layer.register_full_backward_pre_hook(lambda _, grads: (2 * grads[0],)),
    "another input": lambda layer: layer.register_forward_pre_hook(lambda _, args: (args[0].sin(),)),
}


def _penalty(model: nn.Module, x: Tensor) -> None:
    check_loss(model, gradient_penalty, x)


@crossed(hook=USERS, late=[False, True], param_grad=[True, False])
def test_hooks_of_the_users_on_a_layer(hook: str, late: bool, param_grad: bool) -> None:
    model, x = made("mlp")
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for number in range(4):
            if number == (3 if late else 0):
                USERS[hook](model[2])
            _penalty(model, x)


@PARAM_GRAD
def test_a_weight_that_the_loss_reads(param_grad: bool) -> None:
    model, x = made("mlp")

    def losses() -> Tensor:
        h = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(h).sin().sum(), h, create_graph=True)
        return (slope @ model[0].weight.T).square().sum(1)

    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(3):
            _penalty(model, x)
        losses().sum().backward()
        with pytest.raises(PerSampleGradientError):
            autograd_hacks.compute_grad1(model, "sum")


@PARAM_GRAD
def test_orders_that_rise_and_batches_without_samples(param_grad: bool) -> None:
    model, x = made("mlp")
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for loss in LOSSES:
            for batch in (x, x[:0], x[:3]):
                if len(batch):
                    check_loss(model, loss, batch)
                else:
                    step(model, loss, batch)
                    autograd_hacks.compute_grad1(model, "sum")
                    assert model[0].weight.grad1.shape == (0, 5, 3)


@PARAM_GRAD
def test_layers_by_themselves_beside_the_model(param_grad: bool) -> None:
    """A linear one and a norm, in the same loss and micro-batch as the model."""
    model, x = made("norms")

    def of_two() -> Tensor:
        h = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model[1](model[0](h)).sin().sum(), h, create_graph=True)
        return slope.flatten(1).square().sum(1) + model(x).flatten(1).sum(1)

    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        _penalty(model, x)
        with autograd_hacks.accumulate(model):
            model.zero_grad()
            of_two().sum().backward()
            squares(model(x)).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        with autograd_hacks.pause_hooks():
            losses = lambda: torch.cat([of_two(), squares(model(x))])  # noqa: E731
            assert_same(found(model), one_loss_at_a_time(model, losses))
        autograd_hacks.clear_backprops(model)
        _penalty(model, x)


# Parameters that are laid out for each sample are used again by a derivative, behind an order that values tell.
ORDERS: list[Callable[[Tensor], Tensor]] = [
    lambda h: h.flip(0).flip(0).sin(),
    lambda h: torch.stack([row.sin() for row in h]),
    lambda h: h[torch.arange(len(h))].sin(),
]
LAID_OUT: list[Callable[[nn.Module, Tensor], Tensor]] = [
    lambda m, h: torch.bmm(h, m.w.expand(len(h), -1, -1)),
    lambda m, h: torch.bmm(h, m.inside(m.w).repeat(len(h), 1, 1)),
    lambda m, h: torch.stack([row @ m.w for row in h]),
    lambda m, h: torch.cat([m.w[:1].expand(len(h), 1, 3), h], 1).square() @ m.w,
]


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16])
@pytest.mark.parametrize("laid_out", LAID_OUT)
@pytest.mark.parametrize("order", ORDERS)
def test_what_is_laid_out_for_each_sample_is_used_again(order: Any, laid_out: Any, dtype: torch.dtype) -> None:
    model = Bare(
        lambda m, x: laid_out(m, order(m.first(x))), first=nn.Linear(3, 3), inside=nn.Linear(3, 3), w=torch.randn(3, 3)
    )
    model, x = model.to(dtype), torch.randn(3, 5, 3).to(dtype)

    def losses() -> Tensor:
        points = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(squares(model(points)).sum(), points, create_graph=True)
        return squares(slope) + squares(points)

    with autograd_hacks.add_hooks(model):
        autograd_hacks.backward(losses(), "sum")
        autograd_hacks.compute_grad1(model, "sum")
        with autograd_hacks.pause_hooks():
            right = one_loss_at_a_time(model, losses)
        for name, p in model.named_parameters():
            if (own := right[name]) is not None:
                assert (p.grad1 - own).norm() <= (1e-10 if dtype == torch.double else 0.05) * own.norm()


def of_lengths(m: nn.Module, x: Tensor) -> Tensor:
    """A recurrent layer on packed sequences whose lengths change between steps."""
    packed = pack_padded_sequence(m.first(x).tanh(), torch.tensor(m.lengths), batch_first=True, enforce_sorted=False)
    out, ends = m.recur(packed)
    y = m.head(pad_packed_sequence(out, batch_first=True)[0]).sum(1)
    return y + (ends[0] if isinstance(ends, tuple) else ends)[0] if m.reads_ends else y


@crossed(
    given=[(nn.RNN, False), (nn.LSTM, False), (nn.GRU, False), (nn.GRU, True)], loss=LOSSES[:2], param_grad=[True, False]
)
def test_packed_sequences(given: tuple[type[nn.RNNBase], bool], loss: Callable[..., Tensor], param_grad: bool) -> None:
    torch.manual_seed(0)
    kind, reads_ends = given
    model = Bare(
        of_lengths, first=nn.Linear(3, 4), recur=kind(4, 4, batch_first=True), head=nn.Linear(4, 1), reads_ends=reads_ends
    ).double()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for model.lengths in ([3, 3, 3], [1, 3, 2], [3]):
            check_loss(model, loss, torch.randn(len(model.lengths), max(model.lengths), 3).double())
