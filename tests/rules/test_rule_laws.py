"""Laws 1, 2 and 6 over random layers in every configuration that their classes accept: that rows are those of each sample
alone (1) contains what permuted, split and changed batches would show."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import one_backward_per_sample, squares, targets
from steps import check
from strategies import Case, layers
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks

loss_types = st.sampled_from(["mean", "sum"])


EVEN_SAME = Case(nn.Conv2d(2, 4, (2, 4), padding="same", groups=2).double(), torch.randn(3, 2, 5, 6).double())


@given(layers, loss_types)
@example(EVEN_SAME, "mean")
def test_rule_equals_one_backward_per_sample(case: Case, loss_type: str) -> None:
    with autograd_hacks.add_hooks(case.layer):
        for _ in range(2):  # the record of an earlier step is there to be replaced
            check(case.layer, case.x, loss_type)
        for p in case.layer.parameters():
            assert not p.grad1.requires_grad
            if len(case.x):
                assert_close(p.grad1.mean(0) if loss_type == "mean" else p.grad1.sum(0), p.grad)


@given(layers)
def test_hooks_change_neither_outputs_nor_gradients(case: Case) -> None:
    def step() -> list[Tensor]:
        case.layer.zero_grad()
        out = case.layer(case.x)
        squares(out, targets(len(case.x))).sum().backward()
        return [out.detach(), *[p.grad for p in case.layer.parameters()]]

    before = step()
    with autograd_hacks.add_hooks(case.layer):
        hooked = step()
    for one, other in zip(before, hooked):
        assert torch.equal(one, other)
    assert not case.layer._forward_hooks
    assert not case.layer._forward_pre_hooks


@pytest.mark.parametrize("expand", [lambda g: g.expand(3, 4, 5), lambda g: g.expand(3, 5, 4).mT], ids=["stride 0", "mT"])
def test_gradients_that_are_expanded_or_permuted(expand: Callable[[Tensor], Tensor]) -> None:
    layer, x = nn.Linear(2, 5).double(), torch.randn(3, 4, 2, dtype=torch.float64)
    gradient = expand(torch.ones((), dtype=torch.float64))
    with autograd_hacks.add_hooks(layer):
        layer(x).backward(gradient)
        autograd_hacks.compute_grad1(layer, "sum")
        assert_close(layer.weight.grad1, torch.einsum("nto,nti->noi", gradient, x))
        assert_close(layer.bias.grad1, gradient.sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grad1_has_the_parameters_dtype(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)).to(dtype)
    x = torch.randn(4, 2, 4, 4, dtype=dtype)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        expected = one_backward_per_sample(model, squares, x)
        tolerance = 20 * torch.finfo(dtype).eps  # in these precisions an einsum and a convolution differ by a few eps
        for name, p in model.named_parameters():
            assert p.grad1.dtype == dtype
            assert_close(p.grad1, expected[name], rtol=tolerance, atol=tolerance)


def test_autocast_gives_grad1_in_the_parameters_dtype() -> None:
    model, x = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), torch.randn(4, 6)
    with autograd_hacks.add_hooks(model):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        squares(out.float()).mean().backward()
        autograd_hacks.compute_grad1(model)
        for p in model.parameters():
            assert p.grad1.dtype == torch.float32
            assert_close(p.grad1.mean(0), p.grad, rtol=0.02, atol=0.02)
