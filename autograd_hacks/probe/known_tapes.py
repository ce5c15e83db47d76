"""The tapes of forwards whose samples were shown to be independent, and whether another tape is one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autograd_hacks.probe.tape import CONSTANT, NAMED, OUTSIDE, Entry, Site, Source, Tape
from autograd_hacks.support.trees import ByTensor

MOST = 32
"""How many tapes of one kind of forward are kept."""
_SIZES = frozenset("size stride shape split_sizes".split())  # noqa: SIM905
_PLACES = frozenset("start end length repeats split_size index pad output_size N HxW".split())  # noqa: SIM905
"""Arguments of operations that are sizes, or places along axes, which may be at a size."""


class Tapes:
    """The last tapes that were shown to be independent.  Copies leave them out."""

    def __init__(self) -> None:
        self.sites: set[Site] = set()  # those of forwards that were checked as a whole
        self.constants = ByTensor[bool]()  # tensors that are older than a forward
        self.packed: dict[int, frozenset[int]] = {}  # by argument, the axes along which samples were packed
        self.mixing: Any = None  # what ran in the last forward in which samples mixed
        self._known: list[_Shown] = []  # the one that was met last is the last

    def __len__(self) -> int:
        return len(self._known)

    def how(self, tape: Tape) -> str:
        """How an equal tape was shown to be independent; "" if none was."""
        for k in reversed(range(len(self._known))) if not tape.untold else ():
            if self._known[k].is_of(tape):
                self._known.append(self._known.pop(k))
                return self._known[-1].how
        return ""

    def like(self, tape: Tape, answers: Any = None) -> Iterator[_Shown]:
        """Those of several samples that ran what a tape did, in other sizes.  answers: to Python, if they must be alike"""
        known = (own for own in reversed(self._known) if own.samples > 1 and answers in (None, own.answers))
        return (own for own in known if own.is_like(tape))

    def other_than(self, samples: int) -> int:
        """The last number of several samples that differs by an odd number; else an odd number less, or one more."""
        usual = samples // 2 + (samples - samples // 2 + 1) % 2 if samples > 4 else samples + 1
        return next((x.samples for x in reversed(self._known) if x.samples > 1 and (x.samples - samples) % 2), usual)

    def latest(self) -> Sequence[Entry]:
        """The entries of the tape that was met last."""
        return self._known[-1].entries if self._known else ()

    def add(self, tape: Tape, read: Iterable[int], how: str, samples: int) -> None:
        """read: the numbers of the tensors on whose values it rests that samples are independent"""
        sources = {n: s._replace(kind=CONSTANT) if s.kind == OUTSIDE else s for n, s in tape.sources.items()}
        values = {n: x.detach().clone() for n in read if (x := tape.value(n)) is not None}
        answers, sites, told = tape.answers(), frozenset(tape.sites), frozenset(tape.told)
        shown = _Shown(tape.entries, sources, sites, values, how, samples, answers, told, tape.placed & values.keys())
        self._known = [*self._known[1 - MOST :], shown]

    def forget(self, tape: Tape) -> None:
        """Leaves out a tape that was added."""
        self._known = [own for own in self._known if own.entries is not tape.entries]

    def __reduce__(self) -> tuple[type[Tapes], tuple[()]]:
        return Tapes, ()


class _Shown(NamedTuple):
    """What is kept of a tape."""

    entries: list[Entry]
    sources: dict[int, Source]
    sites: frozenset[Site]
    values: Mapping[int, Tensor]  # those on which it rests, by number
    how: str  # how independence was shown
    samples: int  # N
    answers: Mapping[int, Any]  # what Python read of what may depend on arguments
    told: frozenset[Site]  # where outputs were compared with those of other answers
    placed: Collection[int]  # of the values, those of which each sample meets the part at its place

    def is_of(self, tape: Tape) -> bool:
        is_same = self.entries == tape.entries and self.sources == tape.sources and self.sites == tape.sites
        return is_same and self._has_values(tape, self.values)

    def _has_values(self, tape: Tape, numbers: Iterable[int]) -> bool:
        given = ((self.values[n], tape.value(n)) for n in numbers)
        return all(own is not None and torch.equal(x, own) for x, own in given)

    def is_like(self, tape: Tape) -> bool:
        """Whether a tape has the same operations, numbers and values at places of samples, except for sizes."""
        mine, others = ({n: own[1::3] for n, own in x.sources.items() if own.kind == NAMED} for x in (self, tape))
        if (
            len(self.entries) != len(tape.entries)
            or self.sources.keys() != tape.sources.keys()
            or mine != others
            or not self._has_values(tape, self.placed)
        ):
            return False
        arguments = ((own.shape, tape.sources[n].shape) for n, own in self.sources.items() if n in tape.arguments)
        sizes = {pair for x, y in arguments for pair in (*zip(x, y), (prod(x), prod(y)))}
        return all(
            x.func is y.func and x.kwargs == y.kwargs and (x.args == y.args or _fit(x.args, y.args, sizes, x.func))
            for x, y in zip(self.entries, tape.entries)
        )


def _fit(mine: Sequence[Any], others: Sequence[Any], sizes: Iterable[tuple[int, int]], func: Any, name: str = "") -> bool:
    """Whether arguments of an operation differ in sizes alone.  sizes: of the model's arguments, in both forwards"""
    for k, (x, y) in enumerate(zip(mine, others)):
        own = name or func._schema.arguments[k].name
        if type(x) is list and type(y) is list and len(x) == len(y):
            if own in _SIZES or _fit(x, y, sizes, func, own):
                continue
        elif type(x) is type(y) is int and ((x, y) in sizes or (own in _PLACES and any(x * b == y * a for a, b in sizes))):
            continue
        if x != y:
            return False
    return len(mine) == len(others)
