"""Backward passes without ordinary gradients: ``add_hooks(param_grad=False)``.

While a model is hooked so, ``torch.autograd.backward`` asks the engine for the nodes of the uses and for all leaves but the
model's parameters, as its own ``inputs=`` does.  So the engine takes its usual way, and computes no gradient of these
parameters.

It is asked for all that isn't known to be a use: a parameter that a node outside of the model's forwards takes, as a penalty
does; and passes that make a graph, that pass reentrant checkpoints, or that begin in another way.  `Backward` then restores
``.grad``.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autograd_hacks.capture.arrivals import ASKED, hook_before, may_skip, on_node
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.ran import Ran
from autograd_hacks.support.graph import CHECKPOINT, Leaf
from autograd_hacks.support.internals import is_transformed, sequence_number
from autograd_hacks.support.switch import NO_TASK, Switch, current_task

_plain = torch.autograd.backward
_LEAN: weakref.WeakSet[Backward] = weakref.WeakSet()
"""Those whose passes fill no ``.grad``."""


class Met(NamedTuple):
    """What a forward has in its graph, by nodes' numbers: a node that is held here would keep the graph."""

    uses: frozenset[int]  # the nodes of uses
    takers: frozenset[int]  # the nodes that take a parameter
    leaves: frozenset[Node]  # at which the parameters end the graph


class Asked:
    """What the engine is asked for in a running pass.

    skipped: the leaves whose gradients are not    inputs: what is
    """

    def __init__(self, skipped: frozenset[Node], inputs: Sequence[GradientEdge]) -> None:
        self.skipped, self.inputs = skipped, inputs

    def counts(self, backward: Backward) -> dict[str, int]:
        """By name of a skipped parameter of a model, how many gradients will arrive at its uses."""
        hooks = (hook for edge in self.inputs for hook in on_node(edge.node) if hook.receiver is backward)
        uses = [use for hook in hooks if (use := hook.whose) is not None]
        return Counter(edge.name for use in uses for edge in use.edges.values() if edge.node in self.skipped)


def meet(backward: Backward, ran: Ran, began: int) -> None:
    """Notes a forward, whose parameters' gradients passes need not compute: all uses are known, and no samples mix.

    What shows that a loss reads where they do are gradients.  Rows are compared with gradients first.

    began: the number of the first node that it could make.  What an older node took, as for a weight that a module keeps, is
    also an earlier forward's
    """
    told = ran.within.told
    if ran.within.refused or told.mixing or told.mixed_outputs or told.kind.derives is not False:
        return
    if told.walk is not None and not told.walk.was_read:
        return
    if ran.within.calls is None or ran.is_checkpointed:
        return
    trace = ran.trace
    if not ran.takers:  # of all forwards with equal graphs
        own = {k for k in trace.leaves if trace.nodes[k] in ran.leaves}
        ran.takers.append([k for k, ahead in enumerate(trace.edges) if any(e is not None and e[0] in own for e in ahead)])
    noted = compress(ran.noted, ran.within.calls)  # but those whose rule gives no rows
    uses = [node for node, _ in ran.hooks] + [node for one in noted for node, _ in one.hooks]
    takers = [trace.nodes[k] for k in ran.takers[0]]
    is_own = backward.record.is_parameter
    leaves = [leaf for leaf, name in ran.leaves.items() if is_own(ran.parameters[name])]
    numbers, of_takers = (frozenset(map(sequence_number, nodes)) for nodes in (uses, takers))
    backward.met[ran.within] = Met(numbers, frozenset(k for k in of_takers if k >= began), frozenset(leaves))


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
    asked, tensors = None, tensors if isinstance(tensors, Tensor | GradientEdge) else tuple(tensors)
    if inputs is None and not create_graph and _LEAN and Switch.on() and current_task() == NO_TASK and not is_transformed():
        asked = _asked(_nodes_of(tensors))
    if asked is None or not asked.inputs:
        _plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        return
    with _noted(asked, _nodes_of(tensors)):
        _plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, asked.inputs)


def _nodes_of(tensors: Any) -> list[Node]:
    roots = [tensors] if isinstance(tensors, Tensor | GradientEdge) else list(tensors)
    nodes = (root.node if isinstance(root, GradientEdge) else getattr(root, "grad_fn", None) for root in roots)
    return [node for node in nodes if node is not None]


def _asked(roots: Iterable[Node]) -> Asked | None:
    """What the engine is to be asked for; None for everything."""
    lean = (own for own in _LEAN if own.met and own.hears() and not own.wants_grad)
    known = [own for own in lean if not (own.has_new_hooks() or own.record.comparing)]
    met = [one for own in known for one in [*own.met.values()]]
    if not met:
        return None
    uses, takers, skippable = (frozenset().union(*sets) for sets in zip(*met))
    nodes, inputs = list(dict.fromkeys(roots)), list[GradientEdge]()
    seen, taken, others = set(nodes), dict[Any, None](), dict[Any, None]()
    for node in nodes:  # the list grows
        number = sequence_number(node)
        if number in uses:
            inputs.append(GradientEdge(node, 0))
        leaves = taken if number in takers else others
        for ahead, _ in node.next_functions:
            if type(ahead) is Leaf:
                leaves[ahead] = None
            elif ahead is not None and ahead not in seen:
                seen.add(ahead)
                nodes.append(ahead)
    if any(map(_is_checkpoint, set(map(type, nodes)))):
        return None
    skipped = {leaf for leaf in taken if leaf in skippable and leaf not in others and may_skip(leaf.variable)}
    inputs += [GradientEdge(leaf, 0) for leaf in {**taken, **others} if leaf not in skipped]
    return Asked(frozenset(skipped), inputs) if skipped else None


@cache
def _is_checkpoint(kind: type) -> bool:
    return kind.__name__ == CHECKPOINT


@contextmanager
def _noted(asked: Asked, roots: Sequence[Node]) -> Iterator[None]:
    """A context in which hooks know what the engine was asked for, by the number of its pass.  roots: which run first"""
    tasks = list[int]()

    def note(_: object) -> None:
        tasks.append(current_task())
        ASKED[tasks[-1]] = asked

    handles = [hook_before(root, note) for root in roots]
    for handle in handles:  # a root may be a use's node
        hooks: Any = handle.hooks_dict_ref()
        for key in [key for key in hooks if key != handle.id]:
            hooks[key] = hooks.pop(key)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for task in tasks:
            ASKED.pop(task, None)
