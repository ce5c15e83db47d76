"""A forward of the model for a proof: with hooks, on copies of its arguments, and nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.uses import LayerCall, Use
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.parts import settled
from autograd_hacks.support.restored import restored
from autograd_hacks.support.trees import is_packed

Key = tuple[str, int, int]
"""A call's path, its number there in the order in which a backward pass comes to them, and the output's number."""

Grads = dict[Key, tuple[Use, Tensor]]
"""The gradients at calls' outputs."""

Note = Callable[[Key, Use, Tensor], None]


@contextmanager
def listening(backward: Backward, note: Note) -> Iterator[None]:
    """A context in which gradients at calls go to a callable, and into no record."""
    counts: dict[tuple[str, int], dict[int, int]] = {}

    def hear(use: Use, slot: int, grad: Tensor | None) -> None:
        if grad is not None:
            path = use.path if isinstance(use, LayerCall) else use.place
            seen = counts.setdefault((path, slot), {})
            note((path, seen.setdefault(id(use), len(seen)), slot), use, settled(grad))

    with restored(lambda: setattr(backward, "listener", None)):
        backward.listener = hear
        yield


def layout_in(use: Use, slot: int, samples: int) -> Layout | None:
    """Where samples are in a gradient at one of a call's outputs; None where that isn't known."""
    if use.samples is None or slot >= len(use.layouts):
        return None
    if isinstance(use, LayerCall) and any(is_packed(x) for x in use.args):
        return None
    return use.layouts[slot]
