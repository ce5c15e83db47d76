"""Clocks, memory, and how cost grows."""

from __future__ import annotations

import gc
import math
import random
import re
import resource
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from systems import SKIPPED, SYSTEMS, Maker, Step, trainable
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from workloads import Batch, Workload

import autograd_hacks

Numbers = list[float]
SIZES = {"N": [8, 16, 32, 64, 128, 256, 512], "T": [16, 32, 64, 128, 256, 512]}
READ = re.compile(r"(?:^| and )(rule|operation|run again|replay|frozen|refused|wrong)\b")
FIXED = {"N": 16, "T": 8}  # the other one's size


def build(workload: Workload, maker: Maker, device: torch.device, dtype: torch.dtype = torch.float32) -> Step:
    """A system on a model of its own, with the same weights for each."""
    torch.manual_seed(0)
    with device:  # where drawing billions of weights takes no time
        model = workload.model()
    return maker(workload, model.to(device, dtype))


def batch_of(workload: Workload, number: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Batch:
    """The batch of a step's number."""
    torch.manual_seed(number)
    return {name: x.to(device, dtype if x.is_floating_point() else x.dtype) for name, x in workload.batch(number).items()}


def seconds(step: Callable[[], object], device: torch.device) -> float:
    """What a step takes; on a GPU by its own events."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        torch.cuda.synchronize()
        return round(start.elapsed_time(end) / 1e3, 7)
    begin = time.perf_counter()
    step()
    return round(time.perf_counter() - begin, 7)


def interleaved(
    workload: Workload,
    steps: dict[str, Step],
    rounds: int,
    device: torch.device,
    label: str,
    dtype: torch.dtype = torch.float32,
    until: float = math.inf,
) -> dict[str, Numbers]:
    """{system: seconds of each round}; every round runs each system once on the same batch.

    dtype: of the batch's real numbers    until: the ``perf_counter`` from which no other round is begun
    """
    times: dict[str, Numbers] = {system: [] for system in steps}
    shuffler = random.Random(0)
    for number in tqdm(range(rounds), desc=label, unit="round", leave=False):
        if number and time.perf_counter() > until:
            break
        batch = batch_of(workload, number, device, dtype)
        # In another order each time: what ran before leaves the allocator and the caches as it likes.
        for system in shuffler.sample(list(steps), len(steps)):
            times[system].append(seconds(partial(steps[system], batch), device))
    return times


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once, of those made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for storage in [x.untyped_storage() for x in tree_leaves(out) if isinstance(x, Tensor)]:
            if storage.nbytes() and storage.data_ptr() not in known | self._seen:
                self._hold(storage)
        return out

    def _hold(self, storage: Any) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._let_go, key, size)

    def _let_go(self, key: int, size: int) -> None:
        self.now -= size
        self._seen.discard(key)


def peak(workload: Workload, maker: Maker, device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """MB of tensors alive at once in a system's second step, beside the model and the batch.

    What the first step left is counted, so that keeping memory between steps is no way to need none.
    """
    gc.collect()
    step, batch = build(workload, maker, device, dtype), batch_of(workload, 0, device, dtype)
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        step(batch)
        torch.cuda.reset_peak_memory_stats()
        step(batch)
        return (torch.cuda.max_memory_allocated() - before) / 1e6
    with Held() as held:
        step(batch)
        held.most = held.now
        step(batch)
    return held.most / 1e6


def exponent(sizes: Iterable[float], values: Iterable[float]) -> float:
    """The e of values ≈ c sizesᵉ, by least squares on logarithms."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(value) for value in values]).slope


def scaling(
    letter: str, sizes: list[int], of_size: Callable[[int], Workload], rounds: int, device: torch.device
) -> dict[str, Any]:
    """How seconds and MB grow with the size: {'seconds', 'peak MB', 'exponents'} of {system: ...}.

    of_size: the workload of a size
    """
    makers = {f"{task}: {name}": maker for task, all_of_it in SYSTEMS.items() for name, maker in all_of_it.items()}
    chosen = {
        name: makers[name] for name in ("grad1: plain", f"grad1: {SKIPPED}", "grad1: autograd_hacks", f"clipped: {SKIPPED}")
    }
    times: dict[str, list[Numbers]] = {name: [] for name in chosen}
    memory: dict[str, Numbers] = {name: [] for name in chosen}
    for size in tqdm(sizes, desc=f"growth with {letter}", leave=False):
        workload = of_size(size)
        steps = {name: warm(workload, build(workload, maker, device), device) for name, maker in chosen.items()}
        for name, own in interleaved(workload, steps, rounds, device, f"{letter} = {size}").items():
            times[name].append(own)
        del steps
        gc.collect()
        for name, maker in chosen.items():
            memory[name].append(peak(workload, maker, device))
    exponents = {
        "seconds": {name: exponent(sizes, map(statistics.median, own)) for name, own in times.items()},
        "peak MB": {name: exponent(sizes, own) for name, own in memory.items()},
    }
    return {"sizes": sizes, "seconds": times, "peak MB": memory, "exponents": exponents}


def warm(workload: Workload, step: Step, device: torch.device, dtype: torch.dtype = torch.float32) -> Step:
    """The step, after two runs: the library's first one is another one."""
    for _ in range(2):
        step(batch_of(workload, 0, device, dtype))
    return step


def first_steps(
    workload: Workload, device: torch.device, times: int = 3
) -> tuple[list[tuple[float, float]], dict[str, int]]:
    """Seconds of the first step and of the second, of a few new models, and {by what they are read: of how many parameters}.

    What `describe` says stands for the latter: a word, or a few.
    """
    found = []
    batch = batch_of(workload, 0, device)
    for _ in tqdm(range(times), desc="first steps", leave=False):
        model = workload.model().to(device)
        workload.losses(model, batch).mean().backward()  # so that the gradients' memory is there
        autograd_hacks.add_hooks(model)

        def step(model: nn.Module = model) -> None:
            workload.losses(model, batch).mean().backward()
            autograd_hacks.compute_grad1(model)

        first = seconds(step, device)
        for p in model.parameters():
            p.grad1 = None
        found.append((first, seconds(step, device)))
    rows = autograd_hacks.describe(model).rows
    return found, dict(Counter(" and ".join(dict.fromkeys(READ.findall(row.how))) for row in rows))


def rows_megabytes(workload: Workload) -> float:
    samples = len(next(iter(workload.batch(0).values())))
    return samples * sum(p.numel() * p.element_size() for p in trainable(workload.model()).values()) / 1e6


def resident_growth(steps: int = 1000) -> dict[str, Numbers]:
    """{what ran: MB of resident memory before and after}, of many steps, and of forwards without a backward."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    x = torch.randn(64, 256)
    autograd_hacks.add_hooks(model)

    def forward() -> Tensor:
        return model(x).square().sum(1).mean()

    def step() -> None:
        forward().backward()
        autograd_hacks.compute_grad1(model)

    grown = {}
    for name, run in {"steps": step, "forwards without a backward": forward}.items():
        for _ in range(20):
            run()
        before = resident()
        for _ in tqdm(range(steps), desc=name, leave=False):
            run()
        grown[f"{steps} {name}"] = [before, resident()]
    return grown


def resident() -> float:
    """This process's resident memory in MB."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6
