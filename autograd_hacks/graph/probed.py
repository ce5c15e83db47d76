"""The law of a node that has none: the node is asked, in each forward, and nothing of the answer is kept.

A node's backward is linear in the gradients at its outputs.  Random gradients of half of the samples at a time, the others'
being zero, show which samples each entry of a result depends on: two calls for each binary digit of a sample's number.  An
entry of one sample is not zero in one of the two calls for every digit; if it is in both for some digit, several samples
contribute.  Only zeros are looked at, so an operation whose backward isn't linear to the last bit (``logcumsumexp``) is
judged like any other; a last call, with all samples, shows whether the node is linear at all.  An entry that is zero in all
calls gets nothing *in this forward*: an operand may be zero today.

Two calls are enough for a node that only copies entries, as a write into a slice does: gradients that number the entries
come out as the numbers of their origins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.graph.label import MIXED, NOBODY, SUM, At, Entries, Label, entries, tidied
from autograd_hacks.support.graph import CHECKPOINT, Value, is_users, made
from autograd_hacks.support.parts import undivided
from autograd_hacks.support.sweep import call_node, fitted, outside_passes
from autograd_hacks.support.switch import NO_TASK, Switch, current_task

ROUNDING = 2**12
"""How far the samples' parts may be from the whole, in units in the last place of the largest entry."""


COPIES = {"torch::autograd::CopySlices", "AsStridedBackward0", "AsStridedBackward1"}
"""Nodes that may only copy entries."""


class CannotAsk(Exception):
    """A node can't be called by itself."""


def probed(node: Any, outs: Sequence[Label], samples: int, keeps_zeros: bool = False) -> list[Label]:
    """The labels at a node's inputs, from owned labels at its outputs.  Raises CannotAsk.

    keeps_zeros: whether entries that get nothing today have no owner, also where all others are in an output's order
    """
    if node.name() == CHECKPOINT:
        raise CannotAsk("a reentrant checkpoint runs the forward again")
    if current_task() != NO_TASK:  # there, nodes compute only what the running pass needs
        return outside_passes(partial(probed, node, outs, samples, keeps_zeros))
    metadata = made(node)
    if node.name() in COPIES and len(outs) == 1 and (copied := _copied(node, metadata[0], outs[0], samples)) is not None:
        return copied
    draws = torch.Generator("cpu").manual_seed(0)
    given: list[tuple[Tensor, Tensor] | None] = []
    for like, label in zip(metadata, outs):
        if label is None:
            given.append(None)
            continue
        drawn = like.dtype if like.dtype.is_complex or like.dtype == torch.float64 else torch.float32
        g = torch.randn(tuple(like.shape), dtype=drawn, generator=draws, device="cpu").to(like.device, like.dtype)
        given.append((g, entries(label, like.shape, samples, like.device)))  # type: ignore[arg-type]  # it has owners
    with torch.no_grad(), Switch.paused_here(), torch.random.fork_rng(enabled=is_users(node)):
        passes = [
            _ask(node, [_half(own, digit, half) for own in given])
            for digit in range(max(1, (samples - 1).bit_length()))
            for half in (0, 1)
        ]
        whole, more = (
            _ask(node, [None if own is None else torch.where(own[1] >= 0, times * own[0], 0) for own in given])
            for times in (1, 4)
        )
    found: list[Label] = []
    for place, (ahead, _) in enumerate(node.next_functions):
        of_place = [own[place] for own in passes]
        if ahead is None or not (_adds_up(whole[place], of_place[:2]) and _adds_up(more[place], [whole[place]] * 4)):
            found.append(None if ahead is None else MIXED)
        else:
            in_order = {} if keeps_zeros else dict(zip((tuple(like.shape) for like in metadata), outs))
            found.append(_owners(of_place, samples, in_order))
    return found


