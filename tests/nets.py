"""Models that tests of several files share."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from twin import Bare


class Multiply(torch.autograd.Function):
    """x · scale, as users write it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # of one gradient
        x, scale = ctx.saved_tensors
        return g * scale, (g * x).sum_to_size(scale.shape)


class Product(torch.autograd.Function):
    """x wᵀ, as kernels of others have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, g.T @ x


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Around(nn.Module):
    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own = own


class Patched(nn.Module):
    """A class token, positions, a layer scale, a tied decoder by F.linear, and 3-D weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(7, 4), nn.Embedding(9, 4)
        self.token, self.scale = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(4))
        self.heads, self.out = nn.Parameter(torch.randn(2, 4, 2)), nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(tokens), -1, -1), self.embed(tokens)], 1)
        x = x + self.positions(torch.arange(x.shape[1]))
        x = x + self.scale * self.out(torch.einsum("ntd,hde->nthe", x, self.heads).flatten(2).tanh())
        return F.linear(x, self.embed.weight)


def noisy(features: int) -> nn.Module:
    """Dropout between a bare parameter and the output, which no other run of one sample draws alike."""
    scale, drop = torch.randn(features), nn.Dropout(0.5)
    return Bare(lambda m, x: (m.drop(x * m.scale).cumsum(1) * m.scale).tanh(), scale=scale, drop=drop)


def choosy() -> nn.Module:
    """Control flow on values, which vmap can't follow."""
    up, down = torch.randn(3), torch.randn(3)
    return Bare(lambda m, x: torch.stack([row * (m.up if row.sum() > 0 else m.down) for row in x]), up=up, down=down)


class Hiding:
    """An object of any kind."""

    def __init__(self, x: Any) -> None:
        self.x, self.itself = x, self


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


def routed(m: nn.Module, x: Tensor) -> Tensor:
    """Experts that rows are chosen for, as modules and as one stack, and norms of one's own."""
    rows = x.reshape(-1, 4)
    scores, out = m.gate(rows), torch.zeros_like(rows)
    for expert in range(3):
        at = (scores.argmax(1) == expert).nonzero()[:, 0]
        own = F.linear(rows[at], m.stack[expert]) * scores[at, expert, None]
        out = out.index_add(0, at, m.experts[expert](own.tanh()).sigmoid())
    return F.rms_norm(out.view_as(x), (4,), m.scale)


def routed_net() -> nn.Module:
    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    return Bare(routed, stack=torch.randn(3, 4, 4), scale=torch.randn(4), gate=nn.Linear(4, 3), experts=experts)


class Scale(nn.Module):
    """y = x · scale, for which there is no rule."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features, dtype=torch.float64))
        self.shift = nn.Parameter(torch.zeros(features, dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def language(words: int, width: int) -> nn.Module:
    """An Embedding that is tied to the last Linear."""
    embed, out = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
    out.weight = embed.weight
    return Bare(lambda m, x: m.out(m.embed(x).cumsum(1).tanh()), embed=embed, out=out)


def bare_matrix(width: int) -> nn.Module:
    """A bare parameter, which only a replay covers."""
    token, inside = torch.randn(width, width), nn.Linear(width, width)
    return Bare(lambda m, x: m.inside((x @ m.token).tanh()), token=token, inside=inside)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def tied() -> nn.Module:
    embed, inside, out = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
    out.weight = embed.weight
    return Bare(lambda m, x: m.out(m.inside(m.inside(m.embed(x)).tanh()).relu_()), embed=embed, inside=inside, out=out)


def checkpointed(reentrant: bool) -> nn.Module:
    inside = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.LayerNorm(4), nn.Linear(4, 4))
    how = lambda m, x: m.last(checkpoint(m.inside, m.first(x), use_reentrant=reentrant))  # noqa: E731
    return Bare(how, first=nn.Linear(4, 4), last=nn.Linear(4, 2), inside=inside)


def bare_vector() -> nn.Module:
    return Bare(lambda m, x: m.inside(x * m.token), token=torch.randn(4), inside=nn.Linear(4, 4))


def within(layer: nn.Module, then: Callable[[Any], Any] = lambda out: out) -> nn.Module:
    """A model of one layer.  then: makes the output of the layer's"""
    return Bare(lambda m, *args, **named: then(m.layer(*args, **named)), layer=layer)


def vectors() -> Tensor:
    return torch.randn(3, 5, 4).double()


def words() -> Tensor:
    return torch.randint(7, (3, 5))


def pictures() -> Tensor:
    return torch.randn(3, 2, 6, 6).double()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(inplace=True), nn.Linear(5, 2)), vectors),
    "cnn": (
        lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3)),
        pictures,
    ),
    "tied": (tied, words),
    "lstm": (lambda: within(nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True), itemgetter(0)), vectors),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0, batch_first=True), vectors),
    # From one sequence to another: each reads a slice of the projections' one weight.
    "crossed attention": (
        lambda: Bare(
            lambda m, x: m.out(m.mix(x, x.flip(1), 2 * x.roll(1, 1), need_weights=False)[0]),
            mix=nn.MultiheadAttention(4, 2, batch_first=True),
            out=nn.Linear(4, 2),
        ),
        vectors,
    ),
    "checkpointed": (lambda: checkpointed(False), vectors),
    "replayed": (lambda: nn.Sequential(nn.Linear(4, 4), bare_vector(), nn.Linear(4, 2)), vectors),
}


class Between(nn.Module):
    """Something between two layers."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return self.last(self.how(self.first(x).tanh(), *more))


def with_spare(used: nn.Module, frozen: nn.Module | None = None) -> nn.Module:
    """A layer that no loss reaches, and behind the one that is used another that doesn't train."""
    behind = (frozen or nn.Identity()).requires_grad_(False)
    return Bare(lambda m, x: m.frozen(m.used(x)), used=used, spare=nn.Linear(2, 2), frozen=behind)


class SequenceFirst(nn.Module):
    """T N F inside, folded both ways, and PReLU with T for its channels' neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.mix = nn.Embedding(9, 4), nn.LayerNorm(4), nn.LSTM(4, 4)
        self.inner, self.late, self.slope, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.PReLU(), nn.Linear(4, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        samples, steps = tokens.shape
        x = self.slope(self.norm(self.mix(self.embed(tokens.T))[0]))
        x = torch.tanh(self.inner(x.reshape(steps * samples, 4)))  # T·N
        x = x.view(steps, samples, 4).transpose(0, 1).reshape(samples * steps, 4)
        x = torch.tanh(self.late(x)).view(samples, steps, 4)  # N·T
        return self.out(x)


class LossesInside(nn.Module):
    """As in transformers: a dictionary of several outputs, losses among them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = Patched(), kind

    def forward(self, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self.inner(tokens)[:, 1:]
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        each = {"flat": losses, "tokens": losses.view(targets.shape), "samples": losses.view(targets.shape).mean(1)}
        return {"logits": logits, "losses": each.get(self.kind, losses.mean())}
