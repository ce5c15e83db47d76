"""Whole uses as a table.  Functions of the JSON alone."""

from __future__ import annotations

import statistics
from typing import Any

from report import list_table, machine

OURS = "autograd_hacks"
UNPROVEN = "autograd_hacks, probe=False"

Data = dict[str, Any]


def rows_of(found: dict[str, Data]) -> list[list[str]]:
    """A row for each peer: the use, of what, our milliseconds, the peer, its time in ours, also in ours where nothing was
    proven, and how far its numbers are."""
    rows = []
    for name, result in found.items():
        times = result["seconds"]
        first = [name, result["what"], f"{1e3 * statistics.median(times[OURS]):.0f} ms"]
        for peer in [peer for peer in times if peer not in (OURS, UNPROVEN)]:
            ratios = [ratio(times[peer], times[own]) if own in times else "" for own in (OURS, UNPROVEN)]
            rows.append([*first, peer, *ratios, f"{result['apart'][peer]:.0e}"])
        rows += [[*first, peer, why, "", ""] for peer, why in result["failures"].items()]
    return rows


def ratio(theirs: list[float], ours: list[float]) -> str:
    """The median of the rounds' ratios."""
    return f"{statistics.median(their / own for their, own in zip(theirs, ours)):.2f}"


HEADER = ["Use", "Of", "Ours", "Beside", "times ours", "times ours, probe=False", "Numbers apart"]


def as_text(found: dict[str, Data]) -> str:
    """The figures as a table."""
    rows = [HEADER, *rows_of(found)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows) + "\n"


def as_page(data: Data) -> str:
    """The same for the page, in reStructuredText."""
    return "\n".join([f"*{machine(data)}*", "", *list_table(HEADER, rows_of(data["uses"]))]) + "\n"
