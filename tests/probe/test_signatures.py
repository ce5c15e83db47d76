"""What is one kind of forward."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from nets import Between
from oracle import squares
from steps import check, check_batches
from torch import Tensor
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.kinds import MOST
from autograd_hacks.errors import SamplesMixed
from autograd_hacks.probe.batch import kept_samples


@pytest.mark.parametrize("lengths", [(5, 4), (4,)])
def test_layers_that_are_skipped_at_first(lengths: tuple[int, ...]) -> None:
    """Layers by turns, on T N F."""

    def skipping(m: nn.Module, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for number in m.chosen:
            x = torch.tanh(m.layers[number](x))
        return x.transpose(0, 1)

    model = Bare(skipping, layers=nn.ModuleList(nn.Linear(3, 3) for _ in range(3))).double()
    with autograd_hacks.add_hooks(model):
        for steps in lengths:
            x = torch.randn(4, steps, 3).double()
            for model.chosen in ([0], [0], [1], [1], [2], [2], [2, 1, 0]):
                check(model, x)


def test_a_number_that_changes_each_step_makes_few_kinds() -> None:
    model, x = Between(lambda h, step, heat: h * (1 + step) / heat).double(), torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        for step in range(40):
            squares(model(x, step, 1 / (1 + step))).mean().backward()
        check(model, x, None, lambda x: model(x, 99, 0.5))
        assert len(recorder_of(model).kinds.seen) <= 5


def test_a_number_that_decides_whether_samples_mix() -> None:
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


def test_a_layer_that_is_called_more_often_than_before() -> None:
    def unrolled(m: nn.Module, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 5)
        for t in range(x.shape[1]):
            h = m.cell(x[:, t], h)
        return h

    model = Bare(unrolled, cell=nn.RNNCell(3, 5)).double()
    check_batches(model, *(torch.randn(4, steps, 3).double() for steps in (2, 5, 3, 7)), verify=1)


def test_the_number_of_kinds_is_bounded() -> None:
    """Names of files as dictionary keys, and lists of any length, make each forward another kind."""
    model = Bare(lambda m, x, *_: m.body(x), body=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).double()
    with autograd_hacks.add_hooks(model):
        kinds = recorder_of(model).kinds.seen
        for n in range(100):
            notes: list[Any] = [{f"file {n}": n}, list(range(n)), ["a"] * n, {"file": {str(n): None}}]
            check(model, torch.randn(4, 3).double(), run=lambda x, own=notes[n % 4]: model(x, own))
        assert len(kinds) <= MOST
        x = torch.randn(4, 3).double()
        check(model, x)


def test_a_model_whose_dtype_changes_and_changes_back() -> None:
    """torch makes a new node for a parameter each time, also if nothing runs between two changes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with autograd_hacks.add_hooks(model):
        for n in range(8):
            model.to(torch.float32 if n % 3 else torch.float64)
            if n % 2:
                model.to(torch.float16).to(torch.float32)
            for _ in range(2):
                check(model, torch.randn(4, 3).to(model[0].weight))


@pytest.mark.parametrize("samples", [2, 3, 7, 4100])
def test_of_any_two_samples_a_run_keeps_the_first_and_replaces_the_second(samples: int) -> None:
    kept = torch.stack(kept_samples(samples, torch.Generator())).float()
    assert torch.equal(kept.T @ (1 - kept) == 0, torch.eye(samples, dtype=torch.bool))
