"""Uses of parameters without a layer rule, read from autograd's graph when a forward has ended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autograd_hacks.capture.arrivals import AtNode, Receive, put_on
from autograd_hacks.capture.forward import Noted
from autograd_hacks.capture.records import Pass
from autograd_hacks.capture.uses import Edge, GraphAlive, NodeUse, ValueUse
from autograd_hacks.errors import StaleRecord
from autograd_hacks.forms import Chained, Form
from autograd_hacks.probe.documents import Documents
from autograd_hacks.probe.meetings import Keys, Meetings, gives_rows, is_of, memory_of
from autograd_hacks.probe.plan import AXES, ENTRIES, ROWS, Place, Plan
from autograd_hacks.probe.routes import Routes
from autograd_hacks.rules.views import STEPS
from autograd_hacks.support.graph import CHECKPOINT, Graph, Leaf, Taker, Value, dtype_of, inputs_of, made, shape_of
from autograd_hacks.support.internals import SAVED, tree_leaves
from autograd_hacks.support.layout import Layout, likeliest, samples_of_rows
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import is_packed, tensors_of, unpacked


@dataclass(eq=False)
class Ran:
    """A forward that has run, with its graph.

    modules: the modules whose parameters and buffers are used
    trained: returns the trainable parameters by name
    outputs: the tensors that were returned
    """

    modules: Iterable[nn.Module]
    trained: Callable[[], Mapping[str, Tensor]]
    arguments: Any
    outputs: Sequence[Tensor]
    noted: Sequence[Noted] = ()
    ends: frozenset[Node] = frozenset()  # the nodes that made the arguments: nothing before them belongs to this forward
    of_parameters: frozenset[Node] = frozenset()  # nodes that are known to depend on parameters only
    roots: Sequence[Node] | None = None  # the nodes that made the outputs, if the outputs are gone
    labels: Mapping[Any, Tensor] = field(default_factory=dict)  # the sample of each row, by call or node, as passes showed
    returned: Any = None  # the structure that holds the outputs
    documents: Documents | None = None  # the documents packed into its samples, if rows are per document

    @cached_property
    def parameters(self) -> Mapping[str, Tensor]:
        """The trainable parameters, by name."""
        return self.trained()

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return tensors_of(self.arguments)

    @cached_property
    def packed(self) -> dict[Any, Tensor]:
        """For outputs that are packed sequences, by number: the sample of each row."""
        sequences = [x for x in tree_leaves(unpacked(self.returned, everything=True), is_packed) if is_packed(x)]
        return {slot: samples_of_rows(p) for slot, x in enumerate(self.outputs) for p in sequences if p.data is x}

    @cached_property
    def graph(self) -> Graph:
        roots = [x.grad_fn for x in self.outputs if x.grad_fn is not None] if self.roots is None else self.roots
        return Graph(roots, self.ends)

    @cached_property
    def leaves(self) -> dict[Node, str]:
        """The parameters' names, by the node at which each ends the graph."""
        names = {id(p): name for name, p in self.parameters.items()}
        return {leaf: names[id(leaf.variable)] for leaf in self.ends_of_graph if id(leaf.variable) in names}

    @cached_property
    def ends_of_graph(self) -> list[Any]:
        """All leaves: parameters and others."""
        return self.graph.leaves

    @cached_property
    def given(self) -> set[int]:
        """The memory addresses of the arguments."""
        return {memory_of(x) for x in self.tensors}

    @cached_property
    def fixed(self) -> set[int]:
        """The memory addresses of parameters and buffers."""
        return {memory_of(x) for module in self.modules for x in (*module.parameters(), *module.buffers())}

    @cached_property
    def checkpoints(self) -> list[Any]:
        """The nodes of reentrant checkpoints."""
        return [node for node in self.graph.nodes if node.name() == CHECKPOINT]

    @cached_property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the graph's values."""
        return {x.dtype for x in self.outputs} | {x.dtype for node in self.graph.nodes for x in made(node)}

    @property
    def is_covered(self) -> bool:
        """Whether layers with rules cover all parameters."""
        covered_names = {edge.name for noted in self.noted for edge in noted.call.edges.values()}
        return covered_names >= self.parameters.keys()

    def value(self, slot: int) -> Value:
        """An output, as a value of the graph."""
        x = self.outputs[slot]
        assert x.grad_fn is not None
        return Value(x.grad_fn, x.output_nr)

    def edge_of(self, name: str) -> Edge:
        """The edge at which a parameter ends the graph."""
        leaf: Any = next(leaf for leaf, own in self.leaves.items() if own == name)
        return Edge(name, leaf.variable, leaf)

    def routes(self, plan: Plan, samples: int) -> Routes:
        """Which sample each row belongs to, starting from the places that the plan knows."""
        known: dict[Node, Layout] = {}
        for x, at in zip(self.outputs, plan.outputs):
            if at is not None and x.grad_fn is not None:
                known[x.grad_fn] = at
        for noted in self.noted:
            place = plan.place_of(noted.call.path, noted.number)
            for node, hook in noted.hooks if place is not None and place.kind == AXES else ():
                at = place.layouts[hook.slot] if place is not None else None
                if at is not None and made(node)[hook.number].shape != hook.shape and not at.axis and not at.fold:
                    at = Layout(0, "N·T")  # the node made the same rows, with more axes folded
                if at is not None:
                    known[node] = at
        return Routes(self.graph, known, samples)

    def rows_of(self, noted: Noted, routes: Routes) -> Tensor | None:
        """The sample of each entry on axis 0 of a call's output, into which its node may have folded other axes."""
        node, hook = noted.hooks[0]
        rows, size = routes.rows(node), hook.shape[0]
        if rows is None or len(rows) == size or not size or len(rows) % size:
            return rows
        folded = rows.view(size, -1)
        return folded[:, 0] if bool((folded == folded[:, :1]).all()) else None

    def covered(self, open_calls: Collection[Any] = ()) -> dict[Node, set[str]]:
        """The nodes inside calls of layers with rules, with the parameters whose rows these calls give.

        open_calls: calls that give no rows
        """
        found: dict[Node, set[str]] = {}
        for noted in self.noted:
            if noted.call not in open_calls:
                names = {edge.name for edge in noted.call.edges.values()}
                for node in self.inside(noted):
                    found.setdefault(node, set()).update(names)
        return found

    def taken_apart(self) -> set[Any]:
        """The calls whose inner values are used outside of them, by a derivative that the forward takes.

        Their rules don't see these uses, so their nodes give the rows."""
        found = set[Any]()
        for noted in self.noted:
            inside, own = dict.fromkeys(self.inside(noted)), {Value(node, hook.number) for node, hook in noted.hooks}
            inner = (node for node in inside if not is_of(self.leaves, node))
            values = {Value(node, number) for node in inner for number in range(len(made(node)))} - own
            if any(taker.node not in inside for value in values for taker in self.graph.takers.get(value, ())):
                found.add(noted.call)
        return found

    def inside(self, noted: Noted) -> Iterator[Node]:
        """The nodes of a call, from its outputs to its inputs."""
        waiting, seen = [node for node, _ in noted.hooks], set[Node]()
        while waiting:
            node = waiting.pop()
            if node not in seen and node not in noted.inputs and type(node) is not Leaf:
                seen.add(node)
                yield node
                waiting += [value.node for value in inputs_of(node)]


