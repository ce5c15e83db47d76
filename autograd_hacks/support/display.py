"""Tables, progress bars, and suggestions for names that the library doesn't have."""

import importlib.util
import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from math import floor
from operator import length_hint
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from autograd_hacks.support.parts import part_of

Item = TypeVar("Item")

_DELAY = 3.0
"""Seconds before a progress bar appears."""


def progress(items: Iterable[Item], what: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """The items, with a progress bar on standard error.  There is no bar for a single item.

    what: the label
    unit: the unit of the count
    total: the number of items; by default their length, if known
    """
    if importlib.util.find_spec("tqdm") is None or (length_hint(items) if total is None else total) == 1:
        return items
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a notebook without widgets gets a text bar
        from tqdm.auto import tqdm

    bar: Iterable[Item] = tqdm(items, desc=what, unit=unit, total=total, delay=_DELAY)
    return bar


class Hinting:
    """Suggests close names, and says what it isn't for the names of tensors' methods."""

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> object:
            close = get_close_matches(name, [own for own in dir(self) if own[0] != "_"], 1)
            meant = f"; did you mean {close[0]}?" if close and name[0] != "_" else ""
            if not meant and name[0] != "_" and hasattr(Tensor, name):
                meant = "; it is not a tensor. dense() returns its rows as tensors, weighted_sum(w) their sums"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{meant}")


ELSEWHERE = {
    "compute_grad1(model), which sets param.grad1": ("grad_sample", "grad_batch", "per_sample_gradients", "vmap"),
    "clip_grad1_norm_(model, max_norm)": ("clip", "clip_grad_norm_"),
    "per_sample_jacobian(model, output)": ("jacrev", "jacobian", "ntk"),
    "private.clip_and_noise_(model, max_norm, noise_multiplier, expected_batch_size)": ("dpsgd", "privatize"),
    "compute_hess(model, kind='full')": ("hessian", "ggn"),
    "compute_hess(model, kind='kfac')": ("kfac", "kron"),
    "check.check_rows(model, batch, loss, rows)": ("gradcheck",),
}
"""{call: names of other libraries for it}"""


def hint(name: str, public: Collection[str], verbs: Collection[str]) -> str:
    """The end of a message about an unknown name: a call to use instead, or nothing.

    public: the names that there are    verbs: those of ``per_sample_grads(model)``
    """
    calls = {own: call for call, names in ELSEWHERE.items() for own in names}
    calls |= {verb: f"per_sample_grads(model).{verb}()" for verb in verbs} | {own: own for own in public}
    close = [] if name.startswith("_") else get_close_matches(name, calls, 1)
    return f". Did you mean autograd_hacks.{calls[close[0]]}?" if close else ""


_LONGEST = 25
"""The largest number of rows that a table shows in full."""


@dataclass(frozen=True)
class Table:
    """A title, a header with rows (or neither), and a note.

    is_whole: never shorten the table
    """

    title: str
    rows: Sequence[Sequence[str]] = ()
    note: str = ""
    is_whole: bool = False

    def _shortened(self) -> Sequence[Sequence[str]]:
        header, *rows = self.rows
        if self.is_whole or len(rows) <= _LONGEST:
            return self.rows
        half = _LONGEST // 2
        between = (f"... {len(rows) - 2 * half} more", *[""] * (len(header) - 1))
        return [header, *rows[:half], between, *rows[-half:]]

    def text(self) -> str:
        """The table for a terminal."""
        table = [text_table(self._shortened())] if self.rows else []
        return "\n".join(part for part in (self.title, *table, self.note) if part)

    def html(self) -> str:
        """The same for a notebook.  Long lines can be scrolled."""
        return f'<pre style="white-space: pre; overflow-x: auto">{escape(self.text())}</pre>'


class Shown:
    """An object whose repr is one line, and which prints as a table, also in a notebook.

    Showing it computes nothing, changes nothing and raises nothing.
    """

    def _table(self) -> Table:
        raise NotImplementedError(f"{type(self).__name__} has no table")

    def _shown(self) -> Table:
        try:
            return self._table()
        except Exception as error:  # a user's form, or an incomplete one, must not stop a debugger that shows it
            return Table(f"{type(self).__name__}, which can't be shown ({type(error).__name__}: {error})")

    def __repr__(self) -> str:
        return self._shown().title

    def __str__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """The bytes that tensors take.  Shared memory counts once."""
    memory: dict[object, tuple[int, dict[object, int]]] = {}
    for x in map(part_of, tensors):
        try:
            storage = x.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse tensors, and tensors inside torch.func
            count = x.numel() if x.layout == torch.strided else x._nnz()
            indices = x._indices().nbytes if x.layout == torch.sparse_coo else 0
            memory[id(x)] = count * x.element_size() + indices, {}
            continue
        _, seen = memory.setdefault(storage._cdata, (storage.nbytes(), {}))
        seen[x.storage_offset(), x.numel()] = x.numel() * x.element_size()
    return sum(min(size, sum(seen.values())) if seen else size for size, seen in memory.values())


def percent(share: float) -> str:
    """A share as text, rounded down: less than all is never shown as 100 %."""
    return f"{floor(share * 1000 + 1e-9) / 10:g} %"


def with_unit(size: int | None) -> str:
    """A number of bytes with a unit."""
    if size is None:
        return ""
    power = min(3, (len(str(size)) - 1) // 3)
    number = size / 1000**power
    return f"{number:.{4 if number >= 1000 else 3}g} {('B', 'kB', 'MB', 'GB')[power]}"


def text_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned columns.  The first row is the header."""
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
