"""Backward passes as they begin: how the loss becomes a number, and passes without ordinary gradients.

While a model is hooked, ``torch.autograd.backward`` is a function of this library.  With ``add_hooks(param_grad=False)`` it
asks the engine for the nodes of the uses and for all leaves but the model's parameters, as its own ``inputs=`` does.  So the
engine takes its usual way, and computes no gradient of these parameters.

It is asked for all that isn't known to be a use: a parameter that a node outside of the model's forwards takes, as a penalty
does; and by passes that enter a forward at another value than its outputs, that make a graph, that pass reentrant
checkpoints, or that begin in another way.  `Backward` then restores ``.grad``.
"""

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import wraps
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.arrivals import ASKED, BEGAN, MIXED, may_skip, noted, noting, on_node, registers
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.gradient_hooks import since
from autograd_hacks.capture.ran import Ran
from autograd_hacks.errors import ParamGradSkipped
from autograd_hacks.support.graph import CHECKPOINT, NEW, Leaf, Value
from autograd_hacks.support.internals import count_dispatch_modes, is_transformed, next_node, sequence_number
from autograd_hacks.support.restored import kept
from autograd_hacks.support.switch import NO_TASK, Switch, current_task

_plain = torch.autograd.backward
_HOOKED: set[weakref.ref[Backward]] = set()
"""Those of hooked models."""
_HANDLES: list[RemovableHandle] = []
"""The global hook of torch by which optimizers' steps are checked, if a model needs it."""


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
        edges = (edge for hook in hooks if hook.use is not None for edge in hook.use.edges.values())
        return Counter(edge.name for edge in edges if edge.node in self.skipped)


def meet(backward: Backward, ran: Ran) -> None:
    """Notes a forward, whose parameters' gradients passes need not compute: all uses are known, and no samples mix.

    What shows that a loss reads where they do are gradients.  Rows are compared with gradients first.
    What an older node took, as for a weight that a module keeps, is also an earlier forward's.
    """
    within = ran.within
    names = (ran.parameters.keys() if within.compared is None else within.compared) - within.unsure
    compared = [p for name, p in ran.parameters.items() if name in names]
    is_usual = within.kind.derives is False and not (within.refused or within.mixing or within.mixed_outputs)
    if within.facts.calls is None or not (compared and is_usual):
        return
    trace, met, uses = ran.trace, backward.met, [*ran.uses]
    uses += [node for one in compress(ran.noted, within.facts.calls) for node, _ in one.hooks]  # whose rules give rows
    groups = [trace.nodes[k] for k, _ in trace.roots], uses, [trace.nodes[k] for k in ran.takers]
    ends, numbers, of_takers = (frozenset(map(sequence_number, nodes)) for nodes in groups)
    own, made = map(id, backward.record.own_among(compared)), range(ran.began, next_node())
    leaves = frozenset([within.leaves[n] for n in own if n in within.leaves])
    met[weakref.ref(within, lambda gone: met.pop(gone, None))] = Met(
        made, ends, numbers, of_takers.intersection(made), leaves
    )


def attach(backward: Backward) -> None:
    """From now on, passes are seen as they begin.  If they fill no ``.grad``, optimizers' steps are checked, too."""
    _HOOKED.add(weakref.ref(backward, _HOOKED.discard))
    torch.autograd.backward = _backward
    RemovableHandle.__init__ = noting  # type: ignore[assignment,method-assign]
    if not (backward.wants_grad or _HANDLES):
        _HANDLES.append(register_optimizer_step_post_hook(_stepped))


def detach(backward: Backward) -> None:
    """Restores torch's own functions after the last model.

    Must not run while a model is garbage-collected, because torch may be iterating over its hooks then."""
    _HOOKED.discard(weakref.ref(backward))
    while _HANDLES and not _HOOKED:
        _HANDLES.pop().remove()
    if not _HOOKED and torch.autograd.backward is _backward:
        torch.autograd.backward = _plain
        RemovableHandle.__init__ = registers  # type: ignore[method-assign]
        NEW.clear()


