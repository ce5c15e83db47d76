"""Layers that compute in their own way: subclasses, patched forwards, parametrisations, and bare parameters."""

from collections.abc import Callable

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_loss_at_a_time, squares
from steps import assert_right
from torch import Tensor
from torch.nn.utils import parametrizations, parametrize, prune
from twin import Bare

import autograd_hacks


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def patched() -> nn.Module:
    layer = nn.Linear(3, 2)
    layer.forward = lambda x: 2 * nn.Linear.forward(layer, x)
    return layer


def adapted() -> nn.Module:
    """W + B A, as a parametrisation."""
    layer, lora = nn.Linear(3, 2), Bare(lambda m, w: w + m.b @ m.a, a=torch.randn(1, 3), b=torch.randn(2, 1))
    parametrize.register_parametrization(layer, "weight", lora)
    return layer


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "inside"])
@pytest.mark.parametrize(
    "build",
    [
        lambda: Doubled(3, 2),
        patched,
        adapted,
        lambda: parametrizations.weight_norm(nn.Linear(3, 2)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 2)),
        lambda: parametrizations.spectral_norm(nn.Linear(3, 2)).eval(),
        lambda: parametrizations.orthogonal(nn.Linear(3, 2)),
        lambda: nn.utils.weight_norm(nn.Linear(3, 2)),
        lambda: nn.utils.spectral_norm(nn.Linear(3, 2)),
        lambda: prune.l1_unstructured(nn.Linear(3, 2), "weight", 3),
    ],
    ids=[
        "subclass", "patched", "LoRA", "weight_norm", "spectral_norm", "spectral_norm in eval", "orthogonal",
        "old weight_norm", "old spectral_norm", "pruned",
    ],
)  # fmt: skip
def test_layers_that_compute_in_their_own_way(build: Callable[[], nn.Module], alone: bool) -> None:
    layer = build().double()
    assert not autograd_hacks.is_supported(layer)
    model = layer if alone else nn.Sequential(layer, nn.ReLU(inplace=True), nn.Linear(2, 2).double())
    x = torch.randn(4, 3).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            squares(model(x)).mean().backward()
            after = {name: buffer.clone() for name, buffer in model.named_buffers()}
            autograd_hacks.compute_grad1(model)
            assert all(torch.equal(buffer, after[name]) for name, buffer in model.named_buffers())

            def again(before: dict[str, Tensor] = before) -> Tensor:
                for name, buffer in model.named_buffers():  # power iterations from where the step began
                    buffer.copy_(before[name])
                return squares(model(x))

            with autograd_hacks.pause_hooks():
                assert_rows(model, one_loss_at_a_time(model, again))


@pytest.mark.parametrize("make", [
    lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), nn.Tanh()),
])  # fmt: skip
def test_parametrize_cached_around_the_step(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2)).double()
    x = torch.randn(3, 4).double()
    with autograd_hacks.add_hooks(model):
        for _ in range(2):
            model.zero_grad()
            with parametrize.cached():
                squares(model(x)).mean().backward()
                plain = dict(parametrize._cache)
                autograd_hacks.compute_grad1(model)
                autograd_hacks.verify(model)
                assert plain.keys() == parametrize._cache.keys()
                assert all(parametrize._cache[key] is value for key, value in plain.items())
            assert all(p.grad is not None for p in model.parameters())
            assert_right(model, x)
            for p in model.parameters():
                p.data.sub_(0.1 * p.grad)
