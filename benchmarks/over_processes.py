"""Steps of a model that two processes of this machine train, which talk by gloo, as multiples of the engine's plain step.

Six blocks of 128-512, batches of 16 × 64 a process, one thread each, SGD's step included.  Every round runs each way once,
in an order of its own; all processes begin a step together, and the slower one's time counts.  What the ways of clipping
bring is compared first.
"""

from __future__ import annotations

import json
import os
import random
import socket
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from measuring import Numbers, seconds
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import autograd_hacks

WORLD, BLOCKS, WIDTH, HIDDEN, SAMPLES, POSITIONS = 2, 6, 128, 512, 16, 64
BOUND, WARM = 1.0, 3
ONE, REPLICAS, SHARDS = ENGINES = "one process", "DistributedDataParallel", "fully_shard"
PLAIN, HOOKS = "plain", "hooks, nothing read"
CLIP, SKIPPED, TWICE = CLIPS = "clip", "clip, param_grad=False", "clip in two passes"
WAYS = PLAIN, HOOKS, *CLIPS
AIM = 1.5
"""Plain steps that a clipped one with ``param_grad=False`` is to take at most, over processes."""

Data = dict[str, Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


def spread(engine: str) -> nn.Module:
    """The model, with the same weights for each way."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    if engine == SHARDS:
        from torch.distributed.fsdp import fully_shard

        for block in model:
            fully_shard(block)
        fully_shard(model)
    return DistributedDataParallel(model) if engine == REPLICAS else model


def made(engine: str, way: str) -> tuple[nn.Module, Callable[[Tensor], None]]:
    """A model and a way's step of it."""
    model = spread(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if way != PLAIN:
        autograd_hacks.add_hooks(model, param_grad=way not in (SKIPPED, TWICE))

    def losses(x: Tensor) -> Tensor:
        found: Tensor = model(x).square().flatten(1).sum(1)
        return found

    def backward(x: Tensor) -> None:
        if way != TWICE:
            losses(x).mean().backward()
            if way in (CLIP, SKIPPED):
                autograd_hacks.clip_grad1_norm_(model, BOUND)
            return
        # The first pass has nothing to reduce, and the second is the engine's own, of a forward of its own.
        with model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext():
            loss = losses(x).mean()
            with autograd_hacks.during_backward(model, "norms") as streamed:
                loss.backward()
        with autograd_hacks.pause_hooks():
            (losses(x) * (BOUND / streamed.norms).clamp(max=1)).mean().backward()

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        backward(x)
        optimizer.step()

    return model, step


def check(models: dict[str, nn.Module]) -> None:
    """Raises RuntimeError where ways of clipping have brought different gradients in the first step."""
    expected = gradients(models[CLIP])
    for way in CLIPS:
        for name, grad in gradients(models[way]).items():
            difference = float((grad - expected[name]).abs().max() / expected[name].abs().max())
            if not difference < 1e-4:
                raise RuntimeError(f"{way}: the gradient of {name} is off by {difference:.1e} of its largest number")


def gradients(model: nn.Module) -> dict[str, Any]:
    grads: dict[str, Any] = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in grads.items()}


def timed(engine: str, rounds: int) -> dict[str, Numbers]:
    """{way: seconds of each round}, in one of the processes."""
    made_of = {way: made(engine, way) for way in WAYS}
    device, shuffler = torch.device("cpu"), random.Random(0)
    times: dict[str, Numbers] = {way: [] for way in WAYS}
    for number in tqdm(range(WARM + rounds), desc=engine, unit="round", leave=False, disable=dist.get_rank() > 0):
        draws = torch.Generator().manual_seed(WORLD * number + dist.get_rank())
        x = torch.randn(SAMPLES, POSITIONS, WIDTH, generator=draws)
        for way in shuffler.sample(WAYS, len(WAYS)):
            dist.barrier()
            took = torch.tensor(seconds(partial(made_of[way][1], x), device), dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= WARM:  # the first steps are proven
                times[way].append(round(took.item(), 7))
        if number == 0:
            check({way: model for way, (model, _) in made_of.items()})
    return times


def work(rank: int, folder: str, rounds: int) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    found = {engine: timed(engine, rounds) for engine in ENGINES}
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def processes(rounds: int) -> dict[str, dict[str, Numbers]]:
    """{engine: {way: seconds of each round}}"""
    if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (folder, rounds), WORLD)
        found: dict[str, dict[str, Numbers]] = json.loads((Path(folder) / "found.json").read_text())
    return found


def ratios(found: dict[str, dict[str, Numbers]]) -> dict[str, dict[str, float]]:
    """{engine: {way: in plain steps}}, medians over the rounds."""

    def median(own: Numbers, plain: Numbers) -> float:
        return statistics.median(mine / theirs for mine, theirs in zip(own, plain))

    return {engine: {way: median(own, times[PLAIN]) for way, own in times.items()} for engine, times in found.items()}


def as_text(found: dict[str, dict[str, Numbers]]) -> str:
    """The same as a table."""
    lines = [f"{WORLD} processes, {BLOCKS} blocks of {WIDTH}-{HIDDEN}, {SAMPLES} × {POSITIONS} a process, in plain steps:"]
    lines.append(" " * 28 + "".join(f"{engine:>26}" for engine in found))
    shares = ratios(found)
    for way in WAYS:
        cells = [f"{shares[engine][way]:.2f}" for engine in found]
        if way == PLAIN:
            cells = [f"{1e3 * statistics.median(found[engine][PLAIN]):.0f} ms" for engine in found]
        if way == SKIPPED:
            met = [engine == ONE or shares[engine][way] <= AIM for engine in found]
            cells = [f"{cell}{'' if met else f', {AIM} missed'}" for cell, met in zip(cells, met)]
        lines.append(f"{way:28}" + "".join(f"{cell:>26}" for cell in cells))
    return "\n".join(lines) + "\n"
