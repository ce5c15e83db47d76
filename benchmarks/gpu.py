"""Times a GPU, part by part: this library's verbs beside plain steps, ``vmap(grad)``, Opacus and loops.

    python benchmarks/gpu.py smoke                    does everything run: two minutes
    python benchmarks/gpu.py gpt2 --rounds 10         one part: under nine minutes
    python benchmarks/gpu.py all                      part by part, each in a process of its own
    python benchmarks/gpu.py all --tiny --device cpu  all code, in sizes that tell nothing

A part that has its JSON is not run again without ``--again``; one that ran out of time goes on where it was.  The JSON of
all parts are put together in ``gpu.json``, ``gpu.txt`` and ``gpu.rst``, a page for the docs.  A way that fails, or runs out
of memory, is a row that says so.  Aims stand beside figures, and are no results.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import gpu_report
import in_compiler
import peers
import torch
from gpu_parts import PARTS, Case, Part
from gpu_tests import TESTS, tested
from gpu_ways import NORMS, WAYS
from measuring import Numbers, batch_of, build, interleaved, peak, warm
from run import about, save
from systems import Found, Maker, Step, alone, hooked, trainable
from tqdm import tqdm
from workloads import Batch

import autograd_hacks

Data = dict[str, Any]
ALL, OUT_OF_MEMORY, OUT_OF_TIME = "all", "out of memory", "out of time"
ENOUGH = 0.6
"""A case is begun while no more than this share of a part's time is gone."""
GRACE = 0.5
"""Minutes beyond its own after which a part is ended: one that takes nine is over in nine."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if len(options.parts) > 1:
        failed = [name for name in options.parts if not run_apart(name, options)]
        put_together(options.output)
        if failed:
            sys.exit(f"these parts ended with an error: {', '.join(failed)}")
        return
    (name,), device = options.parts, torch.device(options.device)
    file = options.output / "gpu" / f"{name}.json"
    data = json.loads(file.read_text()) if file.exists() and not options.again else {}
    if data.get("finished"):
        print(f"{name} has its figures, in {file}; --again measures anew")
    else:
        measured(name, data, options, device, file)
    put_together(options.output)
    print(gpu_report.text({"parts": {name: json.loads(file.read_text())}}))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", help=f"{', '.join(PARTS)}, or {ALL}")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="small sizes, which tell only whether the code runs")
    parser.add_argument("--again", action="store_true", help="also parts that have their figures")
    parser.add_argument("--rounds", type=int, help="as the part has it, 20 but for smoke, if not given")
    parser.add_argument("--minutes", type=float, help="that a part may take, 8.5 if not given, and 2 for smoke")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="folder for JSON, text and page")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.parts if name not in (*PARTS, ALL)]:
        parser.error(f"{', '.join(unknown)}: expected some of {', '.join(PARTS)}, or {ALL}")
    if options.device not in ("cpu", "cuda") or (options.device == "cuda" and not torch.cuda.is_available()):
        parser.error(f"--device {options.device}: expected cuda where there is a GPU; cpu goes with --tiny")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: expected --tiny with it, since these sizes are those of a GPU")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    options.parts = list(PARTS) if ALL in options.parts else options.parts
    options.threads, options.peers = torch.get_num_threads(), False
    return options


def run_apart(name: str, options: argparse.Namespace) -> bool:
    """Whether a part ran to its end, in a process of its own: what one left on the card is no other's."""
    told = [f"--{key}={getattr(options, key)}" for key in ("rounds", "minutes") if getattr(options, key) is not None]
    told += [f"--{key}" for key in ("tiny", "again") if getattr(options, key)]
    command = [sys.executable, __file__, name, "--device", options.device, "--output", str(options.output), *told]
    minutes = options.minutes or PARTS[name].minutes
    try:
        return subprocess.run(command, check=False, timeout=60 * (minutes + GRACE)).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"{name} took over {minutes + GRACE:.1f} minutes and was ended; its finished cases are kept")
        return False


def measured(name: str, data: Data, options: argparse.Namespace, device: torch.device, file: Path) -> None:
    """Measures a part's cases that have no figures, and writes after each of them."""
    part: Part = PARTS[name]
    cases, rounds = part.cases(options.tiny), options.rounds or part.rounds
    options.rounds = rounds
    if data.get("tiny") != options.tiny:
        data = {}
    data |= {"about": about_card(options, device), "title": part.title, "tiny": options.tiny, "finished": False}
    results = data.setdefault("cases", {})
    seconds = 60 * (options.minutes or part.minutes)
    begun = perf_counter()
    if name == TESTS:
        data["finished"] = tested(data.setdefault("tests", {}), options.tiny, begun + seconds, lambda: save(data, {}, file))
        save(data, {}, file)
        return
    for case_name, case in tqdm([(key, own) for key, own in cases.items() if key not in results], desc=part.title):
        if perf_counter() - begun > ENOUGH * seconds:
            break
        results[case_name] = timed(case_name, case, rounds, device, begun + seconds)
        save(data, {}, file)
    data["finished"] = set(results) == set(cases)
    save(data, {}, file)


def about_card(options: argparse.Namespace, device: torch.device) -> Data:
    packages = {package: peers.installed_version(package) for package in ("transformers", "opacus")}
    found = about(options, device) | {"packages": packages, "cuda": torch.version.cuda if device.type == "cuda" else None}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"memory GB": round(properties.total_memory / 1e9), "capability": list(torch.cuda.get_device_capability())}
    return found


