"""Running what torch.compile has made as it was written."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autograd_hacks.support.internals import COMPILER
from autograd_hacks.support.restored import restored

_OPEN: set[object] = set()  # contexts, in whatever thread: of two that overlap, torch would forget what was before
_STANCE: list[Any] = []  # what undoes the first
_LOCK = threading.RLock()


@contextmanager
def as_written(wanted: bool = True) -> Iterator[None]:
    """A context in which compiled functions and modules run as they are written, everywhere in the process.

    wanted: False does nothing
    """
    if not wanted or COMPILER not in sys.modules:  # the compiler, which takes a second to import
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
