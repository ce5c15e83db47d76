"""A use of parameters in a forward, as plain data, and the gradients that a backward pass gave it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.kinds import Whose, Within
from autograd_hacks.capture.ways import Held, Stepwise, Way
from autograd_hacks.errors import A_BATCH, SamplesMixed, UnseenGradient
from autograd_hacks.forms import Dense, Form, Zero, add, gathered
from autograd_hacks.formulas.met import Kept, Met
from autograd_hacks.formulas.table import BY_OWNERS, NODES
from autograd_hacks.probe.documents import check_told
from autograd_hacks.support.graph import Value, dtype_of, kept_by, made
from autograd_hacks.support.layout import POSITIONS, Layout
from autograd_hacks.support.parts import undivided
from autograd_hacks.support.sweep import by_node
from autograd_hacks.support.trees import Versions, holds_numbers, version_of, versions_among


class Edge(NamedTuple):
    """A parameter and the node at which it ends the graph."""

    name: str  # the parameter's first name in the model
    parameter: Tensor
    node: Node


@dataclass(eq=False, slots=True)
class OutputGrads:
    """The gradients that one backward pass gave one use."""

    at: list[Tensor | None]  # for each tensor that the use made
    versions: list[int]  # of these gradients
    reached: tuple[str, ...] = ()  # the parameters that the pass reaches, by their names in the use
    # The arguments with their graph, if the gradients have one too: then rows can be differentiated.
    live: Any = None
    kept: Any = None  # what a node saved, taken before the pass frees it

    @property
    def first(self) -> Tensor:
        """The gradient at the first output that has one."""
        return next(grad for grad in self.at if grad is not None)

    def keep(self, forms: Any) -> None:
        """Takes the forms of a node's values, by input number or by name, or an exception to raise when they are read."""
        twice = "a backward pass came to one node of the graph twice, within a pass of its own. Repeat the step without that"
        self.kept = forms if self.kept is None else UnseenGradient(twice)

    @property
    def length(self) -> Tensor:
        """The 2-norm of all gradients together."""
        lengths = [torch.linalg.vector_norm(grad.abs(), dtype=torch.float64) for grad in self.at if grad is not None]
        return torch.linalg.vector_norm(torch.stack(lengths))


@dataclass(eq=False, kw_only=True)
class Use:
    """A place in the graph that gives rows of parameters.  It holds no graph."""

    edges: Mapping[str, Edge]  # the trainable parameters whose rows it gives, by their names in the use
    slots: int  # how many tensors it made
    known: Any  # what stays the same from forward to forward
    within: Within = field(repr=False)
    whose: Whose
    is_own: bool = True  # False if the layer was called by itself or by another model
    versions: Versions = field(default_factory=list)  # of its arguments
    is_first: bool = True  # whether no other forward hook ran before ours
    precision: torch.dtype | None = None  # autocast's dtype

    @property
    def why_refused(self) -> str:
        """Why its parameters have no rows in this forward."""
        refused = self.within.refused
        return next((refused[e.name] for e in self.edges.values() if e.name in refused), "") if refused else ""

    @property
    def what(self) -> str:
        """The use with its arguments, as text for messages."""
        return self.place

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the use is, as text for messages."""

    def batch_size(self, grads: OutputGrads) -> int:
        """The number of samples: as the model's arguments show, or else the number of rows."""
        if self.within.documents is not None:
            return self.within.documents.losses
        return self._rows(grads) if self.within.samples is None else self.within.samples

    def _rows(self, grads: OutputGrads) -> int:
        return 0

    @abstractmethod
    def _forms(self, grads: OutputGrads) -> Mapping[str, Form]: ...

    def forms(self, grads: OutputGrads) -> Mapping[str, Form]:
        """{name in the use: form} for the parameters that a pass has reached, with a row for each sample."""
        if self.within.samples is not None and (
            self.within.samples == 0 or (self.whose.is_unseen and self._is_silent(grads))
        ):
            edges = {local: self.edges[local].parameter.detach() for local in grads.reached}
            rows = self.within.samples if self.within.documents is None else self.within.documents.count
            return {local: Zero(rows, p.shape, p) for local, p in edges.items()}
        if self.within.documents is not None:
            self.within.documents.check_padding(grads.at, self.place)
        return self._forms(grads)

    def _is_silent(self, grads: OutputGrads) -> bool:
        """Whether a use to which no gradient leads from the outputs has none.  Raises UnseenGradient if it has some."""
        if not any(bool(g.any()) for g in grads.at if g is not None):
            return True
        raise UnseenGradient(
            f"{self.place}: the loss reads something of it that the model does not return, so the samples of its rows are "
            "unknown. Return it from forward together with the other outputs."
        )


