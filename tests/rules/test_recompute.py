"""Layers that are recomputed when they are read: what may have changed since, and what must not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.testing import assert_close

import autograd_hacks
from autograd_hacks.errors import StaleRecord


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dropout_that_can_not_be_repeated_is_refused(dtype: torch.dtype) -> None:
    layer, x = nn.LSTM(8, 3, 2, dropout=0.5).to(dtype), torch.randn(4, 5, 8, dtype=dtype)
    with autograd_hacks.add_hooks(layer):
        layer.register_forward_pre_hook(lambda layer, args: torch.rand(1) and None)  # draws after our look at the generator
        layer(x)[0].sum().backward()
        with pytest.raises(StaleRecord, match=r"the model itself \(\w+\) could not be recomputed.*\(set its dropout to 0"):
            autograd_hacks.compute_grad1(layer, "sum")


def moved(layer: nn.Module) -> None:
    torch.optim.SGD(layer.parameters(), 0.1).step()


def behind(layer: nn.Module) -> None:
    """Behind autograd's back."""
    for p in layer.parameters():
        p.data.add_(p.grad, alpha=-0.1)


BAG, BAGS = nn.EmbeddingBag(4, 2, mode="max"), torch.tensor([[0, 1], [1, 1]])
CHANGED: dict[str, tuple[nn.Module, Tensor, Callable[[nn.Module], object], str]] = {
    "LSTM, by an optimizer": (nn.LSTM(4, 2), torch.randn(3, 5, 4), moved, r"'weight_ih_l0' .* before optimizer.step\(\)"),
    "LSTM, behind autograd's back": (nn.LSTM(4, 2), torch.randn(3, 5, 4), behind, "before the update"),
    "bag, by an optimizer": (BAG, BAGS, moved, r"'weight' .* before optimizer.step\(\)"),
    "bag, behind autograd's back": (BAG, BAGS, lambda layer: layer.weight.data.neg_(), "could not be recomputed"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_weights_that_have_changed_since(what: str) -> None:
    layer, x, change, says = CHANGED[what]
    with autograd_hacks.add_hooks(layer):
        out = layer(x)
        (out[0] if isinstance(out, tuple) else out).square().sum().backward()
        change(layer)
        with pytest.raises(StaleRecord, match=says):
            autograd_hacks.compute_grad1(layer, "sum")


def test_attention_is_not_recomputed() -> None:
    """Neither dropout's masks nor the weights are needed once more."""
    layer, x = nn.MultiheadAttention(8, 2, dropout=0.5, add_bias_kv=True).double(), torch.randn(4, 5, 8).double()
    with autograd_hacks.add_hooks(layer):
        layer.register_forward_pre_hook(lambda layer, args: torch.rand(1) and None)
        layer(x, x, x)[0].pow(2).sum().backward()
        grads = {name: p.grad.clone() for name, p in layer.named_parameters()}
        for p in layer.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        autograd_hacks.compute_grad1(layer, "sum")
        for name, p in layer.named_parameters():
            assert p.grad1.shape == (5, *p.shape)
            assert_close(p.grad1.sum(0), grads[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [nn.GRU, nn.MultiheadAttention, nn.Linear])
def test_reading_within_autocast_and_after_it(kind: type[nn.Module], dtype: torch.dtype) -> None:
    more = {"dropout": 0.2, "num_layers": 2} if kind is nn.GRU else {}
    layer, x = kind(8, 4, **more), torch.randn(3, 5, 8)
    with autograd_hacks.add_hooks(layer):
        for within in (True, False):
            layer.zero_grad()
            with torch.autocast("cpu", dtype):
                out = layer(x, x, x) if kind is nn.MultiheadAttention else layer(x)
                (out[0] if isinstance(out, tuple) else out).float().pow(2).sum().backward()
                if within:
                    autograd_hacks.compute_grad1(layer, "sum")
            autograd_hacks.compute_grad1(layer, "sum")
            for p in layer.parameters():
                assert p.grad1.dtype == torch.float32
                assert_close(p.grad1.sum(0), p.grad, rtol=0.1, atol=0.1 * p.grad.abs().max().item() + 1e-3)


def test_recomputing_leaves_the_generator_alone() -> None:
    layer, x = nn.GRU(2, 3, 2, dropout=0.5), torch.randn(4, 5, 2)
    with autograd_hacks.add_hooks(layer):
        layer(x)[0].sum().backward()
        before = torch.get_rng_state()
        autograd_hacks.compute_grad1(layer, "sum")
        assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.GRUCell, nn.MultiheadAttention])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_stays_in_its_row_when_its_layer_is_recomputed(
    kind: type[nn.Module], value: float
) -> None:
    layer, x = kind(4, 2, **({} if kind is nn.GRUCell else {"batch_first": True})), torch.randn(3, 5, 4)
    x[1] = value
    with autograd_hacks.add_hooks(layer):
        out = layer(x[:, 0]) if kind is nn.GRUCell else layer(x, x, x) if kind is nn.MultiheadAttention else layer(x)
        (out[0] if isinstance(out, tuple) else out).flatten(1).sum(1).mean().backward()
        autograd_hacks.compute_grad1(layer)
        for p in layer.parameters():
            assert p.grad1[[0, 2]].isfinite().all()
            assert torch.equal(p.grad1.isfinite().all(), p.grad.isfinite().all())
