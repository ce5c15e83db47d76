"""Programs for graphs, each with what it should be: owned, or mixed."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

N = D = 4
PERMUTED = torch.tensor([1, 0, 3, 2])
ORDER = torch.arange(N)


class Net(nn.Module):
    """Two layers, and an operation between them."""

    def __init__(self, between: Callable[..., Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.between = nn.Linear(D, D), nn.Linear(D, D), between
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor, flag: int = 0) -> Tensor:
        return self.b(self.between(self.a(x), flag) * self.scale)


def _grouped(h: Tensor, flag: int) -> Tensor:
    groups = N // 2 if flag else N
    return F.group_norm(h.view(1, 2 * N, D // 2, 1), groups).view(N, D)


def _folded(h: Tensor, flag: int) -> Tensor:
    """Two positions a sample, adjacent or apart."""
    rows = h.view(N, 2, D // 2)
    rows = rows.transpose(0, 1) if flag else rows
    folded = rows.reshape(2 * N, D // 2).tanh()
    return (folded.view(2, N, D // 2).transpose(0, 1) if flag else folded.view(N, 2, D // 2)).reshape(N, D)


def _selected(h: Tensor, flag: int) -> Tensor:
    index = ORDER.repeat(3) if flag else ORDER.repeat_interleave(3)
    rows = h[index].tanh()
    return rows.view(3, N, D).sum(0) if flag else rows.view(N, 3, D).sum(1)


CHANGING: dict[str, tuple[Callable[[Tensor, int], Tensor], str, str]] = {
    # name: (between(h, flag), what it is without the flag, with it)
    "mean over features, then over samples": (lambda h, k: h - h.mean(0 if k else 1, keepdim=True), "owned", "mixed"),
    "softmax over features, then over samples": (lambda h, k: h.softmax(0 if k else 1), "owned", "mixed"),
    "layer norm over features, then all": (lambda h, k: F.layer_norm(h, h.shape if k else h.shape[1:]), "owned", "mixed"),
    "group norm of samples' groups, then of two samples": (_grouped, "owned", "mixed"),
    "flip": (lambda h, k: h.flip(0 if k else 1), "owned", "owned"),
    "transposed twice, then once": (lambda h, k: h.t().tanh() if k else h.t().tanh().t(), "owned", "owned"),
    "index of several copies": (_selected, "owned", "owned"),
    "one row for all": (lambda h, k: h[torch.zeros(N, dtype=torch.long)] + h if k else h + h, "owned", "mixed"),
    "padding that moves rows": (lambda h, k: F.pad(h, (0, 0, -k, k)), "owned", "owned"),
    "folds": (_folded, "owned", "owned"),
    "product with a diagonal, then with a full matrix": (lambda h, k: (torch.eye(N) + k) @ h, "owned", "mixed"),
    "BatchNorm in eval mode, then in training": (
        lambda h, k: F.batch_norm(h, torch.zeros(D), torch.ones(D), training=bool(k)), "owned", "mixed",
    ),
    "in-batch similarity": (lambda h, k: h @ h.t() if k else h * h, "owned", "mixed"),
    "statistic without a gradient": (lambda h, k: h - h.mean(0).detach() if k else h, "owned", "owned"),
    "repeats": (
        lambda h, k: h.repeat(2, 1).view(2, N, D).sum(0) if k else h.repeat_interleave(2, 0).view(N, 2, D).sum(1),
        "owned", "owned",
    ),
    "convolution over features, then over samples": (
        lambda h, k: F.conv1d(h.t()[None], torch.ones(N, N, 3), padding=1)[0].t() if k
        else F.conv1d(h[:, None], torch.ones(1, 1, 3), padding=1)[:, 0], "owned", "mixed",
    ),
    "attention over heads, then over samples": (
        lambda h, k: F.scaled_dot_product_attention(h[None, None], h[None, None], h[None, None])[0, 0] if k
        else F.scaled_dot_product_attention(h[:, None, None], h[:, None, None], h[:, None, None])[:, 0, 0], "owned", "mixed",
    ),
    "in place, on the other half": (
        lambda h, k: h.clone().index_copy_(0, ORDER[:2], h[2:] if k else h[:2]), "owned", "mixed",
    ),
}  # fmt: skip


def between(name: str) -> Any:
    return CHANGING[name][0]
