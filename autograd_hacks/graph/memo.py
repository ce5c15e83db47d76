"""Walks of earlier forwards: labels are a function of a key and of some values, so a forward with equal ones needs no walk.

This is a cache: the key is the graph itself, with all that laws read of it
(`trace.py`), the roots' labels and N.  What laws by value read is compared; nodes without a law are asked again, and the
answers compared; which operands are the model's or the batch's is looked up again.  Whatever differs means a walk.

A stale walk gives samples each other's rows, whose sum is right, so no check of a step sees it, except
`fits` where it meets an argument; nor does `verify`, whose copy of the model has a memo of its own (`Kinds.for_copy`).

Costs, one thread: half a µs a node for a graph like the last one of its kind, of which half are the sizes of nodes' outputs;
.7 for another known one; 6 to 10 µs for a walk.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.graph.label import Entries, Label, same
from autograd_hacks.graph.probed import CannotAsk, confirmed, probed
from autograd_hacks.graph.trace import Trace
from autograd_hacks.graph.values import MASKS
from autograd_hacks.graph.walk import Memory, Walk, walked
from autograd_hacks.support.graph import kept_by

KEPT = 32
"""How many walks a memo keeps."""
WITH_TENSORS = 2
"""How many of them may hold tensors: what laws have read, and the sample of each entry."""


class Memo:
    """The walks of a model's forwards.

    size: how many are kept
    """

    def __init__(self, size: int = KEPT) -> None:
        self.size, self.hits, self.misses = size, 0, 0
        self._kept: OrderedDict[Any, Walk] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def walk(self, trace: Trace, roots: Mapping[int, Label], samples: int, memory: Memory) -> Walk:
        """The walk of a forward, which is not walked if it is known."""
        key = (trace.key, tuple(roots), tuple(map(told, roots.values())), samples)
        walk = self._kept.get(key)
        if walk is not None and holds(walk, trace, samples, memory):
            self._kept.move_to_end(key)
            self.hits += 1
            return walk
        self.misses += 1
        walk = walked(trace, roots, samples, memory)
        walk.compared = self._compared(trace, samples, walk)
        if walk.met_zero or walk.mixes:  # other values may tell another tale
            self._kept.pop(key, None)
            return walk
        gone = lambda _, kept=self._kept: kept.pop(key, None)  # noqa: E731  # it holds no memo
        walk.parameters = [weakref.ref(trace.nodes[k].variable, gone) for k in trace.fixed]
        self._kept[key] = walk
        self._kept.move_to_end(key)
        if walk.has_tensors:
            for old in [other for other, own in self._kept.items() if own.has_tensors][:-WITH_TENSORS]:
                self._kept.pop(old, None)
        while len(self._kept) > self.size:
            self._kept.popitem(last=False)
        return walk

    def _compared(self, trace: Trace, samples: int, walk: Walk) -> dict[Any, set[str]]:
        """That of an earlier walk through the same operations with the same uses, whatever sizes and numbers they had.

        Rows of other samples, or of more of them, have the same sum."""
        graph, places = (trace.plan.graph, trace.key[1]), [use[:2] for use in walk.uses]
        for ((plan, own, _), _, _, others), before in reversed(self._kept.items()):
            is_alike = (plan[:3], own) == graph and (others == 1) == (samples == 1)
            if is_alike and places == [use[:2] for use in before.uses]:
                return before.compared
        return {}


def told(label: Label) -> Hashable:
    """A label as a part of a key."""
    return (label.samples.shape, *label.samples.flatten().tolist()) if isinstance(label, Entries) else label


def holds(walk: Walk, trace: Trace, samples: int, memory: Memory) -> bool:
    nodes = trace.nodes
    try:
        for k, name, value in walk.read:
            if not _equal(kept_by(nodes[k], name), value):
                return False
        for k, origin in walk.origins.items():
            if memory.origin(nodes[k], trace.read_by(k)) != origin:
                return False
        for k, own in walk.asked.items():
            if not confirmed(nodes[k], own, samples):
                found = probed(nodes[k], own.outs, samples)
                if len(found) != len(own.ins) or not all(map(same, found, own.ins)):
                    return False
    except CannotAsk:
        return False
    return True


def _equal(a: Any, b: Any) -> bool:
    """Whether a saved value is what was noted: a tensor, or the sizes of an index."""
    if isinstance(a, Tensor) and isinstance(b, torch.Size):
        return a.shape == b and a.dtype not in MASKS
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b))
    return a is b or bool(a == b)
