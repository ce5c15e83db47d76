"""Reads a finished forward: finds the hypothesis about its samples that laws confirm, and what has no rows under it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.arrivals import Passed, own_hook
from autograd_hacks.capture.kinds import NESTED
from autograd_hacks.capture.log import INSIDE_PASS
from autograd_hacks.capture.ran import Ran, watch_penalty
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import A_BATCH, NO_BATCH
from autograd_hacks.formulas.table import rule_for
from autograd_hacks.graph.label import NOBODY, Entries, Label, Owned, entries, varying
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.roots import Where, fits, label_of
from autograd_hacks.graph.trace import Nested
from autograd_hacks.graph.walk import ZEROS
from autograd_hacks.probe.documents import Documents, unassigned
from autograd_hacks.probe.tape import MIXING
from autograd_hacks.reading.beyond import labels_by_node
from autograd_hacks.reading.certificate import check_rules
from autograd_hacks.reading.hypotheses import Hypothesis, as_before, batch_axes, tried
from autograd_hacks.reading.independence import is_shown
from autograd_hacks.reading.reader import Read, Reader
from autograd_hacks.support.graph import CHECKPOINT, Value, is_packed, line_of, shape_of
from autograd_hacks.support.layout import Layout

LAYERS = 4
"""How many readings of a graph are kept, for layers that became others: hooked again, or in another place."""
NO_SAMPLES = (
    f"{MIXING}, or may: nothing shows how many there are, since neither the model's arguments nor its outputs have an axis "
    "for them. Return the model's outputs, or a loss for each sample, and add up outside of the model: "
    f"autograd_hacks.backward(losses). {A_BATCH}"
)
LEAKING = "documents mix"
"""The beginning of messages that say so."""


@dataclass
class Chosen:
    """A hypothesis with what laws say under it."""

    hypothesis: Hypothesis
    reader: Reader
    in_order: bool | None  # whether the arguments have the samples there; None if parameters meet no argument itself
    found: Read | None = None  # what was read of an equal forward

    @property
    def is_shown(self) -> bool:
        """Whether an equal forward was read under the hypothesis, or the arguments' memory shows it."""
        shows = self.in_order is True and self.hypothesis.counted_at is None and self.hypothesis.samples > 1
        return self.found is not None or (shows and self.is_sure)

    @property
    def is_sure(self) -> bool:
        return not (self.is_mixed or self.reader.walk.by_values or self.lost())

    @property
    def is_mixed(self) -> bool:
        return self.in_order is False or bool(self.reader.walk.mixed)

    def lost(self) -> dict[int, Value]:
        """For each loss of the model's own: a value in it that isn't known to be a sum over samples, if there is one."""
        known, reader, losses = self.hypothesis.places, self.reader, self.hypothesis.losses
        every = ((slot, value) for slot, added in losses.items() for values in added.values for value in values)
        return {slot: value for slot, value in every if value not in known and not reader.is_own(value.node)}

    def replaces(self, before: Chosen) -> bool:
        """Whether this is what samples do, and not what a likelier hypothesis says.

        Features look like samples if there are N.  So where samples mix on the likelier axis, something must show the other:
        the arguments, or an output on their axis.
        """
        is_sure_enough = self.is_sure if before.reader.walk.by_values else not (self.is_mixed or self.lost())
        if before.is_sure or not is_sure_enough:
            return False
        return self.in_order is True or self.reader.compares_with(Layout(self.hypothesis.axis or 0))


