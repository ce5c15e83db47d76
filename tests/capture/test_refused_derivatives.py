"""Derivatives without a probe, and those that are refused."""

import pytest
import torch.nn as nn
from derivatives import gradient_penalty, rows_of, step
from oracle import assert_same
from steps import batch
from test_derivatives import found, made

import autograd_hacks
from autograd_hacks.errors import SamplesMixed


def test_without_a_probe() -> None:
    model, x = made("mlp")
    with autograd_hacks.add_hooks(model, probe=False):
        step(model, gradient_penalty, x)
        autograd_hacks.compute_grad1(model, "sum")
        with autograd_hacks.pause_hooks():
            assert_same(found(model), rows_of(model, gradient_penalty, x))


def test_samples_that_mix_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    with autograd_hacks.add_hooks(model):
        step(model, gradient_penalty, batch()[0])
        with pytest.raises(SamplesMixed):
            autograd_hacks.compute_grad1(model, "sum")


def test_a_context_gives_hooks_their_settings_back() -> None:
    model, x = made("mlp")
    autograd_hacks.add_hooks(model)
    with autograd_hacks.add_hooks(model, param_grad=False, batch_dim=(0,)):
        step(model, gradient_penalty, x)
        autograd_hacks.compute_grad1(model, "sum")
    assert "batch_dim=0, param_grad=True" in repr(autograd_hacks.add_hooks(model))
