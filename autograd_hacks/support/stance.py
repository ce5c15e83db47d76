"""Runs code that torch.compile has compiled as ordinary Python."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autograd_hacks.support.internals import COMPILER
from autograd_hacks.support.restored import restored

_OPEN: set[object] = set()  # contexts of all threads: if two overlapped, torch would forget the older setting
_STANCE: list[Any] = []  # undoes the first one
_LOCK = threading.RLock()


@contextmanager
def as_written(wanted: bool = True) -> Iterator[None]:
    """A context in which compiled functions and modules run as they are written, everywhere in the process.

    wanted: False does nothing
    """
    if not wanted or COMPILER not in sys.modules:  # it takes a second to import
        yield
        return
    mine = object()

    def leave() -> None:
        with _LOCK:
            _OPEN.discard(mine)
            if _STANCE and not _OPEN:
                _STANCE[0].__exit__(None, None, None)
                _STANCE.clear()

    with restored(leave):
        with _LOCK:
            _OPEN.add(mine)
            if not _STANCE:
                _STANCE.append(torch.compiler.set_stance("force_eager"))
        yield
