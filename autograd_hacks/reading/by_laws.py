"""Reads a finished forward by the laws of its nodes: where the samples are in each call of a layer, where parameters meet the
batch, and whether samples mix.

Everything here holds for this forward.  A forward whose graph, roots and values are those of an earlier one is read as that
one was, since labels are a function of these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.forward import Noted
from autograd_hacks.capture.off_graph import OffGraph, Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.uses import packed_into
from autograd_hacks.graph.label import At, Entries, Label, One, Owned, Several, entries, viewed
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.roots import fits, frontier
from autograd_hacks.graph.trace import LEAF, Trace
from autograd_hacks.graph.walk import Memory, walked
from autograd_hacks.probe.owners import Weights
from autograd_hacks.probe.plan import AXES, ENTRIES, NOT_OF_BATCH, ROWS, Place, Plan
from autograd_hacks.probe.planner import Known
from autograd_hacks.reading.independence import show_independent
from autograd_hacks.reading.inner_losses import sums_samples
from autograd_hacks.reading.labelling import Hypothesis, usual_layouts
from autograd_hacks.reading.proof import batch_axes, grads_kept, hypotheses, is_known, place_by_sizes, why_mixed
from autograd_hacks.rules.table import axes_for, rule_for
from autograd_hacks.support.graph import Taker, Value, is_users
from autograd_hacks.support.internals import sequence_number
from autograd_hacks.support.layout import Layout, likeliest, samples_of_rows

Where = Layout | Tensor
"""Where samples are in a value: a layout, or the sample of each entry on axis 0."""


@dataclass
class Read:
    """What laws say of a forward.  Nodes are numbered as in the trace.

    places: of the calls, in their order
    rows: the sample of each row, by the number of a call
    uses: by node, the values that it takes there, as (node, output, input), and the place
    labels: the sample of each row or entry, by node
    by_rule: for some uses, by node and input, the parameters whose rows a layer's rule gives there
    mixed: the parameters' leaves behind which samples mix, with the node at which they do
    """

    places: list[Place] = field(default_factory=list)
    rows: dict[int, Tensor] = field(default_factory=dict)
    uses: dict[int, tuple[list[tuple[int, int, int]], Place]] = field(default_factory=dict)
    labels: dict[int, Tensor] = field(default_factory=dict)
    by_rule: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    mixed: dict[int, str] = field(default_factory=dict)


class Reader:
    """Reads a forward under one hypothesis.

    places: where samples are in some values
    batch: the arguments that have samples, with their axes
    """

    def __init__(
        self, ran: Ran, samples: int, places: Mapping[Value, Where], batch: Sequence[tuple[Tensor, int]], memo: Memo
    ) -> None:
        self.ran, self.samples, self.batch = ran, samples, batch
        roots = list(
            dict.fromkeys([*places, *(Value(x.grad_fn, x.output_nr) for x in ran.outputs if x.grad_fn is not None)])
        )
        own = {id(p) for p in ran.parameters.values()}
        self.trace = Trace(roots, own, ran.ends)
        labels = {n: self._label(roots[n], at) for n, at in enumerate(places.values())}
        memory = Memory(lambda: ran.fixed, {_address(x) for x, _ in batch})
        asks = any(
            kind.entry is kind.law is None and is_users(node) for kind, node in zip(self.trace.kinds, self.trace.nodes)
        )
        with grads_kept(ran) if asks else nullcontext():  # a Function may run a backward pass of its own
            self.walk = memo.walk(self.trace, labels, samples, memory)
            settled = list[int]()
            while self.walk.deferred:
                settled += self.walk.deferred
                self.walk = walked(self.trace, labels, samples, memory, settled)
        self.number = {node: k for k, node in enumerate(self.trace.nodes)}

    def _label(self, root: Value, at: Where) -> Label:
        shape: Any = (
            root.node.variable.shape if hasattr(root.node, "variable") else root.node._input_metadata[root.number].shape
        )
        if self.samples == 1:
            return One(0)
        if isinstance(at, Tensor):
            return Entries(at.view([-1, *[1] * (len(shape) - 1)]))
        size = shape[at.axis] // self.samples
        outer, inner = {"": (1, 1), "N·T": (1, size), "T·N": (size, 1)}[at.fold]
        return At(at.axis, outer, inner)

    def read(self) -> Read:
        found = Read()
        for number, noted in enumerate(self.ran.noted):
            found.places.append(self._place(number, noted, found))
        apart = self.ran.taken_apart()
        for number, noted in enumerate(self.ran.noted):
            if noted.call in apart:
                found.places[number] = Place(NOT_OF_BATCH)
        self._find_uses(found)
        if self.walk.mixed:
            mix = next((own for own in self.walk.mixes if own.node >= 0), None)
            at = self.trace.kinds[mix.node].name if mix is not None else "an output"
            found.mixed = dict.fromkeys(self.walk.mixed, f"{at} ({mix.why})" if mix is not None and mix.why else at)
        return found

    def _find_uses(self, found: Read) -> None:
        trace, covered, leaves = self.trace, dict[int, set[int]](), self.ran.leaves
        below = _Below(trace, {self.number[leaf] for leaf in leaves if leaf in self.number})
        for noted, place in zip(self.ran.noted, found.places):
            if place.kind != NOT_OF_BATCH:
                names = {edge.name for edge in noted.call.edges.values()}
                own = {self.number[leaf] for leaf, name in leaves.items() if name in names and leaf in self.number}
                for node in self.ran.inside(noted):
                    if (k := self.number.get(node)) is not None:
                        covered.setdefault(k, set()).update(own)
        waiting = [(k, place) for k, place, _ in self.walk.uses if k >= 0]
        for k, place in waiting:  # the list grows
            edge = trace.edges[k][place]
            if edge is None or not (names_below := below[edge[0]]):
                continue
            j, output = edge
            is_inside = k in covered and (trace.kinds[j] is LEAF or j in covered)
            if is_inside and self.samples == 1 and trace.kinds[j] is not LEAF:
                waiting += [(j, n) for n in range(len(trace.edges[j]))]  # to what the layer was given
                continue
            if is_inside:  # the layer's rule gives the rows of its own parameters
                if names_below <= covered[k]:
                    continue
                found.by_rule[k, place] = covered[k]
            if k not in found.uses:
                found.uses[k] = [], self._place_of_node(k, found)
            if (j, output, place) not in found.uses[k][0]:
                found.uses[k][0].append((j, output, place))

    def _at(self, noted: Noted, slot: int) -> tuple[Label, torch.Size] | None:
        """The label of a call's output and its shape."""
        for node, hook in noted.hooks:
            if hook.slot == slot:
                k = self.number.get(node)
                label = None if k is None else self.walk.labels[k][hook.number]
                made: Any = None if k is None else self.trace.shapes[k][hook.number]
                if isinstance(label, Owned) and tuple(made) != tuple(hook.shape):
                    label = viewed(label, made, hook.shape, self.samples)
                return label, hook.shape
        return None

    def is_own(self, node: Node) -> bool:
        """Whether a node's outputs are made of parameters alone."""
        return (k := self.number.get(node)) is not None and self.walk.own[k]

    def _place(self, number: int, noted: Noted, found: Read) -> Place:
        """Where the samples are in a call's outputs."""
        call, layer, samples = noted.call, noted.call.layer, self.samples
        known = {slot: own for slot in range(call.slots) if (own := self._at(noted, slot)) is not None}
        labels = {slot: label for slot, (label, _) in known.items() if label is not None}
        usual = usual_layouts(noted, samples)
        is_own = any(self.is_own(node) for node, _ in noted.hooks)
        if any(isinstance(label, Several) for label in labels.values()) or (is_own and (samples == 1 or not labels)):
            return Place(NOT_OF_BATCH)
        if not labels:
            return Place(AXES, usual, is_decided=False, is_unseen=samples > 1)
        rule, layouts, packed = rule_for(layer), list(usual), packed_into(call)
        if rule is not None and rule.count is not None and rule.count(layer, call.args, call.kwargs) % samples:
            return Place(NOT_OF_BATCH)
        if samples == 1:
            return Place(AXES, tuple(layouts))
        is_row_by_row = call.slots == 1 and rule is not None and rule.count is None and not rule.recomputes
        for slot, label in labels.items():
            shape, owned = known[slot][1], isinstance(label, Owned)
            assert owned
            if packed is not None and not slot:  # its rule knows the sample of each row
                if not _are(label, shape, samples, samples_of_rows(packed)):
                    return Place(NOT_OF_BATCH)
                continue
            at = layout_of(label, shape, samples)
            if at is not None and rule is not None and not rule.by_input and (slot == 0 or rule.axes is not None):
                allowed = axes_for(layer, len(shape)) if rule.axes is None else rule.axes(layer)[slot:][:1]
                at = at if at.axis in allowed else None
            if at is None:
                rows = rows_of(label, shape, samples) if is_row_by_row else None
                if rows is None:
                    return Place(NOT_OF_BATCH)
                found.rows[number] = rows
            layouts[slot] = at
        return Place(ROWS if number in found.rows else AXES, tuple(layouts))

    def _place_of_node(self, k: int, found: Read) -> Place:
        samples, shapes = self.samples, [own or () for own in self.trace.shapes[k]]
        if samples == 1:
            return Place(AXES, tuple([likeliest(shape, 1, range(len(shape))) for shape in shapes]))
        labels = [label if isinstance(label, Owned) else None for label in self.walk.labels[k]]
        layouts = [None if own is None else layout_of(own, shape, samples) for own, shape in zip(labels, shapes)]
        apart = [n for n, own in enumerate(labels) if own is not None and layouts[n] is None]
        if not apart:
            return Place(AXES, tuple(layouts))
        if sum(own is not None for own in labels) > 1:
            found.mixed |= dict.fromkeys(self.walk.mixed, self.trace.kinds[k].name)
        (n, *_), label = apart, labels[apart[0]]
        assert label is not None
        rows = rows_of(label, shapes[n], samples)
        own = entries(label, shapes[n], samples).clamp(min=0) if rows is None else rows
        found.labels[k] = own
        return Place(ENTRIES if rows is None else ROWS, ())

    def follow(self, found: Read, off: OffGraph) -> None:
        """Writes what was found into the calls of this forward and into the reader of its graph."""
        nodes, ran, samples = self.trace.nodes, self.ran, self.samples
        names = {leaf: name for leaf, name in ran.leaves.items()}
        refused = {names[nodes[k]]: why for k, why in found.mixed.items() if nodes[k] in names}
        for number, (noted, place) in enumerate(zip(ran.noted, found.places)):
            call = noted.call
            call.plan, call.samples, call.is_unseen = off.plan, samples, place.is_unseen
            call.layouts, call.labels = place.layouts, found.rows.get(number)
            if noted.is_empty:
                call.labels = torch.zeros(0, dtype=torch.long, device="cpu")
            call.why_refused = (
                next((refused[e.name] for e in call.edges.values() if e.name in refused), "") if refused else ""
            )
            if place.kind == NOT_OF_BATCH:
                call.edges = {}  # its rows come from where its output meets the batch
        for k, (values, place) in found.uses.items():
            node = nodes[k]
            off.found[node] = [(Value(nodes[j], output), Taker(node, at), place) for j, output, at in values]
        off.labels = {nodes[k]: own for k, own in found.labels.items()}
        off.refused = refused
        off.by_rule = {(nodes[k], at): {names[nodes[n]] for n in own} for (k, at), own in found.by_rule.items()}


