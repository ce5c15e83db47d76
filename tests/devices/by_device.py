"""One model of each family, what is true of it on any device, and products in TF32 where the device has none."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from twin import Bare

import autograd_hacks

aten = torch.ops.aten
SAMPLES = 6


@contextmanager
def products(precision: str, *settings: Any) -> Iterator[None]:
    """Whatever may use TF32 does, or by 'ieee' doesn't.  settings: of torch.backends; without, those of a GPU"""
    settings = settings or (torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn)
    kept = [setting.fp32_precision for setting in settings]
    for setting in settings:
        setting.fp32_precision = precision
    try:
        yield
    finally:
        for setting, value in zip(settings, kept):
            setting.fp32_precision = value


def encode(m: nn.Module, x: Tensor) -> Tensor:
    """An encoder's layer on vectors, a class token, the mean over positions."""
    return m.out(m.layer(torch.cat([m.token.expand(len(x), -1, -1), x], 1)).mean(1))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    return Bare(encode, token=torch.randn(1, 1, 8), layer=layer, out=nn.Linear(8, 3))


class Causal(nn.Module):
    """A language model: tied embeddings, learnt positions, SDPA with a causal mask."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.positions, self.heads = nn.Embedding(11, width), nn.Embedding(9, width), heads
        self.qkv, self.merge = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return F.linear(x + self.mlp(x), self.embed.weight)


def recurrent(kind: type[nn.RNNBase], width: int = 4) -> nn.Module:
    """Two layers in both directions, and what they said last."""
    rnn = kind(3, width, 2, batch_first=True, bidirectional=True)
    return Bare(lambda m, x: m.out(m.rnn(x)[0].mean(1)), rnn=rnn, out=nn.Linear(2 * width, 3))


def route(m: nn.Module, x: Tensor) -> Tensor:
    """Each position goes to the expert with the highest score, and is brought back."""
    tokens = x.flatten(0, 1)
    score, chosen = m.gate(tokens).softmax(-1).max(-1)
    y = tokens.new_zeros(len(tokens), 5)
    for number, expert in enumerate(m.experts):
        own = (chosen == number).nonzero()[:, 0]
        y = y.index_add(0, own, (expert(tokens[own]).tanh() * score[own, None]).to(y.dtype))
    return m.out(y.unflatten(0, x.shape[:2]).mean(1))


def experts() -> nn.Module:
    two = nn.ModuleList(nn.Linear(4, 5) for _ in range(2))
    return Bare(route, gate=nn.Linear(4, 2), experts=two, out=nn.Linear(5, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=8),
        nn.Conv2d(8, 6, 1), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip


def vectors(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(SAMPLES, *shape)


def words(length: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(11, (SAMPLES, length))


@dataclass(frozen=True)
class Family:
    model: Callable[[], nn.Module]
    x: Callable[[], Tensor]

    def on(self, device: torch.device | str, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[nn.Module, Tensor]:
        """The model and a batch, the same numbers on each device."""
        torch.manual_seed(seed)
        x = self.x()
        return self.model().to(device, dtype), x.to(device, dtype if x.is_floating_point() else x.dtype)


FAMILIES = {
    "mlp": Family(lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)), vectors(5)),
    "cnn": Family(cnn, vectors(3, 5, 5)),
    "encoder": Family(encoder, vectors(4, 8)),
    "causal language model": Family(Causal, words(7)),
    "lstm": Family(lambda: recurrent(nn.LSTM), vectors(5, 3)),
    "gru": Family(lambda: recurrent(nn.GRU), vectors(5, 3)),
    "embedding bag": Family(
        lambda: nn.Sequential(nn.EmbeddingBag(11, 5, mode="mean"), nn.Tanh(), nn.Linear(5, 3)), words(4)
    ),
    "routed experts": Family(experts, vectors(4, 4)),
}


def losses(out: Tensor) -> Tensor:
    """N, from squares and slopes that no two entries of a sample share."""
    z = out.flatten(1).to(torch.promote_types(out.dtype, torch.float32))
    slopes = torch.linspace(-1, 1, z.shape[1], dtype=z.dtype, device=z.device)
    return (z * slopes).sum(1) + z.square().mean(1)


def step(model: nn.Module, x: Tensor) -> Tensor:
    """A step of a hooked model, whose rows are written.  Returns the output."""
    out = model(x)
    losses(out).mean().backward()
    autograd_hacks.compute_grad1(model)
    return out.detach()


def rows_of(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
    """A plain backward pass from each sample's loss, the sample alone.  {name: (N, *shape)}, zeros where none arrives."""
    parameters = dict(model.named_parameters())
    rows = [
        torch.autograd.grad(
            losses((run or model)(one)).sum(), list(parameters.values()), allow_unused=True, materialize_grads=True
        )
        for one in x.split(1)
    ]
    return {name: torch.stack(own) for name, own in zip(parameters, zip(*rows))}


def double_rows(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """`rows_of` a copy in double precision, on the CPU."""
    exact = copy.deepcopy(model).to("cpu", torch.float64)
    return rows_of(exact, x.to("cpu", torch.float64 if x.is_floating_point() else x.dtype))


def errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """{name: how far all rows are off, of the length of the exact ones}."""
    own = {name: found[name].detach().to("cpu", torch.float64) for name in exact}
    return {name: float((own[name] - exact[name]).norm() / exact[name].norm().clamp(min=1e-30)) for name in exact}


def grad1_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.zeros_like(p) if p.grad1 is None else p.grad1 for name, p in model.named_parameters()}


def tf32(x: Any) -> Any:
    """A tensor of single precision rounded to the ten bits of TF32."""
    if not (isinstance(x, Tensor) and x.dtype == torch.float32):
        return x
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class TF32(TorchDispatchMode):
    """Products of a CPU as a GPU makes them that may use TF32: their factors rounded, their sums not."""

    CONVOLUTIONS = (aten.convolution, aten.convolution_backward)
    PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.dot, *CONVOLUTIONS)

    def __init__(self, operations: tuple[Any, ...] = PRODUCTS) -> None:
        super().__init__()
        self.operations, self.rounded = operations, 0

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if f.overloadpacket in self.operations:
            self.rounded += 1
            args = tree_map(tf32, args)
        return f(*args, **(kwargs or {}))
