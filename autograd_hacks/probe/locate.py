"""From what the traces show of meetings to how each is read in the forwards that follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autograd_hacks.probe.compare import Comparison
from autograd_hacks.probe.functions import BATCHED, BROADCASTING, Key, broadcasts
from autograd_hacks.probe.labels import GROUPED
from autograd_hacks.probe.layout import Fits, Layout, Layouts, only_by_sizes
from autograd_hacks.probe.meetings import Met
from autograd_hacks.probe.plan import BY_LAYER, EXPANDED, RECORDED, ROWS, VALUE, VMAPPED, Read, Reading
from autograd_hacks.rules.operations import BY_CHANNEL, ELEMENTWISE, OPERATIONS

_BY_LAST = frozenset(("linear", "embedding", "layer_norm", "rms_norm"))
"""Operations that give each position a vector, on the last axis, of what follows from a weight."""


class ReadDecision:
    """How the meetings of traces are to be read.

    reading: for the parameters all of whose meetings can be    lost: why others' can't, by name
    conflicts: calls without a batch that make an axis for the samples, and must be read there
    routed: modules by path in which rows are elsewhere than they were, so that each must be followed
    """

    def __init__(self, comparison: Comparison, others: Sequence[Comparison]) -> None:
        self.comparison, self.all_of = comparison, [comparison, *others]
        meetings = comparison.whole.meetings
        self.lost, self.conflicts = dict(meetings.lost), set[Key]()
        self.routed: set[str] = set()
        self.sources: dict[str, Layouts] = {}
        calls = {key: read for key, met in meetings.calls.items() if (read := self._read(key, met)) is not None}
        names = (
            frozenset(n for read in calls.values() if read.kind not in (VALUE, BY_LAYER) for n in read.names)
            - self.lost.keys()
        )
        found: dict[str, dict[int, list[tuple[str, Read]]]] = {}
        for key, read in calls.items():
            if own := read.names & names:
                of = found.setdefault(key.frame.path, {}).setdefault(key.frame.call, [])
                of.append((key.function, replace(read, names=own)))
        carrying = frozenset(path for source in self.sources for path in meetings.carrying.get(source, ()))
        self.reading = Reading(names, found, self.sources, carrying)

    def _read(self, key: Key, met: Met) -> Read | None:
        name = key.function
        if met.by_layer:
            return Read(BY_LAYER, None, met.names)
        if met.output is None and key in self.comparison.whole.meetings.follow.forced and met.grew_to is not None:
            operands = tuple([None if axis is None else Layout(axis) for axis in met.axes])
            kind = RECORDED if name in OPERATIONS or name in ELEMENTWISE else VMAPPED
            return Read(kind, met.grew_to, met.names, operands)
        if met.output is None:
            return Read(VALUE, None, met.names, draws=met.draws)
        ndim, shapes = met.output.real.ndim, [shape for shape, _ in met.values]
        layout, operands = self._place(key, met)
        if (
            layout is None
            and met.source is not None
            and name in (OPERATIONS.keys() | ELEMENTWISE.keys() | GROUPED) - BY_CHANNEL
        ):
            counts = any(frame in self.comparison.whole.tracker.counting for frame in met.stack)
            found = tuple(
                [at if at and not (at.fold and counts) else None for at in self.comparison.input_layouts(met.source)]
            )
            if any(found):
                self.sources[met.source] = found
                return Read(ROWS, None, met.names)
        if layout is None:
            routes = met.routed or not met.output.same_shape or met.output.seen < self.comparison.traces
            self.routed |= {frame.path for frame in met.stack} if routes else set()
            self._lose(met, f"the samples have no place of their own where it is read ({name} in {key.frame.path!r})")
            return None
        if name in BY_CHANNEL and layout.axis:
            self._lose(met, f"the samples are among the channels where it is read ({name} in {key.frame.path!r})")
            return None
        if not broadcasts(name, ndim, layout.axis, map(len, shapes)):
            kind = RECORDED if name in OPERATIONS else VMAPPED
        else:
            kind = RECORDED if name in ELEMENTWISE else EXPANDED
            for shape, grew in met.values:
                at = layout.axis - (ndim - len(shape))
                if at >= 0 and shape[at] != 1 and self.comparison.samples != 1:
                    if not grew or grew[-1] in self.comparison.whole.meetings.follow.forced:
                        self._lose(met, f"it has entries along the samples' axis ({name} in {key.frame.path!r})")
                        return None
                    self.conflicts.add(grew[-1])
        if kind == VMAPPED:
            makers = {grew[-1] for shape, grew in met.values if grew and self.comparison.samples in shape}
            self.conflicts |= makers - self.comparison.whole.meetings.follow.forced
        if kind == VMAPPED and met.draws:
            self._lose(met, f"{name} draws random numbers where it is read in {key.frame.path!r}")
            return None
        if kind == VMAPPED and any(fits is not None and at is None for fits, at in zip(met.operands, operands)):
            self._lose(met, f"the samples can't be told apart in all that {name} is given in {key.frame.path!r}")
            return None
        return Read(kind, layout, met.names, operands, ndim, tuple([0 if f is None else f.real.ndim for f in met.operands]))

    def _lose(self, met: Met, why: str) -> None:
        self.lost = dict.fromkeys(met.names, why) | self.lost

    def _place(self, key: Key, met: Met) -> tuple[Layout | None, Layouts]:
        """Where the samples are in a meeting's output, and in the other tensors that it is given: all must agree."""
        every = [c.whole.meetings.calls.get(key) for c in self.all_of]
        seen = [(c, other) for c, other in zip(self.all_of, every) if other is not None and other.output is not None]
        if met.output is None or met.output.seen < self.comparison.traces:
            return None, ()
        real, samples = met.output.real, self.comparison.samples
        fitting = _common([(other.output, met.rounds) for _, other in seen])
        is_placed = key.function in (OPERATIONS.keys() | ELEMENTWISE.keys() | BROADCASTING | BATCHED)
        own: list[list[Layout]] = []
        for n, operand in enumerate(met.operands):
            if operand is None or not operand.real.ndim:
                own.append([])
                continue
            found = _common([(other.operands[n], met.rounds) for _, other in seen if n < len(other.operands)])
            own.append(found)
            if is_placed and operand.real.ndim == real.ndim:
                fitting = [at for at in fitting if at in found]
            elif not found:
                return None, ()
        fitting = [at for at in fitting if self._is_trusted(met, at, real.ndim)]
        if len(fitting) > 1:  # too little has changed to tell; the operation may
            axes = range(1 if key.function in BY_CHANNEL else real.ndim - (key.function in _BY_LAST))
            fitting = [at for at in fitting if at.axis in axes] or fitting
        if len(fitting) > 1 and samples > 1 and not self.comparison.is_unproven:
            by_size = only_by_sizes(real.shape, samples, axes)
            fitting = [by_size] if by_size in fitting else []
        if not fitting:
            return None, ()
        return fitting[0], tuple([_chosen(found, fitting[0]) for found in own])

    def _is_trusted(self, met: Met, layout: Layout, ndim: int) -> bool:
        """As for the outputs of calls: see `Comparison`."""
        if met.routed and (layout.fold or ndim < 3):
            return False
        counting = self.comparison.whole.tracker.counting
        return not layout.fold or not any(frame in counting for frame in met.stack)


def _common(found: Iterable[tuple[Fits | None, bool]]) -> list[Layout]:
    """The layouts that all comparisons allow."""
    lists = [fits.layouts(range(fits.real.ndim), not rounds)[0] for fits, rounds in found if fits is not None]
    return [at for at in lists[0] if all(at in other for other in lists[1:])] if lists else []


def _chosen(found: Sequence[Layout], layout: Layout) -> Layout | None:
    return layout if layout in found else found[0] if len(found) == 1 else None
