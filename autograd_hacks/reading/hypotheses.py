"""Where the samples may be in the arguments and outputs of a forward, the likeliest first."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, product
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.capture.kinds import runs_time_first
from autograd_hacks.capture.ran import Ran
from autograd_hacks.graph.label import One
from autograd_hacks.graph.roots import Added, Where, frontier, picked
from autograd_hacks.probe.batch import Batch
from autograd_hacks.support.graph import Value, shape_of
from autograd_hacks.support.layout import Layout, candidates, is_time_first
from autograd_hacks.support.trees import is_packed

TRIES = 6
"""How many hypotheses about the samples' places in the outputs are tried."""


@dataclass
class Hypothesis:
    """Where samples may be.  axis: in the arguments    samples: N    places: in the outputs, by number"""

    axis: int | None
    samples: int
    places: Mapping[int | Value, Where]  # also in the tensors that the model's own losses add up
    counted_at: int | None = None  # the output whose axis 0 gives N
    counted_leaf: int | None = None  # the argument that gives N, if not the first
    is_whole: bool = True  # whether these are all places, and samples weren't mixed
    losses: Mapping[int, Added] = field(default_factory=dict)  # by output, what a loss adds up
    taken_from: Collection[Value] = ()  # values with the samples on axis 0, in order, if entries were picked from them

    @property
    def keeps_axis(self) -> bool:
        """Whether the outputs have the samples on the same axis as the arguments."""
        return all(isinstance(at, Layout) and at == Layout(self.axis or 0) for at in self.places.values())


def tried(ran: Ran) -> Iterator[Hypothesis]:
    """Hypotheses about a forward, the likeliest first of those that find samples in most outputs."""
    found = list(hypotheses(ran))
    most = max((len(own.places) for own in found), default=0)
    yield from sorted(found, key=lambda own: len(own.places) < most)


def as_before(ran: Ran) -> Hypothesis | None:
    """The hypothesis of the last forward of this kind.

    It spares the search, but says nothing: which one is believed must not depend on earlier forwards."""
    before: Hypothesis | None = ran.within.kind.hypothesis
    if before is None or not before.is_whole or ran.known is None:
        return None
    samples = ran.within.samples  # by its axis, see `Kinds.look`
    if before.counted_at is not None:
        samples = ran.outputs[before.counted_at].shape[0] if before.counted_at < len(ran.outputs) else None
    graphs = sum(x.grad_fn is not None for x in ran.outputs)  # an output that is new has samples, too, or is a loss
    if samples and graphs == len(before.places) and all(
        isinstance(at, int) and at < len(ran.outputs) and ran.outputs[at].grad_fn is not None
        and isinstance(where, Layout) and where.fits_shape(ran.outputs[at].shape, samples)
        for at, where in before.places.items()
    ):  # fmt: skip
        return before if samples == before.samples else replace(before, samples=samples)
    return None


def batch_axes(ran: Ran, hypothesis: Hypothesis) -> list[tuple[Tensor, int]]:
    """The arguments that have samples if a hypothesis is true, with their axes."""
    if ran.known is None or ran.within.samples is None or hypothesis.counted_at is not None:
        return [(x, 0) for x in ran.tensors]
    batch = ran.known.batch
    found = zip(batch.leaves, batch.axes_of_samples(hypothesis.axis, hypothesis.samples))
    return [(x.data if is_packed(x) else x, at) for x, at in found if at is not None]


def hypotheses(ran: Ran) -> Iterator[Hypothesis]:
    """Possible places of the samples in the arguments and outputs, the likeliest first."""
    assert ran.known is not None
    batch, given = ran.known.batch, ran.within.samples
    outputs = {slot: x for slot, x in enumerate(ran.outputs) if x.grad_fn is not None}
    axes: tuple[int | None, ...] = (ran.known.axis,)
    if ran.known.axis == 0 and runs_time_first(ran.modules, batch):
        # A layer by itself declares its own input's axis.  Nothing declares it for a whole model.
        axes = (1, 0) if is_time_first(ran.modules[0]) else (0, 1)
    # The arguments may not show N, or show it wrongly, as for a list of samples: then use the first output's size.
    first = next((slot for slot, x in outputs.items() if x.ndim and x.shape[0] and slot not in ran.packed), None)
    by_output: Hypothesis | None = None
    if first is not None and not (batch.axes is not None and any(axis is not None for axis in batch.axes)):
        samples = outputs[first].shape[0]
        places: dict[int | Value, Where] = {
            slot: Layout() for slot, x in outputs.items() if x.ndim and x.shape[0] == samples
        }
        by_output = Hypothesis(axes[0], samples, places, first)
        if samples in batch.lists and given != samples:
            yield by_output
    found = [hypothesis for axis in axes for hypothesis in on_axis(batch, axis, ran, outputs)]
    if len(axes) > 1:  # first an axis that outputs have too, that most arguments have, and that has several samples
        calls = (noted for noted in ran.noted if is_time_first(noted.call.layer))
        declared = {hook.shape[1] for noted in calls for _, hook in noted.hooks if len(hook.shape) > 2}
        if declared or not trains_time_first(ran):
            fits = (own for own in found if (own.samples in declared if declared else own.axis == axes[0]))
            found = list(fits) or found
        found.sort(key=lambda own: (not own.keeps_axis, -batch.agreeing(own.axis), own.samples == 1))
    yield from found
    if by_output is not None and (given is None or batch.lists):
        yield by_output


