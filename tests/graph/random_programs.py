"""Random programs of many operations on a cube: samples, positions and features are of one size, which so tells
nothing."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor

Step = tuple[str, int, int]
"""An operation, an axis or another number, and a second one."""
Operation = Callable[[Tensor, "Program", int, int], Tensor]


class Program(nn.Module):
    """A chain of operations on S × S × S, with parameters that several of them share."""

    def __init__(self, size: int, seed: int = 0) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(seed)
        self.size = size
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=k != 1) for k in range(3)])
        self.norm, self.table = nn.LayerNorm(size), nn.Embedding(size, size)
        self.kernel = nn.Conv1d(size, size, 3, padding=1)
        self.vector, self.matrix = nn.Parameter(torch.randn(size)), nn.Parameter(torch.randn(size, size))
        self.gate = nn.Parameter(torch.zeros(()))
        self.register_buffer("constant", torch.randn(size, size, generator=draws))
        self.register_buffer("order", torch.randperm(size, generator=draws))
        self.register_buffer("mask", torch.rand(size, size, generator=draws) < 0.5)
        self.double()
        self.program: Sequence[Step] = ()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[0](x)
        self.seen = [h]
        for name, a, b in self.program:
            h = OPERATIONS[name](h, self, a, b)
            assert h.shape == x.shape, name
            self.seen.append(h)
        return h


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


def _in_place(h: Tensor, m: Program, a: int, b: int) -> Tensor:
    h = h * 1
    h.select(a % 3, b % m.size).mul_(2)
    return h


def _moved(h: Tensor, m: Program, a: int, b: int) -> Tensor:
    out = torch.zeros_like(h)
    return out.index_add(a % 3, m.order, h) if b % 2 else out.index_copy(a % 3, m.order, h)


def _attention(h: Tensor, m: Program, a: int, b: int) -> Tensor:
    h = h.transpose(0, a % 2)
    h = F.scaled_dot_product_attention(h, h * 0.5, m.layers[1](h), is_causal=bool(b % 2))
    return h.transpose(0, a % 2)


def _folded(h: Tensor, m: Program, a: int, b: int) -> Tensor:
    h = h.transpose(0, a % 2)
    return m.layers[b % 3](h.reshape(-1, m.size)).view(h.shape).transpose(0, a % 2)


def _tops(h: Tensor, m: Program, a: int, b: int) -> Tensor:
    found = h.topk(m.size, a % 3)
    return torch.zeros_like(h).scatter(a % 3, found.indices if b % 2 else found.indices.flip(a % 3), found.values)


def _others(a: int) -> list[int]:
    return [d for d in range(3) if d != a % 3]


OPERATIONS: dict[str, Operation] = {
    "tanh": lambda h, m, a, b: h.tanh(),
    "sigmoid gate": lambda h, m, a, b: h * m.layers[b % 3](h).sigmoid(),
    "softmax": lambda h, m, a, b: h.softmax(a % 3),
    "cumsum": lambda h, m, a, b: h.cumsum(a % 3).tanh(),
    "centred": lambda h, m, a, b: h - h.mean(a % 3, keepdim=True),
    "standardised": lambda h, m, a, b: h / (1 + h.std(a % 3, keepdim=True)),
    "normalised": lambda h, m, a, b: F.normalize(h, dim=a % 3),
    "maximum": lambda h, m, a, b: h - h.amax(a % 3, keepdim=True).tanh(),
    "statistic without a gradient": lambda h, m, a, b: h - h.mean(a % 3, keepdim=True).detach(),
    "linear": lambda h, m, a, b: m.layers[b % 3](h),
    "folded linear": _folded,
    "layer norm": lambda h, m, a, b: m.norm(h),
    "layer norm of several axes": lambda h, m, a, b: F.layer_norm(h, h.shape[a % 3 :]),
    "group norm": lambda h, m, a, b: F.group_norm(h.transpose(0, a % 3), 1 if b % 2 else m.size).transpose(0, a % 3),
    "batch norm": lambda h, m, a, b: F.batch_norm(
        h.transpose(1, a % 3), m.vector.detach() * 0, m.vector.detach() * 0 + 1, training=b % 4 == 0).transpose(1, a % 3),
    "convolution": lambda h, m, a, b: m.kernel(h.transpose(0, a % 2)).transpose(0, a % 2).tanh(),
    "depthwise convolution": lambda h, m, a, b: F.conv1d(
        h, m.constant[:, None, :1].expand(-1, 1, 3), padding=1, groups=m.size),
    "pooled": lambda h, m, a, b: F.avg_pool1d(h, 3, 1, 1),
    "largest of neighbours": lambda h, m, a, b: F.max_pool1d(h.transpose(a % 3, 2), 3, 1, 1).transpose(a % 3, 2),
    "transposed": lambda h, m, a, b: h.transpose(a % 3, b % 3),
    "transposed and back": lambda h, m, a, b: h.transpose(a % 3, b % 3).contiguous().tanh().transpose(a % 3, b % 3),
    "flipped": lambda h, m, a, b: h.flip(a % 3),
    "rolled": lambda h, m, a, b: h.roll(1 + b, a % 3),
    "reshaped": lambda h, m, a, b: h.reshape(m.size**2, m.size).tanh().view(h.shape),
    "reshaped otherwise": lambda h, m, a, b: h.reshape(m.size, m.size**2).t().reshape(h.shape) if b % 4 == 0 else h,
    "index": lambda h, m, a, b: (h[m.order], h[:, m.order], h[:, :, m.order])[a % 3],
    "gather": lambda h, m, a, b: h.gather(a % 3, m.order.view([-1 if d == a % 3 else 1 for d in range(3)]).expand(h.shape)),
    "one for all": lambda h, m, a, b: h + h.select(a % 3, b % m.size).unsqueeze(a % 3).tanh(),
    "sorted": lambda h, m, a, b: h.sort(a % 3).values,
    "largest back in place": _tops,
    "moved": _moved,
    "masked": lambda h, m, a, b: h.masked_fill(m.mask, 0.0),
    "where": lambda h, m, a, b: torch.where(m.mask, h, h.flip(a % 3)) if b % 3 == 0 else torch.where(m.mask, h, -h),
    "picked by a mask": lambda h, m, a, b: torch.zeros_like(h).masked_scatter(m.mask.expand_as(h), h[m.mask.expand_as(h)]),
    "pieces swapped": lambda h, m, a, b: torch.cat([h.narrow(a % 3, 1, m.size - 1), h.narrow(a % 3, 0, 1)], a % 3),
    "constants beside": lambda h, m, a, b: torch.cat([h, torch.ones_like(h)], a % 3).narrow(a % 3, 0, m.size),
    "shifted": lambda h, m, a, b: F.pad(h.transpose(a % 3, 2), (1, -1)).transpose(a % 3, 2),
    "repeated": lambda h, m, a, b: h.repeat_interleave(2, a % 3).unflatten(a % 3, (m.size, 2)).sum(a % 3 + 1)
    if b % 2 else h.repeat([2 if d == a % 3 else 1 for d in range(3)]).unflatten(a % 3, (2, m.size)).sum(a % 3),
    "unbound": lambda h, m, a, b: torch.stack(h.unbind(a % 3)[:: -1 if b % 2 else 1], a % 3),
    "windows": lambda h, m, a, b: h.unfold(a % 3, 1, 1)[..., 0],
    "diagonal": lambda h, m, a, b: torch.diag_embed(h.diagonal(0, *_others(a)), 0, *_others(a)) + h,
    "times a vector": lambda h, m, a, b: h * (m.vector if b % 2 else m.vector[:, None]),
    "times a matrix, entry by entry": lambda h, m, a, b: h * (m.matrix if b % 2 else m.matrix[:, None]),
    "times a standardised matrix": lambda h, m, a, b: h @ (m.matrix / m.matrix.norm(dim=a % 2, keepdim=True)),
    "product on the left": lambda h, m, a, b: (m.matrix if b % 2 else m.constant) @ h,
    "product on the right": lambda h, m, a, b: h @ (m.matrix if b % 2 else m.constant),
    "einsum": lambda h, m, a, b: torch.einsum(("ij,jkl->ikl", "ij,kjl->kil", "ij,klj->kli")[a % 3], m.constant, h),
    "with a transposed self": lambda h, m, a, b: (h @ h.transpose(1, 2)).tanh(),
    "attention": _attention,
    "positions": lambda h, m, a, b: h + m.table(torch.arange(m.size)).unsqueeze(a % 2),
    "looked up": lambda h, m, a, b: h + m.table(m.order)[:, None] if b % 2 else h + m.table(m.order.expand(m.size, -1)),
    "a gate, zero at first": lambda h, m, a, b: h + m.gate * h.mean(a % 3, keepdim=True),
    "in place": _in_place,
    "a Function": lambda h, m, a, b: Doubles.apply(h.tanh()),
    "dropout": lambda h, m, a, b: F.dropout(h, 0.3),
    "from before": lambda h, m, a, b: h + m.seen[a % len(m.seen)].tanh(),
    "scaled by its size": lambda h, m, a, b: h / (
        1 + torch.linalg.vector_norm(h, dim=tuple(_others(a)), keepdim=True)),
    "in complex numbers": lambda h, m, a, b: torch.fft.ifft(torch.fft.fft(h, dim=a % 3) * 0.5, dim=a % 3).real,
}  # fmt: skip
