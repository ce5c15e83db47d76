"""Times per-sample gradients.

    python benchmarks/run.py --output bench

Every round runs each system once on the same batch, in an order of its own, so that a busy machine slows all of them
alike; the table shows medians, and ratios to the plain forward and backward pass of the same run.  Every result is compared
with one backward pass for each sample before it is timed.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call, grad, vmap
from tqdm import tqdm
from workloads import WORKLOADS, Batch, Workload

import autograd_hacks

PLAIN, WRITE, LOOP, VMAP, HOOKS = "plain", "write once", "loop", "vmap(grad)", "autograd_hacks"
PROBE_AIM = 5.0  # per cent of a hundred plain steps

Rows = dict[str, Tensor]
Step = Callable[[Batch], Rows]


def systems(workload: Workload, peers: bool) -> dict[str, Step]:
    """{name: a step that returns the rows it made}, each checked; the library has a copy of the model of its own."""
    torch.manual_seed(0)
    plain_model, hooked = workload.model(), workload.model()
    hooked.load_state_dict(plain_model.state_dict())
    autograd_hacks.add_hooks(hooked)
    parameters = dict(plain_model.named_parameters())
    samples = len(next(iter(workload.batch(0).values())))
    buffers = [torch.empty(samples, *p.shape) for p in parameters.values()]

    def plain(batch: Batch) -> Rows:
        plain_model.zero_grad()
        workload.losses(plain_model, batch).mean().backward()
        return {}

    def write_once(batch: Batch) -> Rows:
        for buffer in buffers:
            buffer.fill_(0.0)
        return {}

    def loop(batch: Batch) -> Rows:
        rows = []
        for n in range(samples):
            loss = workload.losses(plain_model, {name: x[n : n + 1] for name, x in batch.items()}).sum()
            rows.append(torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True))
        return dict(zip(parameters, map(torch.stack, zip(*rows))))

    class Sample(nn.Module):
        """The losses of a model, as a module."""

        def __init__(self) -> None:
            super().__init__()
            self.model = plain_model

        def forward(self, batch: Batch) -> Tensor:
            return workload.losses(self.model, {name: x[None] for name, x in batch.items()}).sum()

    sample, detached = Sample(), {f"model.{name}": p.detach() for name, p in parameters.items()}

    def torch_func(batch: Batch) -> Rows:
        rows = vmap(grad(lambda weights, one: functional_call(sample, weights, (one,))), (None, 0))(detached, batch)
        return {name.removeprefix("model."): own for name, own in rows.items()}

    def hooks(batch: Batch) -> Rows:
        hooked.zero_grad()
        workload.losses(hooked, batch).mean().backward()
        autograd_hacks.compute_grad1(hooked)
        return {name: p.grad1 for name, p in hooked.named_parameters() if p.grad1 is not None}

    steps: dict[str, Step] = {PLAIN: plain, WRITE: write_once, HOOKS: hooks}
    if peers:
        steps |= {LOOP: loop, VMAP: torch_func}
    batch = workload.batch(0)
    expected = loop(batch)
    for name, step in steps.items():
        check(name, step(batch), expected)
    return steps


def check(name: str, rows: Rows, expected: Rows) -> None:
    for parameter, own in rows.items():
        largest = float(expected[parameter].abs().max())
        torch.testing.assert_close(
            own, expected[parameter], rtol=1e-3, atol=1e-3 * largest + 1e-6, msg=f"{name} is wrong on {parameter}"
        )


def measure(workload: Workload, steps: dict[str, Step], rounds: int, name: str) -> dict[str, list[float]]:
    """{system: seconds of each round}"""
    seconds: dict[str, list[float]] = {system: [] for system in steps}
    shuffler = random.Random(0)
    for number in tqdm(range(rounds), desc=name, unit="round"):
        batch = workload.batch(number)
        # In another order each time: what ran before leaves the allocator and the caches as it likes.
        for system in shuffler.sample(list(steps), len(steps)):
            start = time.perf_counter()
            steps[system](batch)
            seconds[system].append(time.perf_counter() - start)
    return seconds


def probe_seconds(workload: Workload, times: int = 3) -> float:
    """What a model's first step takes more than its later ones, the median of a few models."""
    extra = []
    for _ in range(times):
        model = workload.model()
        batch = workload.batch(0)
        workload.losses(model, batch).mean().backward()  # so that the gradients' memory is there
        autograd_hacks.add_hooks(model)
        start = time.perf_counter()
        workload.losses(model, batch).mean().backward()
        autograd_hacks.compute_grad1(model)
        first = time.perf_counter() - start
        for p in model.parameters():
            p.grad1 = None
        start = time.perf_counter()
        workload.losses(model, batch).mean().backward()
        autograd_hacks.compute_grad1(model)
        extra.append(first - (time.perf_counter() - start))
    return max(0.0, statistics.median(extra))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="only workloads with this in their name; may be repeated")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--peers", action="store_true", help="time a loop over samples and torch.func too")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, help="folder for the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    chosen = {
        name: workload
        for name, workload in WORKLOADS.items()
        if not options.workload or any(part in name for part in options.workload)
    }
    results = {}
    for name, workload in chosen.items():
        steps = systems(workload, options.peers)
        seconds = measure(workload, steps, options.rounds, name)
        results[name] = {"seconds": seconds, "first step beyond": probe_seconds(workload)}
    report(results, options.threads)
    if not options.workload:
        print_memory()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        about = {"torch": torch.__version__, "machine": platform.machine(), **vars(options), "output": None}
        (options.output / "results.json").write_text(json.dumps({"about": about, "results": results}, indent=1))


def print_memory(steps: int = 1000) -> None:
    """Resident memory before and after many steps, and many forwards without a backward: it must not grow."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    x = torch.randn(64, 256)
    autograd_hacks.add_hooks(model)

    def forward() -> Tensor:
        return model(x).square().sum(1).mean()

    def step() -> None:
        forward().backward()
        autograd_hacks.compute_grad1(model)

    for name, run in {"steps": step, "forwards without a backward": forward}.items():
        for _ in range(20):
            run()
        before = resident()
        for _ in tqdm(range(steps), desc=name, unit="step"):
            run()
        print(f"resident memory over {steps} {name}: {before:.0f} MB before, {resident():.0f} MB after")


def resident() -> float:
    """This process's resident memory in MB."""
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def report(results: dict[str, dict[str, object]], threads: int) -> None:
    print(f"\nmedians, {threads} threads, torch {torch.__version__}; x: in plain steps")
    print(f"{'':50}{'plain ms':>9}{'write x':>9}{'ours x':>9}{'beyond write':>14}{'aim':>6}{'first step %':>14}{'aim':>5}")
    for name, result in results.items():
        seconds: dict[str, list[float]] = result["seconds"]  # type: ignore[assignment]  # what measure gave
        medians = {system: statistics.median(values) for system, values in seconds.items()}
        plain, write, ours = (medians[system] for system in (PLAIN, WRITE, HOOKS))
        first = float(result["first step beyond"]) / plain  # type: ignore[arg-type]  # a number; per cent of a hundred steps
        print(
            f"{name:50}{1e3 * plain:9.1f}{write / plain:9.2f}{ours / plain:9.2f}{(ours - write) / plain:14.2f}"
            f"{WORKLOADS[name].beyond_write:6.1f}{first:14.1f}{PROBE_AIM:5.0f}"
        )
        for system in (LOOP, VMAP):
            if system in medians:
                print(f"    {system:46}{'':18}{medians[system] / plain:9.2f}")


if __name__ == "__main__":
    main()
