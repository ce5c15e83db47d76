"""Times per-sample gradients (grad1) and the mean of clipped ones (clipped) on every workload.

    python benchmarks/run.py --output bench-output                  this library, in its ways
    python benchmarks/run.py --output bench-output --peers          and what else there is
    python benchmarks/run.py --quick --workload CNN --workload MLP  a short look
    python benchmarks/run.py --architectures --peers                models of timm, transformers and peft
    python benchmarks/run.py --processes                            clipped steps of two processes
    python benchmarks/run.py --compiled                             steps in the compiler, beside hooks
    python benchmarks/run.py --uses                                 whole uses, beside the systems trusted with each
    python benchmarks/run.py --layers                               what each further layer costs, in µs

Every round runs each system once on the same batch, in an order of its own, so that a busy machine slows all of them alike;
the tables have medians, and ratios to the plain forward and backward pass of the same run.  Every system is first compared
with one backward pass for each sample, in double precision, where ReLU decides alike in every batch size.  A peer that fails
or is wrong is shown so, and not timed; this library being wrong ends the run.

Peers' figures are kept in the output folder's JSON: a later run without them shows them, as ratios, with their date.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import curved
import derived
import in_compiler
import jaxed
import layers
import peers
import report
import torch
import uses
import uses_report
from architectures import ARCHITECTURES
from checks import PEER_SAMPLES, checked, reason
from derived import DERIVED
from families import FULL
from given import given
from jaxed import JAX
from measuring import (
    FIXED,
    SIZES,
    build,
    first_steps,
    interleaved,
    peak,
    resident_growth,
    rows_megabytes,
    scaling,
    warm,
)
from over_processes import as_text, processes
from proofs import MODELS, proofs
from systems import (
    CLIPPED,
    DEFAULT,
    GRAD1,
    PLAIN,
    REAL,
    SYSTEMS,
    WRITE,
    Maker,
    Step,
)
from tqdm import tqdm
from workloads import ARCHITECTURE, CURVED, MAIN, NARROW, OTHER, RECURRENT, TINY, Workload, transformer
from workloads import WORKLOADS as FIRST_ORDER

WORKLOADS = FIRST_ORDER | derived.WORKLOADS
ROUNDS, QUICK_ROUNDS, SCALING_ROUNDS = 20, 5, 5

Data = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if options.processes:
        over_processes(options, device)
        return
    if options.uses:
        whole_uses(options, device)
        return
    if options.layers:
        by_layers(options, device)
        return
    if options.compiled:
        of_compiled_steps(options, device)
        return
    main_only = (MAIN, RECURRENT)
    quick = (*main_only, CURVED, ARCHITECTURE)
    chosen = {
        name: workload
        for name, workload in known(options.architectures).items()
        if is_chosen(name, options.workload) and (workload.kind in quick or not options.quick)
    }
    stem = f"{device.type}-architectures" if options.architectures else device.type
    file = options.output / f"{stem}.json" if options.output else None
    old = json.loads(file.read_text()) if file and file.exists() else {}
    data: Data = {"about": about(options, device), "results": {}}
    for task in (GRAD1, CLIPPED, *curved.TASKS, DERIVED, REAL):
        kinds = {
            GRAD1: (*main_only, OTHER, TINY, NARROW), CLIPPED: main_only, DERIVED: derived.KINDS, REAL: (ARCHITECTURE,),
        }.get(task, (CURVED,))  # fmt: skip
        in_task = {name: workload for name, workload in chosen.items() if workload.kind in kinds}
        if not in_task:
            continue
        results = data["results"].setdefault(task, {})
        for name, workload in tqdm(in_task.items(), desc=task, unit="workload"):
            results[name] = timed(task, name, workload, options, device)
            save(data, old, file)  # so that a run that is broken off has left what it found
    if not (options.system or options.architectures):
        proven = {name: workload for name, workload in chosen.items() if workload.kind not in (CURVED, *derived.KINDS)}
        for name, workload in tqdm(proven.items(), desc="proofs", unit="workload"):
            data.setdefault("proofs", {})[name] = proofs(workload, device, 1 if options.quick else MODELS)
            save(data, old, file)
    if not (options.quick or options.workload or options.system or options.architectures):
        rounds = min(options.rounds, SCALING_ROUNDS)
        data["scaling"] = {
            "N": scaling("N", SIZES["N"], lambda size: transformer(size, FIXED["N"]), rounds, device),
            "T": scaling("T", SIZES["T"], lambda size: transformer(FIXED["T"], size), rounds, device),
        }
        data["resident MB"] = resident_growth()
    save(data, old, file)
    if file:
        file.with_suffix(".txt").write_text(report.text(data))
        for task, workload in ((task, workload) for task, results in data["results"].items() for workload in results):
            report.chart(data, task, workload, file.with_name(report.chart_name(file.stem, task, workload)))
    print(report.text(data))


def over_processes(options: argparse.Namespace, device: torch.device) -> None:
    """Times and prints what two processes do together."""
    data: Data = {"about": about(options, device), "processes": processes(options.rounds)}
    file = options.output / f"{device.type}-processes.json" if options.output else None
    save(data, {}, file)
    if file:
        file.with_suffix(".txt").write_text(as_text(data["processes"]))
    print(as_text(data["processes"]))


def by_layers(options: argparse.Namespace, device: torch.device) -> None:
    """Times and prints what each further layer costs."""
    found = layers.layers(options.rounds, device, layers.COUNTS, layers.WIDTHS)
    data: Data = {"about": about(options, device), "layers": found}
    file = options.output / f"{device.type}-layers.json" if options.output else None
    save(data, {}, file)
    if file:
        file.with_suffix(".txt").write_text(layers.as_text(found))
    print(layers.as_text(found))


def of_compiled_steps(options: argparse.Namespace, device: torch.device) -> None:
    """Times and prints steps in the compiler."""
    names = [name for name in in_compiler.models() if is_chosen(name, options.workload)]
    found = in_compiler.in_compiler(names, options.rounds, device)
    data: Data = {"about": about(options, device), "compiled": found}
    file = options.output / f"{device.type}-compiled.json" if options.output else None
    save(data, {}, file)
    if file:
        file.with_suffix(".txt").write_text(in_compiler.as_text(found))
    print(in_compiler.as_text(found))


def whole_uses(options: argparse.Namespace, device: torch.device) -> None:
    """Times and prints whole uses, beside other systems."""
    of = given(800, 40, 200) if options.quick else given()
    found = uses.uses(options.rounds, device, of, options.workload)
    packages = {package for use in uses.USES.values() for package in use.packages.values()}
    versions = {package: peers.installed_version(package) for package in sorted(packages)}
    data: Data = {"about": about(options, device) | {"packages": versions}, "uses": found}
    file = options.output / f"{device.type}-uses.json" if options.output else None
    save(data, {}, file)
    if file:
        file.with_suffix(".txt").write_text(uses_report.as_text(found))
    print(uses_report.as_text(found))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="only workloads with this in their name; may be repeated")
    parser.add_argument("--system", action="append", help="only systems with this in their name, and plain; may be repeated")
    parser.add_argument("--architectures", action="store_true", help="models that people train, in the place of the others")
    parser.add_argument("--processes", action="store_true", help="two processes on one machine, in the place of all else")
    parser.add_argument("--uses", action="store_true", help="whole uses beside other systems, in the place of all else")
    parser.add_argument("--layers", action="store_true", help="what each further layer costs, in the place of all else")
    parser.add_argument("--compiled", action="store_true", help="steps in the compiler, in the place of all else")
    parser.add_argument("--peers", action="store_true", help="time other ways and other libraries too")
    parser.add_argument("--jax", default=sys.executable, help="a Python with JAX, if not this one, for --peers")
    parser.add_argument("--quick", action="store_true", help="the main workloads and few rounds: about two minutes")
    parser.add_argument("--rounds", type=int, help=f"{ROUNDS}, or {QUICK_ROUNDS} with --quick, if not given")
    parser.add_argument(
        "--threads", type=int, help=f"{torch.get_num_threads()}, or 1 with --layers and --compiled, if not given"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--output", type=Path, help="folder for the figures as JSON, the table as text and the charts")
    options = parser.parse_args(arguments)
    if options.uses and options.device != "cpu":
        parser.error("--uses: expected --device cpu")
    if options.rounds is None:
        options.rounds = QUICK_ROUNDS if options.quick else ROUNDS
    if options.threads is None:
        options.threads = 1 if options.layers or options.compiled else torch.get_num_threads()
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads: expected 1 or more")
    if options.device not in ("cpu", "cuda") or (options.device == "cuda" and not torch.cuda.is_available()):
        parser.error(f"--device {options.device}: expected cpu, or cuda where there is a GPU")
    tables = (SYSTEMS, curved.SYSTEMS, derived.SYSTEMS, peers.PEERS, {GRAD1: {JAX: None}})
    systems = {system for tasks in tables for own in tasks.values() for system in own}
    workloads = dict.fromkeys(uses.USES) if options.uses else known(options.architectures)
    workloads = in_compiler.models() if options.compiled else workloads
    for kind, parts, names in (("workload", options.workload, workloads), ("system", options.system, systems)):
        for part in parts or ():
            if not any(part in name for name in names):
                parser.error(f"--{kind} {part}: expected a part of one of {', '.join(map(repr, sorted(names)))}")
    return options


def known(architectures: bool) -> dict[str, Workload]:
    return {name: make(FULL) for name, make in ARCHITECTURES.items()} if architectures else WORKLOADS


def is_chosen(name: str, parts: list[str] | None) -> bool:
    return not parts or any(part in name for part in parts)


def makers(task: str, workload: Workload, options: argparse.Namespace) -> dict[str, Maker]:
    """{system: its maker}; what ratios need is always there."""
    found = (SYSTEMS | curved.SYSTEMS | derived.SYSTEMS)[task] | (peers.installed(task) if options.peers else {})
    found = {name: maker for name, maker in found.items() if derived.fits(name, workload)}
    return {name: maker for name, maker in found.items() if name in (PLAIN, WRITE) or is_chosen(name, options.system)}


def timed(task: str, name: str, workload: Workload, options: argparse.Namespace, device: torch.device) -> Data:
    """What a workload's run gave: seconds of each round, why systems fail, and peaks of memory."""
    chosen = makers(task, workload, options)
    errors: dict[str, float] = {}
    failures = checked(task, name, workload, chosen, device, errors, PEER_SAMPLES if options.quick else None)
    steps: dict[str, Step] = {}
    for system in [system for system in chosen if system not in failures]:
        try:
            steps[system] = warm(workload, build(workload, chosen[system], device), device)
        except Exception as error:  # in single precision; whatever a peer raises
            failures[system] = reason(system, error, workload)
    result: Data = {"kind": workload.kind, "failures": failures, "errors": errors}
    result["seconds"] = interleaved(workload, steps, options.rounds, device, name)
    del steps
    gc.collect()
    if (
        options.peers
        and device.type == "cpu"
        and task == GRAD1
        and name in jaxed.WORKLOADS
        and is_chosen(JAX, options.system)
    ):
        try:
            parameters = sum(p.numel() for p in workload.model().parameters())
            result["seconds"][JAX] = jaxed.measured(name, options.rounds, options.threads, options.jax, parameters)
        except (OSError, RuntimeError) as error:
            failures[JAX] = str(error)
    if workload.kind == OTHER:
        found, _ = first_steps(workload, device)
        result["first step beyond"] = max(0.0, statistics.median(first - second for first, second in found))
    elif workload.kind == ARCHITECTURE and DEFAULT in result["seconds"]:
        result["first steps"], result["reads"] = first_steps(workload, device, 1 if options.quick else 3)
        result["rows MB"] = rows_megabytes(workload)
    if workload.kind != OTHER and not options.quick and task in (GRAD1, CLIPPED, DERIVED, REAL):
        others = (WRITE, JAX, *(peers.PEERS[task] if task in (DERIVED, REAL) else ()))
        sound = [system for system in result["seconds"] if system not in others]
        result["peak MB"] = {
            system: peak(workload, chosen[system], device) for system in tqdm(sound, desc=f"memory, {name}", leave=False)
        }
    return result


