"""A default device of torch's is the user's: no tensor of the library's own goes there."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import assert_rows, one_backward_per_sample, squares
from torch import Tensor
from torch.utils._device import _device_constructors

import autograd_hacks

PACKAGE = Path(__file__).parent.parent.parent / "autograd_hacks"


def made_without_device(text: str) -> list[str]:
    """The calls of torch's that make a tensor where the default device is."""
    names = {function.__name__ for function in _device_constructors()} | {"normal"}
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    makers = [c for c in calls if isinstance(c.func, ast.Attribute) and c.func.attr in names and _is_torch(c.func.value)]
    return [ast.unparse(call) for call in makers if not any(word.arg == "device" for word in call.keywords)]


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def test_every_tensor_says_where_it_is() -> None:
    found = {path.name: calls for path in PACKAGE.rglob("*.py") if (calls := made_without_device(path.read_text()))}
    assert not found
    assert made_without_device("x = torch.arange(3) + torch.ones(3, device=y.device)") == ["torch.arange(3)"]


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).tanh() * self.scale


def first(model: nn.Module) -> nn.Module:
    model.register_forward_hook(lambda module, args, output: output[0])
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lambda: torch.randn(5, 3)),
    "conv": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 2)),
        lambda: torch.randn(5, 3, 4, 4),
    ),
    "lstm": (
        lambda: nn.Sequential(nn.Embedding(9, 3), first(nn.LSTM(3, 4, batch_first=True))),
        lambda: torch.randint(9, (5, 4)),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True), lambda: torch.randn(5, 3, 4)),
    "bag": (lambda: nn.EmbeddingBag(9, 4), lambda: torch.randint(9, (5, 4))),
    "bare": (Bare, lambda: torch.randn(5, 3)),
}


def everything(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Each verb's result, on a new step where it ends one."""

    def losses() -> Tensor:
        model.zero_grad()
        return model(x).flatten(1).square().sum(1)

    found: dict[str, Any] = {}
    with autograd_hacks.add_hooks(model):
        losses().mean().backward()
        autograd_hacks.compute_grad1(model, set_grad=True)
        found["grad1"] = {name: p.grad1.clone() for name, p in model.named_parameters()}
        grads, own = autograd_hacks.per_sample_grads(model), {name: p.detach() for name, p in model.named_parameters()}
        weights, groups = torch.linspace(1, 2, 5, device="cpu"), torch.tensor([0, 0, 1, 1, 1], device="cpu")
        found |= {
            "norms": grads.norms(),
            "weighted": dict(grads.weighted_sum(weights)),
            "dot": grads.dot(own),
            "gram": grads.gram(),
            "moments": (dict(grads.second_moment()), dict(grads.variance())),
            "projection": grads.project(4),
            "selected": (grads.select(slice(1, 3)).norms(), grads.select(groups == 1).norms()),
            "grouped": grads.group(groups).norms(),
            "curvature": (dict(grads.fisher_matvec(own)), dict(grads.natural_gradient(own, damping=0.1))),
            "table": str(autograd_hacks.describe(model)),
        }
        autograd_hacks.verify(model, samples=2)
        with autograd_hacks.during_backward(model, "norms", "gram", project=3) as streamed:
            losses().mean().backward()
        found["streamed"] = streamed.norms, streamed.gram, streamed.projection
        autograd_hacks.backward(losses())
        found["clipped"] = autograd_hacks.clip_grad1_norm_(model, 0.1)
        with autograd_hacks.accumulate(model):
            for part in x.split(3):
                model(part).flatten(1).square().sum(1).mean().backward()
        found["accumulated"] = autograd_hacks.per_sample_grads(model).select(slice(2, 4)).gram()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_step_with_meta_as_default_device(name: str) -> None:
    model, x = MODELS[name][0](), MODELS[name][1]()
    expected = everything(model, x)
    with torch.device("meta"):
        found = everything(model, x)
    torch.testing.assert_close(
        {k: v for k, v in found.items() if k != "table"}, {k: v for k, v in expected.items() if k != "table"}
    )
    assert found["table"] == expected["table"]
    model, x = model.double(), x.double() if x.is_floating_point() else x
    with autograd_hacks.add_hooks(model):
        torch.set_default_device("meta")
        try:
            model.zero_grad()
            model(x).square().flatten(1).sum(1).mean().backward()
            autograd_hacks.compute_grad1(model)
        finally:
            torch.set_default_device(None)
        with autograd_hacks.pause_hooks():
            assert_rows(model, one_backward_per_sample(model, lambda out: out.square().flatten(1).sum(1), x))


@pytest.mark.parametrize("name", ["mlp", "conv"])
def test_curvature_with_meta_as_default_device(name: str) -> None:
    model, x = MODELS[name][0](), MODELS[name][1]()

    def curved(device: str, samples: int | None) -> dict[str, Tensor]:
        with autograd_hacks.add_hooks(model), torch.device(device):
            generator = torch.Generator().manual_seed(1) if samples else None
            autograd_hacks.backprop_hess(model(x), "CrossEntropy", samples, generator)
            autograd_hacks.compute_hess(model)
            return {key: p.hess.clone() for key, p in model.named_parameters()}

    for samples in (None, 3):
        torch.testing.assert_close(curved("meta", samples), curved("cpu", samples))
    assert squares(model(x)).shape == (5,)
