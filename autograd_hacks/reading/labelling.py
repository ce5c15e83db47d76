"""Finds the sample that each gradient in a forward's graph belongs to, from labelled passes and a hypothesis about where the
samples are."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.utils.rnn import PackedSequence

from autograd_hacks.capture.forward import Noted
from autograd_hacks.capture.off_graph import Ran
from autograd_hacks.capture.uses import LayerCall, packed_into
from autograd_hacks.probe.meetings import Follows, Meetings, memory_of
from autograd_hacks.probe.owners import NOBODY, Verdict, Weights, judged
from autograd_hacks.probe.plan import AXES, ENTRIES, NOT_OF_BATCH, ROWS, Place
from autograd_hacks.probe.routes import Routes
from autograd_hacks.rules.table import axes_for, rule_for
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.graph import Value, made, operands_of
from autograd_hacks.support.layout import Layout, candidates, likeliest, samples_of_rows
from autograd_hacks.support.parts import part_of, undivided
from autograd_hacks.support.philox import random_like
from autograd_hacks.support.sweep import Grads, sweep
from autograd_hacks.support.trees import tensors_of

Where = Layout | Tensor
"""Where samples are in an output: a layout, or the sample of each entry on axis 0."""

Key = tuple[Any, int]
"""A call and the number of its tensor, or a node and the number of its output."""


@dataclass
class Hypothesis:
    """Where samples may be.  axis: in the arguments    samples: N    places: in the outputs, by number"""

    axis: int | None
    samples: int
    places: Mapping[int | Value, Where]  # also in the tensors from which the model's own losses are computed
    counted_at: int | None = None  # the output whose axis 0 gives N
    counted_leaf: int | None = None  # the argument that gives N, if not the first

    @property
    def keeps_axis(self) -> bool:
        """Whether the outputs have the samples on the same axis as the arguments."""
        return all(isinstance(at, Layout) and at == Layout(self.axis or 0) for at in self.places.values())


@dataclass
class Found:
    """The findings of the passes, if a hypothesis is true."""

    hypothesis: Hypothesis
    calls: dict[LayerCall, Place] = field(default_factory=dict)
    nodes: dict[Node, Place] = field(default_factory=dict)
    labels: dict[LayerCall | Node, Tensor] = field(default_factory=dict)  # the sample of each entry, if no layout gives it
    is_chosen: bool = False  # whether values selected rows, so that a layout fits by chance only
    checkpoints: list[Place] = field(default_factory=list)  # of reentrant ones, in the order of the graph
    mixed: dict[str, str] = field(default_factory=dict)  # parameters at which samples mix, with the nodes there
    meetings: Meetings | None = None
    unsure: bool = False  # whether something had no gradient, or too little
    is_doubtful: bool = False  # whether samples mix in a tensor that may not belong to them


class Passes:
    """Backward passes that start with G and with w ∘ G at the outputs, and what they show if a hypothesis is true.

    batch: the arguments that have samples, with their axes
    assumed: see `Meetings`
    """

    def __init__(
        self,
        ran: Ran,
        batch: Sequence[tuple[Tensor, int]],
        hypothesis: Hypothesis,
        draws: torch.Generator,
        assumed: bool = False,
    ) -> None:
        self.assumed = assumed
        self.ran, self.batch, self.hypothesis, self.samples = ran, batch, hypothesis, hypothesis.samples
        self.weights = Weights(self.samples, draws, ran.dtypes)
        self.given: dict[Value, list[Tensor]] = {}
        for at, where in hypothesis.places.items():
            value = ran.value(at) if isinstance(at, int) else at
            like: Any = ran.outputs[at] if isinstance(at, int) else made(at.node)[at.number]
            g = random_like(like, draws)
            weights = (self.weights.of_pass(number).to(g) for number in range(self.weights.passes))
            own = [g, *(g * over(g, w, where) for w in weights)]
            before = self.given.get(value)
            self.given[value] = own if before is None else [x + y for x, y in zip(before, own)]
        self.arrived: dict[str, Tensor] = {}  # gradients at parameters, in the pass with the first weights
        self.grads: dict[Key, Tensor] = {}  # gradients at calls and nodes, in the pass without weights
        self.verdicts: dict[Key, Verdict] = {}
        self.looked_at: set[Node] | None = None

    def run(self) -> Found:
        """Runs the passes.  Runs them again if some calls turn out to belong to no sample, for the nodes behind these."""
        open_calls: set[LayerCall] = self.ran.taken_apart()
        while True:
            found = self._run(open_calls)
            others = {call for call, place in found.calls.items() if place.kind == NOT_OF_BATCH} - open_calls
            if not others:
                return found
            open_calls |= others

    def _run(self, open_calls: Set[LayerCall]) -> Found:
        ran, found = self.ran, Found(self.hypothesis)
        covered = ran.covered(open_calls)
        calls = [noted for noted in ran.noted if noted.call not in open_calls]
        first = self._meetings(covered, {})
        nodes = list(dict.fromkeys([*first.climbed, *first.open(), *ran.checkpoints]))
        if self.looked_at is None or not self.looked_at.issuperset(nodes):
            # Position embeddings turn out to be open.  If they are treated so from the start, one sweep is enough.
            bare = {noted.call for noted in ran.noted if self._is_bare(noted)} | open_calls
            others = self._meetings(ran.covered(bare), {}).climbed if bare != open_calls else ()
            self._look(ran.noted, list(dict.fromkeys([*nodes, *others])))
        by_node = {node: own for node in nodes if (own := self._of_all(node))}
        for noted in calls:
            found.calls[noted.call] = self._place(noted, found)
            made_by = next((v for slot in range(noted.call.slots) if (v := self.verdicts.get((noted.call, slot)))), None)
            if made_by is not None:  # outputs of layers show what is known about their arguments
                by_node = dict.fromkeys(ran.inside(noted), made_by) | by_node
        found.calls |= {call: Place(NOT_OF_BATCH) for call in open_calls}
        owned = [noted for noted in calls if self._is_owned(noted, found)]
        meetings = self._meetings(covered, by_node, owned)
        if alike := _like_meetings(meetings, by_node):
            meetings = self._meetings(covered, by_node, owned, alike)
        if self.samples == 1:  # all gradients belong to that sample, even those of values of parameters only
            following = set[Node]()
            while new := self._inside(meetings, calls) - following:
                following |= new
                meetings = self._meetings(covered, by_node, owned, alike, following)
            inner = {taker.node for _, taker in meetings.inner}
            of_parameters = (noted.call for noted in calls if not inner.isdisjoint(ran.inside(noted)))
            found.calls |= dict.fromkeys(of_parameters, Place(NOT_OF_BATCH))
        found.meetings = meetings
        for meeting in meetings.found:
            node = meeting.taker.node
            found.nodes[node] = self._place_of_node(node, found)
        found.checkpoints = [self._place_of_node(node, found) for node in ran.checkpoints]
        found.unsure = any(not place.is_decided for place in (*found.calls.values(), *found.nodes.values()))
        for value, taker in meetings.mixed.items():
            found.mixed |= dict.fromkeys(meetings.keys.below(value.node), taker.node.name())
        if not meetings.returned.isdisjoint(self.given):  # a way to the samples that avoids all meetings
            for node in meetings.doubtful():
                found.mixed |= dict.fromkeys(meetings.keys.below(node), node.name())
        found.is_doubtful = bool(meetings.doubtful())
        found.mixed |= self._out_of_order(found)
        return found

    def _inside(self, meetings: Meetings, calls: Sequence[Noted]) -> set[Node]:
        """Nodes that make values of parameters inside layer calls that also depend on the batch, for example of a learnt
        first state and the layer's weight.  The rule gives that weight's rows, so the state must meet the batch here."""
        inner, found = {taker.node for _, taker in meetings.inner}, set[Node]()
        for noted in calls:
            if any(meetings.follows(node) is Follows.YES for node, _ in noted.hooks):
                found |= inner.intersection(self.ran.inside(noted))
        return found

    def _is_bare(self, noted: Noted) -> bool:
        """Whether a call got no argument of the model and no node's output."""
        given = {memory_of(x) for x, _ in self.batch}
        return not noted.inputs and given.isdisjoint(map(memory_of, noted.call.given))

    def _look(self, calls: Sequence[Noted], nodes: Sequence[Node]) -> None:
        """Runs the passes: which sample each gradient at calls and nodes belongs to, and the gradients of parameters."""
        self.grads, self.verdicts, self.arrived = {}, {}, {}
        self.looked_at = set(nodes)
        watched: dict[Node, list[tuple[Key, int, torch.Size | None]]] = {}
        for noted in calls:
            for node, hook in noted.hooks:
                watched.setdefault(node, []).append(((noted.call, hook.slot), hook.number, hook.shape))
        for node in nodes:
            watched.setdefault(node, []).extend(((node, number), number, None) for number in range(len(made(node))))
        leaves = self.ran.leaves

        def arrive(node: Node, passes: list[Grads]) -> None:
            if node in leaves and (grad := passes[1][0]) is not None:
                self.arrived[leaves[node]] = grad.detach()
            for key, number, shape in watched.get(node, ()):
                x, *others = (own[number] for own in passes)
                if x is not None and shape is not None:  # the node may have folded the call's output
                    x, others = x.reshape(shape), [y if y is None else y.reshape(shape) for y in others]
                if x is not None:
                    self._judge(key, x, *others)

        with torch.no_grad(), without_autocast(self.ran.outputs):
            sweep(self.given, arrive, self.ran.ends, to_leaves=1)

    def _judge(self, key: Key, arrived: Tensor, *others: Tensor | None) -> None:
        x, weighted = undivided(arrived), [None if y is None else undivided(y) for y in others]
        axes = list(range(x.ndim))
        if isinstance(key[0], LayerCall) and not key[1]:
            axes = list(dict.fromkeys([*axes_for(key[0].layer, x.ndim), *axes]))
        layouts = candidates(x.shape, self.samples, [axis for axis in axes if axis < x.ndim])
        self.grads[key], self.verdicts[key] = arrived, judged(x, weighted, self.weights, layouts)

    def _of_all(self, node: Node) -> Verdict | None:
        """The common verdict for all outputs of a node."""
        found = [own for n in range(len(made(node))) if (own := self.verdicts.get((node, n))) is not None]
        if len(found) < 2:
            return found[0] if found else None
        first = max(found, key=lambda verdict: verdict.owners)
        return replace(first, is_mixed=any(verdict.is_mixed for verdict in found))

    def _is_owned(self, noted: Noted, found: Found) -> bool:
        """Whether some output of a call belongs to samples."""
        known = (self.verdicts.get((noted.call, slot)) for slot in range(noted.call.slots))
        return found.calls[noted.call].kind != NOT_OF_BATCH and any(v is not None and v.owners for v in known)

    @cached_property
    def _copies(self) -> set[int]:
        """The addresses of saved tensors that hold an argument's numbers, cast or reordered by a view."""
        by_size: dict[int, list[Tensor]] = {}
        for x, _ in self.batch:
            if x.is_floating_point() and x.layout == torch.strided and not (x.is_nested or x.is_meta) and x.numel() > 1:
                by_size.setdefault(x.numel(), []).append(x.detach())
        kept = (y for node in self.ran.graph.nodes for y in operands_of(node) if y.is_floating_point())
        alike = ((x, y) for y in kept for x in by_size.get(y.numel(), ()) if y.layout == torch.strided)
        return {memory_of(y) for x, y in alike if memory_of(x) != memory_of(y) and _has_numbers_of(x, y)}

    def _meetings(
        self,
        covered: Mapping[Node, Collection[str]],
        verdicts: Mapping[Node, Verdict],
        owned: Collection[Noted] = (),
        others: Collection[Node] = (),
        following: Collection[Node] = (),
    ) -> Meetings:
        ran, given = self.ran, {memory_of(x) for x, _ in self.batch} | self._copies
        # Layers copy their arguments, so their nodes don't show that they depend on the batch.
        of_batch = [*owned, *(noted for noted in ran.noted if not given.isdisjoint(map(memory_of, noted.call.given)))]
        inside = {node for noted in of_batch for node in ran.inside(noted)}.union(others)
        known = verdicts.get, covered, ran.ends, self.assumed, ran.of_parameters, inside, following
        return Meetings(ran.graph, ran.leaves, given, ran.fixed, self.samples, *known).find()

    def _place(self, noted: Noted, found: Found) -> Place:
        """Where the samples are in a call's outputs."""
        call, layer = noted.call, noted.call.layer
        usual, packed = usual_layouts(noted, self.samples), packed_into(call)
        known = {slot: self.verdicts[call, slot] for slot in range(call.slots) if (call, slot) in self.verdicts}
        if not any(verdict.owners or verdict.is_mixed for verdict in known.values()):
            return Place(AXES, usual, is_decided=False, is_unseen=self.samples > 1 and bool(known))
        if any(verdict.is_mixed for verdict in known.values()):
            return Place(NOT_OF_BATCH)
        rule, layouts = rule_for(layer), list(usual)
        if rule is not None and rule.count is not None and rule.count(layer, call.args, call.kwargs) % self.samples:
            return Place(NOT_OF_BATCH)
        for slot, verdict in known.items():
            if packed is not None and not slot:  # its rule knows the sample of each row
                if not _are_rows_of(packed, verdict, self.grads[call, slot], self.samples):
                    return Place(NOT_OF_BATCH)
                continue
            if rule is not None and not rule.by_input and (slot == 0 or rule.axes is not None):
                ndim = self.grads[call, slot].ndim
                allowed = axes_for(layer, ndim) if rule.axes is None else rule.axes(layer)[slot:][:1]
                verdict = replace(verdict, layouts=tuple(at for at in verdict.layouts if at.axis in allowed))
            if verdict.layout is None and (len(known) > 1 or call.slots > 1 or not self._keep_rows(call, verdict, found)):
                return Place(NOT_OF_BATCH)
            layouts[slot] = verdict.layout
            if verdict.layout is not None and self._are_chosen(noted.hooks[0][0], verdict.layout):
                can_tell = call.slots == 1 and rule is not None and rule.count is None and not rule.recomputes
                found.is_chosen |= not can_tell
                if can_tell:
                    size = self.grads[call, slot].shape[0]
                    found.labels[call] = verdict.layout.rows(size, self.samples, torch.device("cpu"))
        kind = ROWS if call in found.labels else AXES
        return Place(kind, tuple(layouts), all(verdict.is_decided for verdict in known.values()))

    @cached_property
    def _routes(self) -> Routes:
        at = self.hypothesis.places.items()
        made_at = [(self.ran.value(n) if isinstance(n, int) else n, where) for n, where in at]
        return Routes(self.ran.graph, {v.node: where for v, where in made_at if isinstance(where, Layout)}, self.samples)

    def _are_chosen(self, node: Node, layout: Layout) -> bool:
        """Whether rows fit a layout by chance only, because a node selected them by their values."""
        return self.samples > 1 and not layout.axis and self._routes.are_chosen(node)

    def _keep_rows(self, call: LayerCall, verdict: Verdict, found: Found) -> bool:
        """Whether each entry on axis 0 belongs to one sample.  If so, stores the labels."""
        rule = rule_for(call.layer)
        if verdict.labels is None or rule is None or rule.count is not None or rule.recomputes:
            return False
        if verdict.labels.ndim < 2:  # one sample, without an axis
            return False
        rows = rows_of(verdict.labels)
        if rows is not None:
            found.labels[call] = rows
        return rows is not None

    def _place_of_node(self, node: Node, found: Found) -> Place:
        count = len(made(node))
        known = [self.verdicts.get((node, number)) for number in range(count)]
        layouts = [None if v is None else v.layout for v in known]
        if not any(v is not None and (v.owners or v.is_mixed) for v in known):
            usual = (likeliest(x.shape, self.samples, range(len(x.shape))) for x in made(node))
            is_empty, is_unseen = all(0 in x.shape for x in made(node)), self.samples > 1 and any(known)
            return Place(AXES, tuple(usual), is_decided=False, was_empty=is_empty, is_unseen=is_unseen)
        labelled = [v.labels for v in known if v is not None and v.labels is not None]
        if count == 1 and layouts[0] is not None and self._are_chosen(node, layouts[0]):
            labelled = [layouts[0].rows(made(node)[0].shape[0], self.samples, torch.device("cpu"))]
        if labelled and count == 1:
            rows = rows_of(labelled[0])
            found.labels[node] = labelled[0] if rows is None else rows
            return Place(ENTRIES if rows is None else ROWS, (), known[0] is None or known[0].is_decided)
        return Place(AXES, tuple(layouts), all(v is None or v.is_decided or not v.owners for v in known))

    def _out_of_order(self, found: Found) -> dict[str, str]:
        """Parameters that meet the model's own arguments where samples are in another order or on another axis."""
        wrong, given = dict[str, str](), {memory_of(x): (x, at % x.ndim) for x, at in self.batch if x.ndim}
        if self.samples < 2 or found.meetings is None or self.hypothesis.counted_at is not None:
            return wrong

        def is_moved(operands: Iterable[Tensor], place: Place, labels: Tensor | None) -> bool:
            known = [at for x in operands if memory_of(x) in given and (at := _view_of(x, *given[memory_of(x)]))]
            if known and place.kind == ROWS and labels is not None and known[0].axis == 0:
                own = known[0].rows(len(labels), self.samples, labels.device)
                return len(own) != len(labels) or not bool(((labels == own) | (labels == NOBODY)).all())
            return bool(known) and place.is_decided and (place.kind != AXES or place.layouts[0] != known[0])

        for call, place in found.calls.items():
            rule = rule_for(call.layer)
            if place.kind != NOT_OF_BATCH and rule is not None and (rule.features or not (rule.axes or rule.count)):
                wrong |= {
                    e.name: call.place
                    for e in call.edges.values()
                    if is_moved(tensors_of(call.args)[:1], place, found.labels.get(call))
                }
        for meeting in found.meetings.found:
            node = meeting.taker.node
            if is_moved(operands_of(node), found.nodes[node], found.labels.get(node)):
                wrong |= dict.fromkeys(found.meetings.keys.below(meeting.value.node), node.name())
        return wrong