def ready(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as rules expect it: in the parameters' dtype, whatever autocast made of it."""
    tensor = undivided(tensor)
    if type(tensor) is not Tensor and holds_numbers(tensor):  # of a user's tensor class
        tensor = tensor.as_subclass(Tensor)
    tensor = tensor if tensor.layout == torch.strided else tensor.to_dense()
    if tensor.dtype == dtype or not (tensor.is_floating_point() and dtype.is_floating_point):
        return tensor
    return tensor.to(dtype)


def _coarsest(dtypes: Set[torch.dtype]) -> torch.dtype | None:
    """The one of the lowest precision."""
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps) if floating[1:] else floating[0] if floating else None


class ValueUse(NamedTuple):
    """A value computed from parameters, as one input of a node."""

    place: int  # the number of the node's input
    shape: torch.Size
    names: tuple[str, ...]  # of the parameters
    way: Way | None  # how it follows from them; None if it is the parameter


class Planned(NamedTuple):
    """What follows from a graph about a use at one of its nodes."""

    node: str  # its name
    slots: int
    values: tuple[ValueUse, ...]
    locals: tuple[str, ...]  # of all parameters, their names in the use
    names: tuple[str, ...]  # and in the model, which are the same
    whose: Whose
    ids: frozenset[int]
    is_users: bool  # whether the node belongs to a user's Function


