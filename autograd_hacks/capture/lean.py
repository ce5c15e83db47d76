"""Backward passes without ordinary gradients: ``add_hooks(param_grad=False)``.

The model's outputs are replaced by those of one function.  Its backward asks autograd for the gradients at the uses only, so
autograd computes no gradient of a parameter.  The parameters stay in the graph, and a pass can be asked whether it reaches
them.

If a pass makes a graph, that graph leads into the forward's own graph, around the function.  Later passes then arrive by
both ways, and their gradients at a use are added up, because rows are linear in the gradient.  Later forwards keep their
graph: parameters' gradients are computed, and `Backward` restores ``.grad``.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autograd_hacks.capture.arrivals import CAPTURED, EXECUTED, AtNode, AtOutput, hook_before, may_skip, reach_of
from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.kinds import Kind
from autograd_hacks.capture.ran import Ran
from autograd_hacks.capture.records import Inner
from autograd_hacks.graph.trace import Nested
from autograd_hacks.support.graph import Graph, made
from autograd_hacks.support.internals import keeps_graph, will_execute
from autograd_hacks.support.restored import kept
from autograd_hacks.support.switch import current_task
from autograd_hacks.support.trees import map_tensors


class Behind:
    """The graph of a forward, behind the function that replaces it."""

    def __init__(self, backward: Backward, kind: Kind, ran: Ran, is_hooked: bool) -> None:
        self.is_hooked = is_hooked  # whether the user has put hooks on its nodes, which must run
        self.backward, self.kind = backward, kind
        self.outputs = [x for x in ran.outputs[: ran.count] if x.grad_fn is not None]
        self.has_graphs = False  # whether passes made graphs, which lead into this one
        # The hooks at uses, with their nodes.  A call whose rule gives no rows is none.
        noted = ran.noted if ran.within.calls is None else compress(ran.noted, ran.within.calls)
        self.hooks: list[tuple[Node, AtNode | AtOutput]] = [*ran.hooks, *(own for one in noted for own in one.hooks)]
        trace, nodes = ran.trace, ran.trace.nodes
        if not ran.ends_of_passes:
            ran.ends_of_passes.append(self._ends(ran))
        lowest, parameters, others = ran.ends_of_passes[0]
        self.lowest = [nodes[k] for k in lowest]
        self.parameters = {name: nodes[k] for name, k in parameters.items()}
        self.trained = [ran.parameters[name] for name in self.parameters]
        # Gradients continue from here: leaves that aren't the model's, and the nodes that made its arguments.
        given = {x.grad_fn: x for x in ran.tensors if x.grad_fn is not None and x.grad_fn in trace.number}
        self.inputs: list[Tensor] = [*(trace.leaf(k) for k in others), *given.values()]
        self.edges = [GradientEdge(nodes[k], 0) for k in others]
        self.edges += [GradientEdge(node, x.output_nr) for node, x in given.items()]

    def _ends(self, ran: Ran) -> tuple[list[int], dict[str, int], list[int]]:
        """Where passes through the forward end, as numbers in its trace: the nodes with hooks from which gradient reaches
        all others, the leaves of the model's own parameters, by name, and other leaves."""
        is_own, trace = self.backward.record.is_parameter, ran.trace
        parameters = {name: trace.number[leaf] for leaf, name in ran.leaves.items() if is_own(ran.parameters[name])}
        hooked, own = [trace.number[node] for node, _ in self.hooks if node in trace.number], set(parameters.values())
        others = [k for k in trace.leaves if k not in own]
        leads_on, stops = set[int](), {*hooked, *others}
        for k in reversed(trace.order()):  # where each pass goes to a lower one, too, that one's own hook notices
            if any(edge is not None and (edge[0] in stops or edge[0] in leads_on) for edge in trace.edges[k]):
                leads_on.add(k)
        return [k for k in dict.fromkeys(hooked) if k not in leads_on], parameters, others

    def at(self, nodes: Collection[Node]) -> dict[Node, list[AtNode | AtOutput]]:
        """The hooks on some nodes."""
        found: dict[Node, list[AtNode | AtOutput]] = {node: [] for node in nodes}
        for node, hook in self.hooks:
            if node in found:
                found[node].append(hook)
        return found

    def ways(self) -> dict[str, str]:
        """What the running pass does at parameters; see `reach_of`.  Raises ParamGradSkipped if it is to take gradients."""
        try:
            return {name: EXECUTED for name, leaf in self.parameters.items() if will_execute(leaf)}
        except RuntimeError:  # it takes some
            ways = {name: way for name, leaf in self.parameters.items() if (way := reach_of(leaf))}
            taken = [p for name, p in zip(self.parameters, self.trained) if ways.get(name) == CAPTURED]
            self.backward.check_captured(taken)
            return ways

    def counts(self, roots: Sequence[Tensor]) -> dict[str, int]:
        """By parameter, how many gradients arrive at its uses in a pass that begins at the given outputs."""
        hooks = self.at(Graph([x.grad_fn for x in roots if x.grad_fn is not None]).nodes)
        return Counter(name for own in hooks.values() for name in names_at(own))


