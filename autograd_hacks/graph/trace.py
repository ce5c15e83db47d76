"""One forward's graph as plain numbers, and the key under which it is remembered.

Nodes are numbered in the order in which they are met from the roots.  The key holds all that laws by rule can read: kinds,
the saved numbers that laws name, sizes, edges, parameters by identity and other leaves by order.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Final

from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter

from autograd_hacks.graph.laws import _BY_TYPE, Kind, kind_of
from autograd_hacks.support.graph import Leaf

LEAF: Final = Kind("leaf")
END: Final = Kind("end")
"""A value that an earlier forward of the model returned, at which the walk stops."""


class Nested(Exception):
    """A value is a nested tensor, which has no axes."""


class Trace:
    """The graph behind some values.

    roots: nodes and output numbers
    parameters: the identities of the model's parameters
    ends: nodes at which to stop

    ``number`` gives a node's number.
    """

    __slots__ = (
        "edges", "ends", "fixed", "key", "kinds", "leaves", "nodes", "number", "numbers", "parameters", "roots", "shapes"
    )  # fmt: skip

    def __init__(self, roots: Sequence[tuple[Node, int]], parameters: Collection[int], ends: Collection[Node] = ()) -> None:
        nodes: list[Any] = list(dict.fromkeys(node for node, _ in roots))
        place: dict[Any, int] = {node: k for k, node in enumerate(nodes)}
        leaves: list[int] = []
        fixed: list[int] = []  # those that are parameters, of this model or of one that it hides
        found: list[tuple[Kind, Any, Any, tuple[tuple[int, int] | None, ...]]] = []
        key: list[Hashable] = [tuple((place[node], number) for node, number in roots)]
        find, known = place.get, _BY_TYPE.get
        for node in nodes:  # the list grows
            kind = type(node)
            if kind is Leaf:
                x = node.variable
                leaves.append(len(found))
                if id(x) in parameters or isinstance(x, Parameter):
                    fixed.append(len(found))
                    key.append(id(x))
                found.append((LEAF, None, (tuple(x.shape),), ()))
                continue
            made = node._input_metadata
            if made[0].is_nested_tensor:
                raise Nested
            sizes: Any = (tuple(made[0].shape),) if len(made) == 1 else tuple([tuple(m.shape) for m in made])
            if ends and node in ends:
                found.append((END, None, sizes, ()))
                continue
            own = known(kind) or kind_of(node)
            ahead: list[tuple[int, int] | None] = []
            for other, number in node.next_functions:
                if other is None:
                    ahead.append(None)
                    continue
                k = find(other)
                if k is None:
                    k = place[other] = len(nodes)
                    nodes.append(other)
                ahead.append((k, number))
            found.append((own, None if own.get is None else own.get(node), sizes, tuple(ahead)))
        kinds, numbers, shapes, edges = zip(*found) if found else ((), (), (), ())
        self.number: Mapping[Any, int] = place
        self.nodes, self.kinds, self.numbers, self.shapes, self.edges = nodes, kinds, numbers, shapes, edges
        self.roots: list[tuple[int, int]] = [(place[node], number) for node, number in roots]
        self.parameters, self.ends, self.leaves, self.fixed = parameters, ends, leaves, fixed
        self.key: Hashable = (tuple(key), tuple(fixed), tuple(found))

    def leaf(self, k: int) -> Tensor:
        x: Tensor = self.nodes[k].variable
        return x

    def read_by(self, k: int) -> Sequence[tuple[int, int] | None]:
        """A node's edges, without those to what its operation only overwrites."""
        return self.edges[k][self.kinds[k].overwritten :]

    def behind(self, starts: Iterable[int]) -> set[int]:
        """The nodes behind some nodes, with these."""
        waiting = list(starts)
        seen = set(waiting)
        while waiting:
            ahead = {edge[0] for edge in self.edges[waiting.pop()] if edge is not None} - seen
            seen |= ahead
            waiting += ahead
        return seen

    def order(self) -> list[int]:
        """Nodes, each before those that made its inputs."""
        waiting = [0] * len(self.nodes)
        for ahead in self.edges:
            for edge in ahead:
                if edge is not None:
                    waiting[edge[0]] += 1
        ready = [k for k, n in enumerate(waiting) if not n]
        for k in ready:
            for edge in self.edges[k]:
                if edge is not None:
                    waiting[edge[0]] -= 1
                    if not waiting[edge[0]]:
                        ready.append(edge[0])
        return ready