def _under(ran: Ran, hypothesis: Hypothesis, memo: Memo) -> Chosen:
    batch, places = batch_axes(ran, hypothesis), {ran.value(at): where for at, where in hypothesis.places.items()}
    reader = Reader(ran, hypothesis.samples, places, batch, memo)
    if (found := reader.known()) is not None:
        return Chosen(hypothesis, reader, True, found)
    if hypothesis.counted_at is not None or hypothesis.samples < 2:
        return Chosen(hypothesis, reader, True)
    in_order = fits(reader.trace, reader.walk, reader.given, hypothesis.samples)
    if in_order is False and not reader.walk.mixes:  # a label may also speak of entries to which nothing comes
        reader.walk = reader.walked_again(reader.labels, hypothesis.samples, ZEROS)
        in_order = None if fits(reader.trace, reader.walk, reader.given, hypothesis.samples) else False
    is_loss_alone = bool(hypothesis.losses) and not any(isinstance(at, int) for at in hypothesis.places)
    if in_order is None and is_loss_alone and (reader.walk.by_values or _is_elsewhere(reader, hypothesis.axis or 0)):
        in_order = False  # nothing but sizes shows the samples
    expected = {value: label_of(Layout(), shape_of(value), reader.samples) for value in hypothesis.taken_from}
    is_taken_in_order = all(reader.is_in_order(value, label) for value, label in expected.items())
    return Chosen(hypothesis, reader, in_order if is_taken_in_order else False)


def _is_elsewhere(reader: Reader, axis: int) -> bool:
    """Whether the samples are along an axis of a parameter, which may be as long, or along another axis than the arguments'
    where parameters meet tensors without a graph."""
    trace, walk = reader.trace, reader.walk
    for k, edges in enumerate(trace.edges):
        own = [edge is not None and walk.of_parameters[edge[0]] for edge in edges]
        if walk.of_parameters[k] or not any(own):
            continue
        kind, outs = trace.kinds[k], trace.shapes[k]
        ins = [None if edge is None else trace.shapes[edge[0]][edge[1]] for edge in edges]
        for o, label in enumerate(walk.labels[k]):
            along = set(varying(label)) if isinstance(label, Owned) else set()
            if None in edges and along - {axis % max(1, len(outs[o] or ()))}:
                return True
            links = kind.entry.links(o, outs, ins, kind.named(trace.numbers[k])) if along and kind.entry else None
            if any(is_own and along.intersection(own_links) for is_own, own_links in zip(own, links or ())):
                return True
    return False


def read_forward(recorder: Recorder, ran: Ran) -> bool:
    """Reads a finished forward.  Returns whether it is still to be shown that its samples are independent."""
    try:
        _read(recorder, ran)
    except Nested:
        ran.within.refuse(ran.parameters, NESTED)
    return recorder.kinds.independent and not is_shown(recorder, ran)


def _read(recorder: Recorder, ran: Ran) -> None:
    within, memo = ran.within, recorder.kinds.memo
    best: Chosen | None = None
    before = None if (known := as_before(ran)) is None else _under(ran, known, memo)
    if before is not None and before.is_shown:
        best = before
    for hypothesis in tried(ran) if best is None else ():
        chosen = before if before is not None and hypothesis == before.hypothesis else _under(ran, hypothesis, memo)
        if best is None or chosen.replaces(best):
            best = chosen
        if best.is_sure:
            break
    if best is None:
        within.refuse(ran.parameters, NO_SAMPLES)
        return
    found = best.found
    if found is None or within.documents is not None:
        best, found = _in_full(recorder, ran, best)
    else:
        best.reader.follow(found)
    nodes, walk = best.reader.trace.nodes, best.reader.walk
    # Until rows agreed with whatever arrived they are compared with it; later it is enough that nothing else arrives.
    if found.compared is None:
        # Of what was read of the calls, what doesn't change with sizes.
        compared, at = walk.compared, (best.reader.key[0], *[own[:5] for own in best.reader.key[1:]])
        found.compared = compared[at] = compared.pop(at, set())
        if len(compared) > LAYERS:
            del compared[next(iter(compared))]
    within.compared = found.compared
    packed = [k for k in found.planned or () if is_packed(nodes[k], by_users=True)]
    within.unsure = found.unsure.union(*[found.planned[k].names for k in packed if found.planned])
    if within.compared and recorder.backward.wants_grad:
        if found.linked != within.compared:
            found.linked, found.links = {*within.compared}, best.reader.links(found)
        for link in () if packed else found.links:
            own_hook(nodes[link.node].register_hook(Passed(recorder.backward, link)))
    places = best.hypothesis.places
    within.places = [places.get(slot) for slot in range(len(ran.outputs))]
    ran.labels, ran.added = walk.labels, {at: where for at, where in places.items() if isinstance(at, Value)}
    within.mixes_at = best.reader.mixing(walk)[0]
    within.axis, within.counted_at = best.hypothesis.axis, best.hypothesis.counted_at
    if not within.mixing and within.kind.dependent is not None:
        within.mixing, within.mixed_outputs = within.kind.dependent
    recorder.watch_hooks(labels_by_node(best.reader), best.hypothesis.samples, ran.users_hooks)


