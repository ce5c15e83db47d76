"""Finds the sample of each row where values selected the rows, from the nodes that selected them in this forward."""

from collections.abc import Generator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.support.graph import (
    Graph,
    Value,
    inputs_of,
    kept_by,
    made,
    number_of,
    shape_of,
)
from autograd_hacks.support.layout import Layout

_VIEWS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"))

_ADDS = {"IndexAddBackward0": 1, "IndexCopyBackward0": 1}
"""Nodes that put rows into others by an index on one axis, with the number of the input that has the rows."""


Search = Generator[tuple[Value, bool], Tensor | None, Tensor | None]
"""A search for the samples of a value's rows.  It yields other values with their directions, and gets their rows."""


class Routes:
    """Carries the samples of rows from nodes at which they are known to nodes at which they are needed.

    known: where samples are in some nodes' outputs
    samples: N
    by_size: whether N entries on axis 0 are assumed to be the samples
    """

    def __init__(self, graph: Graph, known: Mapping[Node, Layout], samples: int, by_size: bool = False) -> None:
        self.graph, self.known, self.samples, self.by_size = graph, known, samples, by_size
        self._found: dict[tuple[Value, bool], Tensor | None] = {}
        self._chosen: set[tuple[Value, bool]] = set()  # results that went through a node that selects rows

    def are_chosen(self, node: Node) -> bool:
        """Whether the samples of a node's rows depend on values, so that another batch may have another order."""
        value = Value(node, 0)
        rows = self.rows(node)
        return rows is not None and (value, self._found[value, False] is None) in self._chosen

    def rows(self, node: Node) -> Tensor | None:
        """The sample of each entry on axis 0 of a node's output; None if it is unknown."""
        value = Value(node, 0)
        found = self._of(value, up=False)
        return self._of(value, up=True) if found is None else found

    def _of(self, value: Value, up: bool) -> Tensor | None:
        searches, answer = [self._search(value, up)], None
        while searches:  # a loop, because a graph may be deeper than Python's stack
            try:
                searches.append(self._search(*searches[-1].send(answer)))
                answer = None
            except StopIteration as ended:
                searches.pop()
                answer = ended.value
        return answer

    def _search(self, value: Value, up: bool) -> Search:
        """Finds the samples of a value's rows.  up: from the nodes that take it, not from its node's inputs"""
        if (value, up) not in self._found:
            self._found[value, up] = None  # while it is being computed
            shape = shape_of(value)
            found = self._known(value.node, shape) if shape else None
            if found is None and shape:
                found = yield from (self._above(value, shape[0]) if up else self._below(value, shape))
            self._found[value, up] = found if found is None or len(found) == shape[0] else None
        return self._found[value, up]

    def _known(self, node: Node, shape: torch.Size) -> Tensor | None:
        layout = self.known.get(node)
        if layout is None and self.by_size and shape[0] == self.samples:
            layout = Layout()
        if layout is None or layout.axis or not (shape[0] % self.samples == 0 if layout.fold else shape[0] == self.samples):
            return None
        return layout.rows(shape[0], self.samples, torch.device("cpu"))

    def _below(self, value: Value, shape: torch.Size) -> Search:
        """The samples of a value's rows, from its node's inputs."""
        node: Any = value.node
        name, behind = node.name(), list(inputs_of(node))
        if not behind:
            return None
        if name == "IndexBackward0":
            self._chosen.add((value, False))
            return _indexed((yield behind[0], False), kept_by(node, "indices"))
        if name in ("IndexSelectBackward0", "SliceBackward0", "SplitBackward0", "SplitWithSizesBackward0"):
            rows = yield behind[0], False
            if (number_of(node, "dim") or 0) % len(shape_of(behind[0])) != 0:
                return rows
            self._note((value, False), (behind[0], False), name == "IndexSelectBackward0")
            return None if rows is None else _taken(node, name, value.number, rows)
        if name in _VIEWS:
            rows = _reshaped((yield behind[0], False), shape[0])
            self._note((value, False), (behind[0], False))
            return rows
        known = []
        for other in behind:
            if (size := shape_of(other)) and size[0] == shape[0] and (yield other, False) is not None:
                known.append(other)
        known.sort(key=lambda other: (other, False) in self._chosen)
        if not known:
            return None
        self._note((value, False), (known[0], False))
        return self._found[known[0], False]

    def _note(self, key: tuple[Value, bool], source: tuple[Value, bool], chooses: bool = False) -> None:
        if chooses or source in self._chosen:
            self._chosen.add(key)

    def _above(self, value: Value, size: int) -> Search:
        """The samples of a value's rows, from the nodes that take it."""
        chosen: Tensor | None = None
        for taker in self.graph.takers.get(value, ()):
            node: Any = taker.node
            above = Value(node, 0)
            if not made(node) or not shape_of(above):
                continue
            name = node.name()
            rows: Tensor | None = None
            chooses = name == "IndexPutBackward0" or (name in _ADDS and taker.place == _ADDS[name])
            if name in _ADDS:
                if taker.place == _ADDS[name] and number_of(node, "dim") == 0:
                    target = yield above, True
                    rows = None if target is None else target[kept_by(node, "index").cpu().flatten()]
                elif taker.place == 0:
                    rows = yield above, True
            elif name == "IndexPutBackward0" and taker.place:
                rows = _indexed((yield above, True), kept_by(node, "indices"))
            elif name in _VIEWS:
                rows = _reshaped((yield above, True), size)
            elif name not in _CHOOSING and shape_of(above)[0] == size:
                rows = yield above, True
            if rows is not None and len(rows) == size:
                if not chooses and (above, True) not in self._chosen:
                    return rows
                chosen = rows
        if chosen is not None:
            self._chosen.add((value, True))
        return chosen


