"""What is one kind of forward."""

from typing import Any

import pytest
import torch
import torch.nn as nn
from steps import check
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.kinds import MOST
from autograd_hacks.probe.batch import kept_samples


def test_the_number_of_kinds_is_bounded() -> None:
    """Names of files as dictionary keys, and lists of any length, make each forward another kind."""
    model = Bare(lambda m, x, *_: m.body(x), body=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))).double()
    with autograd_hacks.add_hooks(model):
        kinds = recorder_of(model).kinds.seen
        for n in range(100):
            notes: list[Any] = [{f"file {n}": n}, list(range(n)), ["a"] * n, {"file": {str(n): None}}]
            check(model, torch.randn(4, 3).double(), run=lambda x, own=notes[n % 4]: model(x, own))
        assert len(kinds) <= MOST


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
