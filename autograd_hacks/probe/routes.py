"""Finds the sample of each row where values selected the rows, from the nodes that selected them in this forward."""

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.probe.plan import Plan
from autograd_hacks.support.graph import (
    Graph,
    Leaf,
    Value,
    inputs_of,
    is_users,
    kept_by,
    made,
    number_of,
    operands_of,
    shape_of,
    signed,
)
from autograd_hacks.support.internals import RAW, SAVED
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


def places_left(graph: Graph, samples: int) -> tuple[bool | int, ...]:
    """For each node that may move samples, in the graph's order: whether it leaves them in place, or how it moves them."""
    return tuple([own for node in graph.nodes for own in moved_by(node, samples) or ()])


def kinds_in(graph: Graph) -> frozenset[Hashable]:
    """The nodes' names, with the axes on which they work: a mean over another axis may mix samples."""
    return frozenset((node.name(), *axes_of(node)) for node in graph.nodes if type(node) is not Leaf)


def axes_of(node: Any) -> list[Any]:
    """The axes on which a node works, and whether it takes statistics of the batch, as it saves them."""
    kind: type[Node] = type(node)
    return [getattr(node, name) for name in _names_of_axes(kind)]


@lru_cache(maxsize=512)
def _names_of_axes(kind: type[Node]) -> tuple[str, ...]:
    names = (f"{SAVED}{name}" for name in ("dim", "dims", "dim0", "dim1", "dimension", "training"))
    return tuple([name for name in names if hasattr(kind, name)])


def moves_as_proven(graph: Graph, plan: Plan, samples: int) -> bool:
    """Whether a forward moves samples as a proven one did, by no other kinds of nodes."""
    return kinds_in(graph) <= plan.kinds and places_left(graph, samples) in plan.places_left


def moved_by(node: Any, samples: int) -> list[bool | int] | None:
    """The same for one node; None for a node that can't move samples, whatever its values."""
    if type(node) is Leaf or (name := node.name()) in _LOSSES:
        return None
    if (moving := _MOVING.get(name)) is not None:
        return moving(node, samples)
    return _of_function(node, samples) if is_users(node) else _by_operands(node, samples) or None


def has_choosing(graph: Graph, samples: int) -> bool:
    """Whether some node moves samples depending on the values of its inputs."""
    return any(node.name() in _BY_VALUES and _MOVING[node.name()](node, samples) for node in graph.nodes)


_LOSSES = frozenset(("NllLossBackward0", "NllLoss2DBackward0", "CtcLossBackward0"))
"""Nodes whose indices are classes.  They move nothing."""


def _by_operands(node: Any, samples: int) -> list[bool | int]:
    """Operands that show the order in which another node takes rows: a matrix of samples by samples, or indices."""
    found: list[bool | int] = []
    if any(x.is_nested_tensor for value in inputs_of(node) for x in made(value.node)):
        return found
    behind = [shape_of(value) for value in inputs_of(node) if type(value.node) is not Leaf]
    has_rows = any(samples > 1 and size % samples == 0 for shape in behind for size in shape)
    for x in operands_of(node) if has_rows else ():
        pairs = [n for n in range(x.ndim - 1) if x.shape[n] == x.shape[n + 1] == samples]
        is_index = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if pairs and not x.is_meta:
            found.append(_is_diagonal(x if x.layout == torch.strided else x.to_dense(), pairs[0]))
        elif is_index and 0 < x.ndim < 3 and len(x) > 1 and len(x) % samples == 0 and x.numel() and not x.is_meta:
            found.append(_order(x if x.ndim == 1 else x[:, 0]))
    return found


def _filled_in(node: Any, samples: int) -> list[bool | int]:
    """Which samples are filled with one value common to all, or which of two tensors is taken as a whole."""
    behind = [shape_of(value).numel() for value in inputs_of(node) if type(value.node) is not Leaf]
    is_for_all = any(size * samples == shape_of(Value(node, 0)).numel() for size in behind)
    bools = [x for x in operands_of(node) if x.dtype == torch.bool and samples > 1 and not x.is_meta]
    chosen = [x for x in bools if x.numel() == 1 or (x.numel() == samples and is_for_all)]
    return [hash(tuple(x.flatten().tolist())) for x in chosen]


def _is_diagonal(x: Tensor, axis: int) -> bool:
    """Whether a tensor is zero outside the diagonal of two neighbouring axes."""
    own = torch.eye(x.shape[axis], dtype=torch.bool, device=x.device).view(-1, x.shape[axis], *[1] * (x.ndim - axis - 2))
    return not bool(x.masked_fill(own, 0).any())


def _of_function(node: Any, samples: int) -> list[bool | int]:
    """The order in which a user's function takes rows, as vectors that it saved show it."""
    kept = [*operands_of(node), *(x for x in vars(node).values() if isinstance(x, Tensor))]
    vectors = [x.detach() for x in kept if x.ndim == 1 and len(x) > 1 and not (x.is_floating_point() or x.is_complex())]
    return [_order(x) for x in vectors if samples and len(x) % samples == 0 and not x.is_meta]


