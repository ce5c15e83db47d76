"""`backward(losses)`, what the scale of a row is, and losses that begin to mix."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows, one_backward_per_sample, squares
from rarely import crossed
from steps import assert_right, batch, check_hooked, check_losses
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence
from torch.testing import assert_close
from twin import Bare, check_right

import autograd_hacks
from autograd_hacks.errors import BatchSizeError, SamplesMixed


def test_a_loss_that_is_zero_at_some_positions_and_samples() -> None:
    model, x = nn.Linear(3, 2).double(), torch.randn(4, 5, 3, dtype=torch.float64)
    mask = (torch.arange(5) < torch.tensor([[5], [2], [0], [1]])).double()

    def masked(out: Tensor, mask: Tensor) -> Tensor:
        return (out.pow(2).sum(2) * mask).sum(1) / 8  # the batch's own denominator, held fixed

    with autograd_hacks.add_hooks(model):
        masked(model(x), mask).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, one_backward_per_sample(model, masked, x, mask))


def test_the_reduction_of_two_kinds_of_passes() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh()), torch.randn(5, 3)
    autograd_hacks.add_hooks(model)
    with autograd_hacks.accumulate(model):
        model(x).square().sum().backward()
        autograd_hacks.backward(model(x).square().sum(1), "sum")
    with pytest.raises(ValueError, match=r"some accumulated losses are means and some are sums.*pass loss_type='sum'"):
        autograd_hacks.per_sample_grads(model)
    assert autograd_hacks.per_sample_grads(model, "sum").samples == 10
    model.zero_grad()
    with autograd_hacks.accumulate(model):
        for loss_type in ("sum", "mean"):
            autograd_hacks.backward(model(x).square().sum(1), loss_type)
    with pytest.raises(ValueError, match="some accumulated losses are means and some are sums"):
        autograd_hacks.per_sample_grads(model)


EACH = partial(F.cross_entropy, reduction="none")
WEIGHT = torch.tensor([1.0, 5.0, 2.0, 1.0]).double()
UNITS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "a sum": (partial(F.cross_entropy, reduction="sum"), EACH),
    "loss / K": (lambda out, y: F.cross_entropy(out, y) / 4, lambda out, y: EACH(out, y) / 4),
    "class weights": (partial(F.cross_entropy, weight=WEIGHT), partial(EACH, weight=WEIGHT)),
    "ignored targets": (partial(F.cross_entropy, ignore_index=1), partial(EACH, ignore_index=1)),
}


@pytest.mark.parametrize("name", UNITS)
def test_what_is_assumed_of_a_loss_is_said_once_a_kind_of_loss_and_losses_need_no_assumption(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (scalar, losses), x, y = UNITS[name], next(_batches()), torch.tensor([0, 1, 1, 3, 2])
    said = "autograd_hacks: no loss_type was given, so the loss is assumed to be the mean of the samples'"
    model = _net()
    check_hooked(model, lambda: losses(model(x), y))
    for param_grad in (True, False):
        model, told, (other, _) = _net(), list[str](), UNITS["a sum" if name == "loss / K" else "loss / K"]
        with autograd_hacks.add_hooks(model, param_grad=param_grad):
            for loss, loss_type in ((scalar, "mean"), *((own, None) for own in (scalar, scalar, other, scalar, other))):
                loss(model(x), y).backward()
                autograd_hacks.compute_grad1(model, loss_type)
                told.append(capsys.readouterr().err.partition(" losses.")[0])
        assert told == ["", said, "", said, "", ""]


def test_backward_with_a_vector_of_losses(model: nn.Module) -> None:
    x, y = batch()
    for loss_type in ("mean", "sum"):
        model.zero_grad()
        autograd_hacks.backward(squares(model(x), y), loss_type)
        assert_right(model, x, y)
        assert_close([getattr(p.grad1, loss_type)(0) for p in model.parameters()], [p.grad for p in model.parameters()])


def test_losses_beside_a_forward_of_no_samples(model: nn.Module) -> None:
    x, _ = batch(3)
    with pytest.raises(BatchSizeError, match="the numbers of samples disagree"):
        autograd_hacks.backward(squares(model(x)) + model(x[:0]).sum())


def test_backward_in_accumulate_and_through_a_retained_graph(model: nn.Module) -> None:
    x, y = batch(4)
    with autograd_hacks.accumulate(model):
        autograd_hacks.backward(squares(model(x[:3]), y[:3]))
        autograd_hacks.backward(squares(model(x[3:]), y[3:]), "sum")
    assert_right(model, x, y)
    losses = squares(model(x), y) / 2
    autograd_hacks.backward(losses, retain_graph=True)
    autograd_hacks.backward(losses, "sum")
    assert_right(model, x, y)


# Losses in which samples begin to mix, or to use parameters, after steps in which they didn't


BEGINS, STEPS = 3, 5

Losses = Callable[[nn.Module, Tensor], Tensor]


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def _slope(out: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]


def _penalised(change: Callable[[Tensor], Tensor]) -> Losses:
    """change: of the slopes' squares, N D, into a loss of each sample"""

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x.requires_grad_())
        return squares(out) + change(_slope(out, x).square())

    return losses


