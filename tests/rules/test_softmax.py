"""Layers that end in a softmax or are a loss: rows against a backward pass for each sample's loss."""

import pytest
import torch
import torch.nn as nn
from nets import Inside
from oracle import assert_rows, one_backward_per_sample, one_loss_at_a_time
from torch import Tensor

import autograd_hacks


def test_adaptive_softmax() -> None:
    """Its output and its loss, with targets in every cluster or in some."""
    torch.manual_seed(0)
    for bias, targets in ((True, [0, 1, 2, 4, 5, 7]), (False, [6, 1, 7, 6])):
        layer = nn.AdaptiveLogSoftmaxWithLoss(4, 8, [2, 5], div_value=2, head_bias=bias).double()
        x, y, w = torch.randn(len(targets), 4).double(), torch.tensor(targets), torch.randn(len(targets)).double()

        def each(layer: nn.Module = layer, x: Tensor = x, y: Tensor = y, w: Tensor = w) -> Tensor:
            return (w - 3 / len(y)) * layer(x, y).output

        for model in (layer, Inside(layer)):
            with autograd_hacks.add_hooks(model):
                out = model(x, y)
                ((out.output * w).sum() + 3 * out.loss).backward()
                autograd_hacks.compute_grad1(model, "sum")
                with autograd_hacks.pause_hooks():
                    assert_rows(model, one_loss_at_a_time(model, each))
            model.zero_grad()


@pytest.mark.parametrize("targets", [[0, 1, 2, 4], [9, 0, 1], [4, 9, 0, 5], [4]])
def test_adaptive_softmax_with_one_target_in_a_cluster(targets: list[int]) -> None:
    """Torch selects its row and writes it by an index without axes."""
    torch.manual_seed(0)
    first, layer = nn.Linear(4, 16).double(), nn.AdaptiveLogSoftmaxWithLoss(16, 12, [3, 7]).double()
    model, x, y = nn.ModuleList([first, layer]), torch.randn(len(targets), 4).double(), torch.tensor(targets)
    model.forward = lambda x, y: layer(first(x), y).output
    own = one_backward_per_sample(model, lambda h, y: layer(h, y).output, x, y, run=first)
    with autograd_hacks.add_hooks(model):
        model(x, y).sum().backward()
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, own)


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
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, each))
        model.zero_grad()
