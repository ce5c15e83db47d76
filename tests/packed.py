"""A small model of packed documents, and batches for it."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import autograd_hacks

WORDS, WIDTH = 11, 8


class Attention(nn.Module):
    """Causal attention within documents.  leak: '' or how documents come to see each other"""

    def __init__(self, leak: str = "") -> None:
        super().__init__()
        self.qkv, self.out, self.leak = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), leak
        self.gain = nn.Parameter(torch.rand(WIDTH) + 0.5)  # read off the graph

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()[None]
        if self.leak != "mask":
            mask = mask & (document[:, :, None] == document[:, None, :])
        y = self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None])[:, 0])
        if self.leak == "value":
            y = y - x.mean(1, keepdim=True).detach()
        return x + y * (y.square().mean(-1, keepdim=True) + 1e-3).rsqrt() * self.gain


class Packed(nn.Module):
    def __init__(self, leak: str = "") -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(16, WIDTH)
        self.norm = nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH))
        self.first, self.second, self.head = Attention(leak), Attention(), nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor, position_ids: Tensor, document_ids: Tensor | None = None) -> Tensor:
        document = (position_ids == 0).cumsum(1)
        x = self.norm(self.words(ids) + self.places(position_ids))
        return self.head(self.second(self.first(x, document), document))


def batch(samples: int, lengths: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Words, their positions in documents, and the words to come."""
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(samples, -1).contiguous()
    ids = torch.randint(WORDS, positions.shape)
    return ids, positions, torch.randint(WORDS, ids.shape)


def losses(model: nn.Module, ids: Tensor, positions: Tensor, targets: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(model(ids, position_ids=positions, **more).mT, targets, reduction="none")


def rows_of(model: nn.Module, lengths: Sequence[int], loss: Any, *given: Tensor) -> dict[str, Tensor]:
    """A plain backward pass from each document's loss by itself, zeros where it doesn't reach.  given: of the loss, N T"""
    alone = [own for n in range(len(given[0])) for own in zip(*(x[n : n + 1].split(lengths, 1) for x in given))]
    with autograd_hacks.pause_hooks():
        rows = [torch.autograd.grad(loss(model, *own).sum(), [*model.parameters()], materialize_grads=True) for own in alone]
    return {name: torch.stack(own) for (name, _), own in zip(model.named_parameters(), zip(*rows))}


def hooked(segments: Any, leak: str = "", **settings: Any) -> Packed:
    torch.manual_seed(0)
    model = Packed(leak).double()
    autograd_hacks.add_hooks(model, segments=segments, **settings)
    return model