def _copied(node: Any, like: Any, label: Label, samples: int) -> list[Label] | None:
    """The labels at the inputs of a node that only copies entries; None if it does more.

    An entry that is a sum of others, or a multiple of one, may have the number of another, but not in both calls."""
    count = math.prod(like.shape)
    if not 0 < count < 2**24 or like.dtype not in (torch.float32, torch.float64):  # each number has a float of its own
        return None
    numbers, draws = _numbers(count, like.dtype, like.device)
    with torch.no_grad(), Switch.paused_here():
        first, second = (_ask(node, [own.view(tuple(like.shape))]) for own in (numbers, draws))
    owners = entries(label, like.shape, samples, like.device).expand(tuple(like.shape)).flatten()  # type: ignore[arg-type]  # it has some
    found: list[Label] = []
    for (ahead, _), at, drawn in zip(node.next_functions, first, second):
        if ahead is None or at is None or drawn is None:
            found.append(None)
            continue
        is_alike = isinstance(label, At) and at.shape == like.shape
        if is_alike and _are_in_place(at, numbers) and _are_in_place(drawn, draws):
            found.append(label)
            continue
        is_there, origin = at != 0, (at.clamp(1, count) - 1).long()
        if not all(bool((x == own[origin].where(is_there, 0)).all()) for x, own in ((at, numbers), (drawn, draws))):
            return None
        owner = owners[origin]
        found.append(_tidied(owner, is_there & (owner >= 0), samples, {tuple(like.shape): label}))
    return found


def _are_in_place(x: Tensor, own: Tensor) -> bool:
    """Whether each entry has its own number, or none."""
    return bool(((x.flatten() == own) | (x.flatten() == 0)).all()) and bool(x.any())


@lru_cache(maxsize=8)
def _numbers(count: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Numbers from 1 on, and random ones, none of which is 0."""
    draws = torch.rand(count, dtype=dtype, generator=torch.Generator("cpu").manual_seed(0), device="cpu")
    return torch.arange(1, count + 1, dtype=dtype, device=device), (draws + 1).to(device)


def _adds_up(whole: Tensor | None, parts: Sequence[Tensor | None]) -> bool:
    """Whether what the node makes of the batch's gradients is what it makes of the samples', or depends on all of them.

    A Function may divide by a norm over the batch, which no zero shows.  It may divide by a sample's own norm: then rows
    depend on how the losses are added up."""
    if whole is None:
        return all(x is None for x in parts)
    most = whole.abs().nan_to_num(0, 0, 0).max() if whole.numel() else 0
    rest = whole - sum(x for x in parts if x is not None)
    return bool((rest.abs().nan_to_num(0, 0, 0) <= ROUNDING * torch.finfo(whole.dtype).eps * most).all())


def _half(given: tuple[Tensor, Tensor] | None, digit: int, half: int) -> Tensor | None:
    if given is None:
        return None
    g, at = given
    return torch.where((at >= 0) & ((at >> digit) % 2 == half), g, 0)


def _ask(node: Any, grads: list[Tensor | None]) -> list[Tensor | None]:
    try:
        found = call_node(node, grads)
    except Exception as error:  # a user's Function may raise anything for other gradients than its own
        raise CannotAsk(f"its backward raised {type(error).__name__}: {error}") from error
    ahead = node.next_functions
    return [
        None if at is None or found is None or (x := found[place]) is None else undivided(fitted(x, Value(at, number)))
        for place, (at, number) in enumerate(ahead)
    ]


def _owners(given: list[Tensor | None], samples: int, outs: dict[tuple[int, ...], Label]) -> Label:
    """outs: labels of outputs, by shape"""
    like = next((x for x in given if x is not None), None)
    if like is None:
        return None
    there = [torch.zeros_like(like, dtype=torch.bool) if x is None else x != 0 for x in given]
    low, high = there[0::2], there[1::2]
    several, owner, anybody = there[0] & False, torch.zeros_like(like, dtype=torch.long), there[0] & False
    for digit, (a, b) in enumerate(zip(low, high)):
        several |= a & b
        anybody |= a | b
        owner |= b.long() << digit
    if bool(several.any()):  # what no axis has as many places as there are samples has no axis of theirs
        return MIXED if any(size % samples == 0 for size in several.shape) else SUM
    return _tidied(owner, anybody, samples, outs)


def _tidied(owner: Tensor, anybody: Tensor, samples: int, outs: dict[tuple[int, ...], Label]) -> Label:
    """The label of entries with owners.  anybody: which have one    outs: labels of outputs, by shape"""
    if not bool(anybody.any()):  # today: behind it there may be uses
        return Entries(torch.full([1] * owner.ndim, NOBODY, device="cpu"))
    # For what gets nothing, by chance or for good, an order is claimed only where it is the output's own.
    at = outs.get(tuple(owner.shape))
    if isinstance(at, At) and not bool(((entries(at, owner.shape, samples, owner.device) != owner) & anybody).any()):
        return at
    found = Entries(torch.where(anybody, owner, NOBODY))
    return tidied(found, owner.shape, samples) if bool(anybody.all()) else found
