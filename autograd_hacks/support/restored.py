"""Restores things, even if an interrupt comes at any line."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch

from autograd_hacks.support.internals import (
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    pop_function_mode,
    pop_saved_hooks,
    set_grad_enabled,
    top_saved_hooks,
)


@contextmanager
def restored(undo: Callable[[], None]) -> Iterator[None]:
    """A context that calls ``undo`` at its end, and once more if an interrupt stopped it halfway.

    Enter it before the first change.  It is a generator, which Python ends at once if an interrupt comes while the ``with``
    statement is left.

    undo: must have the same effect if it is called several times
    """
    try:
        try:
            yield
        finally:
            undo()
    except BaseException:
        undo()
        raise


def kept(own: object, *names: str) -> AbstractContextManager[None]:
    """A context that restores an object's attributes: the named ones, or all."""
    attributes = vars(own)
    return restored(partial(attributes.update, {name: attributes[name] for name in names or attributes}))


def switches_kept() -> AbstractContextManager[None]:
    """A context that restores torch's `switches`, which torch's own contexts don't if an interrupt comes at their end."""
    return restored(switches())


def switches(*more: Callable[[], None]) -> Callable[[], None]:
    """Restores torch's switches for this thread: gradients, autocast, fast attention, modes.  more: what it also calls"""
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES]
    gradients, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    fast = torch.backends.mha.get_fastpath_enabled()
    saved, depth = _saves_by(), _autocasts()
    functions, dispatches = count_function_modes(), count_dispatch_modes()

    def undo() -> None:
        while count_dispatch_modes() > dispatches:
            dispatch_modes()[-1].__exit__(None, None, None)
        while count_function_modes() > functions:
            pop_function_mode()
        while (now := _saves_by()) is not saved and now is not None:
            pop_saved_hooks()
        set_grad_enabled(gradients)
        torch.set_autocast_cache_enabled(cache)
        while _autocasts() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        for device, is_on, dtype in autocast:
            torch.set_autocast_enabled(device, is_on)
            torch.set_autocast_dtype(device, dtype)
        torch.backends.mha.set_fastpath_enabled(fast)
        for other in more:
            other()

    return undo


_DEVICES = [device for device in ("cpu", "cuda") if torch.amp.is_autocast_available(device)]


def _saves_by() -> object:
    found: Any = top_saved_hooks(True)
    return None if found is None else found[0]


def _autocasts() -> int:
    """How many autocast contexts are open.  Autocast's cache of weights is cleared with the last one."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
