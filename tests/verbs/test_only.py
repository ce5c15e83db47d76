"""Per-sample gradients of some parameters alone; the others train as ever."""

import copy
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from nets import MODELS
from oracle import one_loss_at_a_time, squares
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.hooks import Hook


def tower() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Unflatten(1, (2, 3)), nn.GroupNorm(2, 2), nn.Flatten(), nn.Linear(6, 3)
    ).double()


@pytest.mark.filterwarnings("ignore:None of the inputs")
@crossed(name=MODELS, every=[1, 2, 3])
def test_rows_of_some_are_those_of_each_loss(name: str, every: int) -> None:
    build, batch = MODELS[name]
    model = build().double()
    twin = copy.deepcopy(model)
    asked = [name for n, (name, p) in enumerate(model.named_parameters()) if p.requires_grad and n % every == 0]
    if not asked:
        pytest.skip("none of these train")
    with autograd_hacks.add_hooks(model, only=asked):
        for _ in range(4):
            x = batch()
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda x=x: squares(model(x)))
            for own in (model, twin):
                own.zero_grad()
                torch.manual_seed(3)
                squares(own(x)).mean().backward()
            assert autograd_hacks.per_sample_grads(model).keys() == set(asked)
            autograd_hacks.compute_grad1(model)
            for (n, p), other in zip(model.named_parameters(), twin.parameters()):
                assert hasattr(p, "grad1") == (n in asked)
                if n in asked:
                    assert_close(p.grad1, expected[n])
                assert_close(p.grad, other.grad)


def test_norm_layers_and_biases() -> None:
    model = tower()
    with autograd_hacks.add_hooks(model, only="norms") as hooks:
        assert "left out" in str(hooks)
        assert not any(isinstance(hook, Hook) for m in model for hook in m._forward_hooks.values())  # read at nodes
        squares(model(torch.randn(5, 4).double())).mean().backward()
        names = ["0.bias", "1.weight", "1.bias", "3.weight", "3.bias", "5.bias"]
        assert list(autograd_hacks.per_sample_grads(model)) == names
        assert "left out by only=" in str(autograd_hacks.describe(model))
    autograd_hacks.add_hooks(model)
    squares(model(torch.randn(5, 4).double())).mean().backward()
    assert list(autograd_hacks.per_sample_grads(model, only="norms")) == names
    assert len(autograd_hacks.per_sample_grads(model)) == 8


def stem(m: Any, x: Tensor) -> Tensor:
    """Norm layers behind a convolution of what has no graph, and in front of one."""
    x = m.norm(m.stem(F.pad(x, (1, 1, 1, 1))))
    return m.last(m.gain(F.relu6(x).transpose(1, -1)).transpose(1, -1)).mean((2, 3))


@pytest.mark.parametrize(
    "only", ["norms", "norm.*", ["norm.weight", "gain.*"], "gain.weight", "last.bias", ["stem.bias", "last.*"]]
)
def test_what_lies_before_is_of_the_batch(only: str | list[str]) -> None:
    model = Bare(
        stem, stem=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4).eval(), last=nn.Conv2d(4, 3, 3), gain=nn.RMSNorm(4)
    ).double()
    model.norm.running_mean.normal_()
    with autograd_hacks.add_hooks(model, only=only):
        for size in (3, 6, 1, 3):
            x = torch.randn(size, 2, 6, 6).double()
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda x=x: squares(model(x)))
            squares(model(x)).mean().backward()
            autograd_hacks.compute_grad1(model)
            asked = list(autograd_hacks.per_sample_grads(model))
            assert asked
            for name in asked:
                assert_close(model.get_parameter(name).grad1, expected[name])


def test_settings_come_back() -> None:
    model, x = tower(), torch.randn(5, 4).double()
    autograd_hacks.add_hooks(model)
    squares(model(x)).mean().backward()
    autograd_hacks.compute_grad1(model)
    with autograd_hacks.add_hooks(model, only="0.*"):
        assert not hasattr(model[5].weight, "grad1")  # of another step
        squares(model(x)).mean().backward()
        autograd_hacks.compute_grad1(model)
        assert not hasattr(model[5].weight, "grad1")
    squares(model(x)).mean().backward()
    assert len(autograd_hacks.per_sample_grads(model)) == 8
    autograd_hacks.remove_hooks(model)
    with autograd_hacks.add_hooks(model, only="0.*"):
        assert not any(isinstance(hook, Hook) for hook in model[5]._forward_hooks.values())
        autograd_hacks.add_hooks(model)
        assert any(isinstance(hook, Hook) for hook in model[5]._forward_hooks.values())
        squares(model(x)).mean().backward()
        assert len(autograd_hacks.per_sample_grads(model)) == 8


def test_quantities_of_a_pass() -> None:
    model, x = tower(), torch.randn(5, 4).double()
    with autograd_hacks.add_hooks(model, only="norms"):
        squares(model(x)).mean().backward()
        norms = autograd_hacks.per_sample_grads(model).norms()
        model.zero_grad()
        with autograd_hacks.during_backward(model, "norms", "grad1") as found:
            squares(model(x)).mean().backward()
        assert_close(found.norms, norms)
        assert not hasattr(model[0].weight, "grad1")
        assert model[0].bias.grad1.shape == (5, 6)
        autograd_hacks.verify(model, args=(x,))
