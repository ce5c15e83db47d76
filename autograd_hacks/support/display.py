"""Tables and progress bars, for people."""

import importlib.util
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

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


_VERBS = {
    "weighted_sum": ("mean", "sum"),
    "variance": ("var", "std"),
    "norms": ("norm", "length"),
    "gram": ("T", "mT", "mm", "matmul"),
    "select": ("index_select", "narrow", "take"),
    "clip_grad1_norm_(model, max_norm)": ("clip", "clamp", "clip_", "clamp_"),
    "samples": ("size", "batch_size"),
}
"""What may be meant by the names that tensors have for it."""


class Hinting:
    """Rows that are no tensors, and say so."""

    if not TYPE_CHECKING:  # which would take any name for known

        def __getattr__(self, name: str) -> object:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{self._hint(name)}")

    def _hint(self, name: str) -> str:
        if name.startswith("_"):
            return ""
        meant = next((verb for verb, names in _VERBS.items() if name in names and (verb in dir(self) or "(" in verb)), None)
        close = [meant] if meant else get_close_matches(name, [known for known in dir(self) if known[0] != "_"], 1)
        if close:
            return f"; did you mean {close[0]}?"
        return "; it is no tensor: dense() returns its rows as tensors" if hasattr(Tensor, name) else ""


class Rows(Hinting):
    """A form, for people."""

    if TYPE_CHECKING:
        samples: int
        shape: torch.Size

        def leaves(self) -> Iterable[object]: ...

    def __repr__(self) -> str:
        kinds = " + ".join(dict.fromkeys(type(leaf).__name__ for leaf in self.leaves() if leaf is not self))
        made_of = f" of {kinds}" if kinds else ""
        return f"{type(self).__name__}{made_of}: {self.samples} rows of shape {tuple(self.shape)}"


def text_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first of them the header, in columns."""
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