def _in_full(recorder: Recorder, ran: Ran, best: Chosen) -> tuple[Chosen, Read]:
    """Reads a forward that is like none before, and keeps what was read for those that will be like it."""
    within, mixed_outputs, lost = ran.within, list[int](), best.lost()
    if best.is_mixed:
        best, mixed_outputs = _without_mixed(ran, best, recorder.kinds.memo)
    hypothesis, reader = best.hypothesis, best.reader
    found, samples = reader.read(), hypothesis.samples
    found.is_scaled = any(added.is_scaled for added in hypothesis.losses.values())
    if best.in_order is False:
        found.mixed |= dict.fromkeys([n for leaf in ran.leaves if (n := reader.number.get(leaf)) is not None], "an argument")
    outside = [slot for slot, x in enumerate(ran.outputs) if x.grad_fn is not None and slot not in hypothesis.places]
    of_parameters = [slot for slot in outside if reader.is_own(ran.value(slot).node)]
    of_batch = [slot for slot in outside if samples > 1 and slot not in {*of_parameters, *hypothesis.losses}]
    mixed_outputs += [slot for slot in (*lost, *of_batch) if slot not in mixed_outputs]
    if within.documents is not None:
        untold, within.untold = _note_leaks(ran, within.documents, best, found)
        mixed_outputs += untold
    nodes = reader.trace.nodes
    mixed = {ran.leaves[nodes[k]]: why for k, why in found.mixed.items() if nodes[k] in ran.leaves}
    returned = [n for n in mixed_outputs if n < ran.count]
    within.mixing = why_mixed(ran, mixed, mixed_outputs, lost) if mixed or (returned and not within.untold) else ""
    if any(reader.trace.kinds[mix.node].name == CHECKPOINT for mix in reader.walk.mixes if mix.node >= 0):
        within.mixing = INSIDE_PASS
    within.mixed_outputs = tuple(mixed_outputs)
    reader.follow(found)
    calls = (noted.call for noted, whose in zip(ran.noted, found.calls) if whose is not None)
    found.covered = frozenset([name for call in calls for name in call.known.names])
    if found.uses:
        _note_nodes(ran, reader, found)
    found.disproven = check_rules(ran, found.calls, samples) if not within.mixing else {}
    for slot in of_parameters:
        node = ran.value(slot).node
        watch_penalty(recorder.backward, node, reader.below(reader.number[node]))
    of_model = {id(p) for p in ran.parameters.values()}
    found.returns_parameters = bool(of_parameters) or any(id(x) in of_model for x in ran.outputs)
    layouts: dict[int | Value, Where] = {
        at: where for at, where in hypothesis.places.items() if isinstance(at, int) and isinstance(where, Layout)
    }
    is_plain = not (within.mixing or mixed_outputs or any(ran.outputs[slot].numel() == 1 for slot in outside))
    is_whole = is_plain and len(layouts) == len(hypothesis.places)  # nodes must not be held
    within.kind.hypothesis = replace(hypothesis, places=layouts, is_whole=is_whole, losses={}, taken_from=())
    if reader.is_plain and is_plain and not of_parameters and within.documents is None:
        reader.walk.read_as = dict([*reader.walk.read_as.items()][-LAYERS:]) | {reader.key: found}
    return best, found


