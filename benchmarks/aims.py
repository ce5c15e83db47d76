"""What was aimed for, beside what was measured.  Functions of the JSON alone."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from curved import FACTORS, MATVEC
from derived import DERIVED, MLP
from peers import PEERS, VMAP
from systems import CLIPPED, CLIPPING, DEFAULT, GRAD1, HOOKS, OURS, PLAIN, REAL, SKIPPED, STREAMED, WRITE
from workloads import ARCHITECTURE, MAIN, NARROW, OTHER, RECURRENT, TINY

Data = dict[str, Any]
PROOFS = "proofs"
STEPS = 16
"""So many of a model's first steps are run, to see what proofs cost."""

LATER = {4: 2, 16: 1}
"""How many later ones of a thousand steps are taken to cost as much."""


@dataclass(frozen=True)
class Aim:
    """figure: what was measured    bound: what it should be at most, or at least    limit: the same bound in plain steps"""

    task: str
    workload: str
    system: str
    what: str
    figure: float
    bound: float
    limit: float | None = None
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound


def medians(result: Data) -> dict[str, float]:
    """{system: seconds of a step}, of one workload"""
    return {system: statistics.median(values) for system, values in result["seconds"].items()}


def ratios(data: Data, task: str, workload: str) -> dict[str, float]:
    """{system: its time in plain steps}, those of peers from an earlier run included"""
    times = medians(data["results"][task][workload])
    kept = data.get("kept", {}).get(task, {}).get(workload, {})
    earlier = {peer: own["ratio"] for peer, own in kept.items() if "ratio" in own}
    return earlier | {system: seconds / times[PLAIN] for system, seconds in times.items()}


def all_aims(data: Data) -> list[Aim]:
    found: list[Aim] = []
    for task, results in data["results"].items():
        for workload, result in results.items():
            own = ratios(data, task, workload)
            found += of_time(task, workload, result["kind"], own)
            found += against_peers(task, workload, own)
            found += of_workload(task, workload, result)
            found += of_derivatives(task, workload, result)
    return [*found, *of_proofs(data), *in_the_mean(data), *of_growth(data)]


def of_time(task: str, workload: str, kind: str, own: dict[str, float]) -> Iterator[Aim]:
    """own: {system: its time in plain steps}"""

    def aim(system: str, what: str, bound: float, unit: float = 1.0, beyond: float = 0.0) -> Iterator[Aim]:
        if system in own:
            yield Aim(task, workload, system, what, (own[system] - beyond) / unit, bound, bound * unit + beyond)

    if task == MATVEC:
        yield from aim(DEFAULT, "product / plain", 3.0)
    if task == FACTORS:
        yield from aim(DEFAULT, "forward, pass and factors / plain", 1.5)
    if task == CLIPPED:
        yield from aim(SKIPPED, "clipped step / plain", 3.0 if kind == RECURRENT else 1.3)
        return
    floor = 1 + own.get(WRITE, 0.0)
    if kind == MAIN:
        yield from aim(SKIPPED, "step / (plain + write once)", 1.25, floor)
        yield from aim(DEFAULT, "step / (plain + write once)", 1.5, floor)
    elif kind == RECURRENT:
        yield from aim(SKIPPED, "step / plain", 3.0)
        yield from aim(DEFAULT, "step / plain", 4.0)
    elif kind in (TINY, NARROW):
        for system in (SKIPPED, DEFAULT):
            yield from aim(system, "step / plain", 3.0 if kind == TINY else 2.2)
    elif kind == ARCHITECTURE:
        yield from aim(SKIPPED, "step / (plain + write once)", 1.35, floor)
        yield from aim(DEFAULT, "step / (plain + write once)", 1.6, floor)
        yield from aim(CLIPPING, "clipped step / plain", 1.5)
    elif kind == OTHER:
        yield from aim(DEFAULT, "(step - write once) / plain", 2.0, beyond=own[WRITE])
    if kind in (MAIN, RECURRENT):
        yield from aim(HOOKS, "hooks without rows / plain", 1.05)


def against_peers(task: str, workload: str, own: dict[str, float]) -> Iterator[Aim]:
    others = [own[peer] for peer in PEERS[task] if peer in own]
    for system in (SKIPPED, DEFAULT):
        if others and system in own:
            yield Aim(task, workload, system, "fastest other way / ours", min(others) / own[system], 1.0, at_least=True)


