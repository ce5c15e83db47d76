"""Tables and progress bars, for people."""

import importlib.util
from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

_DELAY = 3.0
"""Seconds without a progress bar."""


def progress(items: Iterable[Item], what: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """The items, with a bar on standard error, unless there is but one, that tells how many of ``total`` have been taken."""
    if total == 1 or importlib.util.find_spec("tqdm") is None:
        return items
    from tqdm.auto import tqdm

    bar: Iterable[Item] = tqdm(items, desc=what, unit=unit, total=total, delay=_DELAY)
    return bar


def text_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first of them the header, in columns."""
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
