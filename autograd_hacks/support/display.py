"""Tables, progress bars, and suggestions for names that the library doesn't have."""

import importlib.util
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
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


_VERBS = {
    "weighted_sum": ("mean", "sum"),
    "variance": ("var", "std"),
    "norms": ("norm", "length"),
    "gram": ("T", "mT", "mm", "matmul"),
    "select": ("index_select", "narrow", "take"),
    "clip_grad1_norm_(model, max_norm)": ("clip", "clamp", "clip_", "clamp_"),
    "samples": ("size", "batch_size"),
}
"""{verb: names that tensors have for it}"""


def _meant(name: str, meant: Mapping[str, Collection[str]], known: Collection[str]) -> str | None:
    """What somebody means by a name: a key of ``meant`` that has it, or else the closest name that is known."""
    told = (call for call, names in meant.items() if name in names)
    return next(told, None) or next(iter(get_close_matches(name, known, 1)), None)


class Hinting:
    """Suggests verbs for the names of tensors' methods."""

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> object:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{self._hint(name)}")

    def _hint(self, name: str) -> str:
        if name.startswith("_"):
            return ""
        known = [own for own in dir(self) if own[0] != "_"]
        if found := _meant(name, {verb: names for verb, names in _VERBS.items() if verb in known or "(" in verb}, known):
            return f"; did you mean {found}?"
        return "; it is not a tensor. dense() returns its rows as tensors" if hasattr(Tensor, name) else ""


MEANT = {
    "add_hooks(model)": ("hook", "hooks", "attach", "extend", "watch", "register_hooks", "GradSampleModule"),
    "remove_hooks(model)": ("detach", "unhook", "remove", "unwatch"),
    "compute_grad1(model), which sets param.grad1": (
        *("grad1", "grad_sample", "grad_samples", "per_sample_gradient", "per_sample_gradients", "per_example_gradients"),
        *("grad_batch", "individual_gradients", "vmap", "call_for_per_sample_grads"),
    ),
    "per_sample_grads(model)": ("grads", "rows", "gradients", "per_sample_grad", "per_example_grads"),
    "per_sample_grads(model).norms()": ("norm", "norms", "grad_norms", "per_sample_norms", "gradient_norms"),
    "per_sample_grads(model).dot(v)": ("dot", "jvp", "directional_derivative"),
    "per_sample_grads(model).gram()": ("gram", "inner_products", "similarity"),
    "per_sample_grads(model).weighted_sum(w)": ("weighted_sum", "vjp", "reweight"),
    "per_sample_grads(model).noise_scale()": ("noise_scale", "gns", "gradient_noise_scale"),
    "per_sample_grads(model).project(dim)": ("project", "projection", "trak"),
    "per_sample_jacobian(model, output)": ("jacobian", "jacrev", "ntk", "tangent_kernel"),
    "clip_grad1_norm_(model, max_norm)": (
        *("clip", "clip_", "clip_grad_norm", "clip_grad_norm_", "clip_gradients", "clip_per_sample", "ghost_clipping"),
    ),
    "private.clip_and_noise_(model, max_norm, noise_multiplier, expected_batch_size)": (
        "noise",
        "privatize",
        "dp_step",
        "dpsgd",
    ),
    "integrations.opacus.PrivacyEngine": ("PrivacyEngine", "make_private"),
    "compute_hess(model, kind='full')": ("hess", "hessian", "ggn", "gauss_newton"),
    "compute_hess(model, kind='diag')": ("hess_diag", "diag_ggn", "diagonal"),
    "compute_hess(model, kind='kfac')": ("kfac", "KFAC", "kron"),
    "curvature.matvec(grads, v)": ("fisher", "fisher_matvec", "ggn_matvec"),
    "add_hooks(model).accumulate()": ("accumulation", "micro_batches", "no_sync"),
    "check.check_rows(model, batch, loss, rows)": ("check_grads", "gradcheck"),
}
"""{call: names that people try for it, from other libraries, tensors and `PerSampleGrads`}"""


def hint(name: str, public: Collection[str]) -> str:
    """The end of a message about an unknown name: a call or a close name to use instead, or nothing."""
    if name.startswith("_"):
        return ""
    found = _meant(name, MEANT, public)
    if found is None and (close := get_close_matches(name, [other for names in MEANT.values() for other in names], 1, 0.8)):
        found = _meant(close[0], MEANT, public)
    if found is not None and found.startswith("integrations."):  # whose modules are imported one by one
        module, _, name = found.rpartition(".")
        return f". Did you mean this: from autograd_hacks.{module} import {name}?"
    return "" if found is None else f". Did you mean autograd_hacks.{found}?"


_LONGEST = 25
"""The largest number of rows that a table shows in full."""
_CELL = "text-align: left; vertical-align: top; padding: 0.15em 1em 0.15em 0; white-space: "


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
        """The table for a notebook, in the notebook's colours."""
        lines = []
        for tag, cells in zip(["th", *["td"] * len(self.rows)], self._shortened() if self.rows else ()):
            spaces = ["pre" if len(text) <= 40 else "pre-wrap; min-width: 16em" for text in cells]  # long text wraps
            shown = (f'<{tag} style="{_CELL}{space}">{escape(text)}</{tag}>' for text, space in zip(cells, spaces))
            lines.append(f"<tr>{''.join(shown)}</tr>")
        table = f"<table><thead>{lines[0]}</thead><tbody>{''.join(lines[1:])}</tbody></table>" if lines else ""
        before, after = (f"<p>{escape(x)}</p>".replace("\n", "<br>") if x else "" for x in (self.title, self.note))
        return f'<div style="overflow-x: auto">{before}{table}{after}</div>'


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
