"""Tables for people."""

from collections.abc import Sequence


def text_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first of them the header, in columns."""
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