def _without_mixed(ran: Ran, best: Chosen, memo: Memo) -> tuple[Chosen, list[int]]:
    """Leaves out the outputs in which samples mix."""
    places = best.hypothesis.places
    losses = [slot for slot, x in enumerate(ran.outputs) if slot not in places and x.grad_fn is not None]

    def numbers(slots: Iterable[int | Value]) -> list[int]:
        return list(dict.fromkeys(n for at in slots for n in ([at] if isinstance(at, int) else losses)))

    if len(places) == 1:
        return best, numbers(places)
    alone = {at: _under(ran, replace(best.hypothesis, places={at: where}), memo) for at, where in places.items()}
    left = {at: places[at] for at, own in alone.items() if not own.is_mixed}
    if len(left) == len(places):  # one may be a weight, such as a normalised one, and no output of samples
        of_batch = {at: where for at, where in places.items() if not best.reader.is_own(ran.value(at).node)}
        left = {at: where for at, where in of_batch.items() if alone[at].in_order is not None}
        left = left or {at: where for at, where in of_batch.items() if not isinstance(at, int) or at < ran.count}
    if not left or len(left) == len(places):
        return best, numbers(places)
    return _under(ran, replace(best.hypothesis, places=left), memo), numbers(places.keys() - left.keys())


def _note_leaks(ran: Ran, documents: Documents, chosen: Chosen, found: Read) -> tuple[list[int], str]:
    """Notes the parameters whose gradients mix documents.

    Returns the outputs whose entries no document is known for, and why not, if that is so of some"""
    reader, labels, untold, why = chosen.reader, dict[int, Label](), list[int](), ""
    if documents.is_of_tokens or not documents.count:
        return untold, why
    for n, (at, (k, output)) in enumerate(zip(chosen.hypothesis.places, reader.trace.roots)):
        shape = reader.trace.shapes[k][output] or ()
        numbers = torch.arange(1, documents.count + 1, device=documents.ids.device)
        own = documents.over(numbers[0].expand(*shape), numbers)  # 0 at padding
        if own is not None:
            labels[n] = Entries(own + NOBODY)
        elif isinstance(at, int):
            untold.append(at)
    if untold or not labels:
        why = (
            f"{LEAKING}: the model returned shape {tuple(ran.outputs[(untold or [0])[0]].shape)}, but the documents cover "
            f"{tuple(documents.ids.shape)} positions, so output entries can't be assigned to documents. Compute the loss "
            "from an output with an entry for each position."
        )
        documents.leaks.update({} if labels else dict.fromkeys(ran.parameters, why))
    if not labels or documents.most < 2:
        return untold, why
    walk = reader.walked_again(labels, documents.count)
    for k, names in _takers(ran, reader, found).items():
        for label, of_sample, shape in zip(walk.labels[k], reader.walk.labels[k], reader.trace.shapes[k]):
            layouts = () if of_sample is None else (Layout(), Layout(0, "N·T"))  # nothing arrives there
            by_sizes = (documents.owners(shape, where, documents.ids.device) for where in layouts)
            if (told := next((x for x in by_sizes if x is not None), None)) is None:
                continue
            # Another axis may have as many places as there are positions.  What padding gets is seen in the pass.
            own = entries(label, shape, documents.count, told.device) if isinstance(label, Owned) else None
            if own is None or bool(((own != told) & (own >= 0) & (told >= 0)).any()):
                documents.leaks.update(dict.fromkeys(names, unassigned(reader.trace.nodes[k].name(), shape)))
    at_node = reader.mixing(walk)[0] or "an output"
    for name in filter(None, (ran.leaves.get(reader.trace.nodes[k]) for k in walk.mixed)):
        documents.leaks[name] = (
            f"{LEAKING}: one document's loss depends on another document's tokens in the same sample, so {name} has no "
            f"gradients of single documents ({at_node}). Mask attention by document: give the model position_ids, a block "
            "mask or cu_seqlens, and use an attention that reads it."
        )
    return untold, why