class OffGraph:
    """The uses that a plan reads from the graph of a finished forward.  key: the first part of the uses' keys"""

    def __init__(self, ran: Ran, plan: Plan, samples: int, key: tuple[Hashable, ...] = ()) -> None:
        self.ran, self.plan, self.samples, self.key = ran, plan, samples, key
        self.is_known = True  # whether the plan knows all uses of parameters
        self.documents: Documents | None = None  # whose rows are wanted, instead of samples'
        self.found: dict[Node, list[tuple[Value, Taker, Place]]] = {}  # by the node that takes the values
        self.hooks: list[tuple[Node, AtNode]] = []
        self.by_rule: Mapping[tuple[Node, int], Collection[str]] = {}  # parameters of whose values rules give the rows
        self.refused: Mapping[str, str] = {}  # why parameters have no rows in this forward

    @cached_property
    def keys(self) -> Keys:
        return Keys(self.ran.leaves)

    def find(self) -> OffGraph:
        """Climbs from each parameter to the nodes at which the plan says that it meets the batch."""
        graph, plan, covered, counts = self.ran.graph, self.plan, self.ran.covered(), dict[Any, int]()
        waiting = [Value(leaf, 0) for leaf in graph.leaves if leaf in self.ran.leaves]
        seen = set(waiting)
        while waiting:
            value = waiting.pop()
            for taker in graph.takers.get(value, ()):
                above = {Value(taker.node, n) for n in range(max(1, len(made(taker.node))))} - seen
                if gives_rows(covered, self.keys, value, taker.node):
                    if is_of(self.ran.leaves, taker.node):
                        seen |= above
                        waiting += above
                    continue
                key = self.keys.of(value, taker)
                is_inner = key in plan.alike and self.keys.with_all_behind(key, taker) in plan.inner
                if (places := plan.meetings.get(key)) is not None and not is_inner:
                    number = counts[key] = counts.get(key, -1) + 1
                    place = places[number] if number < len(places) else places[0]
                    self.is_known &= number < len(places) or all(other == place for other in places)
                    self.is_known &= place.kind != AXES or fit(place.layouts, taker.node, self.samples)
                    self.is_known &= not place.was_empty or all(0 in x.shape for x in made(taker.node))
                    self.found.setdefault(taker.node, []).append((value, taker, place))
                elif is_inner or key in plan.inner:
                    seen |= above
                    waiting += above
                else:
                    self.is_known = False
        return self

    def assume(self) -> OffGraph:
        """Finds uses without a proof: tensors without a graph are assumed to be the batch, and axis 0 the samples."""
        ran = self.ran
        found = Meetings(
            ran.graph, ran.leaves, ran.given, ran.fixed, self.samples, covered=ran.covered(), ends=ran.ends, assumed=True
        )
        for meeting in found.find().found:
            shapes = [x.shape for x in made(meeting.taker.node)]
            layouts = [likeliest(shape, self.samples, (0,)) for shape in shapes] if self.samples else []
            place = Place(AXES, tuple(layouts), is_decided=False)
            self.found.setdefault(meeting.taker.node, []).append((meeting.value, meeting.taker, place))
        return self

    def attach(
        self, edge_of: Callable[[str], Edge], forward: int, receive: Receive, recomputed_in: Pass | None = None
    ) -> None:
        """Sends the gradients at these nodes to ``receive``.  recomputed_in: the pass that made the nodes"""
        for node, use in self.uses(edge_of, forward):
            use.recomputed_in = None if recomputed_in is None else weakref.ref(recomputed_in)
            graph = GraphAlive()
            use.graph = weakref.ref(graph)
            hook = AtNode(use, graph, receive)
            put_on(node, hook)
            self.hooks.append((node, hook))

    @property
    def is_told(self) -> bool:
        """Whether the sample of every row is known."""
        return None not in self.labels.values()

    @property
    def is_unseen(self) -> bool:
        """Whether some use had no gradient when the plan was proven."""
        return any(met[0][2].is_unseen for met in self.found.values())

    @cached_property
    def labels(self) -> dict[Node, Tensor | None]:
        """The sample of each row, at nodes where no layout gives it; None where it is unknown."""
        wanted = [node for node, met in self.found.items() if met[0][2].kind in (ROWS, ENTRIES)]
        routes = self.ran.routes(self.plan, self.samples) if wanted else None
        told = self.ran.labels
        return {node: told[node] if node in told else routes.rows(node) if routes else None for node in wanted}

    def uses(self, edge_of: Callable[[str], Edge], forward: int) -> Iterator[tuple[Node, NodeUse]]:
        for number, (node, met) in enumerate(self.found.items()):
            place, graph = met[0][2], GraphAlive()
            yield (
                node,
                NodeUse(
                    node=node.name(),
                    values=[self._value(value, taker) for value, taker, _ in met],
                    edges={name: edge_of(name) for value, taker, _ in met for name in self._names(value, taker)},
                    slots=len(made(node)),
                    forward=forward,
                    key=(*self.key, number),
                    samples=self.samples,
                    layouts=place.layouts,
                    is_unseen=place.is_unseen,
                    precision=_coarsest([node, *(inner for value, _, _ in met for inner in _inside(value))]),
                    labels=self.labels.get(node),
                    graph=weakref.ref(graph),
                    plan=self.plan,
                    documents=self.documents,
                    why_refused=self._why_refused(met),
                ),
            )

    def _names(self, value: Value, taker: Taker) -> list[str]:
        """The parameters of a value whose rows are read here."""
        return sorted(self.keys.below(value.node).difference(self.by_rule.get((taker.node, taker.place), ())))

    def _why_refused(self, met: list[tuple[Value, Taker, Place]]) -> str:
        names = {name for value, _, _ in met for name in self.keys.below(value.node)} if self.refused else ()
        return next((self.refused[name] for name in names if name in self.refused), "")

    def _value(self, value: Value, taker: Taker) -> ValueUse:
        names, is_complex = self._names(value, taker), dtype_of(value).is_complex
        if type(value.node) is Leaf:
            return ValueUse(taker.place, shape_of(value), {names[0]: None}, is_complex)
        leaves = {name: leaf for leaf, name in self.ran.leaves.items() if name in names}
        if len(leaves) == 1 and (steps := _steps(value)) is not None:
            return ValueUse(taker.place, shape_of(value), dict.fromkeys(leaves, partial(_stepwise, steps)), is_complex)
        transposed = Transposed(value, leaves)
        ways = dict.fromkeys(leaves, transposed.pull)
        return ValueUse(taker.place, shape_of(value), ways, is_complex, transposed.make)


