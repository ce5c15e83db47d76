"""The law of a node that has none: the node is asked, in each forward, and nothing of the answer is kept.

A node's backward is linear in the gradients at its outputs.  Random gradients of half of the samples at a time, the others'
being zero, show which samples each entry of a result depends on: two calls for each binary digit of a sample's number.  An
entry of one sample is not zero in one of the two calls for every digit; if it is in both for some digit, several samples
contribute.  Only zeros are looked at, so operations whose backward isn't linear to the last bit (``logcumsumexp``) are judged
like any other.  An entry that is zero in all calls gets nothing *in this forward*: an operand may be zero today.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.graph.label import MIXED, NOBODY, At, Entries, Label, Owned, entries
from autograd_hacks.support.graph import CHECKPOINT, Value, is_users, made
from autograd_hacks.support.sweep import call_node, fitted
from autograd_hacks.support.switch import Switch


class CannotAsk(Exception):
    """A node can't be called by itself."""


def probed(node: Any, outs: Sequence[Label], samples: int) -> list[Label]:
    """The labels at a node's inputs, from owned labels at its outputs.  Raises CannotAsk."""
    if node.name() == CHECKPOINT:
        raise CannotAsk("a reentrant checkpoint runs the forward again")
    draws, metadata = torch.Generator().manual_seed(0), made(node)
    given: list[tuple[Tensor, Tensor] | None] = []
    for like, label in zip(metadata, outs):
        if label is None:
            given.append(None)
            continue
        assert isinstance(label, Owned)
        g = torch.randn(tuple(like.shape), dtype=_drawn(like.dtype), generator=draws).to(like.device, like.dtype)
        given.append((g, entries(label, like.shape, samples).to(like.device)))
    there: list[list[Tensor | None]] = [[] for _ in node.next_functions]  # by input, digit and half: what isn't zero
    with torch.no_grad(), Switch.paused_here(), torch.random.fork_rng(enabled=is_users(node)):
        for digit in range(max(1, (samples - 1).bit_length())):
            for half in (0, 1):
                _ask(node, [_half(own, digit, half) for own in given], there)
    return [None if ahead is None else _owners(own, samples, outs) for (ahead, _), own in zip(node.next_functions, there)]


def _drawn(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32


def _half(given: tuple[Tensor, Tensor] | None, digit: int, half: int) -> Tensor | None:
    if given is None:
        return None
    g, at = given
    return torch.where((at >= 0) & ((at >> digit) % 2 == half), g, 0)


def _ask(node: Any, grads: list[Tensor | None], there: list[list[Tensor | None]]) -> None:
    try:
        found = call_node(node, grads)
    except Exception as error:
        raise CannotAsk(f"its backward raised {type(error).__name__}: {error}") from error
    for place, (ahead, number) in enumerate(node.next_functions):
        x = None if ahead is None or found is None else found[place]
        there[place].append(None if ahead is None or x is None else fitted(x, Value(ahead, number)) != 0)


def _owners(given: list[Tensor | None], samples: int, outs: Sequence[Label]) -> Label:
    like = next((x for x in given if x is not None), None)
    if like is None:
        return None
    there = [torch.zeros_like(like) if x is None else x for x in given]
    low, high = there[0::2], there[1::2]
    several, owner, anybody = torch.zeros_like(like), torch.zeros_like(like, dtype=torch.long), torch.zeros_like(like)
    for digit, (a, b) in enumerate(zip(low, high)):
        several |= a & b
        anybody |= a | b
        owner |= b.long() << digit
    if bool(several.any()):
        return MIXED
    if not bool(anybody.any()):
        return None
    known = {label.inner for label in outs if isinstance(label, At)}
    for d, size in enumerate(owner.shape):
        if size % samples == 0:
            for inner in {1, size // samples, *known}:
                order = (torch.arange(size, device=owner.device) // inner % samples).view(
                    [-1 if k == d else 1 for k in range(owner.ndim)]
                )
                if size % (samples * inner) == 0 and bool(((owner == order) | ~anybody).all()):
                    return At(d, size // (samples * inner), inner)
    return Entries(torch.where(anybody, owner, NOBODY))
