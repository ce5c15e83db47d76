"""One forward's graph as plain numbers, and the key under which it is remembered.

Nodes are numbered in the order in which they are met from the roots.  The key holds all that laws by rule can read: kinds,
the saved numbers that laws name, edges, parameters by identity and other leaves by order; and all sizes that don't follow
from these and from other sizes.  Values that laws read are not in it: `memo.py` compares them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain, compress
from math import prod
from operator import attrgetter, itemgetter
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


def _sizes(node: Any) -> tuple[Any, ...]:
    made = node._input_metadata
    if made[0].is_nested_tensor:
        raise Nested
    return tuple([tuple(m.shape) for m in made])


JOINS = frozenset(["CatBackward0", "IndexCopyBackward0", "ScatterBackward0", "IndexPutBackward0"])
"""What makes a tensor of parts of others, and of nothing else."""


def _others(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of axes on which two shapes differ."""
    return sum(m != n for m, n in zip(a, b)) if len(a) == len(b) else len(a) + len(b)


class Plan:
    """What equal graphs have in common, by nodes' numbers: it holds no node.

    A graph of which one is expected is compared with it along the edges by which nodes were met first."""

    def __init__(self, roots: Sequence[tuple[Node, int]], nodes: list[Any], ends: Collection[Node]) -> None:
        place: dict[Any, int] = {node: k for k, node in enumerate(nodes)}
        met, edges = list[tuple[int, int]](), list[tuple[tuple[int, int] | None, ...]]()
        for at, node in enumerate(nodes):  # the list grows
            ahead: list[tuple[int, int] | None] = []
            for other, number in () if ends and node in ends else node.next_functions:
                if other is not None and other not in place:
                    place[other] = len(nodes)
                    nodes.append(other)
                    met.append((at, len(ahead)))
                ahead.append(None if other is None else (place[other], number))
            edges.append(tuple(ahead))
        types, known = [*map(type, nodes)], _BY_TYPE.get
        kinds = [LEAF if kind is Leaf else known(kind) or kind_of(node) for node, kind in zip(nodes, types)]
        for k in [k for k, node in enumerate(nodes) if node in ends] if ends else ():
            kinds[k] = END
        self.kinds, self.edges, self.roots = tuple(kinds), tuple(edges), [(place[node], number) for node, number in roots]
        self.leaves = [k for k, kind in enumerate(kinds) if kind is LEAF]
        # What laws read: saved numbers, and sizes that don't follow from others.
        numbers = {k: kind.get(nodes[k]) for k, kind in enumerate(kinds) if kind.get is not None}
        unknown = (k for k, kind in enumerate(kinds) if kind is not LEAF and (not kind.keeps_sizes or None in edges[k]))
        sizes = {k: _sizes(nodes[k]) for k in unknown}
        self.graph: tuple[Hashable, ...] = (*self.roots,), self.kinds, self.edges
        self.key: tuple[Hashable, ...] = *self.graph, tuple(numbers.values()), tuple(sizes.values())
        self._types, self._met, self._numbers, self._sizes = types, met, numbers, sizes

    @cached_property
    def _expected(self) -> tuple[Any, ...]:
        """How many edges each node has, their nodes and numbers, the nodes at which the graph ends, all shapes, and whether
        nodes' types tell their kinds."""
        flat = [(-1, 0) if edge is None else edge for ahead in self.edges for edge in ahead]
        at_end = [k for k, kind in enumerate(self.kinds) if kind is END]
        shapes = [[*shape] for outs in self._sizes.values() for shape in outs]
        are_told = {*self._types} <= {Leaf, *_BY_TYPE}
        return [*map(len, self.edges)], [k for k, _ in flat], [number for _, number in flat], at_end, shapes, are_told

    def nodes(self, roots: Sequence[tuple[Node, int]], ends: Collection[Node]) -> list[Any] | None:
        """The nodes of an equal graph; None if it is another one."""
        counts, targets, numbers, at_end, shapes, are_told = self._expected
        nodes: list[Any] = list(dict.fromkeys([node for node, _ in roots]))
        edges, add = [node.next_functions for node in nodes], nodes.append
        try:
            for at, place in self._met:
                add(node := edges[at][place][0])
                edges.append(node.next_functions)
        except (AttributeError, IndexError):  # there is no such edge
            return None
        for k in at_end:
            edges[k] = ()
        flat = [*chain.from_iterable(edges)]
        is_equal = (
            are_told
            and [*map(type, nodes)] == self._types
            and [*map(len, edges)] == counts
            and [*map(_SECOND, flat)] == numbers
            and [*map(_FIRST, flat)] == [*map([*nodes, None].__getitem__, targets)]
            and len({*nodes}) == len(nodes)
            and [(nodes.index(node), number) for node, number in roots] == self.roots
            and ([k for k, node in enumerate(nodes) if node in ends] if ends else []) == at_end
            and [self.kinds[k].get(nodes[k]) for k in self._numbers] == [*self._numbers.values()]  # type: ignore[misc]  # these kinds read numbers
            and [*map(len, outputs := [nodes[k]._input_metadata for k in self._sizes])] == [*map(len, self._sizes.values())]
            and not any(map(_IS_NESTED, chain.from_iterable(outputs)))
            and [*map(_SHAPE, chain.from_iterable(outputs))] == shapes
        )
        return nodes if is_equal else None


