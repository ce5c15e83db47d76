"""Samples that mix: in any order along the batch, by any way, behind a gate."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import Between
from oracle import assert_rows, one_loss_at_a_time, squares
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.errors import SamplesMixed


class Mixing(nn.Module):
    def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 4), nn.Linear(4, 2), how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.how(self.first(x)))


@pytest.mark.parametrize("how", [lambda h: h.sub_(h.mean(0)), lambda h: F.batch_norm(h, None, None, training=True)])
def test_what_is_said_of_samples_that_mix(how: Callable[[Tensor], Tensor]) -> None:
    model = Mixing(how)
    with autograd_hacks.add_hooks(model):
        squares(model(torch.randn(6, 3))).mean().backward()
        with pytest.raises(SamplesMixed, match=r"samples mix: .* reaches other samples at .*, before first.* batch_dim"):
            autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("asks", [lambda x: torch.is_grad_enabled(), lambda x: x.requires_grad])
def test_samples_that_mix_where_gradients_are_on(asks: Callable[[Tensor], bool]) -> None:
    model = Mixing(lambda h: h - h.mean(0) if asks(h) else h)
    with autograd_hacks.add_hooks(model):
        squares(model(torch.randn(5, 3))).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


def test_a_model_that_takes_gradients_of_its_input() -> None:
    class Forces(nn.Module):
        def __init__(self, how: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.inner, self.out, self.how = nn.Linear(3, 3), nn.Linear(3, 2), how

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x).tanh()
            (forces,) = torch.autograd.grad(h.sum(), x, create_graph=True)
            return self.out(self.how(h)) + forces.detach().sum(1, keepdim=True)

    for x in (torch.randn(5, 3).double().requires_grad_(), torch.randn(5, 3).double().requires_grad_() * 2):
        model = Forces(lambda h: h - h.mean(0)).double()
        with autograd_hacks.add_hooks(model):
            squares(model(x)).mean().backward(retain_graph=True)
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(model)
        model = Forces(lambda h: h).double()
        with autograd_hacks.add_hooks(model):
            squares(model(x)).mean().backward(retain_graph=True)
            autograd_hacks.compute_grad1(model)
            with autograd_hacks.pause_hooks():
                (row,) = torch.autograd.grad(squares(model(x))[1], model.inner.weight)
            torch.testing.assert_close(model.inner.weight.grad1[1], row)


def test_samples_that_mix_at_the_very_end() -> None:
    def contrastive(m: nn.Module, x: Tensor) -> Tensor:
        z = m.tower(x)
        return z @ z.T

    model = Bare(contrastive, tower=nn.Linear(3, 4))
    with autograd_hacks.add_hooks(model):
        F.cross_entropy(model(torch.randn(6, 3)), torch.arange(6)).backward()
        with pytest.raises(SamplesMixed, match="output number 0"):
            autograd_hacks.compute_grad1(model)


def test_samples_that_mix_in_memory_of_the_users_own() -> None:
    """Every forward, the probe's too, writes its outputs to the same place."""

    class Into(nn.Module):
        def __init__(self, out: list[Tensor]) -> None:
            super().__init__()
            self.tower, self.into = nn.Linear(3, 4), lambda: out[0]

        def forward(self, x: Tensor) -> Tensor:
            z = self.tower(x)
            return self.into().detach_().copy_(z - z.mean(0))

    model = Into([torch.empty(6, 4)])
    with autograd_hacks.add_hooks(model):
        squares(model(torch.randn(6, 3))).mean().backward()
        with pytest.raises(SamplesMixed, match="output number 0"):
            autograd_hacks.compute_grad1(model)


def test_mixing_behind_sizes_that_are_read_off_the_data() -> None:
    def how(h: Tensor, lengths: Tensor) -> Tensor:
        h = h[:, : int(lengths.max())].sum(1)
        return h - h.mean(0)

    model, x = Between(how), torch.randn(4, 5, 3)
    with autograd_hacks.add_hooks(model):
        for lengths in ([1, 2, 3, 2], [2, 5, 1, 1], [1, 1, 1, 2]):
            squares(model(x, torch.tensor(lengths))).mean().backward()
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("independent", [False, True])
def test_a_gate_of_zero_hides_no_mixing(independent: bool) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner, self.gate = nn.Linear(3, 3), nn.Linear(3, 3), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            h = x if independent else self.first(x)  # of x itself nothing has a gradient
            return x + self.gate * self.inner(h - h.mean(0))

    model, x = Gated().double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model, independent=independent):
        for gate in (0.0, 0.0, 0.5, 0.0):
            nn.init.constant_(model.gate, gate)
            model.zero_grad()
            squares(model(x)).mean().backward()
            if gate or independent:
                with pytest.raises(SamplesMixed):
                    autograd_hacks.compute_grad1(model)
                continue
            autograd_hacks.compute_grad1(model)  # in this forward, no gradient goes from one sample to another
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda: squares(model(x)))
            assert_rows(model, expected)


def test_a_loss_that_is_computed_inside() -> None:
    def with_loss(m: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = m.out(x) * m.scale
        return F.cross_entropy(logits, y), logits

    model, x, y = Bare(with_loss, out=nn.Linear(3, 2), scale=torch.ones(2)), torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    with autograd_hacks.add_hooks(model):
        for trains in (True, False):
            model.scale.requires_grad_(trains)
            for loss in (lambda: model(x, y)[0], lambda: F.cross_entropy(model(x, y)[1], y)):
                model.zero_grad()
                loss().backward()
                autograd_hacks.compute_grad1(model)
                with autograd_hacks.pause_hooks():
                    losses = one_loss_at_a_time(model, lambda: F.cross_entropy(model(x, y)[1], y, reduction="none"))
                    assert_rows(model, losses)


@pytest.mark.parametrize("kind", ["itself", "computed from", "autocast"])
def test_as_many_features_as_samples_are_not_taken_for_these(kind: str) -> None:
    """Layers that meet no argument itself don't show on which axis the samples are."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x if kind != "computed from" else x * 2).tanh()
            return self.last(h - h.mean(0))

    model, x = Centred(), torch.randn(3, 3)
    with autograd_hacks.add_hooks(model), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        for _ in range(2):
            squares(model(x).float()).mean().backward()
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("is_shared", [False, True])
def test_as_many_features_as_samples_in_one_of_two_outputs(is_shared: bool) -> None:
    """An output by a way of its own is on another axis than the first only if something shows it."""

    def two(m: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        h = m.first(x * 2).tanh()
        return m.one(h if is_shared else x * 2), m.other(h - h.mean(0))

    model = Bare(two, one=nn.Linear(3, 3), first=nn.Linear(3, 3), other=nn.Linear(3, 3)).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            squares(model(torch.randn(3, 3).double())).mean().backward()
            with pytest.raises(SamplesMixed):
                autograd_hacks.compute_grad1(model)


@pytest.mark.parametrize("batch_dim", [0, 1])
def test_mixing_in_a_part_that_is_called_by_itself(batch_dim: int) -> None:
    """The samples of a part are on axis 0 of its input, whatever the axis of the model's."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:  # only the gradient depends on other samples
            return x * self.scale + (self.scale - self.scale.detach()) * x.detach().mean(0)

    model = nn.Sequential(Centred(), nn.Linear(3, 2))
    with autograd_hacks.add_hooks(model, batch_dim=batch_dim, independent=True):
        squares(model[0](torch.randn(4, 5, 3))).mean().backward()
        with pytest.raises(SamplesMixed, match="rows of scale changed"):
            autograd_hacks.compute_grad1(model)
