"""The text and the page of what a GPU was measured to do.  Functions of the JSON alone."""

from __future__ import annotations

import statistics
from typing import Any

Data = dict[str, Any]
PLAIN = "plain"
"""The way that all others are measured by."""
TINY = "sizes for a look at whether it runs: no figures"
COLUMNS = ("ms", "plain steps", "tokens/s", "MB", "aim")


def machine(part: Data) -> str:
    """The card, and what it ran."""
    about = part["about"]
    packages = "".join(f", {name} {version}" for name, version in about["packages"].items() if version)
    cuda = f", CUDA {about['cuda']}" if about["cuda"] else ""
    return f"{about['machine']}, torch {about['torch']}{cuda}{packages}; {about['date']}"


def table(case: Data) -> dict[str, tuple[str, ...]]:
    """{way: ms, plain steps, tokens/s, MB and aim, as words}, in the order of a case's ways; or why one failed."""
    middle = {way: statistics.median(own) for way, own in case["seconds"].items() if own}
    goals = {goal["way"]: goal["says"] for goal in case["goals"]}
    found: dict[str, tuple[str, ...]] = {}
    for way in case["ways"]:
        if way not in middle:
            found[way] = (case["failures"].get(way, "not begun"), "", "", "", goals.get(way, ""))
            continue
        seconds, memory = middle[way], case["peak MB"].get(way)
        found[way] = (
            f"{1e3 * seconds:.2f}",
            f"{seconds / middle[PLAIN]:.2f}" if PLAIN in middle else "",
            f"{case['tokens'] / seconds:,.0f}" if case["tokens"] else "",
            "" if memory is None else f"{memory:,.0f}",
            goals.get(way, ""),
        )
    return found


def tests_of(part: Data) -> list[tuple[str, str, str, str]]:
    """A file of tests each: whether it passed, its seconds, and what pytest says, with the tests that failed."""
    return [
        (
            file,
            "passed" if own["passed"] else "failed",
            f"{own['seconds']:.0f}",
            "; ".join([own["says"], *own["failed"]]),
        )
        for file, own in part.get("tests", {}).items()
    ]


def beside(case: Data) -> str:
    """What stands under a case's table."""
    rounds = max((len(own) for own in case["seconds"].values()), default=0)
    says = f"{case['parameters']:,} parameters that train; medians of {rounds} rounds by turns"
    if case["error"] is not None:
        says += f"; norms of two samples are off by {case['error']:.0e} at most, from backward passes of one sample"
    return says


def text(data: Data) -> str:
    """Every part's cases, in columns."""
    lines = []
    for part in data["parts"].values():
        lines += [part["title"], machine(part), *([TINY] if part["tiny"] else [])]
        lines += [f"    {file:48}{passed:>12}{seconds:>8} s   {says}" for file, passed, seconds, says in tests_of(part)]
        for name, case in part["cases"].items():
            lines += ["", f"{name:52}" + "".join(f"{column:>12}" for column in COLUMNS[:-1]) + "   aim, no result"]
            for way, (first, *others, goal) in table(case).items():
                is_figure = way in case["seconds"] and bool(case["seconds"][way])
                figures = "".join(f"{own:>12}" for own in (first, *others)) if is_figure else f"   {first[:90]}"
                lines.append(f"    {way:48}{figures}   {goal}".rstrip())
            lines.append(f"    {beside(case)}")
        lines += ["" if part["finished"] else "\nNot all cases were begun: run the part again.", ""]
    return "\n".join(lines)


def page(data: Data) -> str:
    """The same in reStructuredText, a section of a page."""
    cards = ", ".join(dict.fromkeys(part["about"]["machine"] for part in data["parts"].values()))
    lines = [cards, "-" * len(cards), "", "Aims stand beside figures, and are no results.", ""]
    for part in data["parts"].values():
        title = part["title"] + (f" ({TINY})" if part["tiny"] else "")
        lines += [title, "~" * len(title), "", machine(part) + ".", ""]
        if rows := tests_of(part):
            lines += [".. list-table::", "   :header-rows: 1", ""]
            for line in [("", "", "seconds", "pytest says"), *rows]:
                lines += [f"   {'*' if n == 0 else ' '} - {own}".rstrip() for n, own in enumerate(line)]
            lines.append("")
        for name, case in part["cases"].items():
            lines += [f".. list-table:: {name}", "   :header-rows: 1", ""]
            for row in [("", *COLUMNS), *((way, *figures) for way, figures in table(case).items())]:
                lines += [f"   {'*' if n == 0 else ' '} - {own}".rstrip() for n, own in enumerate(row)]
            lines += ["", beside(case)[0].upper() + beside(case)[1:] + ".", ""]
    return "\n".join(lines) + "\n"
