"""Losses in which samples begin to mix, or to use parameters, after steps in which they didn't."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import squares
from rarely import crossed
from steps import check_losses
from torch import Tensor

import autograd_hacks
from autograd_hacks.errors import SamplesMixed

BEGINS, STEPS = 3, 5

Losses = Callable[[nn.Module, Tensor], Tensor]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def _contrastive(model: nn.Module, x: Tensor) -> Tensor:
    z = F.normalize(model(x), dim=1)
    return F.cross_entropy(4 * z @ z.T, torch.arange(len(z)).roll(1), reduction="none")


def _centred(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out - out.mean(0)).square().sum(1)


def _another_order(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model(x)).roll(1)


def _some_in_another_order(model: nn.Module, x: Tensor) -> Tensor:
    order = torch.arange(len(x))
    order[:2] = order[:2].flip(0)
    return squares(model(x))[order]


def _weighted_by_the_batch(model: nn.Module, x: Tensor) -> Tensor:
    own = squares(model(x))
    return own.softmax(0) * own


def _a_little_of_all(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return out.square().sum(1) + 1e-4 * out.sum()


def _slope(out: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]


def _penalty_of_the_batch(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = model(x)
    return squares(out) + _slope(out, x).square().sum()


def _penalty_of_a_neighbour(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = model(x)
    return squares(out) + _slope(out, x).square().sum(1).roll(1)


MIXING = (
    _contrastive,
    _centred,
    _another_order,
    _some_in_another_order,
    _weighted_by_the_batch,
    _a_little_of_all,
    _penalty_of_the_batch,
    _penalty_of_a_neighbour,
)


def _batches(n: int = 5) -> Iterator[Tensor]:
    torch.manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(n, 3, dtype=torch.float64)


@crossed(losses=MIXING, param_grad=[True, False])
def test_are_refused_in_the_step_in_which_they_begin(losses: Losses, param_grad: bool) -> None:
    model = _net()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for number, x in enumerate(_batches()):
            if number < BEGINS:
                check_losses(model, lambda x=x: squares(model(x)))
            else:
                vector = losses(model, x)
                with pytest.raises(SamplesMixed, match=r"losses given to backward.*Samples mix at \w+"):
                    autograd_hacks.backward(vector)


@pytest.mark.parametrize("losses", MIXING)
def test_of_one_sample_have_rows(losses: Losses) -> None:
    model = _net()
    with autograd_hacks.add_hooks(model):
        for number, x in enumerate(_batches(1)):
            if losses is not _some_in_another_order:
                check_losses(model, lambda x=x, own=losses if number >= BEGINS else _plain: own(model, x))


def _plain(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model(x))


def _penalty(model: nn.Module, x: Tensor) -> Tensor:
    x = x.requires_grad_()
    out = model(x)
    return squares(out) + _slope(out, x).square().sum(1)


def _in_two_orders(model: nn.Module, x: Tensor) -> Tensor:
    own = squares(model(x))
    return own + own.flip(0).flip(0)


def _among_own_positions(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    return (out[:, :, None] * out[:, None]).softmax(-1).square().sum((1, 2))


def _masked(model: nn.Module, x: Tensor) -> Tensor:
    own, mask = squares(model(x)), torch.arange(len(x)) % 2 == 0
    return torch.zeros_like(own).masked_scatter(mask, own[mask])


def _with_a_factor_of_the_batch(model: nn.Module, x: Tensor) -> Tensor:
    own = squares(model(x))
    return own / own.detach().sum() + F.cross_entropy(model(x), torch.arange(len(x)) % 4, reduction="none")


@pytest.mark.parametrize("losses", [_penalty, _in_two_orders, _among_own_positions, _masked, _with_a_factor_of_the_batch])
def test_others_begin_without_a_complaint(losses: Losses) -> None:
    model = _net()
    with autograd_hacks.add_hooks(model):
        for number, x in enumerate(_batches()):
            check_losses(model, lambda x=x, own=losses if number >= BEGINS else _plain: own(model, x))


class Returning(nn.Module):
    """Returns a parameter beside the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.log_scale = _net(), nn.Parameter(torch.zeros(4).double())
        self.weight = nn.Parameter(torch.eye(4).double())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.net(x), self.log_scale, self.weight


def test_uses_of_returned_parameters_that_begin() -> None:
    model = Returning()

    def losses(x: Tensor, number: int) -> Tensor:
        out, log_scale, weight = model(x)
        found = squares(out)
        if number > 0:
            found = found + squares(out * log_scale.exp())
        if number > 1:
            found = found + squares(torch.tanh(out) @ weight)
        if number > 2:
            x = x.requires_grad_()
            out, log_scale, weight = model(x)
            found = found + _slope((out * log_scale.exp()) @ weight, x).square().sum(1)
        return found

    with autograd_hacks.add_hooks(model):
        for number, x in enumerate(_batches()):
            check_losses(model, lambda x=x, number=number: losses(x, number))


def test_returned_parameters_in_two_passes_of_one_graph() -> None:
    model = Returning()
    with autograd_hacks.add_hooks(model):
        for x in _batches():
            out, log_scale, _ = model(x)
            vector = squares(out * log_scale.exp())
            autograd_hacks.backward(vector, retain_graph=True)
            first = autograd_hacks.per_sample_grads(model).dense()
            model.zero_grad()
            autograd_hacks.backward(vector)
            both = autograd_hacks.per_sample_grads(model).dense()
            for name, rows in first.items():
                torch.testing.assert_close(both[name], 2 * rows)
