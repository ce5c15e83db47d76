"""Which nodes bring a parameter all of its gradient, so that what arrives must be what they have made.

A parameter that the forward uses once gets its gradient from one node, or through nodes that pass it on to it alone (casts
of autocast, parametrisations).  A gradient to which anything else adds is another tensor."""

from collections.abc import Collection, Mapping, Sequence
from typing import cast

from autograd_hacks.capture.arrivals import Link
from autograd_hacks.graph.trace import Trace
from autograd_hacks.support.graph import is_users

INSIDE = "TBackward0"
"""What ``F.linear`` makes of its weight, where nobody else can add to it."""


def links_of(
    trace: Trace, takers: Mapping[int, Sequence[tuple[int, int, int]]], own: Sequence[bool], names: Mapping[int, str],
    read: Collection[tuple[int, int, int]], inside: Mapping[int, Collection[int]],
) -> list[Link]:  # fmt: skip
    """Links from uses to the parameters that get all of their gradient by them.

    takers: by node, who takes its outputs (-1: a loss), at which of their inputs, and which output
    own: whether each node's outputs are made of parameters alone
    names: of the parameters, by their leaves
    read: nodes at which rows are read, with the place and the node of what they take there
    inside: the nodes inside layers' calls, with the leaves of which the layers' rules give rows there
    """

    def path_to(leaf: int) -> list[Link]:
        path, at, receiver, is_begun = list[Link](), leaf, cast("str | int", names[leaf]), False
        while len(met := takers.get(at, [])) == 1:
            k, place, number = met[0]
            if path:  # a node that passes on what it gets
                path[-1] = path[-1]._replace(output=number)
            if k < 0 or is_users(trace.nodes[k]):  # a Function may not be linear, so its rows are compared
                break
            if not own[k]:
                whole = path if is_begun else [*path, Link(k, ((place, receiver),), True, 0)]
                return whole if (k, place, at) in read or leaf in inside.get(k, ()) else []
            is_begun = trace.kinds[k].name == INSIDE and k in inside
            path.append(Link(k, ((place, receiver),), is_begun, 0))
            at, receiver = k, k
        return []

    made: dict[tuple[int, bool, int], list[tuple[int, str | int]]] = {}
    for link in (link for leaf in names for link in path_to(leaf)):
        made.setdefault((link.node, link.is_first, link.output), []).extend(link.made)
    return [Link(k, tuple(makes), is_first, output) for (k, is_first, output), makes in made.items()]
