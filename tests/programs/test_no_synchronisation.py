"""What a steady step asks of the host: nothing, since on a GPU each question waits for all kernels before it.

Without a GPU: the forms take the way that they take there, and questions are counted.
"""

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autograd_hacks
from autograd_hacks.forms import factored, numerics, positions

aten = torch.ops.aten
ASKING = [aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.unique_consecutive]
INDEXING = [aten.index, aten.index_put, aten.index_put_]


class Questions(TorchDispatchMode):
    """Notes where a tensor's numbers decide what the host does next."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "autograd_hacks" in frame.filename]
        self.asked.append(f"{what} at {frames[-1].filename}:{frames[-1].lineno}" if frames else what)

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = f.overloadpacket in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
        repeats = f.overloadpacket is aten.repeat_interleave and (kwargs or {}).get("output_size") is None
        if f.overloadpacket in ASKING or by_mask or repeats:
            self.note(str(f))
        return f(*args, **(kwargs or {}))


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.depthwise = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, groups=8)
        self.norm, self.out = nn.GroupNorm(2, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.depthwise(self.conv(x))).mean((2, 3)))


class Text(nn.Module):
    """Tied embeddings with padding, attention, a parameter by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.scale = nn.Embedding(50, 32, padding_idx=0), nn.Parameter(torch.ones(32))
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.block(self.token(x)) * self.scale) @ self.token.weight.t()


def wide() -> nn.Module:
    """Norms of its layers are taken from products between positions."""
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512))


def images() -> Tensor:
    return torch.randn(6, 3, 10, 10)


def tokens() -> Tensor:
    return torch.randint(0, 50, (6, 12))


def sequences() -> Tensor:
    return torch.randn(32, 16, 512)


def losses(out: Tensor) -> Tensor:
    return out.flatten(1).square().mean(1)


def rows(model: nn.Module, x: Tensor) -> None:
    losses(model(x)).mean().backward()
    autograd_hacks.compute_grad1(model)


def norms(model: nn.Module, x: Tensor) -> None:
    losses(model(x)).mean().backward()
    autograd_hacks.per_sample_grads(model).norms()


def clip(model: nn.Module, x: Tensor) -> None:
    autograd_hacks.backward(losses(model(x)))
    autograd_hacks.clip_grad1_norm_(model, 1.0)


def stream(model: nn.Module, x: Tensor) -> None:
    with autograd_hacks.streaming(model):
        losses(model(x)).mean().backward()


def arriving(model: nn.Module, x: Tensor) -> None:
    with autograd_hacks.during_backward(model, "grad1", "norms"):
        losses(model(x)).mean().backward()


def asks(model: nn.Module, x: Tensor) -> None:
    """What the others mustn't be like."""
    rows(model, x)
    _ = [bool((p.grad1 != 0).any()) for p in model.parameters()]


Verb = Callable[[nn.Module, Tensor], None]


def questions(kind: Callable[[], nn.Module], make: Callable[[], Tensor], verb: Verb, param_grad: bool) -> list[str]:
    """What the 20th step asks, at which no plan is proven anew."""
    torch.manual_seed(0)
    model = kind()
    with autograd_hacks.add_hooks(model, param_grad=param_grad):
        for _ in range(19):
            verb(model, make())
            model.zero_grad()
        with pytest.MonkeyPatch.context() as patch, Questions() as found:
            for name in ("tolist", "cpu", "numpy"):
                patch.setattr(Tensor, name, lambda x, *args, name=name: found.note(name) or getattr(Tensor, name)(x, *args))
            verb(model, make())
    return found.asked


@pytest.mark.parametrize("param_grad", [True, False])
@pytest.mark.parametrize("verb", [rows, norms, clip, stream, arriving])
@pytest.mark.parametrize(("kind", "make"), [(Convolutional, images), (Text, tokens), (wide, sequences)])
def test_a_steady_step_asks_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: Callable[[], nn.Module], make: Callable[[], Tensor], verb: Verb, param_grad: bool
) -> None:
    for module in (factored, numerics, positions):
        monkeypatch.setattr(module, "looks_free", lambda tensor: False)
    assert questions(kind, make, verb, param_grad) == []


def test_questions_are_seen() -> None:
    assert questions(Convolutional, images, asks, True)
    assert questions(wide, sequences, norms, True)  # on a CPU, where looking is free
