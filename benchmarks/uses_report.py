"""Whole uses as a table.  Functions of the JSON alone."""

from __future__ import annotations

import statistics
from typing import Any

from report import list_table, machine

OURS = "autograd_hacks"

Data = dict[str, Any]


def rows_of(found: dict[str, Data]) -> list[list[str]]:
    """A row for each peer: the use, of what, our milliseconds, the peer, its time in ours, how far its numbers are."""
    rows = []
    for name, result in found.items():
        ours = result["seconds"][OURS]
        taken = f"{1e3 * statistics.median(ours):.0f} ms"
        for peer, theirs in result["seconds"].items():
            if peer != OURS:
                ratio = statistics.median(their / own for their, own in zip(theirs, ours))
                rows.append([name, result["what"], taken, peer, f"{ratio:.2f}", f"{result['apart'][peer]:.0e}"])
        rows += [[name, result["what"], taken, peer, why, ""] for peer, why in result["failures"].items()]
    return rows


HEADER = ["Use", "Of", "Ours", "Beside", "takes, in ours", "Numbers apart"]


def as_text(found: dict[str, Data]) -> str:
    """The figures as a table."""
    rows = [HEADER, *rows_of(found)]
    widths = [max(len(row[k]) for row in rows) for k in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows) + "\n"


def as_page(data: Data) -> str:
    """The same for the page, in reStructuredText."""
    return "\n".join([f"*{machine(data)}*", "", *list_table(HEADER, rows_of(data["uses"]))]) + "\n"
