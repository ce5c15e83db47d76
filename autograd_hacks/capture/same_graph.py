"""Keeps what was read from a forward's graph for later forwards with the same graph, so that they need no climb."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch.autograd.graph import Node

from autograd_hacks.capture.off_graph import OffGraph, Ran, fit
from autograd_hacks.probe.plan import AXES, Place, Plan
from autograd_hacks.probe.routes import axes_of, moved_by
from autograd_hacks.support.graph import Leaf, Taker, Value

FEW = 4
"""How many batch sizes are remembered."""


@dataclass(frozen=True)
class SameGraph:
    """A graph and what was found in it.  Nodes are numbered in the order of `_laid_out`."""

    structure: list[object]
    axes: list[object]  # of the nodes, see `axes_of`
    leaves: list[tuple[int, str | None]]  # all leaves, with the parameters' names
    moving: list[int]  # nodes that may move samples
    places_left: list[bool | int]  # what `moved_by` says about these nodes
    found: list[tuple[int, list[tuple[int, int, int, Place]]]]  # the same as `OffGraph.found`


def remember(ran: Ran, plan: Plan, off: OffGraph | None, samples: int) -> None:
    """Keeps what was read from a forward's graph, unless some of it depends on values."""
    met = [use for uses in off.found.values() for use in uses] if off is not None else []
    if plan.checkpoints or any(place.kind != AXES or place.was_empty for _, _, place in met):
        return
    nodes, structure, axes = _laid_out(ran)
    at = {node: number for number, node in enumerate(nodes)}
    left = {number: found for number, node in enumerate(nodes) if (found := moved_by(node, samples)) is not None}
    uses = [
        (at[node], [(at[value.node], value.number, taker.place, place) for value, taker, place in own])
        for node, own in (off.found.items() if off is not None else ())
    ]
    leaves = [(at[leaf], ran.leaves.get(leaf)) for leaf in ran.graph.leaves]
    if len(plan.graphs) >= FEW:
        plan.graphs.clear()
    places_left = [own for found in left.values() for own in found]
    plan.graphs[_sizes(ran, samples)] = SameGraph(structure, axes, leaves, list(left), places_left, uses)


def recall(ran: Ran, plan: Plan, samples: int) -> OffGraph | None:
    """What was read from the graph, if it is known for batches of these sizes.

    A graph that differs only in axes must be proven: its nodes may mix samples."""
    same = plan.graphs.get(_sizes(ran, samples)) if plan.graphs else None
    if same is None:
        return None
    nodes, structure, axes = _laid_out(ran)
    if structure != same.structure:
        return None
    if axes != same.axes:
        plan.pending = True
        return None
    left: list[bool | int] = []
    for number in same.moving:
        left += moved_by(nodes[number], samples) or ()
    if left != same.places_left:
        return None
    off = OffGraph(ran, plan, samples)
    for number, own in same.found:
        node = nodes[number]
        if not all(fit(place.layouts, node, samples) for _, _, _, place in own):
            return None
        off.found[node] = [(Value(nodes[of], n), Taker(node, at), place) for of, n, at, place in own]
    ran.leaves = {nodes[number]: name for number, name in same.leaves if name is not None}
    ran.ends_of_graph = [nodes[number] for number, _ in same.leaves]
    return off


def _sizes(ran: Ran, samples: int) -> Hashable:
    hooked = [hook.shape for noted in ran.noted for _, hook in noted.hooks]
    return samples, *hooked, None, *[x.shape for x in ran.outputs], None, *[x.shape for x in ran.tensors]


def _laid_out(ran: Ran) -> tuple[list[Node], list[object], list[object]]:
    """The nodes of a forward's graph, a description that identifies it, of kinds of nodes and what each one takes, and the
    axes on which they work."""
    names = {id(p): name for name, p in ran.parameters.items()}
    nodes = list(dict.fromkeys([x.grad_fn for x in ran.outputs if x.grad_fn is not None]))
    number_of, structure, axes = {node: number for number, node in enumerate(nodes)}, list[object](), list[object]()
    for node in nodes:  # the list grows
        kind = type(node)
        structure.append(kind)
        if kind is Leaf:
            structure.append(names.get(id(node.variable)))  # type: ignore[attr-defined]
        if node in ran.ends:
            continue
        axes += axes_of(node)
        for ahead, output in node.next_functions:
            if ahead is None:
                structure.append(None)
                continue
            number = number_of.get(ahead)
            if number is None:
                number = number_of[ahead] = len(nodes)
                nodes.append(ahead)
            structure += (number, output)
    return nodes, structure, axes