def fit(layouts: Sequence[Layout | None], node: Node, samples: int) -> bool:
    """Whether the sizes of a node's outputs fit the layouts."""
    return all(at is None or at.fits_shape(x.shape, samples) for at, x in zip(layouts, made(node)))


def _inside(value: Value) -> set[Node]:
    """The nodes between a value and its parameters."""
    found, waiting = set[Node](), [value.node]
    while waiting:
        node = waiting.pop()
        if node not in found and type(node) is not Leaf:
            found.add(node)
            waiting += [behind.node for behind in inputs_of(node)]
    return found


def _coarsest(nodes: Sequence[Node]) -> torch.dtype | None:
    """The lowest-precision dtype among the nodes' outputs."""
    dtypes = {x.dtype for node in nodes for x in made(node) if x.dtype.is_floating_point}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _steps(value: Value) -> list[Callable[[Form], Form]] | None:
    """The changes to a value's form, node by node, if all nodes on the way are views; else None."""
    found = []
    while type(value.node) is not Leaf:
        behind = list(inputs_of(value.node))
        make = STEPS.get(value.node.name())
        if make is None or len(behind) != 1:
            return None
        if (step := make(value.node, value.number, shape_of(behind[0]))) is None:
            return None
        found.append(step)
        (value,) = behind
    return found


