"""The tapes of forwards whose samples were shown to be independent, and whether another tape is one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autograd_hacks.probe.tape import CONSTANT, OUTSIDE, Entry, Site, Source, Tape
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

    def are_like(self, tape: Tape) -> bool:
        """Whether a tape needs no comparison with other numbers of samples: it ran what another one did, in other sizes."""
        return any(own.samples > 1 and own.is_like(tape) for own in reversed(self._known))

    def other_than(self, samples: int) -> int:
        """The last number of several samples that differs by an odd number; 0 if there was none."""
        known = (own.samples for own in reversed(self._known) if own.samples > 1)
        return next((other for other in known if (other - samples) % 2), 0)

    def latest(self) -> Sequence[Entry]:
        """The entries of the tape that was met last."""
        return self._known[-1].entries if self._known else ()

    def add(self, tape: Tape, read: Iterable[int], how: str, samples: int) -> None:
        """read: the numbers of the tensors on whose values it rests that samples are independent"""
        sources = {n: s._replace(kind=CONSTANT) if s.kind == OUTSIDE else s for n, s in tape.sources.items()}
        values = {n: x.detach().clone() for n in read if (x := tape.value(n)) is not None}
        self._known = [*self._known[1 - MOST :], _Shown(tape.entries, sources, frozenset(tape.sites), values, how, samples)]

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

    def is_of(self, tape: Tape) -> bool:
        given = ((x, tape.value(n)) for n, x in self.values.items())
        is_same = self.entries == tape.entries and self.sources == tape.sources and self.sites == tape.sites
        return is_same and all(own is not None and torch.equal(x, own) for x, own in given)

    def is_like(self, tape: Tape) -> bool:
        """Whether a tape has the same operations and numbers, except for sizes."""
        if len(self.entries) != len(tape.entries) or self.sources.keys() != tape.sources.keys():
            return False
        arguments = ((own.shape, tape.sources[n].shape) for n, own in self.sources.items() if n in tape.arguments)
        sizes = {pair for shapes in arguments for pair in zip(*shapes)}
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
        elif own in _PLACES and type(x) is type(y) is int and any(x * b == y * a for a, b in sizes):
            continue
        if x != y:
            return False
    return len(mine) == len(others)
