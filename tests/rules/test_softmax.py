"""Layers that end in a softmax or are a loss: rows against a backward pass for each sample's loss."""

import pytest
import torch
import torch.nn as nn
from nets import Inside
from torch import Tensor

import autograd_hacks


def test_adaptive_softmax() -> None:
    """Its output and its loss, with targets in every cluster or in some."""
    torch.manual_seed(0)
    for bias, targets in ((True, [0, 1, 2, 4, 5, 7]), (False, [6, 1, 7, 6])):
        layer = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 5], div_value=2, head_bias=bias).double()
        x, y, w = torch.randn(len(targets), 4).double(), torch.tensor(targets), torch.randn(len(targets)).double()
        for model in (layer, Inside(layer)):
            with autograd_hacks.add_hooks(model):
                out = model(x, y)
                ((out.output * w).sum() + 3 * out.loss).backward()
                autograd_hacks.compute_grad1(model, "sum")
                rows = {p: p.grad1 for p in model.parameters()}
            for n in range(len(targets)):
                model.zero_grad()
                (-3 / len(targets) + w[n]).mul(layer(x, y).output[n]).backward()
                for p in model.parameters():
                    expected = torch.zeros_like(p) if p.grad is None else p.grad
                    torch.testing.assert_close(torch.zeros_like(p) if rows[p] is None else rows[p][n], expected)
            model.zero_grad()


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="newer than this torch")
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_linear_cross_entropy(reduction: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, 4).double(), torch.tensor([0, 2, -100, 1, 2])
    layer = nn.LinearCrossEntropyLoss(4, 3, weight=torch.rand(3).double(), reduction=reduction, bias=True, ignore_index=-100)
    layer = layer.double()

    def each() -> Tensor:
        logits = layer.linear(x)
        if reduction == "mean":  # with the batch's own denominator
            whole = nn.functional.cross_entropy(logits, y, layer.weight, reduction="none")
            return whole / layer.weight[y[y >= 0]].sum()
        return nn.functional.cross_entropy(logits, y, layer.weight, reduction="none")

    for model in (layer, Inside(layer)):
        with autograd_hacks.add_hooks(model):
            model(x, y).sum().backward()
            autograd_hacks.compute_grad1(model, "sum")
            rows = {p: p.grad1 for p in model.parameters()}
        for n in range(5):
            model.zero_grad()
            each()[n].backward()
            for p in model.parameters():
                torch.testing.assert_close(rows[p][n], p.grad)
        model.zero_grad()
