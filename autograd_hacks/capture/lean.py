"""Backward passes without ordinary gradients: ``add_hooks(param_grad=False)``.

While a model is hooked so, ``torch.autograd.backward`` asks the engine for the nodes of the uses and for all leaves but the
model's parameters, as its own ``inputs=`` does.  So the engine takes its usual way, and computes no gradient of these
parameters.

It is asked for all that isn't known to be a use: a parameter that a node outside of the model's forwards takes, as a penalty
does; and by passes that enter a forward at another value than its outputs, that make a graph, that pass reentrant
checkpoints, or that begin in another way.  `Backward` then restores ``.grad``.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import cache, wraps
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autograd_hacks.capture.arrivals import ASKED, AtNode, may_skip, noted, on_node
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.ran import Ran
from autograd_hacks.support.graph import CHECKPOINT, Leaf
from autograd_hacks.support.internals import is_transformed, next_node, sequence_number
from autograd_hacks.support.switch import NO_TASK, Switch, current_task

_plain = torch.autograd.backward
_LEAN: weakref.WeakSet[Backward] = weakref.WeakSet()
"""Those whose passes fill no ``.grad``."""


class Met(NamedTuple):
    """What a forward has in its graph, by nodes' numbers: a node that is held here would keep the graph."""

    made: range  # all that it made
    outputs: frozenset[int]  # the nodes of what it returned, and of what modules keep
    uses: frozenset[int]  # the nodes of uses
    takers: frozenset[int]  # the nodes that take a parameter
    leaves: frozenset[Node]  # at which the parameters end the graph


class Asked(NamedTuple):
    """What the engine is asked for in a running pass."""

    skipped: frozenset[Node]  # the leaves whose gradients it isn't
    inputs: Sequence[GradientEdge]

    def counts(self, backward: Backward) -> dict[str, int]:
        """By name of a skipped parameter of a model, how many gradients will arrive at its uses."""
        hooks = (hook for edge in self.inputs for hook in on_node(edge.node) if hook.receiver is backward)
        uses = (hook.use if isinstance(hook, AtNode) else hook.call for hook in hooks)
        edges = (edge for use in uses if use is not None for edge in use.edges.values())
        return Counter(edge.name for edge in edges if edge.node in self.skipped)


def meet(backward: Backward, ran: Ran) -> None:
    """Notes a forward, whose parameters' gradients passes need not compute: all uses are known, and no samples mix.

    What shows that a loss reads where they do are gradients.  Rows are compared with gradients first.
    What an older node took, as for a weight that a module keeps, is also an earlier forward's.
    """
    within = ran.within
    is_compared = within.kind.derives is False and (within.walk is None or within.walk.was_read)
    if not is_compared or within.calls is None or within.refused or within.mixing or within.mixed_outputs:
        return
    trace = ran.trace
    uses = [node for node, _ in ran.hooks]
    uses += [node for one in compress(ran.noted, within.calls) for node, _ in one.hooks]  # whose rules give rows
    outputs, takers = [trace.nodes[k] for k, _ in trace.roots], [trace.nodes[k] for k in ran.takers]
    own = map(id, backward.record.own_among(ran.parameters.values()))
    ends, numbers, of_takers = (frozenset(map(sequence_number, nodes)) for nodes in (outputs, uses, takers))
    made, leaves = range(ran.began, next_node()), frozenset([within.leaves[n] for n in own if n in within.leaves])
    backward.met[within] = Met(made, ends, numbers, of_takers.intersection(made), leaves)


def attach(backward: Backward) -> None:
    """From now on, passes do without the gradients of a model's parameters."""
    _LEAN.add(backward)
    torch.autograd.backward = _backward


def detach(backward: Backward) -> None:
    _LEAN.discard(backward)
    if not _LEAN and torch.autograd.backward is _backward:
        torch.autograd.backward = _plain


@wraps(_plain)
def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    tensors = (tensors,) if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)
    nodes = (root.node if isinstance(root, GradientEdge) else getattr(root, "grad_fn", None) for root in tensors)
    roots, asked = [node for node in nodes if node is not None], None
    if inputs is None and not create_graph and Switch.on() and current_task() == NO_TASK and not is_transformed():
        asked = _asked(roots)
    with nullcontext() if asked is None else noted(roots, ASKED, asked):
        given = inputs if asked is None else asked.inputs
        _plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, given)


def _asked(roots: Iterable[Node]) -> Asked | None:
    """What the engine is to be asked for; None for everything."""
    known = [own for own in _LEAN if own.met and own.hears() and not (own.wants_grad or own.record.comparing)]
    met = [one for own in known if not own.has_new_hooks() for one in [*own.met.values()]]
    if not met:
        return None
    uses, takers, skippable = (frozenset().union(*sets) for sets in list(zip(*met))[2:])
    nodes, inputs = list(dict.fromkeys(roots)), list[GradientEdge]()
    seen, taken, others, is_only = set(nodes), dict[Any, None](), dict[Any, None](), len(met) == 1
    entered: set[tuple[int, Any]] = {(-1, node) for node in nodes}  # nodes, with the forward from which the pass comes
    first = met[0].made if len(met) == 1 else ()
    for node in nodes:  # the list grows
        number = sequence_number(node)
        if number in uses:
            inputs.append(GradientEdge(node, 0))
        leaves, within = taken if number in takers else others, 0 if number in first else _of(met, number)
        for ahead, _ in node.next_functions:
            if type(ahead) is Leaf:
                leaves[ahead] = None
            elif ahead is not None:
                if within < 0 or not is_only:
                    entered.add((within, ahead))
                if ahead not in seen:
                    seen.add(ahead)
                    nodes.append(ahead)
    for before, node in entered:
        within = _of(met, number := sequence_number(node))
        if within not in (-1, before) and number not in met[within].outputs:
            return None
    if any(map(_is_checkpoint, set(map(type, nodes)))):
        return None
    skipped = {leaf for leaf in taken if leaf in skippable and leaf not in others and may_skip(leaf.variable)}
    inputs += [GradientEdge(leaf, 0) for leaf in {**taken, **others} if leaf not in skipped]
    return Asked(frozenset(skipped), inputs) if skipped else None


def _of(met: Sequence[Met], number: int) -> int:
    """Which forward has made a node; -1 for none of them."""
    for n, own in enumerate(met):
        if number in own.made:
            return n
    return -1


@cache
def _is_checkpoint(kind: type) -> bool:
    return kind.__name__ == CHECKPOINT