def _takers(ran: Ran, reader: Reader, found: Read) -> dict[int, set[str]]:
    """By node of a use, the parameters that have rows from there."""
    names = {k: {name for j, _, _ in values for name in reader.below(j)} for k, (values, _) in found.uses.items()}
    for noted, whose in zip(ran.noted, found.calls):
        for node, _ in noted.hooks if whose is not None else ():
            names.setdefault(reader.number.get(node, -1), set()).update(noted.call.known.names)
    return {k: own for k, own in names.items() if k >= 0}


def _note_nodes(ran: Ran, reader: Reader, found: Read) -> None:
    """Notes which nodes read parameters, for messages."""
    nodes, paths = reader.trace.nodes, {x: one.call.known.path for one, own in zip(ran.noted, ran.inside) for x in own}
    for k, (values, _) in found.uses.items():
        at = k  # it is followed to the next call of a layer with a rule, or to the outputs
        while at >= 0 and nodes[at] not in paths:
            at = reader.takers[at][0][0]
        place = "the outputs" if at < 0 else f"the input of {paths[nodes[at]]!r}"
        text = f"{nodes[k].name()} at {place}"
        for name in {name for j, _, _ in values for name in reader.below(j)}:
            known = found.nodes.setdefault(name, [])
            known += [text] if text not in known else []


def why_mixed(ran: Ran, mixed: Mapping[str, str], mixed_outputs: Sequence[int], lost: Mapping[int, Value]) -> str:
    """How samples mix, as text for messages.  lost: see `Chosen.lost`"""
    for noted in ran.noted:
        rule = rule_for(noted.call.layer)
        if rule is not None and rule.mixes is not None and (why := rule.mixes(noted.call.layer, noted.call.training)):
            return f"{noted.call.place} {why}"
    if ran.noted and not ran.noted[0].is_batched:
        return f"{ran.noted[0].call.place}, which ran first, {NO_BATCH}. {A_BATCH}"
    if lost and not mixed:
        slot, value = next(iter(lost.items()))
        return (
            f"{MIXING}: output number {slot} of the model, of shape {tuple(ran.outputs[slot].shape)}, has no axis with the "
            "samples. A loss that the model computes itself must be a sum or a mean of values that have one, or the root "
            f"of one such sum. {value.node.name()}{line_of(value.node)} returned shape {tuple(shape_of(value))}, which has "
            "none. Return the model's outputs, or a loss for each sample, and add up outside of the model: "
            "autograd_hacks.backward(losses). " + A_BATCH
        )
    slots = ", ".join(f"{slot} (shape {tuple(ran.outputs[slot].shape)})" for slot in mixed_outputs)
    name, node = next(iter(mixed.items()), ("a parameter", "its node"))
    return (
        f"{MIXING}: the gradient at one sample's entries of output number {slots} of the model reaches other samples at "
        f"{node}, before {name}. This holds for every axis that was tried as the batch. If the batch is not axis 0 of the "
        "model's input, name its axis: add_hooks(model, batch_dim=...), with None for an argument that all samples share: "
        "batch_dim=(0, None). Compute a loss of single samples outside the model: backward(losses). " + A_BATCH
    )


def assume(ran: Ran) -> None:
    """Reads a forward whose outputs are assumed to have the samples on axis 0.

    Without samples, the graph is read as if it had one."""
    roots, samples = [(x, x.grad_fn) for x in ran.outputs if x.grad_fn is not None], ran.within.samples
    samples = next((x.shape[0] for x, _ in roots if x.ndim), None) if samples is None else samples
    if samples is None:
        return
    at = {Value(node, x.output_nr): Layout() for x, node in roots if not samples or Layout().fits(x, samples)}
    reader = Reader(ran, samples or 1, at)
    found, reader.samples = reader.read(), samples
    reader.follow(found)
    ran.within.unsure = found.unsure


ABOVE.read_forward, ABOVE.assume = read_forward, assume
