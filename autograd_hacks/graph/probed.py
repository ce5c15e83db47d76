"""The law of a node that has none: the node is asked in each forward.  An earlier answer is only supposed.

A node's backward is linear in the gradients at its outputs.  Random gradients of half of the samples at a time, the others'
being zero, show which samples each entry of a result depends on: two calls for each binary digit of a sample's number.  An
entry of one sample is not zero in one of the two calls for every digit; if it is in both for some digit, several samples
contribute.  Only zeros are looked at, so an operation whose backward isn't linear to the last bit (``logcumsumexp``) is
judged like any other; a last call, with all samples, shows whether the node is linear at all.  An entry that is zero in all
calls gets nothing *in this forward*: an operand may be zero today.

Two calls are enough to see that a supposed answer is right (`confirmed`): that of an equal graph, or that the samples stay
on their axis.  The first is, if the node does what it did in an earlier forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.graph.label import MIXED, NOBODY, SUM, At, Entries, Label, Owned, Several, entries, tidied
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.graph import CHECKPOINT, Value, is_collective, is_users, made, shape_of
from autograd_hacks.support.parts import undivided
from autograd_hacks.support.sweep import call_node, fitted, outside_passes
from autograd_hacks.support.switch import NO_TASK, Switch, current_task

WIDE = (torch.float32, torch.float64)
ROUNDING = 2**12
"""How far the samples' parts may be from the whole, in units in the last place of the largest entry."""


class CannotAsk(Exception):
    """A node can't be called by itself."""


def probed(node: Any, outs: Sequence[Label], samples: int, keeps_zeros: bool = False) -> list[Label]:
    """The labels at a node's inputs, from owned labels at its outputs.  Raises CannotAsk.

    keeps_zeros: whether entries that get nothing today have no owner, also where all others are in an output's order
    """
    if node.name() == CHECKPOINT:
        raise CannotAsk("a reentrant checkpoint runs the forward again")
    if is_collective(node):
        raise CannotAsk("it exchanges samples with other processes")
    if current_task() != NO_TASK:  # there, nodes compute only what the running pass needs
        return outside_passes(partial(probed, node, outs, samples, keeps_zeros))
    metadata = made(node)
    in_order = {} if keeps_zeros else dict(zip((tuple(like.shape) for like in metadata), outs))
    # The label of an input may be that of an output of its shape, or its first axis with a place for each sample.
    shapes = [None if x is None else tuple(shape_of(Value(x, n))) for x, n in node.next_functions]
    supposed = [None if x is None else in_order.get(x, At(x.index(samples)) if samples in x else None) for x in shapes]
    if in_order and confirmed(node, Asked(outs, supposed, None), samples):
        return supposed
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
            found.append(_owners(of_place, samples, in_order))
    return found


@dataclass(slots=True)
class Asked:
    """The labels at the outputs and inputs of a node that was asked.

    told: numbers that tell what it made of random gradients in a later forward; None if that is another thing in each
    """

    outs: Sequence[Label]
    ins: Sequence[Label]
    told: Sequence[int] | None = ()


def confirmed(node: Any, asked: Asked, samples: int) -> bool:
    """Whether the labels at a node's inputs are known to be those of an earlier answer.  It may say no to right ones.

    Raises CannotAsk.

    The node gets random gradients G, and D G, where D multiplies each sample's part by 0 or a power of two of its own.  If
    no samples mix, the second result is D times the first, to the last bit.  Else it isn't: entry i, of sample a, is
    Σⱼ Lᵢⱼ gⱼ, and Σⱼ Lᵢⱼ (dⱼ - dₐ) gⱼ is 0 for random g only where each Lᵢⱼ between samples is 0.  What isn't linear
    differs, too.  What is linear and makes of G what it made before does the same to all gradients.
    """
    given, ins = [*zip(made(node), asked.outs)], asked.ins
    if not _is_exact(node, asked.outs):
        return False

    def ask(number: int) -> list[Tensor | None]:
        return _ask(node, [None if label is None else _scaled(like, label, samples, number) for like, label in given])

    with torch.no_grad(), Switch.paused_here(), torch.random.fork_rng(enabled=is_users(node)):
        found = [ask(0)]
        now = None if asked.told is None or is_users(node) else _told(found[0])
        if now and now == asked.told:
            return True
        asked.told = None if asked.told else now  # what differs once does so again
        found += map(ask, range(1, len(_factors(samples, torch.float64, torch.device("cpu")))))
    if not any(isinstance(own, Owned) for own in ins):
        return False
    for label, (ahead, _), (first, *more) in zip(ins, node.next_functions, zip(*found)):
        if ahead is None or isinstance(label, Several) or label is first is None:
            continue
        if label is None or first is None:
            return False
        at, factors = entries(label, first.shape, samples, first.device), _factors(samples, first.dtype, first.device)
        # Where nothing arrives today, an order is claimed only if it is an output's own.
        is_own = any(tuple(like.shape) == first.shape and label == own for like, own in given)
        arrives = first.any() if is_own else ((first != 0) | (at < 0)).all()
        if isinstance(label, Entries) and bool(((first != 0) & (at < 0)).any()):  # nobody's factor may be a sample's, too
            return False
        if not (arrives and all(x is not None and torch.equal(x, first * own[at]) for x, own in zip(more, factors[1:]))):
            return False
    return True


