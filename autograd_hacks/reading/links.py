"""Which nodes bring a parameter all of its gradient, so that what arrives must be what they have made.

A parameter that the forward uses once gets its gradient from one node, or through nodes that pass it on to it alone (casts
of autocast, parametrisations).  A gradient to which anything else adds is another tensor."""

from collections.abc import Callable, Collection, Mapping, Sequence

from autograd_hacks.capture.arrivals import Link
from autograd_hacks.graph.trace import Trace

INSIDE = "TBackward0"
"""What ``F.linear`` makes of its weight, where nobody else can add to it."""

Step = tuple[int, bool, int, int, "str | int"]
"""A node's number, whether it begins a path, the number of its output, and what it makes for whom."""


def links_of(
    trace: Trace, own: Sequence[bool], names: Mapping[int, str], is_read: Callable[[int, int, int, int], bool],
    inside: Collection[int],
) -> list[Link]:  # fmt: skip
    """Links from uses to the parameters that get all of their gradient by them.

    own: whether each node's outputs are made of parameters alone
    names: of the parameters, by their leaves
    is_read: of a node, the place and the node of what it takes there, and a leaf: whether rows of the leaf are read there
    inside: the nodes inside layers' calls
    """
    takers: dict[int, list[tuple[int, int, int]]] = {}
    for k, ahead in enumerate(trace.edges):
        for place, edge in enumerate(ahead):
            if edge is not None:
                takers.setdefault(edge[0], []).append((k, place, edge[1]))
    for k, number in trace.roots:  # the loss brings gradient there
        takers.setdefault(k, []).append((-1, 0, number))

    def path_to(leaf: int) -> list[Step]:
        path, at, receiver = list[Step](), leaf, names[leaf]
        while len(met := takers.get(at, ())) == 1:
            ((k, place, number),) = met
            if path:  # a node that passes on what it gets
                before, is_first, _, *makes = path[-1]
                path[-1] = before, is_first, number, *makes
            if k < 0:
                break
            if not own[k]:
                is_whole = is_read(k, place, at, leaf)
                is_begun = bool(path) and path[-1][1]
                return [] if not is_whole else path if is_begun else [*path, (k, True, 0, place, receiver)]
            path.append((k, trace.kinds[k].name == INSIDE and k in inside, 0, place, receiver))
            at, receiver = k, k
        return []

    made: dict[tuple[int, bool, int], list[tuple[int, str | int]]] = {}
    for leaf in names:
        for k, is_first, number, place, receiver in path_to(leaf):
            made.setdefault((k, is_first, number), []).append((place, receiver))
    return [Link(k, tuple(makes), is_first, number) for (k, is_first, number), makes in made.items()]