def _view_of(x: Tensor, of: Tensor, axis: int) -> Layout | None:
    """Where samples are in a view of a tensor that has them on an axis; None if strides don't show it."""
    if x.layout != torch.strided or x.is_nested or x.numel() != of.numel() or x.is_meta:
        return None
    samples, stride = of.shape[axis], of.stride(axis)
    for at, (size, own) in enumerate(zip(x.shape, x.stride())):
        if size == samples and own == stride:
            return Layout(at)
        if size > samples and size % samples == 0 and own * (size // samples) == stride:
            return Layout(at, "N·T")
        if size > samples and size % samples == 0 and own == stride:
            return Layout(at, "T·N")
    return None


def usual_layouts(noted: Noted, samples: int) -> tuple[Layout | None, ...]:
    """Where samples are in a call's outputs, judging by sizes."""
    is_packed_call, layer = packed_into(noted.call) is not None, noted.call.layer
    # No layout gives the samples of packed rows.
    shapes = {hook.slot: hook.shape for _, hook in noted.hooks if hook.slot or not is_packed_call}
    return tuple(
        likeliest(shapes[slot], samples, axes_for(layer, len(shapes[slot]))) if slot in shapes else None
        for slot in range(noted.call.slots)
    )


def _has_numbers_of(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors of the same size have the same numbers, and more than one distinct number."""
    x, y = part_of(x).to(y.dtype).flatten(), part_of(y).flatten()
    if bool((y == y[0]).all()):
        return False
    return torch.equal(x, y) or torch.equal(x.sort().values, y.sort().values)


def _like_meetings(meetings: Meetings, verdicts: Mapping[Node, Verdict]) -> list[Node]:
    """Nodes with the same key as a meeting that were not counted as meetings, as in a layer called sample by sample."""
    keys = meetings.keys
    met = {keys.of(meeting.value, meeting.taker) for meeting in meetings.found}
    alike = [taker.node for value, taker in meetings.inner if met and keys.of(value, taker) in met]
    return [node for node in alike if node in verdicts and not verdicts[node].is_mixed]


def _are_rows_of(packed: PackedSequence, verdict: Verdict, x: Tensor, samples: int) -> bool:
    """Whether gradients of packed rows belong to the samples of their own sequences."""
    rows = samples_of_rows(packed).to(x.device)
    if verdict.labels is not None:
        found = rows_of(verdict.labels)
        return found is not None and bool(((found == rows) | (found == NOBODY)).all())
    told = [at.rows(len(x), samples, x.device) for at in verdict.layouts if not at.axis]
    return any(torch.equal(own, rows) for own in told)


def rows_of(labels: Tensor) -> Tensor | None:
    """The sample of each entry on axis 0, from the samples of all entries; None if an entry has several."""
    if not labels.ndim:
        return None
    flat = labels.flatten(1) if labels.ndim > 1 else labels[:, None]
    rows = flat.amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    is_one = (flat == rows[:, None]) | (flat == NOBODY)
    return rows if bool(is_one.all()) else None


def over(x: Tensor, values: Tensor, at: Where) -> Tensor:
    """A value for each sample, shaped so that it multiplies a tensor.  values: N"""
    if isinstance(at, Layout):
        return at.over(x, values)
    return values[at.to(values.device)].view(-1, *[1] * (x.ndim - 1))
