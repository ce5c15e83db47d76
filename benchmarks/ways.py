"""The one list of ways to step.  A name is ``what: by``, what is asked for and who gives it; steps that find nothing have no
colon in theirs."""

from __future__ import annotations

import importlib.metadata
from functools import partial

import peers
import systems
from systems import Maker
from workloads import Workload

READ = {"rows": systems.written, "norms": systems.normed, "clip": systems.clipped}
BY_ROWS = {
    "loop": systems.loop,
    "vmap(grad)": peers.torch_func,
    "expand trick": peers.expand_trick,
    "ExpandedWeights": peers.expanded_weights,
    "Opacus": peers.opacus,
    "BackPACK": peers.backpack,
}
WAYS: dict[str, Maker] = {
    "plain": systems.plain,
    "plain, compiled": systems.plain_compiled,
    "write once": systems.write_once,
    "hooks alone": systems.hooks_alone,
    **{f"{what}: ours": partial(systems.hooked, read=read) for what, read in READ.items()},
    **{
        f"{what}: ours, param_grad=False": partial(systems.hooked, read=read, param_grad=False)
        for what, read in READ.items()
    },
    **{f"{what}: graph": partial(systems.compiled, verb=what, backend=None) for what in ("rows", "norms", "clip")},
    **{f"{what}: compiled": partial(systems.compiled, verb=what, backend="inductor") for what in ("rows", "norms", "clip")},
    **{f"rows: {by}": rows for by, rows in BY_ROWS.items()},
    **{f"clip: {by}": systems.after(rows, systems.mean_of_clipped) for by, rows in BY_ROWS.items()},
    "clip: ours, two passes": systems.clip_twice,
    "clip: loop": systems.loop_clip,
    "clip: Opacus, ghost": peers.ghost_clipping,
}
PACKAGES = {"Opacus": "opacus", "Opacus, ghost": "opacus", "BackPACK": "backpack-for-pytorch"}
CHANGES = {"rows": lambda rows: rows, "norms": systems.norms_of, "clip": systems.mean_of_clipped}


def what_of(way: str) -> str:
    return way.partition(": ")[0]


def by_of(way: str) -> str:
    return way.partition(": ")[2] or way


def is_ours(way: str) -> bool:
    return by_of(way).startswith("ours")


def is_compiled(way: str) -> bool:
    return by_of(way) in ("plain, compiled", "graph", "compiled")


def oracle(way: str, workload: Workload) -> Maker | None:
    """One backward pass per sample, which a way is compared with; None for what is compared in the tests alone."""
    rows, change = systems.each_loss if workload.drawn else systems.loop, CHANGES.get(what_of(way))
    return change and systems.after(rows, change)


def installed_version(package: str) -> str | None:
    """None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_installed(way: str) -> bool:
    """Whether what the way needs is there."""
    package = PACKAGES.get(by_of(way))
    return package is None or installed_version(package) is not None