def _told(made: Sequence[Tensor | None]) -> Sequence[int] | None:
    """Numbers that tell what a node has made; None if they may not tell all of it."""
    there = [x for x in made if x is not None]
    if any(x.dtype not in WIDE or x.device.type not in ("cpu", "cuda") for x in there):
        return None
    return [int(torch.hash_tensor(x * _drawn(x, 1)).view(torch.int64)) if x.numel() else 0 for x in there]


def _is_exact(node: Any, outs: Sequence[Label]) -> bool:
    """Whether products of what the node gets and makes have enough digits to be compared to the last bit."""
    given = [like for like, label in zip(made(node), outs) if label is not None]
    is_wide = all(like.dtype in WIDE and 0 < math.prod(like.shape) < 2**24 for like in given)
    return is_wide and node.name() != CHECKPOINT and current_task() == NO_TASK


_BITS = 6
"""So many binary digits of a sample's number one call distinguishes: by 0 and powers of two from 2 ** -31 to 2 ** 31."""


@lru_cache(maxsize=16)
def _factors(samples: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Factors for each sample, and 0 for nobody: 1, and then by some digits of its number at a time."""
    digits = range(0, max(1, (samples - 1).bit_length()), _BITS)
    numbers = [[(n >> shift) % 2**_BITS for n in range(samples)] for shift in digits]
    powers = [[2.0 ** (k - 2 ** (_BITS - 1)) if k else 0.0 for k in own] for own in numbers]  # 0: some count what isn't 0
    return torch.tensor([[*own, 0.0] for own in ([1.0] * samples, *powers)], dtype=dtype, device=device)


def _scaled(like: Any, label: Label, samples: int, number: int) -> Tensor:
    """Random gradients times each sample's factor."""
    factors = _factors(samples, like.dtype, like.device)[number]
    return _drawn(like) * factors[entries(label, like.shape, samples, like.device)]  # type: ignore[arg-type]  # it has owners


def _drawn(like: Any, turn: int = 0) -> Tensor:
    """Random numbers of a shape.  turn: 1 for others than 0, also where the shapes differ"""
    count = math.prod(like.shape)
    return _draws(1 << count.bit_length(), like.dtype, like.device, turn)[:count].view(tuple(like.shape))


@lru_cache(maxsize=32)
def _draws(count: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Random numbers of absolute value 1 to 2."""
    draws = torch.rand(count, dtype=dtype, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return torch.where(draws < 0.5, -1 - draws, draws + 1).to(device)


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
    return None if given is None else torch.where((given[1] >= 0) & ((given[1] >> digit) % 2 == half), given[0], 0)


def _ask(node: Any, grads: list[Tensor | None]) -> list[Tensor | None]:
    try:
        with without_autocast([x for x in grads if x is not None]):  # as most passes run
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
    if bool(several.any()):  # whether along an axis of theirs, no numbers say
        return SUM
    if not bool(anybody.any()):  # today: behind it there may be uses
        return Entries(torch.full([1] * owner.ndim, NOBODY, device="cpu"))
    # For what gets nothing, by chance or for good, an order is claimed only where it is the output's own.
    at = outs.get(tuple(owner.shape))
    if isinstance(at, At) and not bool(((entries(at, owner.shape, samples, owner.device) != owner) & anybody).any()):
        return at
    found = Entries(torch.where(anybody, owner, NOBODY))
    return tidied(found, owner.shape, samples) if bool(anybody.all()) else found
