"""Laws 1, 2, 5 and 6 over random layers in every configuration that their classes accept."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from hypothesis import example, given
from hypothesis import strategies as st
from oracle import one_backward_per_sample, squares, targets
from steps import check
from strategies import Case, filled_layers, layers
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks

loss_types = st.sampled_from(["mean", "sum"])


def grad1_of(case: Case, loss_type: str, x: Tensor | None = None, y: Tensor | None = None) -> dict[str, Tensor]:
    x, y = case.x if x is None else x, targets(len(case.x)) if y is None else y
    case.layer.zero_grad()
    with autograd_hacks.add_hooks(case.layer):
        per_sample = squares(case.layer(x), y)
        (per_sample.mean() if loss_type == "mean" else per_sample.sum()).backward()
        autograd_hacks.compute_grad1(case.layer, loss_type)
        return {name: p.grad1 for name, p in case.layer.named_parameters()}


EVEN_SAME = Case(nn.Conv2d(2, 4, (2, 4), padding="same", groups=2).double(), torch.randn(3, 2, 5, 6).double())


@given(layers, loss_types)
@example(EVEN_SAME, "mean")
def test_rule_equals_one_backward_per_sample(case: Case, loss_type: str) -> None:
    grad1_of(case, loss_type)  # so that the record of an earlier step is there to be replaced
    with autograd_hacks.add_hooks(case.layer):
        check(case.layer, case.x, loss_type)


@given(layers, loss_types)
def test_rows_add_up_to_grad(case: Case, loss_type: str) -> None:
    rows = grad1_of(case, loss_type)
    for name, p in case.layer.named_parameters():
        if len(case.x):
            assert_close(rows[name].mean(0) if loss_type == "mean" else rows[name].sum(0), p.grad)
        assert not rows[name].requires_grad


@given(layers, st.data())
def test_permuting_samples_permutes_rows_and_splitting_splits_them(case: Case, data: st.DataObject) -> None:
    rows, n = grad1_of(case, "sum"), len(case.x)
    order = torch.tensor(data.draw(st.permutations(range(n))), dtype=torch.long)
    permuted = grad1_of(case, "sum", case.x[order], targets(len(case.x))[order])
    cut = data.draw(st.integers(0, n))
    slices = [slice(cut), slice(cut, n)] if 0 < cut < n else [slice(n)]  # not all layers take an empty batch
    parts = [grad1_of(case, "sum", case.x[s], targets(len(case.x))[s]) for s in slices]
    for name in rows:
        assert_close(permuted[name], rows[name][order])
        assert_close(torch.cat([part[name] for part in parts]), rows[name])


@given(filled_layers)
def test_changing_a_sample_changes_its_row(case: Case) -> None:
    rows, x = grad1_of(case, "sum"), case.x.clone()
    x[0] += 1
    changed = grad1_of(case, "sum", x)
    for name in rows:
        assert not torch.equal(changed[name][0], rows[name][0])


@given(layers.filter(lambda case: len(case.x) > 1))
def test_changing_a_sample_changes_no_other_row(case: Case) -> None:
    rows, x = grad1_of(case, "sum"), case.x.clone()
    x[0] = case.x[1]
    changed = grad1_of(case, "sum", x)
    for name in rows:
        assert_close(changed[name][1:], rows[name][1:])


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