def _address(x: Tensor) -> int:
    return id(x) if x.layout != torch.strided or x.is_nested or x.is_meta else x.untyped_storage().data_ptr()


class _Below:
    """The parameters on which a value depends, by their leaves."""

    def __init__(self, trace: Trace, leaves: set[int]) -> None:
        self.trace, self.leaves, self._known = trace, leaves, dict[int, frozenset[int]]()

    def __getitem__(self, k: int) -> frozenset[int]:
        if k not in self._known:
            seen, waiting = {k}, [k]
            while waiting:
                ahead = {edge[0] for edge in self.trace.edges[waiting.pop()] if edge is not None} - seen
                seen |= ahead
                waiting += ahead
            self._known[k] = frozenset(seen & self.leaves)
        return self._known[k]


def layout_of(label: Owned, shape: Sequence[int], samples: int) -> Layout | None:
    """A label as a layout; None if none says the same."""
    if isinstance(label, At):
        if label.outer == 1 or label.inner == 1:
            fold = "" if label.outer == label.inner == 1 else "N·T" if label.outer == 1 else "T·N"
            return Layout(label.dim, fold)
    return None


def rows_of(label: Owned, shape: Sequence[int], samples: int) -> Tensor | None:
    """The sample of each entry on axis 0; None if it changes along others."""
    if not shape:
        return None
    at = entries(label, shape, samples)
    flat = at.flatten(1) if at.ndim > 1 else at[:, None]
    rows = flat.amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    if not bool(((flat == rows[:, None]) | (flat < 0)).all()):
        return None
    return rows.expand(shape[0]).clamp(min=0)


