"""A progress bar, where tqdm is installed, for what takes more than a few seconds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")

_DELAY = 3.0
"""Seconds without a bar."""


def progress(items: Iterable[Item], what: str, unit: str, total: int | None = None) -> Iterable[Item]:
    """The items, with a bar on standard error, unless there is but one, that tells how many of ``total`` have been taken."""
    if total == 1 or importlib.util.find_spec("tqdm") is None:
        return items
    from tqdm.auto import tqdm

    bar: Iterable[Item] = tqdm(items, desc=what, unit=unit, total=total, delay=_DELAY)
    return bar
