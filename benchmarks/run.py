"""Times per-sample gradients: a table of models, each in several ways to step.

    python benchmarks/run.py --output bench-output                  this library, in its ways
    python benchmarks/run.py --output bench-output --peers          and what else there is
    python benchmarks/run.py --quick --workload CNN --workload MLP  a short look
    python benchmarks/run.py --architectures --peers                models of timm, transformers and peft
    python benchmarks/run.py --compiled                             steps in the compiler, beside hooks
    python benchmarks/run.py --uses                                 whole uses, beside the systems trusted with each
    python benchmarks/run.py --layers                               what each further layer costs, in µs
    python benchmarks/run.py --gpu --device cuda --peers            GPT-2 and BERT on a card

Every round runs each way once on the same batch, in an order of its own, so that a busy machine slows all of them alike.
Tables have medians, and ratios to the first way of the same run.  Every way is first compared with one backward pass for
each sample, in double precision, where ReLU decides alike in every batch size.  A way that fails or is wrong is shown so,
and not timed; if it is this library's, the run ends with an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import report
import torch
import uses
from measuring import compared, measured
from systems import Data
from tables import TABLES
from tqdm import tqdm
from ways import PACKAGES, WAYS, installed_version, is_ours

ROUNDS, QUICK_ROUNDS, QUICK_SAMPLES = 20, 5, 4
OPTIONS = {
    "architectures": "models that people train",
    "layers": "what each further layer costs",
    "compiled": "steps in the compiler",
    "uses": "whole uses beside other systems",
    "gpu": "models of a GPU's size",
}
"""{option: the tables that it has run in the place of the others}"""

Measure = Callable[[], Data]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    name = f"{options.device}-{options.chosen}" if options.chosen else options.device
    file = options.output / f"{name}.json" if options.output else None
    data: Data = {"about": about(options), "results": {}}
    for title, cases in options.tables.items():
        for case, measure in tqdm(cases.items(), desc=title):
            data["results"].setdefault(title, {})[case] = measure()
            save(data, file)  # so that a run that is broken off has left what it found
    if file:
        file.with_suffix(".txt").write_text(report.text(data))
        for title, case in ((title, case) for title, results in data["results"].items() for case in results):
            report.chart(data["results"][title][case], file.with_name(report.chart_name(name, title, case)))
    print(report.text(data))
    wrong = [
        f"{case}: {way}: {why}"
        for results in data["results"].values()
        for case, result in results.items()
        for way, why in result["failures"].items()
        if is_ours(way)
    ]
    if wrong:
        sys.exit("\n".join(["this library failed:", *wrong]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="only what has this in its name; may be repeated")
    parser.add_argument("--system", action="append", help="only ways with this in their name, and plain; may be repeated")
    for option, says in OPTIONS.items():
        parser.add_argument(
            f"--{option}", action="store_const", const=option, dest="chosen", help=f"{says}, in the place of all else"
        )
    parser.add_argument("--peers", action="store_true", help="time other ways and other libraries too")
    parser.add_argument("--quick", action="store_true", help="few rounds, few samples compared, no memory")
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, or {QUICK_ROUNDS} with --quick, if not given")
    parser.add_argument(
        "--threads", type=int, help=f"{torch.get_num_threads()}, or 1 with --layers and --compiled, if not given"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--output", type=Path, help="folder for the figures as JSON, the table as text and the charts")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if options.threads is None:
        options.threads = 1 if options.chosen in ("layers", "compiled") else torch.get_num_threads()
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads: expected 1 or more")
    if options.device == "cuda" and (not torch.cuda.is_available() or options.chosen == "uses"):
        parser.error(f"--device {options.device}: expected cpu, or cuda where there is a GPU, for models")
    found = tables(options)
    cases = [name for own in found.values() for name in own]
    for parts, names in ((options.workload, cases), (options.system, list(WAYS))):
        for part in parts or ():
            if not any(part in name for name in names):
                parser.error(f"{part}: expected a part of one of {', '.join(map(repr, names))}")
    options.packages = sorted({*PACKAGES.values()} if options.peers else uses.PACKAGES if options.chosen == "uses" else ())
    chosen = {name for name in cases if any(part in name for part in options.workload or [""])}
    found = {title: {name: own[name] for name in own if name in chosen} for title, own in found.items()}
    options.tables = {title: own for title, own in found.items() if own}
    return options


def tables(options: argparse.Namespace) -> dict[str, dict[str, Measure]]:
    """{title: {case: what measures it}}"""
    if options.chosen == "uses":
        return {uses.TITLE: uses.cases(options.rounds, options.quick)}
    found: dict[str, dict[str, Measure]] = {}
    samples, device = QUICK_SAMPLES if options.quick else None, torch.device(options.device)
    for title, table in [(title, table) for title, table in TABLES.items() if table.option == options.chosen]:
        for name, case in table.cases(options.peers).items():
            parts = ("plain", "write once", *options.system) if options.system else case.ways
            own = dataclasses.replace(case, ways=tuple(way for way in case.ways if any(part in way for part in parts)))
            check = compared if table.option == "gpu" else None
            measure = partial(measured, name, own, options.rounds, device, samples, not options.quick, check)
            found.setdefault(title, {})[name] = measure
    return found


def about(options: argparse.Namespace) -> Data:
    is_cuda = options.device == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if is_cuda else processor(),
        "processors": os.cpu_count(),
        "threads": options.threads,
        "device": options.device,
        "rounds": options.rounds,
        "packages": {name: installed_version(name) for name in options.packages},
    }


def processor() -> str:
    """The CPU's model name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def save(data: Data, file: Path | None) -> None:
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        numbers = re.compile(r"\[[^\[\]{}\"]*\]")  # a list of numbers takes one line
        file.write_text(numbers.sub(lambda match: " ".join(match[0].split()), json.dumps(data, indent=1)) + "\n")


if __name__ == "__main__":
    main()