def _stepwise(steps: Sequence[Callable[[Form], Form]], name: str, form: Form) -> Form:
    for step in steps:
        form = step(form)
    return form


class Transposed:
    """φ's vector-Jacobian product, in a graph of its own that the user's passes don't free.

    φ'(θ)ᵀ u is linear in u.  Differentiate its product with v by u: the gradient by v of that is φ'(θ)ᵀ again.
    """

    def __init__(self, value: Value, leaves: Mapping[str, Any]) -> None:
        self.names, self.exists = list(leaves), True
        self._of: tuple[Value, list[Any]] | None = (value, list(leaves.values()))

    def make(self) -> bool:
        """Makes the graph, during a pass, when it arrives at the value.

        Before that, weights may not be gathered; afterwards φ is freed.  Returns whether torch has the second derivative."""
        if self._of is None:
            return self.exists
        (value, leaves), self._of = self._of, None
        parameters, own = [leaf.variable for leaf in leaves], made(value.node)[value.number]
        with torch.enable_grad(), Switch.paused_here():
            u = torch.zeros(own.shape, dtype=own.dtype, device=own.device, requires_grad=True)
            edges = [GradientEdge(leaf, 0) for leaf in leaves]
            # Not leaves: a derivative must not accumulate into these.
            down = torch.autograd.grad([GradientEdge(value.node, value.number)], edges, [u.clone()], create_graph=True)
            self.v = [torch.zeros_like(p, requires_grad=True) for p in parameters]
            try:
                # torch divides these gradients by counts, but not the gradients of gradients.
                self.exists = not any(getattr(node, f"{SAVED}scale_grad_by_freq", False) for node in _inside(value))
                (self.up,) = torch.autograd.grad(down, u, [v.clone() for v in self.v], create_graph=True)
            except RuntimeError as error:
                if "derivative for" not in str(error):
                    raise
                self.exists = False
        self.parameters = [p.detach() for p in parameters]
        return self.exists

    def pull(self, name: str, form: Form) -> Form:
        at = self.names.index(name)
        return Chained(form, partial(self._pulled, self.v[at]), self.parameters[at].shape, self.parameters[at])

    def _pulled(self, v: Tensor, rows: Tensor, batched: bool) -> Tensor:
        options: dict[str, Any] = {"retain_graph": True, "create_graph": rows.requires_grad and torch.is_grad_enabled()}
        try:
            with torch.enable_grad():
                return torch.autograd.grad(self.up, v, rows.to(self.up.dtype), is_grads_batched=batched, **options)[0]
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise StaleRecord(
                f"{', '.join(self.names)}: changed in place after the forward (or another tensor did that its value is made "
                "of), and per-sample gradients need the old value. Read them before optimizer.step() and before another "
                "forward."
            ) from error
