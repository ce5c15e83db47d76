"""Reads a finished forward by the laws of its nodes: where the samples are in each call of a layer, where parameters meet
the batch, and whether samples mix.

Everything here holds for this forward.  A forward whose graph, roots and values are those of an earlier one is read as that
one was, since labels are a function of these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.arrivals import Link
from autograd_hacks.capture.calls import packed_into
from autograd_hacks.capture.kinds import Facts, Whose
from autograd_hacks.capture.log import Noted
from autograd_hacks.capture.ran import Ran
from autograd_hacks.capture.uses import Planned, ValueUse
from autograd_hacks.capture.ways import Way, way_of
from autograd_hacks.formulas.table import rule_for
from autograd_hacks.graph.label import NOBODY, At, Label, One, Owned, Several, entries, viewed
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.roots import Where, fits, label_of
from autograd_hacks.graph.trace import LEAF
from autograd_hacks.graph.walk import Memory, Walk, walked
from autograd_hacks.reading.fed import COPY, Taken, argument_of, has_formulas, is_fed, is_recomputed, taken_by
from autograd_hacks.support.graph import Leaf, Value, is_users, made, shape_of
from autograd_hacks.support.layout import Layout, likeliest, samples_of_rows
from autograd_hacks.support.parts import memory_of
from autograd_hacks.support.restored import restored


@dataclass
class Read(Facts):
    """What laws say about a forward.  Nodes are numbered as in the trace."""

    calls: Sequence[Whose | None] = ()
    # By node, the values that it takes there, as (node, output, input), and whose its outputs are.
    uses: dict[int, tuple[list[tuple[int, int, int]], Whose]] = field(default_factory=dict)
    # For some uses, by node and input, the parameters whose rows a layer's rule gives there.
    by_rule: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    mixed: dict[int, str] = field(default_factory=dict)  # by a parameter's leaf behind which samples mix, where they do
    inside: dict[int, set[str]] = field(default_factory=dict)  # by node in a call, the parameters whose rows its rule gives
    unsure: frozenset[str] = frozenset()  # the parameters of calls whose rules may see other values than autograd
    links: Sequence[Link] = ()  # see `Reader.links`
    linked: set[str] = field(default_factory=set)  # of which parameters these are
    compared: set[str] | None = None  # see `Walk`; None until somebody looks
    planned: dict[int, Planned] | None = None  # by node of a use, what follows from the graph; None until somebody looks
    takers: Sequence[int] = ()  # the nodes that take a parameter


class Reader:
    """Reads a forward under one hypothesis.

    places: where samples are in some values
    batch: the arguments that have samples, with their axes
    """

    def __init__(
        self, ran: Ran, samples: int, places: Mapping[Value, Where], batch: Sequence[tuple[Tensor, int]] = (),
        memo: Memo | None = None,
    ) -> None:  # fmt: skip
        self.ran, self.samples, self.places, self.batch = ran, samples, places, batch
        outputs = [ran.value(n) for n, x in enumerate(ran.outputs) if x.grad_fn is not None]
        roots = list(dict.fromkeys([*places, *outputs]))
        self.trace = ran.traced(roots)
        self.labels = labels = {n: label_of(at, shape_of(roots[n]), samples) for n, at in enumerate(places.values())}
        self.memory = memory = Memory(ran.is_fixed, {memory_of(x) for x, _ in batch})
        # A Function may run a backward pass of its own.
        asks = any(map(is_users, {type(node): node for node in self.trace.nodes}.values()))
        modules = (p for m in ran.modules for p in m._parameters.values() if p is not None)
        self._kept = partial(grads_kept, [*ran.parameters.values(), *modules]) if asks else nullcontext
        with self._kept():
            walk = walked if memo is None else memo.walk
            self.walk = walk(self.trace, labels, samples, memory)
        self.number, ran.trace = self.trace.number, self.trace
        self.given: dict[int, list[tuple[Tensor, int]]] = {}
        for x, at in batch:
            has_strides = bool(x.ndim) and x.layout == torch.strided and not x.is_nested
            if has_strides and x.stride(at) != 0 and x.shape[at] == samples:
                self.given.setdefault(memory_of(x), []).append((x, at % x.ndim))
        self.is_plain = True  # whether what is read of the calls besides the walk can be compared
        self.taken: list[Taken | None] = []  # by call, see `taken_by`
        self.key = self._key()

    def compares_with(self, usual: Layout) -> bool:
        """Whether each output that isn't at the usual place leads to a value of the batch to which one leads that is.

        The walk has compared their labels there."""
        ahead = {n: self.trace.behind([self.trace.roots[n][0]]) for n in range(len(self.places))}
        there = [n for n, at in enumerate(self.places.values()) if isinstance(at, Layout) and at == usual]
        are_tables = self.trace.tables(self.walk.of_parameters)  # a weight that a module keeps may have as many rows
        told = {k for n in there for k in ahead[n] if not are_tables[k]}
        compared = {k for k in told if any(isinstance(label, Owned) for label in self.walk.labels[k])}
        return bool(there) and all(n in there or not compared.isdisjoint(own) for n, own in ahead.items())

    def walked_again(self, labels: Mapping[int, Label], samples: int, *modes: str) -> Walk:
        """A walk that nothing keeps."""
        with self._kept():
            return walked(self.trace, labels, samples, self.memory, *([modes] if modes else []))

    def _key(self) -> tuple[tuple[Hashable, ...], ...]:
        """What is read of the calls besides the walk."""
        number, taken = self.number, self.taken
        key: list[tuple[Hashable, ...]] = [(*self.ran.leaves.values(),)]  # the names, which may have been exchanged
        for call, hooks, inputs in self.ran.noted:
            known, own, at, given = call.known, None, None, None
            if len(hooks) == 1:
                ((node, hook),) = hooks
                own = taken_by(node, hook, known)
            taken.append(own)
            if len(hooks) != 1 or not known.is_plain:
                self.is_plain = False
                key.append((known.ref, own))
                continue
            if own is not None and own[0] is COPY:
                at = tuple([(number.get(x), n) for x, n in argument_of(hook)])
            x = None if inputs or not call.args else call.args[0]
            if isinstance(x, Tensor) and (wholes := self.given.get(memory_of(x))) is not None:
                apart = [(own.shape, own.stride(), x.storage_offset() - own.storage_offset()) for own, _ in wholes]
                given = *apart, x.shape, x.stride()
            key.append((known.ref, number.get(node), hook.number, at, own, hook.shape, given))
        return tuple(key)

    def known(self) -> Read | None:
        """What was read of an equal forward before."""
        found = self.walk.read_as.get(self.key) if self.walk.read_as else None
        if found is None or fits(self.trace, self.walk, self.given, self.samples, found.uses) is False:
            return None
        self.ran.within.kind.plan = self.trace.plan
        return found

    def read(self) -> Read:
        found, apart, unsure, number, own = Read(), set[int](), set[str](), self.number, self.walk.of_parameters
        for n, (noted, nodes) in enumerate(zip(self.ran.noted, self.ran.inside)):
            inside = [k for k in map(number.get, nodes) if k is not None]
            # One sample's gradient comes to its parameters unsummed, so that of other uses with it.
            of_one = any(own[k] and isinstance(label, Owned) for k in inside for label in self.walk.labels[k])
            if is_fed(noted, self.taken[n]) and not (of_one and self._is_used_outside(noted, inside, of_one)):
                continue
            if has_formulas(noted, inside, self.trace, self.walk) or self._is_used_outside(noted, inside, of_one):
                apart.add(n)
            elif not is_recomputed(noted, nodes):
                unsure.update(noted.call.known.names)
        found.calls = [None if n in apart else self._whose(noted) for n, noted in enumerate(self.ran.noted)]
        found.unsure = frozenset(unsure)
        at, why = self.mixing(self.walk)
        found.mixed = dict.fromkeys(self.walk.mixed, f"{at} ({why})" if why else at or "an output")
        self._find_uses(found)  # may find more
        return found

    def mixing(self, walk: Walk) -> tuple[str, str]:
        """The name of a node at which samples mix, "" if none is known; and what was found there, if it isn't plain."""
        found = [mix for mix in walk.mixes if mix.node >= 0] if walk.mixes else ()
        return (self.trace.kinds[found[0].node].name, found[0].why) if found else ("", "")

    @cached_property
    def takers(self) -> Mapping[int, Sequence[tuple[int, int, int]]]:
        """By node, who takes its outputs: nodes, -1 for a loss; the number of their input; and the number of the output."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        taken = ((edge, k, place) for k, ahead in enumerate(self.trace.edges) for place, edge in enumerate(ahead))
        for edge, k, place in (*taken, *((root, -1, 0) for root in self.trace.roots)):  # the loss brings gradient to roots
            if edge is not None:
                found.setdefault(edge[0], []).append((k, place, edge[1]))
        return found

    def _is_used_outside(self, noted: Noted, inside: Collection[int], of_one: bool) -> bool:
        """Whether a call's inner values are used outside of it, by a derivative that the forward takes.

        Its rule doesn't see these uses, so its nodes give the rows."""
        # Of parameters alone it makes what has uses of its own, where samples' gradients are summed.
        made = (k for k in inside if of_one or not self.walk.of_parameters[k])
        used = {(k, at) for k in made for j, _, at in self.takers.get(k, ()) if j >= 0 and j not in inside}
        return not used <= {(self.number.get(node), hook.number) for node, hook in noted.hooks}

    def _find_uses(self, found: Read) -> None:
        trace, covered = self.trace, found.inside
        for noted, nodes, whose in zip(self.ran.noted, self.ran.inside, found.calls):
            for node in nodes if whose is not None else ():
                if (k := self.number.get(node)) is not None:
                    covered.setdefault(k, set()).update(noted.call.known.names)
        waiting = [(k, place) for k, place, *_ in self.walk.uses if k >= 0]
        for k, place in waiting:  # the list grows
            edge = trace.edges[k][place]
            if edge is None or not (names_below := self.below(edge[0])):
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
                found.uses[k] = [], self._whose_of_node(k, found)
            if (j, output, place) not in found.uses[k][0]:
                found.uses[k][0].append((j, output, place))

    def links(self, found: Read) -> Sequence[Link]:
        """Which nodes bring a parameter all of its gradient, so that what arrives must be what they have made.

        A parameter that the forward uses once gets its gradient from one node, or through nodes that pass it on to it alone
        (casts of autocast, parametrisations).  A gradient to which anything else adds is another tensor."""
        read = {(k, place, j) for k, (values, _) in found.uses.items() for j, _, place in values}
        made, within = dict[tuple[int, bool, int], list[tuple[int, str | int]]](), self.ran.within
        for leaf, name in self.ran.leaves.items():
            is_compared = leaf in self.number and name in (within.compared or ()) and name not in within.unsure
            for link in self._path_to(self.number[leaf], name, read, found.inside) if is_compared else ():
                made.setdefault((link.node, link.is_first, link.output), []).extend(link.made)
        return [Link(k, tuple(makes), is_first, output) for (k, is_first, output), makes in made.items()]

    def _path_to(
        self, leaf: int, name: str, read: Collection[tuple[int, int, int]], inside: Mapping[int, Collection[str]]
    ) -> list[Link]:
        """The links to a parameter.

        read: nodes at which rows are read, with the place and the node of what they take there    inside: see `Read`"""
        path, at, receiver, is_begun = list[Link](), leaf, cast("str | int", name), False
        while len(met := self.takers.get(at, [])) == 1:
            k, place, number = met[0]
            if path:  # a node that passes on what it gets
                path[-1] = path[-1]._replace(output=number)
            if k < 0 or is_users(self.trace.nodes[k]):  # a Function may not be linear, so its rows are compared
                break
            if not self.walk.of_parameters[k]:
                whole = path if is_begun else [*path, Link(k, ((place, receiver),), True, 0)]
                return whole if (k, place, at) in read or name in inside.get(k, ()) else []
            # What ``F.linear`` makes of its weight, where nobody else can add to it.
            is_begun = self.trace.kinds[k].name == "TBackward0" and k in inside
            path.append(Link(k, ((place, receiver),), is_begun, 0))
            at, receiver = k, k
        return []

    def is_own(self, node: Node) -> bool:
        """Whether a node's outputs are made of parameters alone."""
        return (k := self.number.get(node)) is not None and self.walk.of_parameters[k]

    def is_in_order(self, value: Value, expected: Label) -> bool:
        """Whether what arrives at a value is of the samples whose entries these are."""
        k = self.number[value.node]
        return agree(self.walk.labels[k][value.number], expected, self.trace.shapes[k][value.number] or (), self.samples)

    def _whose(self, noted: Noted) -> Whose | None:
        """Whose a call's outputs are; None if its rule gives no rows, because they aren't of the batch or lie otherwise."""
        call, layer, samples = noted.call, noted.call.layer, self.samples
        known = dict[int, tuple[Label, torch.Size]]()  # by output
        for node, hook in noted.hooks:
            k = self.number.get(node)
            label, made = (None, ()) if k is None else (self.walk.labels[k][hook.number], self.trace.shapes[k][hook.number])
            if isinstance(label, Owned) and tuple(made) != tuple(hook.shape):
                label = viewed(label, made, hook.shape, samples)
            known[hook.slot] = label, hook.shape
        labels = {slot: label for slot, (label, _) in known.items() if isinstance(label, Owned)}
        is_own = any(self.is_own(node) for node, _ in noted.hooks)
        if any(isinstance(label, Several) for label, _ in known.values()) or (is_own and (samples == 1 or not labels)):
            return None
        if not labels:
            return Whose(noted.usual_layouts(samples), is_unseen=samples > 1)
        packed, rows, rule = packed_into(call), None, rule_for(layer)
        counted = None if rule is None or rule.count is None else rule.count(layer, call.args, call.kwargs)
        if (packed is not None and packed.batch_sizes[0] != samples) or (counted or 0) % samples:
            return None  # its rule gives rows of sequences
        owners = (n for slot, own in labels.items() for n in entries(own, known[slot][1], samples).unique().tolist())
        if not noted.is_batched and len({*owners, NOBODY}) < 3:  # a sample by itself, where the rule wants an axis
            return None
        # All entries belong to one sample, or there are none, as of an expert that got no samples.
        is_empty = all(0 in shape for _, shape in known.values())
        if samples == 1 or any(0 in shape for _, shape in known.values()):
            return Whose(noted.usual_layouts(samples), is_unseen=is_empty)
        layouts = list(noted.usual_layouts(samples) if len(labels) < call.slots else [None] * call.slots)
        is_row_by_row = call.slots == 1 and rule is not None and rule.count is None and not rule.recomputes
        for slot, label in labels.items():
            shape = known[slot][1]
            if packed is not None and not slot:  # its rule knows the sample of each row
                if not agree(label, label_of(samples_of_rows(packed), shape, samples), shape, samples):
                    return None
                continue
            at = layout_of(label)
            if at is not None and rule is not None and (slot == 0 or rule.axes is not None):
                allowed = rule.axes_of(layer, len(shape)) if rule.axes is None else rule.axes(layer)[slot:][:1]
                at = at if at.axis in allowed else None
            if at is None:
                rows = rows_of(label, shape, samples) if is_row_by_row else None
                if rows is None:
                    return None
            layouts[slot] = at
        return Whose(tuple(layouts), rows)

    def _whose_of_node(self, k: int, found: Read) -> Whose:
        samples, shapes = self.samples, [own or () for own in self.trace.shapes[k]]
        if samples == 1 or any(0 in shape for shape in shapes):
            guessed = tuple([likeliest(shape, samples, range(len(shape))) for shape in shapes])
            return Whose(guessed, is_unseen=all(0 in shape for shape in shapes))
        labels = [label if isinstance(label, Owned) else None for label in self.walk.labels[k]]
        layouts = [None if own is None else layout_of(own) for own in labels]
        apart = [n for n, own in enumerate(labels) if own is not None and layouts[n] is None]
        if not apart:
            return Whose(tuple(layouts))
        owned = [own for own in labels if own is not None]
        if owned[1:] and (len({*owned}) > 1 or not isinstance(owned[0], One)):
            behind = [j for j in self.trace.behind([k]) if self.trace.kinds[j] is LEAF]
            found.mixed |= dict.fromkeys(behind, self.trace.kinds[k].name)
        n, label = apart[0], owned[0]
        rows = None if owned[1:] else rows_of(label, shapes[n], samples)
        return Whose((), entries(label, shapes[n], samples).clamp(min=0) if rows is None else rows)

    @cached_property
    def below(self) -> Callable[[int], frozenset[str]]:
        """Returns the parameters on which a node's outputs depend, by its number."""
        names = {self.number[leaf]: name for leaf, name in self.ran.leaves.items() if leaf in self.number}
        return cache(lambda k, behind=self.trace.behind: frozenset([names[j] for j in behind([k]) if j in names]))

    def _planned(
        self, k: int, values: Sequence[tuple[int, int, int]], whose: Whose, found: Read, ways: Callable[..., Way | None]
    ) -> Planned:
        """What follows from the graph about the use at a node.  values, whose: see `Read`"""
        uses, nodes = list[ValueUse](), self.trace.nodes
        for j, number, place in values:
            own, value = tuple(sorted(self.below(j) - found.by_rule.get((k, place), set()))), Value(nodes[j], number)
            uses.append(ValueUse(place, shape_of(value), own, None if type(nodes[j]) is Leaf else ways(value, own)))
        every = tuple(dict.fromkeys([name for use in uses for name in use.names]))
        ids, node = frozenset([id(self.ran.parameters[name]) for name in every]), nodes[k]
        return Planned(node.name(), len(made(node)), tuple(uses), every, every, whose, ids, is_users(node))

    def follow(self, found: Read) -> None:
        """Writes what was found into this forward."""
        nodes, ran, within, names = self.trace.nodes, self.ran, self.ran.within, self.ran.leaves
        within.samples, ran.trace = self.samples, self.trace
        within.refused = {names[nodes[k]]: within.mixing or why for k, why in found.mixed.items() if nodes[k] in names}
        if ran.arguments:  # a forward, and not what a loss or a derivative adds to one
            within.facts = found
            within.leaves = dict(zip(map(id, map(ran.parameters.__getitem__, names.values())), names))
        for noted, whose in zip(ran.noted, found.calls):
            if whose is None:  # its rows come from where its output meets the batch
                noted.call.forget()
                for _, hook in noted.hooks:
                    hook.live = None
        if found.planned is None:
            ways = cache(lambda value, own: way_of(value, {ran.leaf_of[name]: name for name in own}))
            found.planned = {k: self._planned(k, *own, found, ways) for k, own in found.uses.items()}
            own, edges = {k for k in self.trace.leaves if nodes[k] in names}, self.trace.edges
            found.takers = [k for k, ahead in enumerate(edges) if any(e is not None and e[0] in own for e in ahead)]
        ran.takers = found.takers
        ran.uses |= {nodes[k]: use for k, use in found.planned.items()}