MIXING: dict[str, Losses] = {
    "contrastive": lambda m, x: F.cross_entropy(
        4 * (z := F.normalize(m(x), dim=1)) @ z.T, torch.arange(len(z)).roll(1), reduction="none"
    ),
    "another order": lambda m, x: squares(m(x)).roll(1),
    "some in another order": lambda m, x: squares(m(x))[[*range(min(len(x), 2))[::-1], *range(2, len(x))]],
    "a little of all": lambda m, x: (out := m(x)).square().sum(1) + 1e-4 * out.sum(),
    "a penalty of the batch": _penalised(torch.sum),
    "a penalty of a neighbour": _penalised(lambda slopes: slopes.sum(1).roll(1)),
}
OTHERS: dict[str, Losses] = {
    "a penalty": _penalised(lambda slopes: slopes.sum(1)),
    "in two orders": lambda m, x: (own := squares(m(x))) + own.flip(0).flip(0),
    "among own positions": lambda m, x: ((out := m(x))[:, :, None] * out[:, None]).softmax(-1).square().sum((1, 2)),
    "masked": lambda m, x: torch.zeros_like(own := squares(m(x))).masked_scatter(
        (mask := torch.arange(len(x)) % 2 == 0), own[mask]
    ),
    "with a factor of the batch": lambda m, x: (
        (own := squares(m(x))) / own.detach().sum() + F.cross_entropy(m(x), torch.arange(len(x)) % 4, reduction="none")
    ),
}


def _batches(n: int = 5) -> Iterator[Tensor]:
    torch.manual_seed(1)
    for _ in range(STEPS):
        yield torch.randn(n, 3, dtype=torch.float64)


@crossed(name=MIXING, param_grad=[True, False])
def test_losses_that_begin_to_mix_are_refused_in_that_step(name: str, param_grad: bool) -> None:
    model = _net()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for number, x in enumerate(_batches()):
            if number < BEGINS:
                check_losses(model, lambda x=x: squares(model(x)))
            else:
                vector = MIXING[name](model, x)
                with pytest.raises(SamplesMixed, match=r"losses given to backward.*Samples mix at \w+"):
                    autograd_hacks.backward(vector)


@pytest.mark.parametrize(("name", "size"), [*((name, 1) for name in MIXING), *((name, 5) for name in OTHERS)])
def test_losses_of_one_sample_and_losses_that_do_not_mix_begin_without_a_complaint(name: str, size: int) -> None:
    def run(model: nn.Module, x: Tensor, begins: bool) -> Tensor:
        return (MIXING | OTHERS)[name](model, x) if begins else squares(model(x))

    check_right(_net(), *[(x, number >= BEGINS) for number, x in enumerate(_batches(size))], run=run, total="each")


RETURNS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a number for each": (lambda h: [own.sum() for own in h], lambda found: torch.stack(found)[:, None]),
    "parts": (lambda h: h.split([2, 3]), torch.cat),
    "packed": (
        lambda h: pack_sequence([*h[:, :, None]]),
        lambda found: pad_packed_sequence(found, batch_first=True)[0][..., 0],
    ),
}


@crossed(
    how=RETURNS,
    mix=[lambda h: h - h.mean(0), lambda h: (h @ h.t()).log_softmax(1), lambda h: h.flip(0)],
    private=[False, True],
)
def test_losses_that_mix_outputs_without_an_axis_of_samples(how: str, mix: Any, private: bool) -> None:
    split, join = RETURNS[how]
    model = Bare(lambda m, x: split(m.net(x)), net=_net())
    with autograd_hacks.add_hooks(model, independent=private and how != "packed"):
        for number, x in enumerate(_batches()):
            h = join(model(x))
            if number != BEGINS:
                check_losses(model, lambda x=x: squares(join(model(x))))
                continue
            with pytest.raises(SamplesMixed, match="losses given to backward"):
                autograd_hacks.backward(squares(mix(h)))


def test_losses_that_are_each_the_batchs() -> None:
    model = Bare(lambda m, x: squares(m.net(x)).mean(), net=_net())
    with autograd_hacks.add_hooks(model), pytest.raises(SamplesMixed, match="losses given to backward"):
        autograd_hacks.backward(model(torch.randn(5, 3).double()).expand(5))


def test_a_returned_parameter_in_two_passes_of_one_graph() -> None:
    model = Bare(lambda m, x: (m.net(x), m.log_scale), net=_net(), log_scale=torch.zeros(4).double())
    with autograd_hacks.add_hooks(model):
        for x in _batches():
            out, log_scale = model(x)
            vector = squares(out * log_scale.exp())
            autograd_hacks.backward(vector, retain_graph=True)
            first = autograd_hacks.per_sample_grads(model).dense()
            model.zero_grad()
            autograd_hacks.backward(vector)
            both = autograd_hacks.per_sample_grads(model).dense()
            assert_close(both, {name: 2 * rows for name, rows in first.items()})