def of_workload(task: str, workload: str, result: Data) -> Iterator[Aim]:
    peaks = result.get("peak MB", {})
    if task == CLIPPED and STREAMED in peaks:
        yield Aim(task, workload, STREAMED, "peak memory / plain's", peaks[STREAMED] / peaks[PLAIN], 1.15)
    plain = medians(result)[PLAIN]
    if task == REAL:
        for system in OURS:
            if system in result["failures"]:
                yield Aim(task, workload, system, "fails", 1.0, 0.0)
            elif system in peaks:
                rows = 0.0 if system == CLIPPING else result["rows MB"]
                figure = (peaks[system] - rows) / peaks[PLAIN]
                yield Aim(task, workload, system, "peak memory without rows / plain's", figure, 1.3)
        if "reads" in result:
            again = sum(count for how, count in result["reads"].items() if re.search("run again|replay", how))
            yield Aim(task, workload, DEFAULT, "parameters read by running modules again", again, 0.0)
        if "first steps" in result:
            first = statistics.median(first for first, _ in result["first steps"])
            yield Aim(task, workload, DEFAULT, "first step / plain", first / plain, 20.0)
    elif "first step beyond" in result and DEFAULT in result["seconds"]:
        share = result["first step beyond"] / plain  # per cent of a hundred steps
        yield Aim(task, workload, DEFAULT, "first step beyond a later one, % of 100 plain", share, 5.0)


def of_derivatives(task: str, workload: str, result: Data) -> Iterator[Aim]:
    """Medians of the rounds' ratios."""

    def aim(system: str, other: str, what: str, bound: float) -> Iterator[Aim]:
        times = result["seconds"]
        if system in times and other in times:
            ratio = statistics.median(own / its for own, its in zip(times[system], times[other]))
            yield Aim(task, workload, system, what, ratio, bound)

    if task != DERIVED:
        return
    for system in (SKIPPED, DEFAULT, CLIPPING):
        yield from aim(system, VMAP, "step / vmap(grad)", 0.15 if result["kind"] == MLP else 0.8)
    peaks = result.get("peak MB", {})
    if CLIPPING in peaks and result["kind"] == MLP and "penalty" in workload:
        yield Aim(task, workload, CLIPPING, "peak memory / plain's", peaks[CLIPPING] / peaks[PLAIN], 2.5)


def proof_costs(found: Data) -> dict[str, float]:
    """What `proofs.proofs` has measured: in plain steps, and memory in that of a clipped step.

    Proofs come in the steps 1, 2, 16 and 128, and what they left open is tried in 4, 32 and 256.  So of a thousand steps 128
    is taken to cost what step 16 does, and 32 and 256 what step 4 does; of all that is taken what an ordinary clipped step
    costs.
    """
    middle = {name: statistics.median(own) for name, own in found["seconds"].items() if own}
    plain, clipped = middle["plain"], middle["clipped"]
    proven = {n: max(0.0, middle[str(n)] - clipped) for n in (1, 2, 4, STEPS)}
    every = sum(own * (1 + LATER.get(n, 0)) for n, own in proven.items())
    told = {"plain": 1.0, "clipped": clipped / plain, "first": middle["1"] / plain, "second": middle["2"] / plain}
    told |= {"every": every / plain} | ({"verify": middle["verify"] / plain} if "verify" in middle else {})
    memory = found["peak MB"]
    return told | {"memory": max(memory["first step"], memory["second step"]) / memory["clipped step"]}


def of_proofs(data: Data) -> Iterator[Aim]:
    for workload, found in data.get("proofs", {}).items():
        costs = proof_costs(found)
        yield Aim(PROOFS, workload, DEFAULT, "first step / plain", costs["first"], 10.0)
        yield Aim(PROOFS, workload, DEFAULT, "proofs of 1,000 steps, in plain steps", costs["every"], 40.0)
        yield Aim(PROOFS, workload, DEFAULT, "peak memory / a clipped step's", costs["memory"], 1.0)


def in_the_mean(data: Data) -> Iterator[Aim]:
    """How many times as fast as the fastest other way, in the geometric mean over the main workloads."""
    for task, kinds, bound in ((GRAD1, (MAIN, RECURRENT), 2.0), (REAL, (ARCHITECTURE,), 1.2)):
        results = data["results"].get(task, {})
        of_kind = [name for name, result in results.items() if result["kind"] in kinds]
        for system in (SKIPPED, DEFAULT):
            found = [aim for name in of_kind for aim in against_peers(task, name, ratios(data, task, name))]
            faster = [aim.figure for aim in found if aim.system == system]
            if faster:
                mean = statistics.geometric_mean(faster)
                what = "fastest other way / ours, geometric mean"
                yield Aim(task, f"{len(faster)} workloads", system, what, mean, bound, at_least=True)


def of_growth(data: Data) -> Iterator[Aim]:
    """Exponents at most 1.1; that of time in the positions at most plain's and 0.1, since attention is quadratic in them."""
    for letter, growth in data.get("scaling", {}).items():
        for quantity, exponents in growth["exponents"].items():
            for name, own in exponents.items():
                task, _, system = name.partition(": ")
                if system != PLAIN:
                    plain = exponents[f"{GRAD1}: {PLAIN}"]
                    what = f"exponent of {quantity} in {letter} (plain's: {plain:.2f})"
                    yield Aim(task, "Transformer d 64, 2 layers", system, what, own, max(1.0, plain) + 0.1)
    for what, (before, after) in data.get("resident MB", {}).items():
        yield Aim(GRAD1, "8 linear layers", DEFAULT, f"resident memory after / before {what}", after / before, 1.01)
