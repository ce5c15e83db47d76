"""The tapes of forwards whose samples were shown to be independent, and whether another tape is one of them."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autograd_hacks.probe.tape import ARGUMENT, CONSTANT, OUTSIDE, Constants, Entry, Source, Tape

MOST = 32
"""How many tapes of one kind of forward are kept."""


class Tapes:
    """The last tapes that were shown to be independent.  Copies leave them out."""

    def __init__(self) -> None:
        self.sites: set[Hashable] = set()  # those of forwards that were checked as a whole
        self.constants = Constants()
        self.mixing: Any = None  # what ran in the last forward in which samples mixed
        self._known: OrderedDict[int, _Shown] = OrderedDict()
        self._next = 0

    def __contains__(self, tape: Tape) -> bool:
        for key, known in reversed(self._known.items()):
            is_same = known.entries == tape.entries and known.sources == tape.sources and known.sites == tape.sites
            if is_same and known.has_values_of(tape):
                self._known.move_to_end(key)
                return True
        return False

    def latest(self) -> Sequence[Entry]:
        """The entries of the tape that was met last."""
        return next(reversed(self._known.values())).entries if self._known else ()

    def has_alike(self, tape: Tape) -> bool:
        """Whether a tape differs from a known one only in sizes, each by the factor of sizes of the arguments."""
        return any(_is_alike(known, tape) and known.has_values_of(tape) for known in self._known.values())

    def add(self, tape: Tape, for_all_values: bool) -> None:
        """for_all_values: whether the samples are independent whatever the values are"""
        sources = {n: s._replace(kind=CONSTANT) if s.kind == OUTSIDE else s for n, s in tape.sources.items()}
        values = () if for_all_values else tuple([x.detach().clone() for x in tape.values])
        self._known[self._next] = _Shown(tape.entries, sources, frozenset(tape.sites), values)
        self._next += 1
        while len(self._known) > MOST:
            self._known.popitem(last=False)

    def __reduce__(self) -> tuple[type[Tapes], tuple[()]]:
        return Tapes, ()


class _Shown(NamedTuple):
    """What is kept of a tape."""

    entries: list[Entry]
    sources: dict[int, Source]
    sites: frozenset[Hashable]
    values: Sequence[Tensor]  # see `Tape`; empty if they don't matter

    def has_values_of(self, tape: Tape) -> bool:
        is_alike = len(self.values) == len(tape.values) and all(map(torch.equal, self.values, tape.values))
        return is_alike or not self.values


def _is_alike(known: _Shown, tape: Tape) -> bool:
    if len(known.entries) != len(tape.entries) or known.sites != tape.sites or known.sources.keys() != tape.sources.keys():
        return False
    factors, sources = {(1, 1)}, list(zip(known.sources.values(), tape.sources.values()))
    for old, new in sources:
        if old.kind == ARGUMENT and len(old.shape) == len(new.shape):
            own = {(a, b) for a, b in zip(old.shape, new.shape) if a != b}
            factors |= own | {(a * c, b * d) for a, b in own for c, d in factors}

    def fits(old: Any, new: Any) -> bool:
        return old == new or any(old * b == new * a and old % a == 0 for a, b in factors)

    def fit(old: Sequence[int], new: Sequence[int]) -> bool:
        return len(old) == len(new) and all(map(fits, old, new))

    def given(old: Any, new: Any, sized: bool) -> bool:
        if type(old) is list and type(new) is list and len(old) == len(new):
            return all(given(a, b, sized) for a, b in zip(old, new))
        return bool(old == new) or (sized and type(old) is type(new) is int and fits(old, new))

    def alike(a: Entry, b: Entry) -> bool:
        return (
            a.func is b.func
            and a.kwargs == b.kwargs
            and len(a.args) == len(b.args)
            and len(a.outputs) == len(b.outputs)
            and all(map(given, a.args, b.args, _sized(a.func)))
            and all(x[0] == y[0] and x[3] == y[3] and fit(x[1], y[1]) for x, y in zip(a.outputs, b.outputs))
        )

    are_alike = all(old[:2] == new[:2] and fit(old.shape, new.shape) for old, new in sources)
    return are_alike and all(map(alike, known.entries, tape.entries))


@cache
def _sized(func: Any) -> list[bool]:
    """Which arguments of an operation are sizes or places, so that they may grow with the batch."""
    names = re.findall(r"SymInt\S* (\w+)", str(func._schema))
    return [a.name in names or func.overloadpacket is torch.ops.aten.arange for a in func._schema.arguments]