def _stepped(optimizer: Optimizer, *_: object) -> None:
    """Called after an optimizer's step.  Raises if all parameters that it should have moved have no ``.grad``."""
    # Only torch's own optimizers are known to skip parameters without .grad; others may read something else.
    hooked = [*_HOOKED] if Switch.on() and type(optimizer).__module__.startswith("torch.optim.") else []
    for record in [own.record for known in hooked if (own := known()) is not None and not own.wants_grad]:
        ours = [p for group in optimizer.param_groups for p in group["params"] if p in record.names]
        if any(p.grad is not None for p in ours):
            continue
        passes = (recorded for s in record.segments if not s.replaced for recorded in s.passes)
        reached = {name for recorded in passes if not (recorded.is_hess or recorded.captures) for name in recorded.names()}
        if missing := [name for p in ours if (name := record.names.get(p)) in reached]:
            raise ParamGradSkipped(
                f"{type(optimizer).__name__}.step() moved nothing: .grad is None for all parameters that had a backward "
                f"pass, for example {missing[0]}. add_hooks(param_grad=False) means that backward() sets no .grad. Call "
                "clip_grad1_norm_(model, max_norm) or compute_grad1(model, set_grad=True) between backward() and step(), "
                "or use param_grad=True."
            )


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
    values = [Value(node, root.output_nr) for root, node in zip(tensors, nodes) if node is not None]
    models = [own for known in [*_HOOKED] if (own := known()) is not None]
    roots, asked, hooks = [value.node for value in values], None, []
    if watching := [own for own in models if own.has_new_hooks() and own.hears()]:
        hooks = since(min(own.looked for own in watching))
        for own in watching:
            if own.watching is not None:
                own.watching.over([(hooks_of, key) for hooks_of, key in hooks if key >= own.looked])
            own.has_looked()
    is_seen = Switch.on() and current_task() == NO_TASK and not is_transformed()
    if is_seen and inputs is None and not (create_graph or hooks or count_dispatch_modes()):
        asked = _asked(roots, models)
    is_told = not models or (BEGAN.announced is not None and any(root is BEGAN.announced for root in tensors))
    mixed, reduced = ABOVE.mixing_in(values) if is_seen and not is_told else ({}, frozenset())
    with (
        kept(BEGAN, "reduced"),
        nullcontext() if asked is None else noted(roots, ASKED, asked),
        noted(roots, MIXED, mixed) if mixed else nullcontext(),
    ):
        BEGAN.reduced = reduced
        given = inputs if asked is None else asked.inputs
        _plain(tensors, grad_tensors, retain_graph, create_graph, grad_variables, given)


def _asked(roots: Iterable[Node], models: Iterable[Backward]) -> Asked | None:
    """What the engine is to be asked for; None for everything."""
    known = [own for own in models if not (own.wants_grad or own.record.comparing) and own.hears() and own.met]
    met = [one for own in known for one in [*own.met.values()]]
    if not met:
        return None
    first, is_only = met[0].made if len(met) == 1 else (), len(met) == 1
    uses, takers, skippable = met[0][2:] if is_only else (frozenset().union(*sets) for sets in list(zip(*met))[2:])
    nodes, inputs = list(dict.fromkeys(roots)), list[GradientEdge]()
    seen, taken, others = dict.fromkeys(nodes), dict[Any, None](), dict[Any, None]()
    entered: set[tuple[int, Any]] = {(-1, node) for node in nodes}  # nodes, with the forward from which the pass comes
    for node in nodes:  # the list grows
        if (number := sequence_number(node)) in uses:
            inputs.append(GradientEdge(node, 0))
        leaves, within = taken if number in takers else others, 0 if number in first else _of(met, number)
        for ahead, _ in node.next_functions:
            if type(ahead) is Leaf:
                leaves[ahead] = None
            elif ahead is not None:
                if within < 0 or not is_only:
                    entered.add((within, ahead))
                if ahead not in seen:
                    seen[ahead] = None
                    nodes.append(ahead)
    for before, node in entered:
        within = _of(met, number := sequence_number(node))
        if within not in (-1, before) and number not in met[within].outputs:
            return None
    if CHECKPOINT in {kind.__name__ for kind in set(map(type, nodes))}:
        return None
    own = [leaf for leaf in taken if leaf in skippable and leaf not in others]
    skipped = {*compress(own, may_skip([leaf.variable for leaf in own]))}
    inputs += [GradientEdge(leaf, 0) for leaf in {**taken, **others} if leaf not in skipped]
    return Asked(frozenset(skipped), inputs) if skipped else None


def _of(met: Sequence[Met], number: int) -> int:
    """Which forward has made a node; -1 for none of them."""
    return next((n for n, own in enumerate(met) if number in own.made), -1)