def _are(label: Owned, shape: Sequence[int], samples: int, rows: Tensor) -> bool:
    """Whether entries on axis 0 belong to given samples."""
    at = entries(label, shape, samples, rows.device)
    return bool(((at == rows.view([-1, *[1] * (len(shape) - 1)])) | (at < 0)).all())


@dataclass
class Chosen:
    """A hypothesis with what laws say under it."""

    hypothesis: Hypothesis
    reader: Reader
    out_of_order: bool  # whether the arguments have the samples elsewhere

    @property
    def is_mixed(self) -> bool:
        return self.out_of_order or bool(self.reader.walk.mixed)


def _under(ran: Ran, known: Known, hypothesis: Hypothesis, memo: Memo) -> Chosen:
    batch = batch_axes(ran, known, hypothesis)
    places = {ran.value(at) if isinstance(at, int) else at: where for at, where in hypothesis.places.items()}
    reader = Reader(ran, hypothesis.samples, places, batch, memo)
    given = {_address(x): (x, at % x.ndim) for x, at in batch if x.ndim and x.layout == torch.strided and not x.is_nested}
    is_counted = hypothesis.counted_at is not None or hypothesis.samples < 2
    is_wrong = not is_counted and fits(reader.trace, reader.walk, given, hypothesis.samples) is False
    return Chosen(hypothesis, reader, is_wrong)


