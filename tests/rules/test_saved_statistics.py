"""Norm layers are read with the means and scales that their nodes saved in the forward; other layers compute again."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from steps import assert_right, check, check_batches
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.errors import StaleRecord

LAYERS = {
    "layer": (lambda: nn.LayerNorm(4), (5, 3, 4)),
    "layer, two axes": (lambda: nn.LayerNorm((3, 4), eps=0.1), (5, 3, 4)),
    "layer, no bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "group": (lambda: nn.GroupNorm(2, 6), (5, 6, 2, 3)),
    "group, no positions": (lambda: nn.GroupNorm(3, 6), (5, 6)),
    "group, of one channel": (lambda: nn.GroupNorm(6, 6), (5, 6, 7)),
    "batch, running": (lambda: nn.BatchNorm2d(3).eval(), (5, 3, 2, 4)),
    "instance, running": (lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True).eval(), (5, 3, 4)),
}


def normalised_again(*_: object) -> Tensor:
    raise AssertionError("normalised again")


only_saved = mock.patch.object(torch, "layer_norm", normalised_again)
"""For reading; a forward of a LayerNorm fails in it too."""


def taken(model: nn.Module) -> list[Tensor]:
    """What the record has of nodes."""
    return [x for use in recorder_of(model).record.passes[0].received for x in use.saved.values()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LAYERS)
def test_rows_are_those_of_each_sample(name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn_like(p))
    check_batches(layer, x, x[:1], 1e3 + x)
    with autograd_hacks.add_hooks(layer):
        squares(layer(x)).sum().backward()
        with only_saved:
            autograd_hacks.compute_grad1(layer, "sum")
        with autograd_hacks.pause_hooks():
            assert_rows(layer, one_backward_per_sample(layer, squares, x))


def test_samples_on_other_axes() -> None:
    layer, x = nn.LayerNorm(4).double(), torch.randn(3, 5, 4, dtype=torch.float64)
    turned = Bare(lambda m, x: m.layer(x.transpose(0, 1)).transpose(0, 1), layer=layer)
    folded = Bare(lambda m, x: m.layer(x.flatten(0, 1)).view(x.shape), layer=layer)
    for model in (turned, folded):
        with autograd_hacks.add_hooks(model):
            squares(model(x)).sum().backward()
            with only_saved:
                autograd_hacks.compute_grad1(model, "sum")
            with autograd_hacks.pause_hooks():
                assert_rows(model, one_backward_per_sample(model, squares, x))


@pytest.mark.parametrize("name", ["layer", "group"])
def test_what_changes_between_the_forward_and_the_read(name: str) -> None:
    make, shape = LAYERS[name]
    layer, x = make().double(), torch.randn(shape, dtype=torch.float64)
    model = nn.Sequential(layer, nn.Tanh())
    expected = one_backward_per_sample(model, squares, x)
    with autograd_hacks.add_hooks(model):
        squares(model(x)).sum().backward()
        with torch.no_grad():
            layer.weight.mul_(3)
        layer.eps = 0.5
        autograd_hacks.compute_grad1(model, "sum")
        assert_rows(model, expected)
        model.zero_grad()
        squares(model(x)).sum().backward()
        x.add_(1)
        with pytest.raises(StaleRecord, match="overwritten"):
            autograd_hacks.compute_grad1(model, "sum")


def test_nothing_is_taken_that_hooks_have_packed_or_that_is_coarse() -> None:
    layer, x = nn.LayerNorm(4), torch.randn(5, 3, 4)
    with autograd_hacks.add_hooks(layer):
        squares(layer(x)).sum().backward()
        assert [x.grad_fn for x in taken(layer)] == [None, None]
        for context in (save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)):
            with context:
                losses = squares(layer(x))
            layer.zero_grad()
            losses.sum().backward()
            assert not taken(layer)
            assert_right(layer, x, loss_type="sum")
        half, x = layer.bfloat16(), x.bfloat16()
        layer.zero_grad()
        squares(half(x)).sum().backward()
        assert not taken(half)


def test_groups_of_an_input_in_another_order_in_half_precision() -> None:
    layer, x = nn.GroupNorm(2, 4).bfloat16(), torch.randn(3, 5, 4).bfloat16().mT
    with autograd_hacks.add_hooks(layer):
        squares(layer(x)).sum().backward()
        autograd_hacks.compute_grad1(layer, "sum")
        assert_close(layer.weight.grad1.sum(0).float(), layer.weight.grad.float(), rtol=0.05, atol=0.05)  # type: ignore[attr-defined, union-attr]


def test_a_checkpoint_normalises_again() -> None:
    layer = nn.LayerNorm(4).double()
    model = Bare(lambda m, x: checkpoint(m.layer, x, use_reentrant=False), layer=layer)
    check_batches(model, torch.randn(5, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("before", [True, False])
def test_a_users_hook_that_normalises_again_has_statistics_of_its_own(before: bool) -> None:
    """The layer's node isn't the one that made the output."""
    layer, other = nn.LayerNorm(4).double(), nn.LayerNorm(4, elementwise_affine=False).double()

    def again(module: nn.Module, args: object, out: Tensor) -> Tensor:
        return other(torch.tensor([1.0, 2, 3, 5], dtype=torch.float64) * out + 1)

    model = nn.Sequential(nn.Linear(4, 4).double(), layer)
    if before:
        layer.register_forward_hook(again)
    with autograd_hacks.add_hooks(model):
        if not before:
            layer.register_forward_hook(again)
        for _ in range(5):
            check(model, torch.randn(5, 4, dtype=torch.float64))


# Layers that are recomputed when they are read: what may have changed since, and what must not


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
