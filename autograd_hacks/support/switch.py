"""Whether hooks record, and which backward pass runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import ClassVar

from autograd_hacks.support.internals import current_task as current_task
from autograd_hacks.support.restored import restored

NO_TASK = -1
"""torch's number for the current backward pass if none runs."""


class _Here(threading.local):
    paused = False  # whether this thread is in one of the library's own contexts


class Switch:
    """Whether hooks record, in the whole process."""

    pauses: ClassVar[set[object]] = set()  # open contexts, of all threads; and the class itself after `disable_hooks`
    here = _Here()

    @classmethod
    def on(cls) -> bool:
        return not cls.pauses and not cls.here.paused

    @classmethod
    @contextmanager
    def paused_here(cls) -> Iterator[None]:
        """A context for the library's own forwards in this thread."""
        with restored(partial(setattr, cls.here, "paused", cls.here.paused)):
            cls.here.paused = True
            yield

    @classmethod
    @contextmanager
    def paused(cls) -> Iterator[None]:
        """A context in which nothing is recorded, in any thread."""
        mine = object()
        with restored(partial(cls.pauses.discard, mine)):
            cls.pauses.add(mine)
            yield