def read_forward(recorder: Recorder, known: Known, ran: Ran) -> tuple[int | None, OffGraph | None]:
    """Reads a finished forward.  Returns N, or None if nothing shows it, and the reader of its graph."""
    plan, memo = known.plan, recorder.planner.memo
    best: Chosen | None = None
    for hypothesis in sorted(hypotheses(known, ran), key=lambda own: not is_known(plan, own)):
        if best is not None and not best.is_mixed:
            break
        chosen = _under(ran, known, hypothesis, memo)
        best = chosen if best is None or not chosen.is_mixed else best
    if best is None:
        recorder.watch_hooks(None, known.samples or 2)
        place_by_sizes(plan, ran, known.samples)
        return known.samples, None
    mixed_outputs: list[int] = []
    if best.is_mixed:
        best, mixed_outputs = _without_mixed(ran, known, best, memo)
    found = best.reader.read()
    if best.out_of_order:
        found.mixed |= dict.fromkeys(
            [n for leaf in ran.leaves if (n := best.reader.number.get(leaf)) is not None], "an argument"
        )
    mixed_outputs += _losses_that_mix(recorder, ran, best)
    off = OffGraph(ran, plan, best.hypothesis.samples)
    _fill(plan, ran, best, found, mixed_outputs)
    best.reader.follow(found, off)
    labels = {sequence_number(node): own for node, own in zip(best.reader.trace.nodes, best.reader.walk.labels)}
    recorder.watch_hooks(labels, best.hypothesis.samples)
    for slot, x in enumerate(ran.outputs):
        if x.grad_fn is not None and slot not in best.hypothesis.places and best.reader.is_own(x.grad_fn):
            recorder.backward.watch_penalty(x.grad_fn, off.keys.below(x.grad_fn))
    return best.hypothesis.samples, off