_FIRST, _SECOND, _IS_NESTED, _SHAPE = itemgetter(0), itemgetter(1), attrgetter("is_nested_tensor"), attrgetter("shape")


class Trace:
    """The graph behind some values.

    roots: nodes and output numbers
    parameters: the identities of the model's parameters
    ends: nodes at which to stop
    plan: that of the graph that is expected

    ``number`` gives a node's number; ``variables`` are the tensors at ``leaves``.
    """

    def __init__(
        self,
        roots: Sequence[tuple[Node, int]],
        parameters: Collection[int],
        ends: Collection[Node] = (),
        plan: Plan | None = None,
    ) -> None:
        found = None if plan is None else plan.nodes(roots, ends)
        nodes: list[Any] = found or list(dict.fromkeys([node for node, _ in roots]))
        self.plan = plan = plan if plan is not None and found else Plan(roots, nodes, ends)
        variables: list[Tensor] = [nodes[k].variable for k in plan.leaves]
        sizes, address = tuple([x.shape for x in variables]), [*map(id, variables)]
        # Those that are parameters, of this model or of one that it hides.
        are_fixed = [at in parameters or isinstance(x, Parameter) for at, x in zip(address, variables)]
        self.number: Mapping[Any, int] = dict(zip(nodes, range(len(nodes))))
        self.nodes, self.kinds, self.edges, self.roots = nodes, plan.kinds, plan.edges, plan.roots
        self.parameters, self.ends, self.leaves, self.variables = parameters, ends, plan.leaves, variables
        self.fixed = [*compress(plan.leaves, are_fixed)]
        self.key: tuple[Hashable, ...] = plan.key, (*self.fixed, *compress(address, are_fixed)), sizes

    @cached_property
    def shapes(self) -> Sequence[tuple[Any, ...]]:
        """The sizes of each node's outputs."""
        leaves = iter(self.variables)
        return [(next(leaves).shape,) if kind is LEAF else _sizes(node) for node, kind in zip(self.nodes, self.kinds)]

    @cached_property
    def numbers(self) -> Sequence[Any]:
        """The saved numbers that each node's law reads."""
        return [None if kind.get is None else kind.get(node) for node, kind in zip(self.nodes, self.kinds)]

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

    def above(self, ends: Iterable[int]) -> set[int]:
        """The nodes that lead to some nodes, with these."""
        found = {*ends}
        for k in reversed(self.order):
            if any(edge is not None and edge[0] in found for edge in self.edges[k]):
                found.add(k)
        return found

    @cached_property
    def order(self) -> Sequence[int]:
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

    def tables(self, own: Sequence[bool]) -> list[bool]:
        """Whether all axes of a node's output are those of parameters, as the axes of ``table + buffer`` are.

        own: whether it is made of parameters alone"""
        found = list(own)
        for k in reversed(self.order):
            kind, edges, outs = self.kinds[k], self.edges[k], self.shapes[k]
            ins = [self.shapes[edge[0]][edge[1]] for edge in edges if edge is not None and found[edge[0]]]
            # What is larger has been expanded: the samples may lie there.  And what indices choose may be anybody's.
            is_part = len(ins) == len(edges) and not kind.by_values and sum(map(prod, outs)) <= sum(map(prod, ins))
            # Of parts of a table some may be constants, and the others' entries are those of parameters alone.
            joins = kind.name in JOINS and len(ins) == sum(edge is not None for edge in edges)
            is_joined = joins and any(_others(own or (), outs[0] or ()) <= 1 for own in ins)
            found[k] |= is_part or is_joined or (kind.is_entrywise and outs[0] in ins)
        return found