@dataclass(eq=False, kw_only=True)
class NodeUse(Use):
    """A node of the graph at which values of parameters meet the batch.

    Its forms are made when the gradient arrives, because afterwards the pass frees what the node saved.
    """

    known: Planned
    is_plain: bool  # whether it is torch's own node, in a batch

    @property
    def place(self) -> str:
        return f"{self.known.node}, which reads {', '.join(edge.name for edge in self.edges.values())}"

    def take(
        self, node: Node, grads: Sequence[Tensor | None], reached: Sequence[str]
    ) -> dict[int, Form | Mapping[str, Form]]:
        """The values' forms, by input number.  If there is no way back in steps: the forms of their parameters, by name.

        node: the node itself, with its saved tensors
        """
        found: dict[int, Any] = {}
        dtypes, met = {g.dtype for g in grads if g is not None}, self._met(node, grads)
        for value in self.known.values:
            if reached is self.known.locals or not set(value.names).isdisjoint(reached):
                form = None if met is None else self._by_formula(node, value, *met)
                found[value.place] = form = self._by_itself(node, value, grads) if form is None else form
                if (way := value.way) is not None:
                    ahead = way.nodes(node.next_functions[value.place][0])  # type: ignore[arg-type]  # it has a graph
                    dtypes |= {made(ahead[0])[way.output].dtype} | {x.dtype for k in way.computing for x in made(ahead[k])}
                    if (back := self._way(way, ahead)).calls_nodes:
                        found[value.place] = back.rows(form, {name: self.edges[name].parameter for name in value.names})
        forms = [own for form in found.values() for own in (form.values() if type(form) is dict else [form])]
        held = [x.detach() if x.requires_grad else x for form in forms for x in form.held]  # it may lead back to the node
        self.versions, self.precision = [*zip(held, versions_among(*held))], _coarsest(dtypes)
        return found

    def _way(self, way: Way, nodes: Sequence[Node]) -> Stepwise:
        """The way back from a value, made when a pass first arrives.  nodes: those between"""
        found = self.within.ways.get(id(way))
        if found is None or (torch.is_grad_enabled() and not found.is_live):
            found = way.bound(nodes, self._kept)
            self.within.ways |= {} if found.calls_nodes else {id(way): found}
        return found

    def _kept(self, node: Node, held: Held | None = None) -> Kept:
        """What a node saves, in the parameter's dtype.  held: gets its numbers that aren't indices, with their versions"""
        dtype, is_live = self._dtype, torch.is_grad_enabled()  # the pass makes a graph

        def kept(name: str) -> Any:
            x = kept_by(node, name)
            if not isinstance(x, Tensor):
                return x
            x = x.detach() if x.requires_grad and not is_live else x
            # A number changes no dtype, and modes that watch operations don't take it for a tensor.
            if type(x) is not Tensor or (x.ndim and (x.dtype is not dtype or x.layout is not torch.strided)):
                x = ready(x, dtype)
            if held is not None and (x.is_floating_point() or x.is_complex()):
                held.append((x, version_of(x)))
            return x

        return kept

    def _met(self, node: Node, grads: Sequence[Tensor | None]) -> tuple[Any, Any, Met] | None:
        """The node's formulas, and what they get except for the value; None if no formula covers the node."""
        arrived = [(slot, g) for slot, g in enumerate(grads) if g is not None]
        formula, by_owners = NODES.get(self.known.node), BY_OWNERS.get(self.known.node)
        (layouts, labels, _), within = self.whose, self.within
        if not (formula or by_owners) or len(arrived) != 1 or (labels is not None and labels.ndim > 1):
            return None
        ((slot, g),), documents = arrived, within.documents
        layout = Layout() if labels is not None else layouts[slot]
        if documents is not None:
            layout = None if labels is not None else documents.layout(g.shape, layout)
        if layout is None:
            return None
        rows = len(g) if labels is not None else documents.ids.numel() if documents is not None else within.samples or 0
        return formula, by_owners, Met(self._kept(node), ready(g, self._dtype), layout, rows, 0, g.shape)

    def _by_formula(self, node: Node, value: ValueUse, formula: Any, by_owners: Any, met: Met) -> Form | None:
        """The value's form; None if no formula covers it."""
        met.place, met.shape = value.place, value.shape
        labels, samples, g, layout = self.whose.labels, self.within.samples or 0, met.grad, met.layout
        form: Form | None = formula(met) if formula else None
        if by_owners and layout.axis == 0 and layout.fold != POSITIONS:
            owners = layout.rows(len(g), samples, g.device) if labels is None else labels.to(g.device)
            found: Form | None = by_owners(replace(met, samples=samples), owners)
            return found
        if form is not None and form.like.dtype.is_complex:
            taken = Value(*node.next_functions[value.place])  # type: ignore[arg-type]  # it has a graph
            form = form if dtype_of(taken).is_complex else Dense(form.dense().real.to(self._dtype))
        if form is not None and self.within.documents is not None:
            return self.within.documents.rows(form)
        return form if form is None or labels is None else gathered(form, labels, samples)

    @property
    def _dtype(self) -> torch.dtype:
        return self.edges[self.known.locals[0]].parameter.dtype

    def _by_itself(self, node: Node, value: ValueUse, grads: Sequence[Tensor | None]) -> Form:
        """The form from calling the node once for each sample's part of the gradients."""
        owners = [None if g is None else self._owners(slot, g) for slot, g in enumerate(grads)]
        if all(own is None for own in owners) and any(g is not None and bool(g.any()) for g in grads):
            raise SamplesMixed(f"{self.place}: it is unknown whose the gradient that arrived is. {A_BATCH}")
        count = (self.within.samples or 0) if self.within.documents is None else self.within.documents.count
        return Dense(by_node(node, value.place, grads, owners, count, value.shape, self.place))

    def _owners(self, slot: int, g: Tensor) -> Tensor | None:
        """The sample, or the document, of each entry of the gradient at an output; None if it is unknown."""
        layouts, of_rows, _ = self.whose
        layout = layouts[slot] if of_rows is None and slot < len(layouts) else None
        if self.within.documents is not None:
            own = self.within.documents.owners(g.shape, layout, g.device)
            return check_told(None, self.place, g.shape) if own is None else own  # type: ignore[return-value]  # it raises
        labels = of_rows if layout is None else layout.rows(g.shape[layout.axis], self.within.samples or 0, g.device)
        if labels is None:  # all entries may be one's own
            return g.new_zeros([1] * g.ndim, dtype=torch.long) if self.within.samples == 1 else None
        sizes = [-1 if n == (0 if layout is None else layout.axis) else 1 for n in range(g.ndim)]
        return (labels.view(sizes) if labels.ndim == 1 else labels).to(g.device)

    def _forms(self, grads: OutputGrads) -> Mapping[str, Form]:
        if isinstance(grads.kept, Exception):
            raise grads.kept
        found: dict[str, Form] = {}
        for value in self.known.values:
            if names := [name for name in value.names if name in grads.reached]:
                kept = grads.kept[value.place]
                if value.way is not None and isinstance(kept, Form):
                    kept = self.within.ways[id(value.way)].rows(kept, {name: self.edges[name].parameter for name in names})
                for name in names:
                    own = kept if isinstance(kept, Form) else kept[name]
                    found[name] = add([found[name], own]) if name in found else own
        return found