def trains_time_first(ran: Ran) -> bool:
    """Whether a layer with samples on axis 1 ran: if it trains, one of its parameters is in the graph."""
    reached = set(map(id, ran.trace.variables))
    layers = filter(is_time_first, ran.modules)
    trained = ([id(p) for p in layer.parameters() if p.requires_grad] for layer in layers)
    return any(not own or not reached.isdisjoint(own) for own in trained)


def on_axis(batch: Batch, axis: int | None, ran: Ran, outputs: Mapping[int, Tensor]) -> Iterator[Hypothesis]:
    """Possible places of the samples in the outputs, if they are on a given axis of the arguments."""
    tried: list[Mapping[Any, Layout]] = []
    size = next((x.shape[axis] for x in outputs.values() if axis is not None and x.ndim > axis), 1)
    counted_leaf = batch.told_otherwise(axis, size)
    if samples := batch.samples(axis, counted_leaf):
        axes = dict.fromkeys([0 if axis is None else axis, *range(8)])
        options: dict[int | Value, list[Layout]] = {
            slot: [] if slot in ran.packed else list(dict.fromkeys(candidates(x.shape, samples, axes)))
            for slot, x in outputs.items()
        }
        ends = {x.grad_fn for slot, x in outputs.items() if options[slot] and x.grad_fn is not None}
        alone = not any(options.values())  # then other outputs without samples say as little as a loss
        outside = [slot for slot in outputs if not (options[slot] or slot in ran.packed)] if samples > 1 else ()
        losses = [slot for slot in outside if alone or outputs[slot].numel() == 1]
        added = {slot: frontier([ran.value(slot)], [samples], ends | ran.ends) for slot in losses}
        together = [values for own in added.values() for values in own.values]
        options |= {first: candidates(shape_of(first), samples, axes) for first, *_ in together}
        make = partial(Hypothesis, axis, samples, counted_leaf=counted_leaf, losses=added)

        def all_of(own: Mapping[Any, Where]) -> dict[int | Value, Where]:
            return {other: own[first] for first, *others in together if first in own for other in others} | {**own}

        chosen, taken_from = chosen_rows(ran, samples, options)
        if chosen or (added and not any(options.values())):  # a loss that adds up no samples is refused
            by_layout = {slot: found[0] for slot, found in options.items() if found}
            yield make(all_of({**by_layout, **chosen}), taken_from=taken_from)
        options = {slot: found for slot, found in options.items() if found}
        turns = range(max(map(len, options.values()), default=0))
        alike = ([found[min(turn, len(found) - 1)] for found in options.values()] for turn in turns)
        each = product(*options.values()) if options else ()  # outputs may have them on different axes
        for chosen_layouts in chain(alike, islice(each, TRIES)):
            by_layout = dict(zip(options, chosen_layouts))
            if by_layout not in tried and len(tried) < TRIES:
                tried.append(by_layout)
                yield make(all_of({**by_layout, **ran.packed}))


def chosen_rows(
    ran: Ran, samples: int, options: Mapping[int | Value, Sequence[Layout]]
) -> tuple[dict[int | Value, Where], list[Value]]:
    """For values whose rows were selected, from packed tensors or N entries on axis 0: the sample of each row.

    Returns also the values with those entries."""
    found: dict[int | Value, Where] = {**ran.packed}
    taken_from = list[Value]()
    for at, layouts in options.items():
        value = ran.value(at)
        shape = shape_of(value)
        is_usual = at in ran.packed or shape[:1] == (samples,) or (isinstance(at, int) and not shape)
        if is_usual or (taken := picked(value, samples)) is None:
            continue
        rows, below = taken
        usual = [own for own in layouts if not own.axis]
        if isinstance(rows, One) or not any(torch.equal(own.rows(len(rows), samples, rows.device), rows) for own in usual):
            found[at] = rows
            taken_from.append(below)
    return found, taken_from
