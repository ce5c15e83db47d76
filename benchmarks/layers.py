"""What each further layer costs beyond a plain step, in µs: mostly Python, where layers are narrow.

Linear layers of one width, with ReLU between, in nets of several lengths.  Every round runs each way of each length once on
the same batch, in an order of its own; the difference to the plain step of the same round counts.  A curve has the
differences' medians by the number of layers, and its slope by least squares is the cost of a layer.  One thread, so that
the figures are Python's and not the scheduler's.  What the ways bring is compared with one backward pass per sample first.
"""

from __future__ import annotations

import gc
import random
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from checks import compare_twice
from measuring import Numbers, batch_of, build, seconds, warm
from systems import HOOKS, PLAIN, Found, Maker, clipped, hooked, hooks_alone, loop, mean_of_clipped, plain, written
from tqdm import tqdm
from workloads import Workload, classification, multilayer, of_shape

import autograd_hacks

COUNTS, WIDTHS, SAMPLES = (10, 50, 200), (16, 512), 4
ROWS, NORMS, CLIP = "rows: compute_grad1", "norms: per_sample_grads().norms()", "clip_grad1_norm_"

Curve = dict[str, list[Numbers]]
"""{way: for each length the seconds of each round}"""
Data = dict[str, Any]


def norms(model: nn.Module) -> Found:
    return {"norms": autograd_hacks.per_sample_grads(model).norms()}


WAYS: dict[str, Maker] = {
    PLAIN: plain,
    HOOKS: hooks_alone,
    ROWS: partial(hooked, read=written),
    NORMS: partial(hooked, read=norms),
    CLIP: partial(hooked, read=clipped),
}


def workload(count: int, width: int) -> Workload:
    """So many layers.  Classes are the last layer's outputs, ten of them or more."""
    return Workload(multilayer(*[max(10, width)] * (count + 1)), of_shape(SAMPLES, max(10, width)), classification)


def check(own: Workload, device: torch.device) -> None:
    """Raises where a way's numbers are wrong."""
    batch = batch_of(own, 0, device, own.dtype)
    rows = build(own, loop, device, own.dtype)(batch)
    lengths = torch.stack([x.flatten(1).norm(dim=1) for x in rows.values()]).norm(dim=0)
    for way, right in {ROWS: rows, NORMS: {"norms": lengths}, CLIP: mean_of_clipped(rows)}.items():
        compare_twice(build(own, WAYS[way], device, own.dtype), batch, right)


def curve(counts: Sequence[int], width: int, rounds: int, device: torch.device) -> Curve:
    """Seconds of all ways and lengths in interleaved rounds."""
    workloads = {count: workload(count, width) for count in counts}
    steps = {
        (way, count): warm(own, build(own, maker, device), device)
        for count, own in workloads.items()
        for way, maker in WAYS.items()
    }
    times: dict[tuple[str, int], Numbers] = {key: [] for key in steps}
    shuffler = random.Random(0)
    for number in tqdm(range(rounds), desc=f"layers of width {width}", unit="round", leave=False):
        batch = batch_of(next(iter(workloads.values())), number, device)
        for key in shuffler.sample(list(steps), len(steps)):
            times[key].append(seconds(partial(steps[key], batch), device))
    return {way: [times[way, count] for count in counts] for way in WAYS}


def layers(
    rounds: int, device: torch.device, counts: Sequence[int] = COUNTS, widths: Sequence[int] = WIDTHS
) -> dict[str, Data]:
    """{width: {'counts', 'seconds'}}."""
    found: dict[str, Data] = {}
    for width in widths:
        check(workload(min(counts), width), device)
        found[str(width)] = {"counts": list(counts), "seconds": curve(counts, width, rounds, device)}
        gc.collect()  # hooked models are cycles that hold large tensors
    return found


def beyond(times: Curve, way: str) -> Numbers:
    """µs of each length beyond the plain step of the same round, medians; of plain itself its own."""
    if way == PLAIN:
        return [1e6 * statistics.median(own) for own in times[PLAIN]]
    pairs = zip(times[way], times[PLAIN])
    return [1e6 * statistics.median(own - plain for own, plain in zip(*pair)) for pair in pairs]


def a_layer(found: Data, way: str) -> float:
    """µs a layer: the slope over the number of layers."""
    return statistics.linear_regression(found["counts"], beyond(found["seconds"], way)).slope


def as_text(found: dict[str, Data]) -> str:
    """The curves and their slopes as a table; plain's own are of the whole step."""
    lines = []
    for width, own in found.items():
        lengths = "".join(f"{f'{count} layers':>12}" for count in own["counts"])
        lines.append(f"{f'width {width}, µs beyond plain':38}{lengths}{'a layer':>12}")
        for way in own["seconds"]:
            figures = "".join(f"{x:12.0f}" for x in beyond(own["seconds"], way))
            lines.append(f"    {way:34}{figures}{a_layer(own, way):12.1f}")
    return "\n".join(lines) + "\n"
