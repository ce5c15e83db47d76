"""Functions for code that has a model but not the handle of `add_hooks`, which does the same by methods.

Most of their names are those of the original autograd-hacks.
"""

from contextlib import AbstractContextManager

import torch.nn as nn

from autograd_hacks.capture.accumulate import accumulate
from autograd_hacks.capture.hooks import Hooked
from autograd_hacks.formulas.table import is_supported
from autograd_hacks.support.switch import Switch

__all__ = ["accumulate", "clear_backprops", "disable_hooks", "enable_hooks", "is_supported", "pause_hooks"]


def enable_hooks() -> None:
    """Undoes `disable_hooks`."""
    Switch.pauses.discard(Switch)


def disable_hooks() -> None:
    """Stops all recording in this process until `enable_hooks`.  Existing records stay."""
    Switch.pauses.add(Switch)


def pause_hooks() -> AbstractContextManager[None]:
    """A context in which nothing is recorded, for any model in this process.  At the end recording is as before."""
    return Switch.paused()


def clear_backprops(model: nn.Module) -> None:
    """Discards the recorded backward passes and frees their memory: ``clear`` of the handle."""
    Hooked(model, None).clear()
