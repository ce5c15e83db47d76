"""Whether hooks record, and which backward pass runs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

NO_TASK = -1
"""What torch calls the current backward pass where none runs."""


def current_task() -> int:
    """The backward pass that is running, by autograd's own count, or `NO_TASK`."""
    return torch._C._current_graph_task_id()


class Switch:
    """Whether hooks record, everywhere in the process."""

    enabled = True
    pauses = 0  # contexts that are open, in whatever thread
    here = threading.local()  # .pauses: those of the library's own, in this thread

    @classmethod
    def on(cls) -> bool:
        return cls.enabled and not cls.pauses and not getattr(cls.here, "pauses", 0)

    @classmethod
    @contextmanager
    def paused_here(cls) -> Iterator[None]:
        """A context in which this thread's forwards are none of the user's."""
        cls.here.pauses = getattr(cls.here, "pauses", 0) + 1
        try:
            yield
        finally:
            cls.here.pauses -= 1
