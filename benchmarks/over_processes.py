"""Steps of a model that two processes of this machine train, which talk by gloo, in the engine's plain steps.

One thread each, SGD's step included.  All processes begin a step together, and the slower one's time counts.  What both ways
of clipping bring is compared first.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from measuring import compare, interleaved, seconds
from systems import Data, Found
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from ways import WAYS
from workloads import Batch, Model, Workload

WORLD, BLOCKS, WIDTH, HIDDEN, SAMPLES, POSITIONS = 2, 6, 128, 512, 16, 64
WARM = 3
"""Steps that don't count: the first read graphs and fill caches."""
TITLE = f"{WORLD} processes, {BLOCKS} blocks of {WIDTH}-{HIDDEN}, {SAMPLES} × {POSITIONS} a process"
ONE, REPLICAS, SHARDS = ENGINES = "one process", "DistributedDataParallel", "fully_shard"
CLIPS = "clip: ours", "clip: ours, param_grad=False"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


def batch(number: int) -> Batch:
    draws = torch.Generator().manual_seed(number)
    return {"x": torch.randn(SAMPLES, POSITIONS, WIDTH, generator=draws)}


def losses(model: Model, batch: Batch) -> Tensor:
    return model(batch["x"]).square().flatten(1).sum(1)


WORKLOAD = Workload(lambda: nn.Sequential(*(Block() for _ in range(BLOCKS))), batch, losses)


def made(engine: str, name: str) -> Callable[[Batch], Found]:
    """A way's step, with the optimizer's, of a model with the same weights for each way.  It returns what the way found."""
    torch.manual_seed(0)
    model = WORKLOAD.model()
    if engine == SHARDS:
        from torch.distributed.fsdp import fully_shard

        for block in (*model.children(), model):
            fully_shard(block)
    model = DistributedDataParallel(model) if engine == REPLICAS else model
    optimizer, own = torch.optim.SGD(model.parameters(), lr=1e-3), WAYS[name](WORKLOAD, model)

    def step(batch: Batch) -> Found:
        found = own(batch)
        optimizer.step()
        return found

    return step


def check(found: dict[str, Found]) -> None:
    """Raises AssertionError where ways of clipping found other gradients than the first of them."""
    first, *others = (
        {key: x.full_tensor() if hasattr(x, "full_tensor") else x for key, x in found[name].items()} for name in CLIPS
    )
    for other in others:
        compare(other, first)


def together(step: Callable[[], object]) -> float:
    """What a step takes in the slowest process."""
    dist.barrier()
    took = torch.tensor(seconds(step, torch.device("cpu")), dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return round(took.item(), 7)


def work(rank: int, folder: str, engine: str, rounds: int) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    steps, failures = {name: made(engine, name) for name in ("plain", "hooks alone", *CLIPS)}, dict[str, str]()
    check({name: step(batch(rank)) for name, step in steps.items()})
    times = interleaved(steps, lambda number: batch(WORLD * number + rank), WARM + rounds, together, failures)
    if rank == 0:
        found = {"ways": list(steps), "seconds": {name: own[WARM:] for name, own in times.items()}, "failures": failures}
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(engine: str, rounds: int) -> Data:
    """What `measuring.measured` gives of a case."""
    if sys.platform == "linux" and any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (folder, engine, rounds), WORLD)
        found: Data = json.loads((Path(folder) / "found.json").read_text())
    return found
