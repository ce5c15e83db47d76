"""Follows values through the operations of a trace: which follow from the batch, which from parameters alone, and where the
two meet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from autograd_hacks.probe.guard import Kept, WriteGuard, memory_of


class Frame(NamedTuple):
    """A call of a module: its path, and how many calls of it came before in the same forward."""

    path: str
    call: int


Stack = tuple[Frame, ...]
"""Calls that run one inside the other, the model's first."""


@dataclass
class Facts:
    """What is known of some memory."""

    from_batch: bool = False  # it follows from the samples
    routed: bool = False  # which rows it has follows from the samples' values
    rounds: bool = False  # something that it follows from was routed, so that rounding may differ
    order: tuple[int, ...] | None = None  # where each row was before, if all that has happened to them is one permutation
    # The parameters that it follows from while it doesn't follow from the batch, by name, each with the innermost calls
    # around all operations on the way.
    sources: dict[str, Stack] = field(default_factory=dict)

    def add(self, other: Facts) -> None:
        self.from_batch |= other.from_batch
        self.rounds |= other.rounds or other.routed
        if other.routed:
            self.order = other.order if not self.routed or self.order == other.order else None
            self.routed = True
        for parameter, stack in other.sources.items():
            self.sources[parameter] = common(stack, self.sources.get(parameter, stack))


def common(first: Stack, second: Stack) -> Stack:
    """The calls around both."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return tuple(frame for frame, _ in pairs)


_SCATTERS = ("index_add", "index_put", "index_copy", "index_fill", "scatter", "masked_scatter", "masked_fill")


class Tracker(WriteGuard):
    """Follows values through all operations, those inside scripted code and C++ included.

    A number that Python takes from a tensor ends the trail: what the batch decides is found in tensors alone.

    parameters: to follow, by name    carrying: the tensors that hold the batch    by_rule: whether a rule covers the
    parameter of a name, where the module at a path reads it in a call of its own
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        carrying: Iterable[Tensor],
        by_rule: Callable[[str, str], bool],
        kept: Kept,
    ) -> None:
        super().__init__(parameters, kept)
        self.stack: Stack = ()
        self.reads: dict[str, set[Stack]] = {}  # where parameters meet the batch but for their rules
        self.unseen: Callable[[str], None] = lambda name: None  # hears of each that does
        self.uses: set[str] = set()  # the parameters that an operation uses
        self.counting: set[Frame] = set()  # the calls in which sizes or choices are taken from the batch
        self._facts: dict[StorageWeakRef, Facts] = {}
        self._by_rule = by_rule
        for tensor in carrying:
            self._add(tensor, Facts(from_batch=True))

    def facts(self, tensor: Tensor) -> Facts:
        """What is known of a tensor; nothing is, of one that no operation before has made of the batch or of parameters."""
        key = memory_of(tensor)
        return Facts() if key is None else self._facts.get(key, Facts())

    def mark(self, tensor: Tensor) -> None:
        """Has a tensor taken for the samples' own from now on."""
        self._add(tensor, Facts(from_batch=True))
        self.facts(tensor).sources.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = self.protect(func, args, kwargs)
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if name.endswith("_like") or name.startswith("new_"):
            return out  # of a tensor's sizes alone
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        known = Facts()
        for x in inputs:
            known.add(self.facts(x))
            for parameter in self.parameters_in(x):
                self.uses.add(parameter)
                known.add(Facts(sources={parameter: self.stack}))
        known.sources = {parameter: common(stack, self.stack) for parameter, stack in known.sources.items()}
        counts = name == "_local_scalar_dense" and not inputs[0].is_floating_point() and inputs[0].dtype != torch.bool
        if known.from_batch and self.stack and (counts or name == "nonzero"):
            self.counting.add(self.stack[-1])
        if known.from_batch:
            self._read(known.sources)
            known.sources = {}
            known.routed, known.order = self._routes(func, name, args, known.order) if inputs else (False, None)
        if known.from_batch or known.sources:
            for x in tree_leaves((out, written)):
                if isinstance(x, Tensor) and memory_of(x) not in self.parameters:
                    self._add(x, known)
        return out

    def _read(self, sources: dict[str, Stack]) -> None:
        for parameter, stack in sources.items():
            if not (stack == self.stack and stack and self._by_rule(stack[-1].path, parameter)):
                self.reads.setdefault(parameter, set()).add(stack)
                self.unseen(parameter)

    def _routes(
        self, func: Any, name: str, args: tuple[Any, ...], order: tuple[int, ...] | None
    ) -> tuple[bool, tuple[int, ...] | None]:
        """Whether the rows of an operation's output depend on the samples' values, and their order, if that is all.

        order: of its inputs' rows
        """
        if name.startswith(_SCATTERS):
            facts = self.facts(args[0])  # the sizes and the order are those of what is written to
            return facts.routed, facts.order
        tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        was_routed = any(self.facts(x).routed for x in tensors)
        if name in ("index", "index_select") and not self.facts(args[0]).from_batch:
            return was_routed, order  # a table, whose entries stand where the indices do
        index = None
        if name == "index" and len(args[1]) == 1:
            index = args[1][0]
        elif name == "index_select":
            index = args[2]
        if index is not None and self.facts(index).from_batch and (places := _permutation(index)):
            if not was_routed:
                return True, places
            # As pad_packed_sequence puts the samples back in their own order, after pack_padded_sequence has sorted them.
            undoes = order is not None and len(order) == len(places) and all(order[p] == n for n, p in enumerate(places))
            return not undoes, None
        if was_routed:
            return True, order
        if name == "index":
            picks = [x for x in args[1] if x is not None]
            by_mask = any(self.facts(x).from_batch and x.dtype in (torch.bool, torch.uint8) for x in picks)
            return by_mask or (args[1][0] is not None and self.facts(args[1][0]).from_batch), None
        if name == "index_select":
            return args[1] == 0 and self.facts(args[2]).from_batch, None
        return torch.Tag.dynamic_output_shape in func.tags, None

    def _add(self, tensor: Tensor, facts: Facts) -> None:
        key = memory_of(tensor)
        if key is not None:
            self._facts.setdefault(key, Facts()).add(facts)


def _permutation(index: Tensor) -> tuple[int, ...] | None:
    """The entries of a vector that has each number from 0 on once."""
    if index.ndim != 1 or index.dtype in (torch.bool, torch.uint8):
        return None
    with _disable_current_modes():
        is_one = bool((index.sort().values == torch.arange(len(index), device=index.device)).all())
        return tuple(index.tolist()) if is_one else None
