"""Models that are spread over processes, and what one process gives on the whole batch: a backward pass for each sample."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from oracle import clipped as clipped_rows
from oracle import joined, one_backward_per_sample
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from twin import Bare

import autograd_hacks

BOUND = 3.0


def squares(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).square().flatten(1).sum(1)


def attends(m: nn.Module, x: Tensor) -> Tensor:
    """A class token and positions that no rule covers, attention, a norm of one's own."""
    x = m.first(x.unflatten(1, (1, 3)).expand(-1, 2, -1) * torch.tensor([[1.0], [2.0]], dtype=x.dtype))
    x = torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.positions
    x = x + m.attention(x, x, x, need_weights=False)[0]
    return m.head(m.norm(x)[:, 0] * m.scale.exp())  # type: ignore[no-any-return]


def tied() -> nn.Module:
    """A weight that two layers share, and one that is skipped."""
    net = Bare(
        lambda m, x: m.head(m.second(m.first(m.inward(x)).tanh()).tanh()),
        inward=nn.Linear(3, 4), first=nn.Linear(4, 4), second=nn.Linear(4, 4, bias=False), unused=nn.Linear(2, 2),
        head=nn.Linear(4, 2),
    )  # fmt: skip
    net.second.weight = net.first.weight
    return net


def recurs(m: nn.Module, x: Tensor) -> Tensor:
    steps = x[:, None] * torch.arange(1, 4, dtype=x.dtype)[:, None]
    return m.head(m.lstm(m.gru(steps)[0])[0][:, -1])  # type: ignore[no-any-return]


def saves(m: nn.Module, x: Tensor) -> Tensor:
    """Blocks under activation checkpointing."""
    x = m.inward(x)
    for block in m.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return m.head(x)  # type: ignore[no-any-return]


class Gains(nn.Module):
    """Makes its loss itself, and reads a weight in a way that needs its value."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.gain, self.head = nn.Linear(3, 4), nn.Parameter(torch.rand(4)), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head(self.inward(x).tanh() * (self.gain * self.gain))
        return squares(out, y).mean(), out


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "Attends": lambda: Bare(
        attends, token=torch.randn(1, 1, 4), positions=torch.randn(3, 4), first=nn.Linear(3, 4),
        attention=nn.MultiheadAttention(4, 2, batch_first=True), norm=nn.LayerNorm(4), scale=torch.randn(4),
        head=nn.Linear(4, 2),
    ),
    "Tied": tied,
    "Recurs": lambda: Bare(
        recurs, gru=nn.GRU(3, 4, batch_first=True), lstm=nn.LSTM(4, 4, batch_first=True), head=nn.Linear(4, 2)
    ),
    "Saves": lambda: Bare(
        saves, inward=nn.Linear(3, 4), head=nn.Linear(4, 2),
        blocks=nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)) for _ in range(2)]),
    ),
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(1)
    return MODELS[name]().double()


def sharded(net: nn.Module, mesh: Any = None, each: bool = False, **options: Any) -> Any:
    """As a user cuts it: blocks first, each layer if told, then the whole."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    tied = [net.first, net.second] if hasattr(net, "second") and each else []
    if tied:
        fully_shard(tied, mesh=mesh, **options)
    for child in net.children() if each else getattr(net, "blocks", ()):
        if any(True for _ in child.parameters()) and not isinstance(child, nn.ModuleList) and child not in tied:
            fully_shard(child, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def whole(tensor: Any) -> Tensor:
    """All of a tensor, whose parts processes may hold."""
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def batch(step: int, size: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(size, 3, generator=draws).double(), torch.randn(size, 2, generator=draws).double()


def own(sizes: tuple[int, ...]) -> slice:
    rank = dist.get_rank()
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def clipped(net: nn.Module, x: Tensor, y: Tensor, divisor: float | None = None) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Norms, and the mean of the clipped gradients, of one process."""
    rows = one_backward_per_sample(net, squares, x, y)
    norms, sums = clipped_rows(rows, BOUND, divisor or len(x))
    assert (norms > BOUND).any()
    return norms, {name: sums.get(name) for name in rows}


def train(
    model: nn.Module, name: str, sizes: tuple[int, ...], steps: int = 3, run: nn.Module | None = None, **tolerance: float
) -> None:
    """Clipped SGD steps of a hooked model beside one process: norms, ``.grad`` and weights of every step.

    sizes: how many samples each process has    run: what is called, if not the hooked model
    """
    twin = made(name)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    for step in range(steps):
        x, y = batch(step, sum(sizes))
        norms, grads = clipped(twin, x, y)
        ours.zero_grad()
        losses = squares((run or model)(x[own(sizes)]), y[own(sizes)])
        (losses.mean() if len(losses) else losses.sum()).backward()
        assert_close(autograd_hacks.clip_grad1_norm_(model, BOUND).double(), norms[own(sizes)], **tolerance)
        for (local, p), expected, twin_p in zip(model.named_parameters(), grads.values(), twin.parameters()):
            assert (p.grad is None) == (expected is None), local
            if p.grad is not None and expected is not None:
                here = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
                assert type(here) is Tensor, "which may be on its way still"
                assert_close(whole(p.grad).double(), expected, msg=lambda m, at=(local, step): f"{at}: {m}", **tolerance)
            twin_p.grad = expected
        ours.step()
        theirs.step()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert_close(whole(p).double(), q.detach(), **tolerance)


def wrapped(net: nn.Module, where: str, **options: Any) -> tuple[nn.Module, nn.Module, DistributedDataParallel]:
    """The model that is to be hooked, the one that is run, and the wrapper."""
    if where == "before":
        autograd_hacks.add_hooks(net)
    ddp = DistributedDataParallel(net, **options)
    hooked = {"before": net, "inner": net, "wrapper": ddp, "around": nn.Sequential(ddp)}[where]
    return hooked, hooked if where == "around" else ddp, ddp


def spread_out(net: nn.Module, way: str, **options: Any) -> nn.Module:
    """The model as a user spreads it.  way: 'replicas', 'shards', or 'shards of layers'    options: of the wrapper"""
    return wrapped(net, "inner", **options)[2] if way == "replicas" else sharded(net, each=way == "shards of layers")


def assert_grads(model: nn.Module, expected: dict[str, Tensor | None]) -> None:
    for (name, p), own in zip(model.named_parameters(), expected.values()):
        assert_close(whole(p.grad), own, msg=lambda m, at=name: f"{at}: {m}")


def train_one(model: nn.Module, name: str = "mlp", sizes: tuple[int, ...] = (4, 4)) -> None:
    """A clipped step over processes, beside one process."""
    x, y = batch(0, sum(sizes))
    norms, grads = clipped(made(name), x, y)
    losses = squares(model(x[own(sizes)]), y[own(sizes)])
    (losses.mean() if len(losses) else losses.sum()).backward()
    assert_close(autograd_hacks.clip_grad1_norm_(model, BOUND), norms[own(sizes)])
    assert_grads(model, grads)
    model.zero_grad()


def rows_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """J by plain backward passes, N × P."""
    return joined(one_backward_per_sample(net, squares, x, y))
