"""What is one kind of forward to the probe, and when it runs again."""

import pytest
import torch
import torch.nn as nn
from nets import Between, SequenceFirst
from oracle import squares
from steps import check, check_batches, count_forwards
from torch import Tensor

import autograd_hacks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.errors import SamplesMixed, UnseenGradient


def test_traces_at_first_and_ever_more_rarely() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 2))
    calls = count_forwards(model)

    def forwards(*shape: int) -> int:
        calls.clear()
        squares(model(torch.randn(*shape))).mean().backward()
        return len(calls)

    with autograd_hacks.add_hooks(model):
        found = [forwards(5, 3) for _ in range(130)]
        again = [n + 1 for n, count in enumerate(found) if count > 1]
        assert again == [1, 2, 16, 128]
        assert max(found) <= 12  # a trace, one for each of six halves, a proof
        assert forwards(6, 3) == 1
        assert forwards(10, 3) > 1  # twice as many samples as were ever traced
        assert forwards(2, 3) == 1
        assert forwards(4, 7, 3) > 1  # another rank
        assert forwards(1, 3) > 1  # in a batch of one nothing can be replaced
        model.eval()
        assert forwards(4, 3) > 1
        calls.clear()
        with torch.no_grad():
            model(torch.randn(4, 2, 2, 3))
        assert len(calls) == 1


def test_samples_that_are_all_alike_are_probed_when_they_no_longer_are() -> None:
    model = SequenceFirst().double()
    alike, x = torch.ones(4, 4, dtype=torch.long), torch.randint(9, (4, 4))
    check_batches(model, x, verify=1)
    calls = count_forwards(model)
    with autograd_hacks.add_hooks(model):
        for tokens, proven in ((alike, True), (alike, True), (alike, False), (x, True), (x, False), (alike, False)):
            calls.clear()
            squares(model(tokens)).mean().backward()
            assert (len(calls) > 1) is proven
        check(model, x)


class Skipping(nn.Module):
    """Layers by turns, on T N F."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.chosen = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]), [0]

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for number in self.chosen:
            x = torch.tanh(self.layers[number](x))
        return x.transpose(0, 1)


def test_layers_that_are_skipped_at_first() -> None:
    """Where one size of its output is N alone, that is the samples' axis; otherwise the step after is right."""
    model = Skipping().double()
    with autograd_hacks.add_hooks(model):
        for steps in (5, 4):
            x = torch.randn(4, steps, 3).double()
            for model.chosen in ([0], [1], [1], [2], [2], [2, 1, 0]):
                check(model, x)
    model, x = Skipping().double(), torch.randn(4, 4, 3).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            squares(model(x)).mean().backward()
        model.chosen = [1]
        squares(model(x)).mean().backward()
        with pytest.raises(UnseenGradient, match=r"called for the first time since .* repeat the step"):
            autograd_hacks.compute_grad1(model)
        check(model, x)


def test_layers_that_are_skipped_at_random_are_probed_once_they_are_there() -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.chosen = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)]), [0]

        def forward(self, x: Tensor) -> Tensor:
            for number in self.chosen:
                x = torch.tanh(self.layers[number](x))
            return x

    model, x = Drop(), torch.randn(4, 3)
    calls = count_forwards(model)
    with autograd_hacks.add_hooks(model):
        found = []
        for model.chosen in ([0], [0], [1], [1], [2], [2], [0, 1, 2], [2], [1]):
            calls.clear()
            squares(model(x)).mean().backward()
            found.append(len(calls) > 1)
    assert found == [True, True, False, True, False, True, False, False, False]


def test_a_number_that_changes_each_step_has_few_plans() -> None:
    model, x = Between(lambda h, step, heat: h * (1 + step) / heat).double(), torch.randn(4, 3).double()
    calls = count_forwards(model)
    with autograd_hacks.add_hooks(model):
        for step in range(40):
            squares(model(x, step, 1 / (1 + step))).mean().backward()
        check(model, x, None, lambda x: model(x, 99, 0.5))
        assert len(recorder_of(model).planner.plans) <= 5
    calls.clear()
    with autograd_hacks.add_hooks(model):
        for step in range(20, 40):
            squares(model(x, step, 1 / (1 + step))).mean().backward()
        many = len(calls)
        for step in range(80, 120):
            squares(model(x, step, 1 / (1 + step))).mean().backward()
        assert len(calls) == many + 40  # no probe any more


def test_a_number_that_was_told_apart_by_its_few_values_has_its_own_plan() -> None:
    def mix(h: Tensor, kind: int) -> Tensor:
        return h - h.mean(0) if kind == 3 else h * (kind + 1)

    model, x = Between(mix).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        for kind in (0, 1, 2):
            check(model, x, None, lambda x, kind=kind: model(x, kind))
        squares(model(x, 3)).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)
        check(model, x, None, lambda x: model(x, 0))


def test_a_number_among_the_arguments_is_part_of_the_signature() -> None:
    model, x = Between(lambda h, share: h + share * h.mean(0) if share else h).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(x, 0.0)).mean().backward()
        autograd_hacks.compute_grad1(model)
        squares(model(x, 0.3)).mean().backward()
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model)


def test_a_layer_that_is_called_more_often_than_before() -> None:
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(3, 5)

        def forward(self, x: Tensor) -> Tensor:
            h = x.new_zeros(len(x), 5)
            for t in range(x.shape[1]):
                h = self.cell(x[:, t], h)
            return h

    check_batches(Unrolled().double(), *(torch.randn(4, steps, 3).double() for steps in (2, 5, 3, 7)), verify=1)


def test_a_model_that_makes_other_calls_where_gradients_are_on() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.late = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.transpose(0, 1) if torch.is_grad_enabled() else x)
            return (self.late(x.tanh()) if torch.is_grad_enabled() else x).transpose(0, 1)

    check_batches(Branching().double(), torch.randn(4, 4, 3).double(), torch.randn(4, 4, 3).double())


def test_a_model_that_can_be_run_but_not_probed() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(1)
            if len(calls) == 1:
                raise ValueError("not ready")
            return self.inner(x - x.mean(0) if len(calls) == 2 else x)

    calls: list[int] = []
    model, x = Late().double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        squares(model(x)).mean().backward()
        with pytest.raises(UnseenGradient, match=r"failed when it was probed.*not ready"):
            autograd_hacks.compute_grad1(model)
        check(model, x)
