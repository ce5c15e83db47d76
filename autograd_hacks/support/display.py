"""Tables and progress bars, for people."""

import importlib.util
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from difflib import get_close_matches
from html import escape
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from autograd_hacks.support.trees import local_of

Item = TypeVar("Item")

_DELAY = 3.0
"""Seconds without a progress bar."""


def progress(items: Iterable[Item], what: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """The items, with a bar on standard error, unless there is but one, that tells how many of ``total`` have been taken;
    unless told, of so many as there are, where that is known."""
    total = _length(items) if total is None else total
    if total == 1 or importlib.util.find_spec("tqdm") is None:
        return items
    from tqdm import TqdmWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # of a notebook without widgets, which gets a bar of letters
        from tqdm.auto import tqdm

    bar: Iterable[Item] = tqdm(items, desc=what, unit=unit, total=total, delay=_DELAY)
    return bar


def _length(items: object) -> int | None:
    try:
        return len(items) if isinstance(items, Sized) else None
    except (TypeError, NotImplementedError, RuntimeError):  # a DataLoader's, if its dataset is an IterableDataset
        return None


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


_LONGEST = 25
"""Rows of a table that is not shortened."""
_CELL = "text-align: left; vertical-align: top; padding: 0.15em 1em 0.15em 0; white-space: "


@dataclass(frozen=True)
class Table:
    """A line, a header with rows below it, which may be none, and a note.

    is_whole: whether it is shown whole, however long
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
        """For a terminal."""
        table = [text_table(self._shortened())] if self.rows else []
        return "\n".join(part for part in (self.title, *table, self.note) if part)

    def html(self) -> str:
        """For a notebook, in the colours that it has."""
        lines = [
            "<tr>" + "".join(_cell(tag, cell) for cell in cells) + "</tr>"
            for tag, cells in zip(["th", *["td"] * len(self.rows)], self._shortened() if self.rows else ())
        ]
        table = f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>" if lines else ""
        before, after = (f"<p>{escape(x)}</p>".replace("\n", "<br>") if x else "" for x in (self.title, self.note))
        return f'<div style="overflow-x: auto">{before}{table}{after}</div>'


def _cell(tag: str, text: str) -> str:
    space = "pre" if len(text) <= 40 else "pre-wrap; min-width: 16em"  # what is long goes on below
    return f'<{tag} style="{_CELL}{space}">{escape(text)}</{tag}>'


class Shown:
    """What people see as a line where it stands in something else, and as a table when it is printed, or in a notebook.

    Nothing is computed for it, nothing changed, and nothing raised.
    """

    def _table(self) -> Table:
        raise NotImplementedError(f"{type(self).__name__} has no table")

    def _shown(self) -> Table:
        try:
            return self._table()
        except Exception as error:  # a form of a user's own, or half made, must not stop a debugger that shows it
            return Table(f"{type(self).__name__}, which can't be shown ({type(error).__name__}: {error})")

    def __repr__(self) -> str:
        return self._shown().title

    def __str__(self) -> str:
        return self._shown().text()

    def _repr_html_(self) -> str:
        return self._shown().html()


class Rows(Hinting, Shown):
    """A form, for people."""

    if TYPE_CHECKING:
        samples: int
        shape: torch.Size
        held: tuple[Tensor, ...]

        @property
        def parts(self) -> Sequence["Rows"]: ...
        @property
        def sources(self) -> Sequence[object]: ...
        @property
        def like(self) -> Tensor: ...
        def leaves(self) -> Iterable["Rows"]: ...

    def _table(self) -> Table:
        kinds = "" if [*self.leaves()] == [self] else f" of {kinds_of(self)}"
        size = f"{holds(self)}, {with_unit(written_bytes(self))} written out"
        title = f"{type(self).__name__}{kinds}: {self.samples} rows of shape {tuple(self.shape)}, {size}"
        return Table(title, [("form", "shape", "made of tensors of shape", "holds"), *_tree(self)])


def _tree(form: Rows, depth: int = 0) -> Iterator[tuple[str, ...]]:
    tensors = "" if form.parts else ", ".join(str(tuple(x.shape)) for x in form.held)
    name = "  " * depth + type(form).__name__
    yield name, str((form.samples, *form.shape)), tensors, holds(form).removeprefix("holds ")
    for part in form.parts:
        yield from _tree(part, depth + 1)


def kinds_of(form: Rows) -> str:
    """What a form is made of, in the end."""
    return " + ".join(dict.fromkeys(type(leaf).__name__ for leaf in form.leaves()))


def holds(*forms: Rows) -> str:
    """What forms keep in memory; of modules that are run again it isn't known."""
    again = any(form.sources for form in forms)
    size = bytes_of(x for form in forms for leaf in form.leaves() for x in leaf.held)
    known = [f"holds {with_unit(size)}"] if size or not again else []
    return " and ".join([*known, *(["is run again"] if again else [])])


def written_bytes(form: Rows) -> int:
    return form.samples * form.shape.numel() * form.like.element_size()


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """What tensors take, memory that several of them see counting once."""
    memory: dict[object, tuple[int, dict[object, int]]] = {}
    for x in map(local_of, tensors):
        try:
            storage = x.untyped_storage()
        except (NotImplementedError, RuntimeError):  # sparse, or inside of torch.func
            count = x.numel() if x.layout == torch.strided else x._nnz()
            indices = x._indices().nbytes if x.layout == torch.sparse_coo else 0
            memory[id(x)] = count * x.element_size() + indices, {}
            continue
        _, seen = memory.setdefault(storage._cdata, (storage.nbytes(), {}))
        seen[x.storage_offset(), x.numel()] = x.numel() * x.element_size()
    return sum(min(size, sum(seen.values())) if seen else size for size, seen in memory.values())


def table_of(title: str, forms: Mapping[str, Rows], shapes: Mapping[str, Sequence[int]], said: Mapping[str, str]) -> Table:
    """A table of forms, by parameter.  shapes: theirs, written out    said: of some, more than their kind"""
    rows = [
        (name, kinds_of(form) + said.get(name, ""), str(tuple(shapes[name])), holds(form), with_unit(written_bytes(form)))
        for name, form in forms.items()
    ]
    rows.append(("all", "", "", holds(*forms.values()), with_unit(sum(map(written_bytes, forms.values())))))
    own = [(*row[:3], row[3].removeprefix("holds "), row[4]) for row in rows]
    return Table(title, [("parameter", "form", "shape", "holds", "written out"), *own])


def with_unit(size: int | None) -> str:
    """A number of bytes, for people."""
    if size is None:
        return ""
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000  # type: ignore[assignment]  # a float from here on
    return f"{size:.4g} GB" if size >= 1000 else f"{size:.3g} GB"


def text_table(table: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first of them the header, in columns."""
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths)).rstrip() for cells in table]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
