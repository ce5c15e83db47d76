"""Models that tensor parallel cuts over two processes, the same whole, and one backward pass per sample through these."""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

N, T, WORDS, WIDTH, HEADS, CLASSES = 6, 4, 11, 8, 4, 7


class Attention(nn.Module):
    """Heads on the last axis: as many as this process's part has."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (own(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for own in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention, self.up, self.down = Attention(), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(WORDS, WIDTH, padding_idx=1), Block()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.words(x))))


class Mlp(nn.Module):
    """A scale, a norm and a head that are whole, beside layers that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.head = nn.Linear(5, 8), nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, CLASSES)
        self.scale = nn.Parameter(torch.linspace(1, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x + self.scale * self.down(torch.tanh(self.up(x)))))


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(5), nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5), nn.RMSNorm(5), nn.Linear(5, CLASSES))


def as_dtensors(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """DTensors from the first layer on to the output, which is one; gradients that are sums over processes, half-way."""

    def enter(_: nn.Module, args: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        return (DTensor.from_local(args[0], mesh, [Replicate()]),)

    net[0] = distribute_module(net[0], mesh, input_fn=enter)
    net[4] = distribute_module(net[4], mesh)
    cut = {"1": ColwiseParallel(use_local_output=False), "3": RowwiseParallel(use_local_output=False)}
    return parallelize_module(net, mesh, cut | {"5": ColwiseParallel(use_local_output=False)})


class Unlike(nn.Module):
    """One process's part of the features mixes samples, much or hardly."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.up, self.down, self.share = nn.Linear(5, 8), nn.Linear(8, 5), share

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.down(h + self.share * dist.get_rank() * h.mean(0))


def mlp(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def by_heads(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Activations between layers whole."""
    cut = {f"block.attention.{name}": ColwiseParallel() for name in "qkv"}
    cut |= {"block.attention.out": RowwiseParallel(), "block.up": ColwiseParallel(), "block.down": RowwiseParallel()}
    cut |= {"words": ColwiseParallel(output_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(net, mesh, cut)


def along_sequences(net: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Activations between layers cut along the positions."""
    cut = {
        "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "block.norm1": SequenceParallel(),
        "block.attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"block.attention.{name}": ColwiseParallel() for name in "qkv"},
        "block.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "block.norm2": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=Shard(1)),
        "block.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    return parallelize_module(net, mesh, cut)


def numbers() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randn(N, 5, generator=draws), torch.randint(CLASSES, (N,), generator=draws)


def sentences() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (N, T), generator=draws), torch.randint(CLASSES, (N, T), generator=draws)


NEAR = {"rtol": 2e-4, "atol": 2e-5}

Cut = Callable[[nn.Module, DeviceMesh], nn.Module]
WAYS: dict[str, tuple[type[nn.Module], Cut, Callable[[], tuple[Tensor, Tensor]]]] = {
    "mlp": (Mlp, mlp, numbers),
    "as DTensors": (Chain, as_dtensors, numbers),
    "by heads": (Transformer, by_heads, sentences),
    "along sequences": (Transformer, along_sequences, sentences),
}


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    net = kind()
    for p in net.parameters():  # so that no bias is 0
        p.data += 0.1 * torch.randn(p.shape)
    return net


def losses(output: Tensor, y: Tensor) -> Tensor:
    output = output.full_tensor() if isinstance(output, DTensor) else output
    each = F.cross_entropy(output.movedim(-1, 1), y, reduction="none")
    return each.flatten(1).sum(1) if each.ndim > 1 else each


def one_backward_per_sample(
    net: nn.Module, x: Tensor, y: Tensor, loss: Callable[[Tensor, Tensor], Tensor] = losses
) -> dict[str, Tensor]:
    rows: dict[str, list[Tensor]] = {name: [] for name, _ in net.named_parameters()}
    for n in range(len(x)):
        net.zero_grad()
        loss(net(x[n : n + 1]), y[n : n + 1]).sum().backward()
        for name, p in net.named_parameters():
            assert p.grad is not None
            rows[name].append(p.grad.clone())
    net.zero_grad()
    return {name: torch.stack(own) for name, own in rows.items()}


def whole(x: Tensor | None) -> Tensor:
    assert x is not None
    return x.full_tensor() if isinstance(x, DTensor) else x.detach()


def joint(rows: dict[str, Tensor]) -> Tensor:
    """Each sample's norm over all parameters."""
    return torch.cat([own.flatten(1) for own in rows.values()], 1).norm(dim=1)
