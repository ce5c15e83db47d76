"""The table, the chart and the page.  Functions of the JSON alone."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

from aims import Aim, all_aims, medians, proof_costs, ratios
from curved import BACKPACK, CURVLINOPS, DIAGONAL, FACTORS, FUNC, MATVEC
from derived import DERIVED, NESTED
from jaxed import JAX
from peers import EXPANDED, GHOST, OPACUS, VMAP
from systems import (
    CLIPPED,
    CLIPPING,
    DEFAULT,
    GRAD1,
    HOOKS,
    LOOP,
    PLAIN,
    REAL,
    SKIPPED,
    STREAMED,
    WITH_PASSES,
    WRITE,
)

Data = dict[str, Any]

COLOURS = {
    PLAIN: "#999999", WRITE: "#cccccc", HOOKS: "#bbbbbb", SKIPPED: "#0b6e4f", DEFAULT: "#2a9d6f", STREAMED: "#7fc8a9",
    WITH_PASSES: "#7fc8a9", CLIPPING: "#7fc8a9", FUNC: "#3b6fb6",
    CURVLINOPS: "#d98a29", LOOP: "#8c6d5a", VMAP: "#3b6fb6", EXPANDED: "#d98a29", OPACUS: "#b5364a", GHOST: "#b5364a",
    BACKPACK: "#7a4fa3", JAX: "#3ba6b6", NESTED: "#7ea3d6",
}  # fmt: skip
ORDER = list(COLOURS)
LIGHT, DARK = "#222222", "#dddddd"  # ink for pages that are light, or dark
SHORT = {
    SKIPPED: "ours, param_grad=False", DEFAULT: "ours", STREAMED: "ours, streaming", LOOP: "loop", VMAP: "vmap(grad)",
    GHOST: "Opacus, ghost", WITH_PASSES: "ours, with its passes", CLIPPING: "ours, clipped step", FUNC: "jvp and vjp",
}  # fmt: skip
TITLES = {
    GRAD1: "Per-sample gradients written out (grad1)", CLIPPED: "The mean of clipped gradients",
    REAL: "Architectures: rows, and a clipped step",
    DERIVED: "Losses with derivatives: rows, and a clipped step",
    MATVEC: "A product with the Gauss-Newton matrix", DIAGONAL: "The Gauss-Newton matrix's diagonal, exact",
    FACTORS: "Kronecker factors, from one drawn label for each sample",
}  # fmt: skip


def chart_name(stem: str, task: str, workload: str) -> str:
    """A picture's file name."""
    return "-".join([stem, *re.findall(r"\w+", f"{task} {workload}")]).lower() + ".svg"


def dark(picture: str) -> str:
    """The name of the same picture for dark pages."""
    return picture.removesuffix(".svg") + "-dark.svg"


def machine(data: Data) -> str:
    about = data["about"]
    taken = f"{about['machine']}, threads: {about['threads']}, of {about['processors']} processors"
    packages = "".join(f", {name} {version}" for name, version in about["packages"].items() if version)
    return f"{taken}, torch {about['torch']}{packages}; {about['date']}, medians of {about['rounds']} interleaved rounds"


def failures(data: Data, task: str, workload: str) -> dict[str, str]:
    """{system: why it fails}, of this run and of peers in earlier ones"""
    kept = data.get("kept", {}).get(task, {}).get(workload, {})
    earlier = {peer: own["failure"] for peer, own in kept.items() if "failure" in own}
    return earlier | data["results"][task][workload]["failures"]


def dates(data: Data, task: str, workload: str) -> dict[str, str]:
    """{peer: when its figure was taken}, of those from earlier runs"""
    return {peer: own["date"] for peer, own in data.get("kept", {}).get(task, {}).get(workload, {}).items()}


def verdict(aim: Aim) -> str:
    return "met" if aim.met else "missed"


def bound(aim: Aim) -> str:
    return f"{'at least' if aim.at_least else 'at most'} {aim.bound:.2f}"