def _without_mixed(ran: Ran, known: Known, best: Chosen, memo: Memo) -> tuple[Chosen, list[int]]:
    """Leaves out the outputs in which samples mix."""
    places = best.hypothesis.places
    losses = [slot for slot, x in enumerate(ran.outputs) if slot not in places and x.grad_fn is not None]

    def numbers(slots: Iterable[int | Value]) -> list[int]:
        return list(dict.fromkeys(n for at in slots for n in ([at] if isinstance(at, int) else losses)))

    if len(places) == 1:
        return best, numbers(places)
    alone = {at: _under(ran, known, replace(best.hypothesis, places={at: where}), memo) for at, where in places.items()}
    left = {at: places[at] for at, own in alone.items() if not own.is_mixed}
    if not left or len(left) == len(places):
        return best, numbers(places)
    return _under(ran, known, replace(best.hypothesis, places=left), memo), numbers(places.keys() - left.keys())


def _losses_that_mix(recorder: Recorder, ran: Ran, chosen: Chosen) -> list[int]:
    """The losses that the model computes itself and that aren't sums over samples, by their numbers."""
    places, samples, found = chosen.hypothesis.places, chosen.hypothesis.samples, list[int]()
    for slot, x in enumerate(ran.outputs) if samples > 1 else ():
        if x.grad_fn is None or slot in places or x.numel() != 1 or chosen.reader.is_own(x.grad_fn):
            continue
        behind = {
            ran.value(at) if isinstance(at, int) else at: where for at, where in places.items() if isinstance(where, Layout)
        }
        added_up = frontier([ran.value(slot)])
        if added_up is not None and all(own in behind or chosen.reader.is_own(own[0]) for own in added_up):
            continue
        draws = torch.Generator().manual_seed(samples)
        weights = Weights(samples, draws, ran.dtypes)
        with recorder.backward.silent():
            if not behind or sums_samples(x, behind, weights, draws)[0] is False:
                found.append(slot)
    return found


def _fill(plan: Plan, ran: Ran, chosen: Chosen, found: Read, mixed_outputs: Sequence[int]) -> None:
    """Keeps what messages and the next forward's hypotheses need."""
    hypothesis, reader = chosen.hypothesis, chosen.reader
    outputs = [hypothesis.places.get(slot) for slot in range(len(ran.outputs))]
    plan.outputs = tuple([at if isinstance(at, Layout) else None for at in outputs])
    plan.axis, plan.counted_at, plan.counted_leaf = hypothesis.axis, hypothesis.counted_at, hypothesis.counted_leaf
    of_model = {id(p) for p in ran.parameters.values()}
    plan.returns_parameters = any(
        id(x) in of_model or (x.grad_fn is not None and reader.is_own(x.grad_fn)) for x in ran.outputs
    )
    plan.mixed_outputs, plan.pending = tuple(mixed_outputs), False
    names = {reader.number[leaf]: name for leaf, name in ran.leaves.items() if leaf in reader.number}
    mixed = {names[k]: why for k, why in found.mixed.items() if k in names}
    plan.mixing = why_mixed(ran, mixed, mixed_outputs) if mixed or mixed_outputs else ""
    plan.refused = dict.fromkeys(mixed, plan.mixing)
