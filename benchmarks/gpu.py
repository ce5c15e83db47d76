"""Times a GPU, part by part: this library's verbs beside plain steps, ``vmap(grad)``, Opacus and loops.

    python benchmarks/gpu.py smoke                    does everything run: two minutes
    python benchmarks/gpu.py gpt2 --rounds 10         one part: under nine minutes
    python benchmarks/gpu.py all                      part by part, each in a process of its own
    python benchmarks/gpu.py all --tiny --device cpu  all code, in sizes that tell nothing

Figures are put into ``gpu.json``, ``gpu.txt`` and ``gpu.rst``, a page for the docs, after each case.  A case that has
figures is not run again without ``--again``, so a part that ran out of time goes on where it was.  A way that fails, or
runs out of memory, is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import report
import torch
from gpu_parts import PARTS
from measuring import Case, error_of, guarded, measured
from run import about, save
from systems import Data, Found
from tqdm import tqdm

ALL = "all"
NORMS = "norms: ours, param_grad=False"
ENOUGH = 0.6
"""A case is begun while no more than this share of a part's time is gone."""
GRACE = 0.5
"""Minutes beyond its own after which a part is ended: one that takes nine is over in nine."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if len(options.parts) > 1:
        failed = [name for name in options.parts if not run_apart(name, options)]
        if failed:
            sys.exit(f"these parts ended with an error: {', '.join(failed)}")
        return
    name, file = options.parts[0], options.output / "gpu.json"
    part = PARTS[name]
    options.rounds, options.minutes = options.rounds or part.rounds, options.minutes or part.minutes
    data: Data = {"about": about(options) | {"tiny": options.tiny}, "results": {}}
    old = json.loads(file.read_text()) if file.exists() else data
    if all(old["about"].get(key) == data["about"][key] for key in ("machine", "tiny")):
        data["results"] = old["results"]
    found = data["results"].setdefault(part.title, {})
    if options.again:
        found.clear()
    begun = perf_counter()
    until = begun + 60 * options.minutes
    left = {name: case for name, case in part.cases(options.tiny).items() if name not in found}
    for name, case in tqdm(left.items(), desc=part.title):
        if perf_counter() - begun > ENOUGH * 60 * options.minutes:
            print("not all cases were begun: run the part again")
            break
        found[name] = measured(name, case, options.rounds, torch.device(options.device), check=compared, until=until)
        save(data, file)
        file.with_suffix(".txt").write_text(report.text(data))
        file.with_suffix(".rst").write_text(report.page(data))
    print(report.text(data))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=[*PARTS, ALL])
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"], help="cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="small sizes, which tell only whether the code runs")
    parser.add_argument("--again", action="store_true", help="also cases that have their figures")
    parser.add_argument("--rounds", type=int, help="as the part has it, 20 but for smoke, if not given")
    parser.add_argument("--minutes", type=float, help="that a part may take, 8.5 if not given, and 2 for smoke")
    parser.add_argument("--output", type=Path, default=Path("bench-output"), help="folder for JSON, text and page")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: expected a GPU; --device cpu goes with --tiny")
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu: expected --tiny with it, since these sizes are those of a GPU")
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected 1 or more")
    options.parts = list(PARTS) if ALL in options.parts else options.parts
    options.threads, options.packages = torch.get_num_threads(), ("transformers", "opacus")
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


def compared(case: Case, device: torch.device, failures: dict[str, str]) -> dict[str, float]:
    """How far our norms of two samples are off, from a backward pass of each alone in the same precision."""

    def apart(found: Found, right: Found) -> float:
        return float((found["norms"].double() / right["norms"].double() - 1).abs().max())

    run = partial(error_of, case.workload, NORMS, 2, device, case.dtype, by=apart)
    error = guarded(run, NORMS, failures)
    return {} if error is None else {NORMS: error}


if __name__ == "__main__":
    main()