def timed(name: str, case: Case, rounds: int, device: torch.device, until: float) -> Data:
    """What a case's run gave: seconds of each round, peaks of memory, and why ways failed."""
    failures: dict[str, str] = {}
    model = [p.numel() for p in trainable(case.workload.model() if device.type == "cpu" else on_meta(case)).values()]
    result: Data = {"parameters": sum(model), "tokens": case.tokens, "ways": list(case.ways), "failures": failures}
    result["goals"] = [{"way": goal.way, "bound": goal.bound, "unit": goal.unit, "says": str(goal)} for goal in case.goals]
    result["error"] = guarded(lambda: error_of(case, device), NORMS, failures, None)
    failures.pop(NORMS, None)
    result["seconds"] = (in_turns if case.apart else together)(name, case, rounds, device, until, failures)
    result["peak MB"] = {}
    for way in [way for way in result["seconds"] if perf_counter() < until]:
        found = guarded(partial(peak, case.workload, WAYS[way], device, case.dtype), way, dict[str, str](), None)
        if found is not None:
            result["peak MB"][way] = found
        release(device)
    return result


def on_meta(case: Case) -> torch.nn.Module:
    with torch.device("meta"):
        return case.workload.model()


def release(device: torch.device) -> None:
    """Hooked models are cycles that hold large tensors."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def guarded(run: Callable[[], Any], way: str, failures: dict[str, str], otherwise: Any) -> Any:
    """What it returns; where it raises, `otherwise`, and why is noted."""
    try:
        return run()
    except Exception as error:  # whatever a way raises is a row
        says = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        is_memory = isinstance(error, torch.OutOfMemoryError) or "not enough memory" in says or "out of memory" in says
        failures[way] = OUT_OF_MEMORY if is_memory else f"fails: {says}"
        return otherwise


def warmed(case: Case, way: str, device: torch.device, failures: dict[str, str], until: float) -> Step | None:
    """A way's step on a model of its own, run twice; None where it fails."""
    if perf_counter() > until:
        failures[way] = OUT_OF_TIME
        return None
    maker: Maker = WAYS[way]
    step = guarded(
        lambda: warm(case.workload, build(case.workload, maker, device, case.dtype), device, case.dtype), way, failures, None
    )
    if step is None:
        release(device)
        return None

    def run(batch: Batch) -> Found:
        return {} if way in failures else guarded(lambda: step(batch), way, failures, {})

    return run


def together(
    name: str, case: Case, rounds: int, device: torch.device, until: float, failures: dict[str, str]
) -> dict[str, Numbers]:
    """Seconds of each round, which runs each way once."""
    made = {way: warmed(case, way, device, failures, until) for way in case.ways}
    steps = {way: step for way, step in made.items() if step is not None}
    found = interleaved(case.workload, steps, rounds, device, name, case.dtype, until)
    del made, steps
    release(device)
    return {way: own for way, own in found.items() if way not in failures}


def in_turns(
    name: str, case: Case, rounds: int, device: torch.device, until: float, failures: dict[str, str]
) -> dict[str, Numbers]:
    """The same where only one way's model fits: two turns of half the rounds each, in another order."""
    found: dict[str, Numbers] = {way: [] for way in case.ways}
    shuffler = random.Random(0)
    for turn in range(2):
        for way in shuffler.sample(case.ways, len(case.ways)):
            count = rounds // 2 + rounds % 2 * (turn == 0)
            if not count or (way in failures and failures[way] != OUT_OF_TIME):
                continue
            step = warmed(case, way, device, failures, until)
            if step is not None:
                found[way] += interleaved(case.workload, {way: step}, count, device, name, case.dtype, until)[way]
            del step
            release(device)
    done = {way: own for way, own in found.items() if own and failures.get(way) in (None, OUT_OF_TIME)}
    for way in done:
        failures.pop(way, None)
    return done


def error_of(case: Case, device: torch.device) -> float:
    """How far our norms of two samples are off, from a backward pass of each alone in the same precision."""
    kept: list[torch.nn.Module] = []

    def make(workload: Any, model: torch.nn.Module) -> Step:
        kept.append(model)
        return hooked(workload, model, in_compiler.norms, param_grad=False)

    batch = {key: x[:2] for key, x in batch_of(case.workload, 0, device, case.dtype).items()}
    step = build(case.workload, make, device, case.dtype)
    found, parameters = step(batch)["norms"].double().cpu(), list(trainable(kept[0]).values())
    with autograd_hacks.pause_hooks():
        right = []
        for loss in alone(case.workload, kept[0], batch):
            own = torch.autograd.grad(loss, parameters, allow_unused=True)
            right.append(torch.stack([g.double().norm().cpu() for g in own if g is not None]).norm())
    kept.clear()
    del step, parameters
    release(device)
    return float((found / torch.stack(right) - 1).abs().max())


def put_together(output: Path) -> None:
    """One JSON, one text and one page of all parts that have figures."""
    files = {name: output / "gpu" / f"{name}.json" for name in PARTS}
    data = {"parts": {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}}
    if data["parts"]:
        save(data, {}, output / "gpu.json")
        (output / "gpu.txt").write_text(gpu_report.text(data))
        (output / "gpu.rst").write_text(gpu_report.page(data))


if __name__ == "__main__":
    main()
