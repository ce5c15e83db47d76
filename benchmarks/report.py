"""Tables, charts and the page, of whatever was run.  Functions of the JSON alone: {'about', 'results': {title: {case: what
`measuring.measured` gave}}}.  Times are in steps of a case's first way, memory in its peak.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from systems import Data
from ways import by_of, is_compiled, is_ours, what_of

COLOURS = {
    "write once": "#cccccc", "hooks alone": "#bbbbbb", "ours": "#2a9d6f", "ours, param_grad=False": "#0b6e4f",
    "ours, two passes": "#7fc8a9", "loop": "#8c6d5a", "vmap(grad)": "#3b6fb6", "expand trick": "#5fa8d3",
    "ExpandedWeights": "#d98a29", "Opacus": "#b5364a", "Opacus, ghost": "#b5364a", "BackPACK": "#7a4fa3",
}  # fmt: skip
LIGHT, DARK = "#222222", "#dddddd"  # ink for pages that are light, or dark
COLUMNS = ("ms", "time ×", "first ×", "second ×", "MB", "memory ×", "error")
LONG = 0.01
"""Seconds of a plain step from which it is arithmetic, and not Python, that counts."""


def machine(data: Data) -> str:
    about = data["about"]
    taken = f"{about['machine']}, threads: {about['threads']}, of {about['processors']} processors"
    packages = "".join(f", {name} {version}" for name, version in about["packages"].items() if version)
    return f"{taken}, torch {about['torch']}{packages}; {about['date']}, medians of {about['rounds']} interleaved rounds"


def medians(result: Data) -> dict[str, float]:
    """{way: seconds of a step}"""
    return {way: statistics.median(own) for way, own in result["seconds"].items()}


def ratios(result: Data) -> dict[str, float]:
    """{way: its time in steps of the case's first way}"""
    times = medians(result)
    base = times.get(result["ways"][0])
    return {way: own / base for way, own in times.items()} if base else {}


def rows_of(result: Data) -> dict[str, list[str]]:
    """{way: what stands in COLUMNS, or why it failed}"""
    times, shares, peaks, base = medians(result), ratios(result), result.get("peak MB", {}), result["ways"][0]
    found = {}
    for way in result["ways"]:
        if way not in times:
            found[way] = [result["failures"].get(way, "not begun")]
            continue
        firsts = zip(*result.get("first", {}).get(way, [])) if base in times else ()
        first, second = [f"{statistics.median(own) / times[base]:.1f}" for own in firsts] or ["", ""]
        memory, error = peaks.get(way), result.get("errors", {}).get(way)
        found[way] = [
            f"{1e3 * times[way]:.2f}",
            f"{shares[way]:.2f}" if shares else "",
            first,
            second,
            "" if memory is None else f"{memory:.1f}",
            "" if memory is None or not peaks.get(base) else f"{memory / peaks[base]:.2f}",
            "" if error is None else f"{error:.0e}",
        ]
    return found


def lead(result: Data, way: str) -> float | None:
    """How many times as long as this library's way the fastest other one takes."""
    own = ratios(result)
    others = [x for other, x in own.items() if what_of(other) == what_of(way) and not (is_ours(other) or is_compiled(other))]
    return min(others) / own[way] if others and way in own and is_ours(way) else None


def summary(results: Data) -> Iterator[str]:
    """What a table's cases say together, in geometric means; and what a further layer of a stack costs."""
    for way in dict.fromkeys(way for result in results.values() for way in result["ways"][1:]):
        shares = [own[way] for result in results.values() if way in (own := ratios(result))]
        leads = {name: found for name, result in results.items() if (found := lead(result, way))}
        if len(shares) > 1:
            says = f"{way}: {statistics.geometric_mean(shares):.2f} in the geometric mean of {len(shares)}"
            if leads:
                least, most = min(leads, key=leads.__getitem__), max(leads, key=leads.__getitem__)
                says += f"; fastest other way / ours {statistics.geometric_mean(leads.values()):.2f} of {len(leads)}"
                says += f", from {leads[least]:.2f} ({least}) to {leads[most]:.2f} ({most})"
                slow = [name for name in leads if medians(results[name])[results[name]["ways"][0]] >= LONG]
                behind = [f"{name} {leads[name]:.2f}" for name in slow if leads[name] < 1]
                says += f"; behind, where plain steps take 10 ms: {', '.join(behind)}" if behind else ""
            yield says
    for width, of_count in sorted(stacks(results).items()):
        for way in next(iter(of_count.values()))["seconds"]:
            yield f"{way}: {slope(of_count, way):.1f} µs for a further layer of width {width}"


def stacks(results: Data) -> dict[int, dict[int, Data]]:
    """{width: {how many layers: what was found}}"""
    found: dict[int, dict[int, Data]] = {}
    for name, result in results.items():
        if match := re.match(r"(\d+) layers of (\d+)", name):
            found.setdefault(int(match[2]), {})[int(match[1])] = result
    return {width: own for width, own in found.items() if len(own) > 1}


def slope(of_count: dict[int, Data], way: str) -> float:
    """µs that a further layer costs beyond a plain step of the same round, or plain's own, by least squares."""
    costs = []
    for result in of_count.values():
        plain = result["seconds"][result["ways"][0]]
        pairs = zip(result["seconds"][way], plain if way != result["ways"][0] else [0.0] * len(plain))
        costs.append(1e6 * statistics.median(own - other for own, other in pairs))
    return statistics.linear_regression(list(of_count), costs).slope


def text(data: Data) -> str:
    """Every case's ways, and what a table's cases say together."""
    lines = [
        machine(data),
        "×: in steps, and in peaks of memory, of each case's first way; first, second: of new models",
        "",
    ]
    for title, results in data["results"].items():
        lines.append(f"{title:46}" + "".join(f"{column:>12}" for column in COLUMNS))
        for name, result in results.items():
            lines.append(name)
            for way, cells in rows_of(result).items():
                shown = "".join(f"{cell:>12}" for cell in cells) if way in result["seconds"] else f"  {cells[0][:100]}"
                lines.append(f"    {way:42}{shown}".rstrip())
        lines += [*summary(results), ""]
    return "\n".join(lines)


def list_table(header: list[str], rows: list[list[str]]) -> list[str]:
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in [header, *rows]:
        lines += [f"   {'*' if number == 0 else ' '} - {cell}".rstrip() for number, cell in enumerate(row)]
    return [*lines, ""]


def literal(words: str) -> str:
    """What may stand between double backticks."""
    return words.replace("`", "'").strip() or "no message"


def as_table(result: Data) -> list[str]:
    """A case's ways in reStructuredText, without columns that are empty."""
    rows = {way: cells for way, cells in rows_of(result).items() if way in result["seconds"]}
    kept = [n for n in range(len(COLUMNS)) if any(cells[n] for cells in rows.values())]
    shown = [[way, *(cells[n] for n in kept)] for way, cells in rows.items()]
    failing = [[way, f"``{literal(why)}``", *[""] * (len(kept) - 1)] for way, why in result["failures"].items()]
    return list_table(["", *(COLUMNS[n] for n in kept)], shown + failing)


def page(data: Data, charts: dict[str, dict[str, str]] | None = None) -> str:
    """A section in reStructuredText.  charts: {title: {case: where its picture is, as seen from the page}}; cases that have
    none are tables alone"""
    title = data["about"]["machine"]
    lines = [title, "-" * len(title), "", f"{machine(data)}.", ""]
    for title, results in data["results"].items():
        lines += [title, "~" * len(title), ""]
        if pictures := (charts or {}).get(title):
            lines += [".. grid:: 1 1 2 2", "   :gutter: 2", ""]
        for name, result in results.items():
            if pictures:
                lines += [f"   {line}".rstrip() for line in card(name, result, pictures[name])]
            else:
                lines += [f"*{name}*", "", *as_table(result)]
        lines += [f"- {says}" for says in summary(results)] + [""]
    return "\n".join(lines) + "\n"


def card(name: str, result: Data, picture: str) -> list[str]:
    """A case's picture for light pages and the one for dark ones, and its figures behind a title."""
    lines = [f".. grid-item-card:: {name}", "   :class-card: chart", ""]
    for file, ground in ((picture, "light"), (dark(picture), "dark")):
        lines += [f"   .. image:: {file}", f"      :class: only-{ground}", f"      :alt: Times on {name}", ""]
    plain = 1e3 * medians(result)[result["ways"][0]]
    lines += [f"   .. dropdown:: Figures; a plain step takes {plain:.1f} ms", ""]
    return lines + [f"      {line}" for line in as_table(result)]


def chart_name(stem: str, title: str, case: str) -> str:
    """A picture's file name."""
    return "-".join([stem, *re.findall(r"\w+", f"{title} {case}")]).lower() + ".svg"


def dark(picture: str) -> str:
    """The name of the same picture for dark pages."""
    return picture.removesuffix(".svg") + "-dark.svg"


def chart(result: Data, path: Path, ink: str = LIGHT, ground: str = "none") -> None:
    """A picture of a case's bars, in plain steps.  ink: LIGHT or DARK, as the page is"""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    own = ratios(result)
    ways = [way for way in result["ways"][1:] if way in own or way in result["failures"]][::-1]
    asked = {what_of(way) for way in ways if what_of(way) != by_of(way)}
    # Ids of a salt, and no date: the same figures give the same file.
    with matplotlib.rc_context({"text.color": ink, "xtick.color": ink, "ytick.color": ink, "svg.hashsalt": path.name}):
        figure = Figure(figsize=(4.6, 0.45 + 0.24 * len(ways)), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.subplots()
        axes.set(xlim=(0, 1.25 * max([1.0, *own.values()])), ylim=(-0.6, len(ways) - 0.4))
        draw(axes, ways, own, result["failures"], ink)
        axes.set_yticks(range(len(ways)), [by_of(way) if len(asked) == 1 else way for way in ways], fontsize=9)
        figure.savefig(path, facecolor=ground, metadata={"Date": None})


def draw(axes: Any, ways: list[str], own: dict[str, float], failing: dict[str, str], ink: str) -> None:
    """A case's bars."""
    step = axes.get_xlim()[1] / 80
    for place, way in enumerate(ways):
        if way in own:
            axes.barh(place, own[way], color=COLOURS.get(by_of(way), "#999999"), height=0.75)
            axes.text(own[way] + step, place, f"{own[way]:.2f}", va="center", fontsize=9)
        else:
            axes.text(step, place, "fails: " + failing[way].partition(":")[0], va="center", fontsize=9)
    axes.axvline(1.0, color="#999999", linewidth=1, zorder=0)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.tick_params(axis="x", labelsize=9)
    axes.tick_params(axis="y", length=0)
    axes.patch.set_visible(False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(ink)