def names_at(hooks: Iterable[AtNode | AtOutput]) -> list[str]:
    """The parameters of the uses that have hooks."""
    uses = [hook.use if isinstance(hook, AtNode) else hook.call for hook in hooks]
    return [edge.name for use in uses if use is not None for edge in use.edges.values()]


def may_stand_behind(kind: Kind, ran: Ran) -> bool:
    """Whether a forward's outputs may leave their graph.

    They may after a first pass that made no graph, if nothing else needs gradients of
    parameters, and no samples mix: what shows that a loss reads where they do are gradients behind that."""
    mixes = ran.within.refused or ran.within.told.mixing or ran.within.told.mixed_outputs
    if mixes or kind.derives is not False:
        return False
    try:
        may_all = all(may_skip(ran.parameters[name]) for name in ran.leaves.values())
    except Nested:
        return False
    return may_all and not ran.checkpoints  # torch.autograd.grad can't pass through these


def without_grad(backward: Backward, kind: Kind, ran: Ran, output: Any, is_hooked: bool) -> tuple[Any, list[Tensor]]:
    """A forward's output, behind a function whose backward computes no parameter gradients, and its tensors.

    is_hooked: whether the user has registered hooks on gradients in the forward"""
    behind = Behind(backward, kind, ran, is_hooked)
    views = iter(_Behind.apply(behind, *behind.inputs, *behind.trained))
    taken = {id(x): next(views) for x in behind.outputs}
    return map_tensors(lambda x: taken.get(id(x), x), output), [taken.get(id(x), x) for x in ran.outputs[: ran.count]]


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, behind: Behind, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.behind = behind
        return tuple([x.detach() for x in behind.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_run(ctx.behind, grads), *(None for _ in ctx.behind.parameters)


def _run(behind: Behind, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Brings gradients to the uses.  Returns the gradients of the inputs."""
    backward = behind.backward
    if backward.inner is not None:  # the inner pass is a later forward's, and passes gradient on to this one itself
        return [None] * len(behind.inputs)
    ways = behind.ways()
    behind.has_graphs |= torch.is_grad_enabled()
    behind.kind.derives = behind.kind.derives or behind.has_graphs
    # Passes may come around the function too, through tensors that the model did not return.
    is_around = any(will_execute(node) for node, _ in behind.hooks)
    keeps = behind.has_graphs or is_around or keeps_graph()
    roots = [(x, g) for x, g in zip(behind.outputs, grads) if g is not None]
    lowest = behind.lowest if ways else []
    hooks = behind.at(lowest)
    # The gradients that are still to be compared with rows.
    record = backward.record
    is_hooked = behind.is_hooked or backward.has_new_hooks()
    names = {name for name in ways if record.comparing or is_around or is_hooked}
    for node in lowest if record.gathered else ():
        is_node = any(isinstance(hook, AtNode) for hook in hooks[node])
        if record.on_arrival is not None or is_node:  # the read needs weights, which are gone after the pass
            names |= {name for name in names_at(hooks[node]) if name in ways}
    wanted = [*behind.edges, *(GradientEdge(behind.parameters[name], 0) for name in names)]
    numbers = [(node, number) for node in lowest for number in range(len(made(node)))]
    wanted += [GradientEdge(node, number) for node, number in numbers]
    if not roots or not wanted:
        return [None] * len(behind.inputs)
    counts = {} if record.on_arrival is None else behind.counts([x for x, _ in roots])
    inner = Inner(current_task(), keeps, ways, counts, frozenset(names))
    if ways and not backward.is_silent:
        backward.enter(inner.task).skipped.update(ways)
    with kept(backward, "inner"):
        backward.inner = inner
        with torch.enable_grad():  # these nodes come before all others
            outputs, given = [x.view_as(x) for x, _ in roots], [g for _, g in roots]
        for x in outputs:
            hook_before(x.grad_fn, lambda _: setattr(inner, "own", current_task()))  # type: ignore[arg-type]  # it has one
        options: dict[str, Any] = {"retain_graph": keeps, "create_graph": torch.is_grad_enabled(), "allow_unused": True}
        found = torch.autograd.grad(outputs, wanted, given, **options)
        arrived: dict[Node, list[Tensor | None]] = {node: [] for node in lowest}
        for (node, _), grad in zip(numbers, found[len(wanted) - len(numbers) :]):
            arrived[node].append(grad)
        for node, own in arrived.items():
            if any(grad is not None for grad in own):
                for hook in hooks[node]:
                    hook(tuple(own), node, keeps)
    return list(found[: len(behind.edges)])