_CHOOSING: dict[str, tuple[str, str | None]] = {
    "IndexBackward0": ("indices", None),
    "IndexPutBackward0": ("indices", None),
    "IndexSelectBackward0": ("index", "dim"),
    "IndexAddBackward0": ("index", "dim"),
    "IndexCopyBackward0": ("index", "dim"),
    "GatherBackward0": ("index", "dim"),
    "ScatterBackward0": ("index", "dim"),
    "ScatterAddBackward0": ("index", "dim"),
    "SortBackward0": ("indices", "dim"),
    "TopkBackward0": ("indices", "dim"),
}
"""Nodes that move entries by an index: the names under which they save the index and the axis."""


def _indexed(rows: Tensor | None, indices: Any) -> Tensor | None:
    """The rows selected by a tuple of indices, in which None selects a whole axis."""
    first = indices[0] if len(indices) else None
    if rows is None or first is None:
        return rows
    first = first.cpu()
    if first.dtype == torch.bool:
        return rows.view(-1, *[1] * (first.ndim - 1)).expand(first.shape)[first]
    return rows[first] if first.ndim == 1 else None


def _taken(node: Any, name: str, number: int, rows: Tensor) -> Tensor:
    """The rows that a node takes along axis 0."""
    if name == "IndexSelectBackward0":
        return rows[kept_by(node, "index").cpu().flatten()]  # it may have no axis
    if name == "SliceBackward0":
        return rows[slice(*(number_of(node, key) for key in ("start", "end", "step")))]
    if name == "SplitBackward0":
        return rows.split(kept_by(node, "split_size"))[number]
    return rows.split(list(kept_by(node, "split_sizes")))[number]


def _reshaped(rows: Tensor | None, size: int) -> Tensor | None:
    """The rows' samples after a change of size that keeps their order."""
    if rows is None or not size or not len(rows):
        return None
    if size % len(rows) == 0:
        return rows.repeat_interleave(size // len(rows))
    if len(rows) % size:
        return None
    groups = rows.view(size, -1)
    return groups[:, 0] if bool((groups == groups[:, :1]).all()) else None
