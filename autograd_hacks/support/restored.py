"""Putting things back, at whatever line an interrupt comes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from autograd_hacks.support.internals import (
    dispatch_modes,
    function_modes,
    pop_function_mode,
    pop_saved_hooks,
    set_grad_enabled,
    top_saved_hooks,
)


@contextmanager
def restored(undo: Callable[[], None]) -> Iterator[None]:
    """A context at whose end ``undo`` puts things back, and once more where an interrupt has stopped it half-way.

    To be entered before the first change.  It is a generator, which Python ends at once where an interrupt comes as the
    ``with`` around it is left.

    undo: gives the same whether it is called once or several times
    """
    try:
        try:
            yield
        finally:
            undo()
    except BaseException:
        undo()
        raise


@contextmanager
def kept(own: object, *names: str) -> Iterator[None]:
    """A context after which an object's attributes are as they were: those that are named, or all."""
    attributes = vars(own)
    with restored(partial(attributes.update, {name: attributes[name] for name in names or attributes})):
        yield


@contextmanager
def undone_by(undo: Callable[[], None]) -> Iterator[None]:
    """A context that ``undo`` undoes where it is left by an exception."""
    try:
        yield
    except BaseException:
        undo()
        raise


@contextmanager
def switches_kept() -> Iterator[None]:
    """A context after which torch's switches for this thread are as they were: gradients, autocast, its cache, attention's
    fast way, modes.  torch's own contexts miss an interrupt that comes as they are left."""
    devices = [device for device in ("cpu", "cuda") if torch.amp.is_autocast_available(device)]
    autocast = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    gradients, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    fast = torch.backends.mha.get_fastpath_enabled()
    saved, depth = _saves_by(), _autocasts()
    functions, dispatches = len(function_modes()), len(dispatch_modes())

    def undo() -> None:
        while len(modes := dispatch_modes()) > dispatches:
            modes[-1].__exit__(None, None, None)
        while len(function_modes()) > functions:
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

    with restored(undo):
        yield


def _saves_by() -> object:
    """What packs tensors that autograd saves; None where nothing does."""
    found: Any = top_saved_hooks(True)
    return None if found is None else found[0]


def _autocasts() -> int:
    """How many autocasts are open: with the last, its memory of weights goes."""
    torch.autocast_increment_nesting()
    depth: int = torch.autocast_decrement_nesting()
    return depth
