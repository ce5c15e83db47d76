"""Compares the trace of a batch with those of the batch with samples replaced, call by call: where are the samples, and do
they mix?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from autograd_hacks.probe.layout import Evidence, Layout, Layouts, differs, layouts_that_fit, likeliest, only_by_sizes
from autograd_hacks.probe.trace import Trace, Traced, Tracer
from autograd_hacks.probe.tracker import Frame
from autograd_hacks.rules.table import axes_for, rule_for


@dataclass(frozen=True)
class Compared:
    """A call of the batch's own trace, and what the other traces say of it."""

    traced: Traced
    other: Traced | None  # the same call in the last trace with samples replaced; None where that has not made it
    owned: set[str]  # the parameters that its rule covers
    layouts: Layouts  # where the samples are in its outputs
    mixing: list[bool]  # in which of them samples mix
    placed: bool  # whether its rule can tell the samples apart

    @property
    def path(self) -> str:
        return self.traced.stack[-1].path


class Comparison:
    """Traces of one model, with the samples on one axis of its arguments.

    whole: the batch's    others: with samples replaced    kept: for each of these N, the samples that are not replaced
    alike: whether the samples were all the same, so that nothing could be replaced
    axis: of the samples; None where the user has said it for each argument
    expanded: the lookups whose output had a copy for each sample
    """

    def __init__(
        self,
        tracer: Tracer,
        whole: Trace,
        others: Sequence[Trace],
        kept: Sequence[Tensor],
        alike: bool,
        axis: int | None,
        expanded: Mapping[str, bool],
    ) -> None:
        self.tracer, self.whole, self.others, self.kept = tracer, whole, others, kept
        self.alike, self.axis, self.expanded = alike, axis, expanded
        self.samples = len(kept[0])
        self.calls = [self._compare(call) for call in whole.calls.values()]

    @property
    def is_unproven(self) -> bool:
        """Whether nothing but sizes tells the samples' axis."""
        return self.alike and self.samples > 1

    def _compare(self, call: Traced) -> Compared:
        frame = call.stack[-1]
        found = [self._place(call, slot, x) for slot, x in enumerate(call.outputs)]
        if call.rows_of_packed is not None:
            found[0] = self._place_packed(call, call.rows_of_packed)
        layouts, placed = tuple(layout for layout, _ in found), False
        is_owner = bool(call.outputs) and frame.path not in self.tracer.parts
        owned = self.tracer.owned.get(frame.path, set()) if is_owner else set()
        other = self.others[-1].calls.get(frame)
        from_batch = other is not None and other.from_batch
        if owned and frame.path in self.expanded:
            layouts, placed = (Layout(),), True
        elif owned and from_batch and call.rows_of_packed is not None:
            layouts, placed = (Layout(axes_for(call.module, call.outputs[0])[0]),), True
        elif owned and from_batch:
            own = self._place_by_rule(call)
            layouts, placed = (own,) if own else layouts, own is not None
        return Compared(call, other, owned, layouts, [mixes for _, mixes in found], placed)

    def _place(self, call: Traced, slot: int, real: Tensor) -> tuple[Layout | None, bool]:
        """Where the samples are in one of a call's outputs, and whether it shows that they mix."""
        evidence = self._evidence(call, lambda traced: traced.outputs[slot : slot + 1])
        if not evidence:
            return None, False
        fitting, has_changed = layouts_that_fit(real, evidence, range(real.ndim))
        if not has_changed and len(call.stack) == 1 and self.axis is not None:
            return likeliest(real.shape, self.samples, [self.axis]), False
        same_shape = all(other.shape == real.shape for other, _ in evidence)
        is_routed = self._is_routed(call.stack[-1])
        mixes = not fitting and same_shape and not is_routed and real.is_floating_point() and real.ndim > 0
        return self._choose(call, real, fitting, range(real.ndim), nothing_to_know_by=not has_changed), mixes

    def _place_packed(self, call: Traced, rows: Tensor) -> tuple[None, bool]:
        """Of a packed sequence, which has no layout, whether samples mix in it.  rows: the sample of each row"""
        evidence = self._evidence(call, lambda traced: traced.outputs[:1])
        same = [kept[rows.to(kept.device)] for _, kept in evidence]
        changed = [differs(call.outputs[0], x)[rows] for (x, _), rows in zip(evidence, same) if len(x) == len(rows)]
        return None, any(bool(change.any()) for change in changed) and not self._is_routed(call.stack[-1])

    def _place_by_rule(self, call: Traced) -> Layout | None:
        """Where a layer's rule finds the samples in its output; None where it can't tell them apart."""
        rule, output = rule_for(call.module), call.outputs[0]
        axes = axes_for(call.module, output)
        by_input = self._evidence(call, lambda traced: traced.inputs)
        fitting: list[Layout] | None = None
        if rule is None or not rule.by_input:
            evidence = self._evidence(call, lambda traced: traced.outputs[:1])
            fitting, _ = layouts_that_fit(output, evidence, axes) if evidence else ([], True)
        if by_input and (fitting is None or len(fitting) > 1):
            # Too little has changed in the output, of zero weights say; its input may tell.
            told, _ = layouts_that_fit(call.inputs[0], by_input, axes)
            fitting = told if fitting is None else [layout for layout in fitting if layout in told]
        return self._choose(call, output, fitting or [], axes, nothing_to_know_by=True)

    def _choose(
        self, call: Traced, real: Tensor, fitting: Sequence[Layout], axes: Iterable[int], nothing_to_know_by: bool
    ) -> Layout | None:
        """The layout that is meant among those that fit; None where that can't be known."""
        trusted = [layout for layout in fitting if self._is_trusted(call, layout, real)]
        if len(trusted) < 2 or (nothing_to_know_by and (self.samples == 1 or self.is_unproven)):
            return next(iter(trusted), None)
        by_size = only_by_sizes(real.shape, self.samples, axes)
        return by_size if by_size in trusted else None

    def _evidence(self, call: Traced, part: Callable[[Traced], list[Tensor]]) -> Evidence:
        """A tensor of a call in each other trace with the samples kept there; nothing where some trace lacks it."""
        found = []
        for other, kept in zip(self.others, self.kept):
            tensors = part(other.calls[call.stack[-1]]) if call.stack[-1] in other.calls else []
            if not tensors:
                return []
            found.append((tensors[0], kept))
        return found

    def _is_routed(self, frame: Frame) -> bool:
        return any(frame not in other.calls or other.calls[frame].routed for other in self.others)

    def _is_trusted(self, call: Traced, layout: Layout, real: Tensor) -> bool:
        """Whether a layout that the values allow is no accident.

        Rows that an operation has chosen by their values may be anyone's in the next forward.  Not so the samples that have
        kept an axis of their own beside others.
        """
        if self._is_routed(call.stack[-1]) and (layout.fold or real.ndim < 3):
            return False
        counting = self.others[-1].tracker.counting
        return not layout.fold or not any(frame in counting for frame in call.stack[:-1])
