"""Steps in the compiler, beside hooks, in plain compiled steps: rows, norms, clipping, and how long compiling takes.

Every round runs each way of a model once on the same batch, in an order of its own, and ratios are those of a round's times.
What a way brings is compared with one backward pass per sample first.  Each model is compiled from nothing.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.nn as nn
from architectures import ARCHITECTURES
from families import FULL
from measuring import Numbers, batch_of, build, seconds
from systems import (
    MAX_NORM,
    PLAIN,
    WRITE,
    Found,
    Maker,
    Step,
    clipped,
    gradients,
    hooked,
    loop,
    mean_of_clipped,
    plain,
    write_once,
    written,
)
from torch import Tensor
from tqdm import tqdm
from workloads import Batch, Workload, classification, multilayer, of_shape

import autograd_hacks

Data = dict[str, Any]

NAMES = (
    "vit", "swin", "convnext", "resnet18, BatchNorm in eval", "bert", "gpt2", "llama", "llama, LoRA", "qwen3", "t5", "mamba",
    "whisper",
)  # fmt: skip
COMPILED = "plain, compiled"


def models() -> dict[str, Workload]:
    """Twelve architectures, and three models in which the arithmetic is little."""
    small = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    return {name: ARCHITECTURES[name](FULL) for name in NAMES} | {
        "three layers of 512, N 256": Workload(multilayer(784, 512, 512, 10), of_shape(256, 784), classification),
        "three convolutions": Workload(lambda: small, of_shape(16, 3, 32, 32), classification),
        "50 layers of 16": Workload(multilayer(*[16] * 51), of_shape(8, 16), classification),
    }


def lengths(rows: Found) -> Tensor:
    return torch.stack([x.flatten(1).norm(dim=1) for x in rows.values()]).norm(dim=0)


def norms(model: nn.Module) -> Found:
    return {"norms": autograd_hacks.per_sample_grads(model).norms()}


def rows_of(step: Any) -> Found:
    return {name: p.grad1 for name, p in step.model.named_parameters() if getattr(p, "grad1", None) is not None}


def compiled(workload: Workload, model: nn.Module, verb: str, read: Callable[[Any], Found], backend: str | None) -> Step:
    numbers: dict[str, Any] = {"max_norm": MAX_NORM} if verb == "clip" else {}
    step = autograd_hacks.compile(model, verb, loss_type="mean", param_grad=False, backend=backend, **numbers)

    def run(batch: Batch) -> Found:
        model.zero_grad()
        workload.losses(step, batch).mean().backward()
        return read(step)

    return run


def plain_compiled(workload: Workload, model: nn.Module) -> Step:
    run = torch.compile(model)

    def step(batch: Batch) -> Found:
        model.zero_grad()
        workload.losses(run, batch).mean().backward()
        return {}

    return step


READ: dict[str, tuple[str, Callable[[nn.Module], Found], Callable[[Any], Found], Callable[[Found], Found]]] = {
    "rows": ("rows", written, rows_of, lambda rows: rows),
    "norms": ("norms", norms, lambda step: {"norms": step.norms}, lambda rows: {"norms": lengths(rows)}),
    "clip": ("clip", clipped, lambda step: gradients(step.model), mean_of_clipped),
}
"""{what is asked for: compile's verb, how hooks read it, how a compiled step gives it, what it must be of rows}"""


def ways() -> dict[str, Maker]:
    found: dict[str, Maker] = {COMPILED: plain_compiled, PLAIN: plain, WRITE: write_once}
    for what, (verb, read, give, _) in READ.items():
        found[f"{what}: hooks"] = partial(hooked, read=read, param_grad=False)
        found[f"{what}: graph"] = partial(compiled, verb=verb, read=give, backend=None)
        found[f"{what}: compiled"] = partial(compiled, verb=verb, read=give, backend="inductor")
    return found


def check(own: Workload, way: str, step: Step, device: torch.device) -> None:
    """Raises where a way's numbers are wrong."""
    what = way.split(":")[0]
    if what not in READ or own.drawn:
        return
    batch = batch_of(own, 0, device)
    found, right = step(batch), READ[what][3](build(own, loop, device)(batch))
    whole = torch.stack([x.norm() for x in right.values()]).norm()
    for name, x in right.items():
        apart = (found[name] - x).norm() if name in found else x.norm()
        if not apart <= 1e-3 * whole:
            raise ValueError(f"{way}: {name} is {float(apart / whole):.1e} from one backward pass per sample")


def in_compiler(names: Iterable[str], rounds: int, device: torch.device) -> dict[str, Data]:
    """{model: {'seconds': {way: of each round}, 'compiling': {way: seconds of the first step}, 'failed': {way: why}}}"""
    found: dict[str, Data] = {}
    for name in tqdm(list(names), desc="in the compiler", unit="model"):
        own, steps = models()[name], dict[str, Step]()
        compiling, failed = dict[str, float](), dict[str, str]()
        torch.compiler.reset()
        for way, maker in ways().items():
            try:
                step, began = build(own, maker, device), perf_counter()
                step(batch_of(own, 0, device))
                compiling[way] = perf_counter() - began
                check(own, way, step, device)
                step(batch_of(own, 0, device))
                steps[way] = step
            except (RuntimeError, ValueError) as error:
                failed[way] = f"{type(error).__name__}: {error}".splitlines()[0]
        times: dict[str, Numbers] = {way: [] for way in steps}
        shuffler = random.Random(0)
        for number in range(rounds):
            batch = batch_of(own, number, device)
            for way in shuffler.sample(list(steps), len(steps)):
                times[way].append(seconds(partial(steps[way], batch), device))
        found[name] = {"seconds": times, "compiling": compiling, "failed": failed}
    return found


def ratio(own: Data, way: str, other: str = COMPILED) -> float | None:
    """The median of a way's steps in another's of the same round."""
    times = own["seconds"]
    if way not in times or other not in times:
        return None
    return statistics.median(x / y for x, y in zip(times[way], times[other]))


def as_text(found: dict[str, Data]) -> str:
    """One line a model, in plain compiled steps; compiling in that of the plain model."""
    columns = [way for way in ways() if way != COMPILED]
    lines = [f"{'in plain compiled steps':32}" + "".join(f"{way:>17}" for way in columns) + f"{'compiling clip':>17}"]
    for name, own in found.items():
        figures = [ratio(own, way) for way in columns]
        took = own["compiling"]
        slower = took["clip: compiled"] / took[COMPILED] if {"clip: compiled", COMPILED} <= took.keys() else None
        lines.append(f"{name:32}" + "".join(f"{'-' if x is None else f'{x:.2f}':>17}" for x in [*figures, slower]))
        lines += [f"    {way}: {why}" for way, why in own["failed"].items()]
    return "\n".join(lines) + "\n"