def text(data: Data) -> str:
    """Every workload's systems, then every aim."""
    lines = [machine(data), "x: in plain steps, and in plain peaks of memory", ""]
    aims = all_aims(data)
    for task, results in data["results"].items():
        lines.append(f"{TITLES[task] + ':':46}{'ms':>10}{'time x':>9}{'aim':>8} {'':8}{'MB':>9}{'memory x':>10}")
        for workload, result in results.items():
            lines.append(workload)
            times, peaks, old = medians(result), result.get("peak MB", {}), dates(data, task, workload)
            limits = {aim.system: aim for aim in aims if (aim.task, aim.workload) == (task, workload) and aim.limit}
            for system, ratio in in_order(ratios(data, task, workload)):
                milliseconds = f"{1e3 * times[system]:.2f}" if system in times else ""
                line = f"    {system:42}{milliseconds:>10}{ratio:9.2f}"
                line += f"{limits[system].limit:8.2f} {verdict(limits[system]):8}" if system in limits else " " * 17
                if system in peaks:
                    line += f"{peaks[system]:9.1f}{peaks[system] / peaks[PLAIN]:10.2f}"
                lines.append((line + (f"  of {old[system]}" if system in old else "")).rstrip())
            lines += [f"    {what}: {said}" for what, said in beside(result).items()]
            for system, why in failures(data, task, workload).items():
                lines.append(f"    {system:42} fails: {why[:90]}" + (f"  of {old[system]}" if system in old else ""))
        lines.append("")
    lines += proofs_as_text(data)
    lines += [f"Aims, {sum(aim.met for aim in aims)} of {len(aims)} met:"]
    for aim in sorted(aims, key=lambda aim: (aim.task, aim.what, aim.system)):
        subject = f"{aim.task}, {aim.system}: {aim.what}"
        lines.append(f"{subject:92}{aim.workload:50}{aim.figure:7.2f}  {bound(aim):14} {verdict(aim)}")
    return "\n".join(lines) + "\n"


def beside(result: Data) -> dict[str, str]:
    """{what: in words}, of an architecture: by what its parameters are read, the largest error, and the first step"""
    if "reads" not in result:
        return {}
    first = [1 / medians(result)[PLAIN] * first for first, _ in result["first steps"]]
    return {
        "parameters read by": ", ".join(f"{how} {count}" for how, count in sorted(result["reads"].items())),
        "largest relative error": f"{max(result['errors'].values(), default=0.0):.1e}",
        "first step, in plain steps": f"{statistics.median(first):.1f}",
    }


PROOFS = {
    "clipped": "a clipped step", "first": "first step", "second": "second step", "every": "all proofs of 1,000 steps",
    "verify": "verify", "memory": "memory, in a clipped step's",
}  # fmt: skip


def proofs_as_text(data: Data) -> list[str]:
    """Each workload's costs of traces and proofs."""
    lines = []
    for workload, found in data.get("proofs", {}).items():
        own = proof_costs(found)
        lines += [workload, *[f"    {PROOFS[name]:42}{own[name]:9.2f}" for name in PROOFS if name in own]]
    return ["Traces and proofs, in plain steps:", *lines, ""] if lines else []


def proofs_as_page(data: Data) -> list[str]:
    rows = [
        [workload, *[f"{own[name]:.2f}" if name in own else "" for name in PROOFS]]
        for workload, own in ((workload, proof_costs(found)) for workload, found in data.get("proofs", {}).items())
    ]
    if not rows:
        return []
    title = "Traces and proofs"
    said = (
        "Times in plain steps.  Steps 1 to 16 of new models were run, with clipping, beside plain steps and clipped ones.  "
        "All proofs are what the steps 1, 2, 4 and 16 take beyond a clipped one; 128 is taken to cost what 16 does, and 32 "
        "and 256, in which what was left open is tried again, what 4 does.  Memory is the most that "
        "the first two steps held at once, beside the model and the batch."
    )
    return [title, "~" * len(title), "", said, "", *list_table(["Workload", *PROOFS.values()], rows)]


