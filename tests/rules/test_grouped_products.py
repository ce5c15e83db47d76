"""Experts in one stack, all applied by one grouped product."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from oracle import assert_rows, one_loss_at_a_time, squares
from rarely import crossed
from torch import Tensor
from torch.testing import assert_close
from twin import Bare

import autograd_hacks
from autograd_hacks import forms

if not hasattr(F, "grouped_mm"):
    pytest.skip("this torch has no grouped product", allow_module_level=True)

EXPERTS, WIDTH, OUT = 4, 8, 12


def routed(m: nn.Module, x: Tensor) -> Tensor:
    """Each token goes to one expert, and expert 3 gets none."""
    tokens = x.flatten(0, 1)
    score, expert = m.gate(tokens).softmax(-1).max(-1)
    order = expert.argsort(stable=True)
    ends = torch.bincount(expert, minlength=EXPERTS).cumsum(0).int()
    weight = m.stack.transpose(-2, -1) if m.transposed else m.stack
    y = F.grouped_mm(m.before(tokens)[order], weight, offs=ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    return (y[back] * score[:, None]).unflatten(0, x.shape[:2])


@crossed(transposed=[False, True], param_grad=[True, False])
@pytest.mark.parametrize(("samples", "tokens"), [(5, 3), (4, 4), (1, 6), (6, 1)])
def test_rows_of_a_stack(samples: int, tokens: int, transposed: bool, param_grad: bool) -> None:
    stack = torch.randn(EXPERTS, *((OUT, WIDTH) if transposed else (WIDTH, OUT)))
    layers = {"before": nn.Linear(5, WIDTH), "gate": nn.Linear(5, EXPERTS - 1)}
    model = Bare(routed, **layers, stack=stack, transposed=transposed)
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(4):
            x = torch.randn(samples, tokens, 5)
            with autograd_hacks.pause_hooks():
                expected = one_loss_at_a_time(model, lambda x=x: squares(model(x)))
            squares(model(x)).mean().backward()
            grads = autograd_hacks.per_sample_grads(model)
            autograd_hacks.compute_grad1(model)
            assert_rows(model, expected, torch.float32)
            rows = model.stack.grad1.flatten(1)
            assert not any(isinstance(leaf, forms.Dense) for leaf in grads["stack"].leaves())  # it stays a sum of products
            assert_close(grads.norms(per_parameter=True)["stack"], rows.norm(dim=1))
            assert_close(
                grads.weighted_sum(torch.arange(samples).float())["stack"].flatten(), torch.arange(samples).float() @ rows
            )
            assert_close(grads["stack"].gram(grads["stack"]), rows @ rows.T, rtol=1e-4, atol=1e-4)
