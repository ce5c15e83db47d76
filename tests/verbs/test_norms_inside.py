"""Norms from inside a model's graph, compiled or not, against one backward pass for each sample."""

import copy
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from oracle import one_backward_per_sample
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import autograd_hacks

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, which change with its version

BACKENDS = [None, "aot_eager"]


@pytest.fixture(autouse=True)
def _forgets() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Text(nn.Module):
    """A small transformer without attention: tables, norms, positions, an in-place slope."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(7, 4, padding_idx=0), nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(self._block() for _ in range(2))
        self.last, self.head = nn.RMSNorm(4), nn.Linear(4, 3)

    def _block(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(inplace=True), nn.Linear(6, 4, bias=False))

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.places(torch.arange(tokens.shape[1]).expand(tokens.shape))
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(self.last(x)).mean(1)


class Checkpointed(Text):
    reentrant = False

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return x + checkpoint(block, x, use_reentrant=self.reentrant)


class Reentrant(Checkpointed):
    reentrant = True


class Images(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(2, 4, 3, padding="same", padding_mode="circular"),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 4, 2, stride=2, groups=2, dilation=2),
            nn.BatchNorm2d(4).eval(),
            nn.Flatten(),
            nn.Linear(16, 3),
        )


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().sum(1)


def tokens(n: int) -> tuple[Tensor, Tensor]:
    return torch.randint(7, (n, 5)), torch.randn(n, 3).double()


def images(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 2, 5, 5).double(), torch.randn(n, 3).double()


Batch = Callable[[int], tuple[Tensor, Tensor]]
NETS: list[tuple[Callable[[], nn.Module], Batch]] = [(Text, tokens), (Checkpointed, tokens), (Images, images)]


def made(net: Callable[[], nn.Module]) -> nn.Module:
    model = net().double()
    for p in model.parameters():
        nn.init.normal_(p)
    return model


def norms_of(rows: dict[str, Any]) -> Tensor:
    return torch.stack([r.flatten(1).norm(dim=1) for r in rows.values() if r is not None]).norm(dim=0)


def compiled(model: nn.Module, backend: str | None) -> Callable[..., Any]:
    return model if backend is None else torch.compile(model, backend=backend, fullgraph=True)


@pytest.mark.parametrize("param_grad", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("net", "batch"), NETS)
def test_two_passes_clip(net: Callable[[], nn.Module], batch: Batch, backend: str | None, param_grad: bool) -> None:
    model = made(net)
    plain, before = copy.deepcopy(model), {name: type(m) for name, m in model.named_modules()}
    inside = autograd_hacks.norms_inside(model, batch(4)[:1], param_grad=param_grad)
    run = compiled(model, backend)
    for n in (4, 6, 4):
        x, y = batch(n)
        rows = one_backward_per_sample(plain, squares, x, y)
        model.zero_grad()
        with inside.batch(n):
            squares(run(x), y).mean().backward()
        norms = inside.norms()
        assert_close(norms, norms_of(rows))
        for name, p in model.named_parameters():
            if param_grad:
                assert_close(p.grad, rows[name].mean(0))
            else:
                assert p.grad is None
        bound = float(norms.median())
        weights = (bound / norms).clamp(max=1)
        model.zero_grad()
        (weights * squares(run(x), y)).mean().backward()
        for name, p in model.named_parameters():
            assert_close(p.grad, torch.tensordot(weights, rows[name], 1) / n)
    assert list(model.state_dict()) == list(plain.state_dict())
    inside.remove()
    assert {name: type(m) for name, m in model.named_modules()} == before
    assert not any("_tap" in vars(m) for m in model.modules())


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler of C++")
def test_norms_under_inductor() -> None:
    model, x = nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 4), nn.Tanh()).double(), torch.randn(4, 5, 3).double()
    plain, y = copy.deepcopy(model), torch.randn(4, 5, 4).double()
    inside = autograd_hacks.norms_inside(model, (x,))
    with inside.batch(4):
        squares(compiled(model, "inductor")(x).flatten(1), y.flatten(1)).sum().backward()
    rows = one_backward_per_sample(plain, lambda out, y: squares(out.flatten(1), y.flatten(1)), x, y)
    assert_close(inside.norms("sum"), norms_of(rows))


@pytest.mark.parametrize("param_grad", [False, True])
def test_reentrant_checkpoints(param_grad: bool) -> None:
    model = made(Reentrant)
    plain = copy.deepcopy(model)
    inside = autograd_hacks.norms_inside(model, tokens(4)[:1], param_grad=param_grad)
    x, y = tokens(4)
    with inside.batch(4):
        squares(model(x), y).sum().backward()
    assert_close(inside.norms("sum"), norms_of(one_backward_per_sample(plain, squares, x, y)))