def _order(x: Tensor) -> int:
    """A number that is equal for vectors of indices, labels or booleans that give rows the same order."""
    steps = (x if x.dtype == torch.bool else x.diff()).long()
    if bool((steps == 1).all()):
        return 0 if x.dtype == torch.bool else int(x[0])
    if x.dtype != torch.bool and not bool((steps > 0).all()):
        return -1 if bool((steps >= 0).all()) else -2  # labels, sorted or unsorted
    return hash(tuple(x.tolist()))  # a selection of rows


def _selected(node: Any, samples: int) -> list[bool | int]:
    """The index of the selected sample."""
    (behind,) = inputs_of(node)
    is_one = shape_of(behind)[number_of(node, "dim") or 0] == samples
    return [number_of(node, "index") or 0] if is_one else []


def _moved_axes(node: Any, samples: int, names: Sequence[str]) -> list[bool | int]:
    """The numbers that say how a node moves axes, or what is on them.  names: under which it saves them"""
    if samples < 2 or any(type(value.node) is Leaf for value in inputs_of(node)):
        return []
    kept = (kept_by(node, name) for name in names)
    return [signed(number) for own in kept for number in (own if isinstance(own, tuple | list) else [own])]


_PIECES = {"SliceBackward0": "start", "SplitBackward0": "", "SplitWithSizesBackward0": "", "UnbindBackward0": ""}
"""Nodes that take a piece: the name under which they save its start; empty if the output's number shows it."""


def _joined(node: Any, samples: int) -> list[bool | int]:
    """The order in which pieces of one tensor are joined."""
    pieces = list(inputs_of(node))
    if len(pieces) < 2 or any(piece.node.name() not in _PIECES for piece in pieces):
        return []
    whole = {behind for piece in pieces for behind in inputs_of(piece.node)}
    axis = number_of(node, "dim") or 0
    sizes = shape_of(next(iter(whole)))
    if len(whole) > 1 or not samples or axis >= len(sizes) or sizes[axis] % samples:
        return []
    names = [(piece, _PIECES[piece.node.name()]) for piece in pieces]
    places = [(number_of(piece.node, name) or 0) if name else piece.number for piece, name in names]
    steps = [number_of(piece.node, "step") or 1 for piece, name in names if name == "start"]
    return [True] if places == sorted(places) and max(steps, default=1) == 1 else [*places, *steps]


def _multiplied(node: Any, samples: int) -> list[bool | int]:
    """Whether a matrix of samples by samples, which may permute them, is the identity."""
    found: list[bool | int] = []
    for (ahead, _), name in zip(node.next_functions, ("self", "mat2")):
        x = getattr(getattr(node, f"{RAW}{name}"), "data", None) if ahead is None else None
        if isinstance(x, Tensor) and x.shape[-2:] == (samples, samples):
            found.append(bool((x == torch.eye(samples, dtype=x.dtype, device=x.device)).all()))
    return found


def _dealt(node: Any, samples: int) -> list[bool | int]:
    """The sizes of the axes that the samples' axis is split into."""
    (behind,) = inputs_of(node)
    before, after = shape_of(behind), shape_of(Value(node, 0))
    if len(after) <= len(before) or samples not in before or any(size % samples == 0 for size in after):
        return []
    axis = before.index(samples)
    return [*after[axis : axis + 2]]


def _keeps_places(node: Any, samples: int, name: str, dim: str | None) -> list[bool | int]:
    """Whether a node leaves the samples in place; empty if it has none."""
    behind, kept = next(inputs_of(node), None), getattr(node, f"{RAW}{name}")
    if behind is None or not samples:
        return []
    raws = list(kept) if isinstance(kept, tuple | list) else [kept]
    axis = (number_of(node, dim) or 0) if dim else next((n for n, raw in enumerate(raws) if raw is not None), 0)
    index, sizes = getattr(raws[axis if dim is None else 0], "data", None), shape_of(behind)
    if not isinstance(index, Tensor) or not sizes or sizes[axis] % samples:
        return []
    if index.dtype == torch.bool:
        return [bool(index.all())]
    at = axis if index.ndim == len(sizes) else 0
    if index.ndim == 0 or index.shape[at] != sizes[axis]:
        return []
    order = torch.arange(sizes[axis], device=index.device).view([-1 if n == at else 1 for n in range(index.ndim)])
    return [bool((index == order).all())]


_MOVING: dict[str, Callable[[Any, int], list[bool | int]]] = {
    "SelectBackward0": _selected,
    "RollBackward0": partial(_moved_axes, names=("dims", "shifts")),
    "FlipBackward0": partial(_moved_axes, names=("dims",)),
    "PermuteBackward0": partial(_moved_axes, names=("dims",)),
    "TransposeBackward0": partial(_moved_axes, names=("dim0", "dim1")),
    "Rot90Backward0": partial(_moved_axes, names=("dims", "k")),
    "UnfoldBackward0": partial(_moved_axes, names=("dimension", "size", "step")),
    "CatBackward0": _joined,
    "StackBackward0": _joined,
    "MmBackward0": _multiplied,
    "BmmBackward0": _multiplied,
    "WhereBackward0": _filled_in,
    "AsStridedBackward0": lambda node, samples: [number_of(node, "storage_offset") or 0],
    "ViewBackward0": _dealt,
    **{kind: partial(_keeps_places, name=name, dim=dim) for kind, (name, dim) in _CHOOSING.items()},
}


_BY_VALUES = frozenset((*_CHOOSING, "MmBackward0", "BmmBackward0", "WhereBackward0"))


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