def about(options: argparse.Namespace, device: torch.device) -> Data:
    return {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "processors": os.cpu_count(),
        "threads": options.threads,
        "device": device.type,
        "rounds": options.rounds,
        "packages": {package: peers.version(system) for system, package in peers.PACKAGES.items()} if options.peers else {},
    }


def processor() -> str:
    """The CPU's model name, as far as the system tells it."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.M) if info.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def save(data: Data, old: Data, file: Path | None) -> None:
    """Writes the JSON, with peers' figures of the JSON that was there."""
    if old:
        data["kept"] = kept(old, data)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        numbers = re.compile(r"\[[^\[\]{}\"]*\]")  # a list of numbers takes one line
        file.write_text(numbers.sub(lambda match: " ".join(match[0].split()), json.dumps(data, indent=1)) + "\n")


def kept(old: Data, new: Data) -> Data:
    """{task: {workload: {peer: {'date', 'ratio' to its own run's plain or 'failure'}}}}, of what the new run has not got."""
    found: Data = {}
    for task, names in peers.PEERS.items():
        for workload in [*old["results"].get(task, {}), *old.get("kept", {}).get(task, {})]:
            result = old["results"].get(task, {}).get(workload, {"seconds": {}, "failures": {}})
            fresh = new["results"].get(task, {}).get(workload, {"seconds": {}, "failures": {}})
            own = dict(old.get("kept", {}).get(task, {}).get(workload, {}))
            for peer in (*names, JAX):
                if peer in result["seconds"]:
                    ratio = statistics.median(result["seconds"][peer]) / statistics.median(result["seconds"][PLAIN])
                    own[peer] = {"date": old["about"]["date"], "ratio": ratio}
                elif peer in result["failures"]:
                    own[peer] = {"date": old["about"]["date"], "failure": result["failures"][peer]}
                if peer in own and (peer in fresh["seconds"] or peer in fresh["failures"]):
                    del own[peer]
            if own:
                found.setdefault(task, {})[workload] = own
    return found


if __name__ == "__main__":
    main()