def layout_of(label: Owned) -> Layout | None:
    """A label as a layout; None if none says the same."""
    if isinstance(label, At) and (label.outer == 1 or label.inner == 1):
        return Layout(label.dim, "" if label.outer == label.inner == 1 else "N·T" if label.outer == 1 else "T·N")
    return None


def rows_of(label: Owned, shape: Sequence[int], samples: int) -> Tensor | None:
    """The sample of each entry on axis 0; None if it changes along others."""
    if not shape:
        return None
    at = entries(label, shape, samples)
    flat = at.flatten(1) if at.ndim > 1 else at[:, None]
    rows = flat.amax(1) if flat.shape[1] else flat.new_zeros(len(flat))
    return rows.expand(shape[0]).clamp(min=0) if bool(((flat == rows[:, None]) | (flat < 0)).all()) else None


def agree(label: Label, expected: Label, shape: Sequence[int], samples: int) -> bool:
    """Whether what arrives belongs to the expected samples."""
    if label is None or not isinstance(label, Owned) or not isinstance(expected, Owned):
        return label is None
    at = entries(label, shape, samples)
    return label == expected or bool(((at == entries(expected, shape, samples, at.device)) | (at < 0)).all())


@contextmanager
def grads_kept(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A context that restores ``.grad``, because a user's function may run its own backward pass inside backward."""
    grads = {p: p.grad for p in parameters if p.is_leaf}

    def undo() -> None:
        for p, grad in grads.items():
            p.grad = grad

    with restored(undo):
        for p in grads:
            p.grad = None
        yield