def in_order(own: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(own.items(), key=lambda pair: ORDER.index(pair[0]))


def list_table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [header, *rows]:
        lines += [f"   {'*' if number == 0 else ' '} - {cell}".rstrip() for number, cell in enumerate(row)]
    return [*lines, ""]


def cards(data: Data, task: str, charts: dict[str, str], aims: list[Aim]) -> list[str]:
    """A card for each workload: its picture for light pages and the one for dark ones, and its figures."""
    lines = [".. grid:: 1 1 2 2", "   :gutter: 2", ""]
    for workload, picture in charts.items():
        own = [f".. grid-item-card:: {workload}", "   :class-card: chart", ""]
        for name, ground in ((picture, "light"), (dark(picture), "dark")):
            own += [f"   .. image:: {name}", f"      :class: only-{ground}", f"      :alt: Times on {workload}", ""]
        plain = 1e3 * medians(data["results"][task][workload])[PLAIN]
        own += [
            f"   {line}"
            for line in folded(f"Figures; a plain step takes {plain:.1f} ms", figures(data, task, workload, aims))
        ]
        lines += [f"   {line}".rstrip() for line in own]
    return lines


def folded(title: str, lines: list[str]) -> list[str]:
    """What is long, behind its title."""
    return [f".. dropdown:: {title}", "", *(f"   {line}".rstrip() for line in lines), ""]


def page(data: Data, charts: dict[str, dict[str, str]]) -> str:
    """A section in reStructuredText.  charts: {task: {workload: where its picture is, as seen from the page}}"""
    title = data["about"]["machine"]
    lines = [title, "-" * len(title), "", f"{machine(data)}.", ""]
    aims = all_aims(data)
    for task, results in data["results"].items():
        lines += [
            TITLES[task],
            "~" * len(TITLES[task]),
            "",
            "Times in plain steps; upright marks are aims, and **bold** is one missed.",
            "",
        ]
        lines += cards(data, task, charts[task], aims)
        rows = [[workload, *beside(result).values()] for workload, result in results.items() if beside(result)]
        if rows:
            header = ["Workload", *beside(next(filter(beside, results.values())))]
            lines += folded("How parameters are read, errors, first steps", list_table(header, rows))
        said = [
            [workload, system, f"``{literal(why)}``"]
            for workload in results
            for system, why in failures(data, task, workload).items()
        ]
        lines += folded("What fails", list_table(["Workload", "System", "Error"], said)) if said else []
    lines += proofs_as_page(data)
    lines += ["Aims", "~~~~", "", f"{sum(aim.met for aim in aims)} of {len(aims)} are met.", ""]
    rows = [
        [f"{aim.task}: {aim.what}", aim.workload, f"``{aim.system}``", shown(f"{aim.figure:.2f}", aim), bound(aim)]
        for aim in sorted(aims, key=lambda aim: (aim.task, aim.what, aim.system))
    ]
    table = list_table(["What", "Of", "System", "Measured", "Aim"], rows)
    return "\n".join(lines + folded("All aims", table)) + "\n"


def literal(words: str) -> str:
    """What may stand between double backticks."""
    return words.replace("`", "'").strip() or "no message"


def shown(words: str, aim: Aim) -> str:
    return words if aim.met else f"**{words}**"


def figures(data: Data, task: str, workload: str, aims: list[Aim]) -> list[str]:
    """One workload's systems, in plain steps, with their aims."""
    own, old = ratios(data, task, workload), dates(data, task, workload)
    limits = {aim.system: aim for aim in aims if (aim.task, aim.workload) == (task, workload) and aim.limit}
    rows = []
    for system, ratio in in_order(own):
        cell, bound = f"{ratio:.2f}", ""
        if system in limits:
            cell, bound = shown(cell, limits[system]), f"{limits[system].limit:.2f}"
        rows.append([SHORT.get(system, system), cell + (f" of {old[system]}" if system in old else ""), bound])
    rows += [[SHORT.get(system, system), "fails", ""] for system in failures(data, task, workload)]
    return list_table(["", "plain steps", "aim"], rows)


def chart(data: Data, task: str, workload: str, path: Path, ink: str = LIGHT, ground: str = "none") -> None:
    """A picture of one workload's bars, in plain steps, the aims marked.  ink: LIGHT or DARK, as the page is"""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    own, failing = ratios(data, task, workload), failures(data, task, workload)
    systems = [system for system in ORDER if system in {*own, *failing} and system != PLAIN][::-1]
    limits = {aim.system: aim.limit for aim in all_aims(data) if (aim.task, aim.workload) == (task, workload) and aim.limit}
    # Ids of a salt, and no date: the same figures give the same file.
    with matplotlib.rc_context({"text.color": ink, "xtick.color": ink, "ytick.color": ink, "svg.hashsalt": path.name}):
        figure = Figure(figsize=(4.6, 0.45 + 0.24 * len(systems)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.set(xlim=(0, 1.25 * max([1.0, *own.values(), *limits.values()])), ylim=(-0.6, len(systems) - 0.4))
        draw(axes, systems, own, limits, failing, dates(data, task, workload), ink)
        figure.savefig(path, facecolor=ground, metadata={"Date": None})


def draw(
    axes: Any,
    systems: list[str],
    own: dict[str, float],
    limits: dict[str, float],
    failing: dict[str, str],
    old: dict[str, str],
    ink: str,
) -> None:
    """One workload's bars and aims; a bar of an earlier run is pale."""
    step = axes.get_xlim()[1] / 80
    for place, system in enumerate(systems):
        if system in own:
            axes.barh(place, own[system], color=COLOURS[system], alpha=0.5 if system in old else 1.0, height=0.75)
            right = max(own[system], limits.get(system, 0.0))
            axes.text(right + step, place, f"{own[system]:.2f}", va="center", fontsize=9)
        elif system in failing:
            axes.text(step, place, "fails: " + failing[system].partition(":")[0], va="center", fontsize=9)
        if system in own and system in limits:
            axes.plot([limits[system]] * 2, [place - 0.45, place + 0.45], color=ink, linewidth=2)
    axes.axvline(1.0, color="#999999", linewidth=1, zorder=0)
    axes.set_yticks(range(len(systems)), [SHORT.get(system, system) for system in systems], fontsize=9)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="x", labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(ink)
