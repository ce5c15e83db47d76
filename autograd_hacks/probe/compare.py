"""Compares the trace of a batch with those of the batch with samples replaced, call by call: where are the samples, and do
they mix?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from autograd_hacks.probe.guard import comparable
from autograd_hacks.probe.layout import Fits, Layout, Layouts, likeliest, only_by_sizes, same
from autograd_hacks.probe.trace import Trace, Traced, Tracer
from autograd_hacks.probe.tracker import Frame
from autograd_hacks.rules.table import axes_for, rule_for


@dataclass(frozen=True)
class Compared:
    """A call of the batch's own trace, and what the other traces say of it."""

    traced: Traced
    missing: bool  # whether some other trace has not made it
    owned: set[str]  # the parameters that its rule covers
    layouts: Layouts  # where the samples are in its outputs
    mixing: list[bool]  # in which of them samples mix
    placed: bool  # whether its rule can tell the samples apart

    @property
    def path(self) -> str:
        return self.traced.stack[-1].path


Gather = Callable[[Any], list[Any]]
"""``gather(x)`` returns the x of each process that has parts of the model's tensors, in the same order on all."""


class Comparison:
    """Traces of one model, with the samples on one axis of its arguments.

    whole: the batch's    samples: N    axis: of the samples; None where the user has said it for each argument
    """

    def __init__(self, tracer: Tracer, whole: Trace, samples: int, axis: int | None) -> None:
        self.tracer, self.whole, self.samples, self.axis = tracer, whole, samples, axis
        self.traces = 0  # with samples replaced
        self.noisy: set[Frame] = set()  # calls that come out different when nothing has changed
        self.kept: tuple[Tensor, Tensor] | None = None  # which samples that the running trace keeps, and which not
        self._met: dict[int, Fits] = {}  # what was shown at meetings
        self._outputs = {
            frame: [Fits(x, samples, None if slot else call.rows_of_packed) for slot, x in enumerate(call.outputs)]
            for frame, call in whole.calls.items()
        }
        self._inputs = {frame: [Fits(x, samples) for x in call.inputs] for frame, call in whole.calls.items()}

    @property
    def is_unproven(self) -> bool:
        """Whether nothing but sizes tells the samples' axis: they were all the same, so that nothing could be replaced."""
        return not self.traces and self.samples > 1

    def see(self, frame: Frame, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Takes a call of another trace, with the samples replaced that are not kept."""
        assert self.kept is not None
        if len(outputs) == len(self._outputs.get(frame, ())):
            for fits, x in (*zip(self._outputs[frame], outputs), *zip(self._inputs[frame], inputs)):
                fits.see(comparable(x), *self.kept)

    def see_meeting(self, fits: Fits, x: Tensor) -> None:
        """Takes a tensor of another trace, at a meeting."""
        assert self.kept is not None
        self._met[id(fits)] = fits
        fits.see(x, *self.kept)

    def agree(self, gather: Gather) -> None:
        """Takes what other processes have found, of their parts of the same tensors."""
        seen = [fits for found in (*self._outputs.values(), *self._inputs.values()) for fits in found]
        seen += self._met.values()
        if len(said := gather(([fits.told() for fits in seen], self.noisy))) > 1:
            for fits, *told in zip(seen, *(told for told, _ in said)):
                fits.agree(told)
            self.noisy = {frame for _, noisy in said for frame in noisy}

    def see_again(self, frame: Frame, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Takes a call of another trace of the batch itself."""
        if any(not same(fits.real, comparable(x)) for fits, x in zip(self._outputs.get(frame, ()), outputs)):
            self.noisy.add(frame)

    @property
    def depends_on_rounding(self) -> bool:
        """Whether something changed by no more than rounding where nothing should, and no routing explains it."""
        return any(
            fits.depends_on_rounding
            for frame, found in self._outputs.items()
            if not self.whole.calls[frame].rounds
            for fits in found
        )

    @property
    def sizes_differ(self) -> bool:
        """Whether some output had another shape when samples were replaced."""
        return any(not fits.same_shape for found in self._outputs.values() for fits in found)

    @property
    def is_finite(self) -> bool:
        """Whether the model's outputs are numbers."""
        return all(bool(x.isfinite().all()) for x in self.whole.calls[Frame("", 0)].outputs)

    def calls(self, others: Sequence[Comparison] = ()) -> list[Compared]:
        """What is known of each call.  others: comparisons of the same model with other parameters"""
        return [self._compare(call, [self, *others]) for call in self.whole.calls.values()]

    def _compare(self, call: Traced, all_of: Sequence[Comparison]) -> Compared:
        frame = call.stack[-1]
        found = [self._place(call, slot, x, all_of) for slot, x in enumerate(call.outputs)]
        if call.rows_of_packed is not None and found:
            found[0] = None, self._mixes_in_packed(call)
        layouts, placed = tuple(layout for layout, _ in found), False
        is_owner = bool(call.outputs) and frame.path not in self.tracer.parts
        owned = self.tracer.owned.get(frame.path, set()) if is_owner else set()
        missing = any(fits.seen < self.traces for fits in self._outputs[frame])
        if owned and not missing and call.from_batch and call.rows_of_packed is not None:
            layouts, placed = (Layout(axes_for(call.module, call.outputs[0])[0]),), True
        elif owned and not missing and call.from_batch:
            own = self._place_by_rule(call, all_of)
            layouts, placed = (own, *layouts[1:]) if own else layouts, own is not None
        return Compared(call, missing, owned, layouts, [mixes for _, mixes in found], placed)

    def _place(self, call: Traced, slot: int, real: Tensor, all_of: Sequence[Comparison]) -> tuple[Layout | None, bool]:
        """Where the samples are in one of a call's outputs, and whether it shows that they mix."""
        frame, is_root = call.stack[-1], len(call.stack) == 1
        fits = self._outputs[frame][slot]
        if fits.seen < self.traces:
            return None, is_root and real.ndim > 0
        fitting, has_changed = self._fitting(call, slot, range(real.ndim), all_of)
        if not has_changed and is_root and self.axis is not None:
            return likeliest(real.shape, self.samples, [self.axis]), False
        mixes = not fitting and real.is_floating_point() and real.numel() > 1 and real.ndim > 0
        # What routing has made of rows inside may be put in order before the end; at the end it is what it is.
        mixes &= is_root or (fits.same_shape and not self._is_routed(call))
        if is_root and call.routed and len(fitting) == 1:
            return fitting[0], mixes  # to be proven
        return self._choose(call, real, fitting, range(real.ndim), nothing_to_know_by=not has_changed), mixes

    def input_layouts(self, path: str) -> Layouts:
        """Where samples are on axis 0 of what a module is given; in all its calls, or none."""
        calls = [fits for frame, fits in self._inputs.items() if frame.path == path]
        if not calls or any(len(fits) != len(calls[0]) for fits in calls):
            return ()
        told = [[next(iter(fits.layouts([0], False)[0]), None) for fits in call] for call in calls]
        return tuple([each[0] if all(at == each[0] for at in each) else None for each in zip(*told)])

    def arguments_of(self, call: Traced) -> Layouts:
        """Where samples are in what a call was given."""
        rule, is_root, found = rule_for(call.module), len(call.stack) == 1, []
        first = self.axis if is_root else None if rule is None else rule.axes(call.module)[0] if rule.axes else 0
        for number, fits in enumerate(self._inputs[call.stack[-1]]):
            axes = range(fits.real.ndim)
            own, has_changed = fits.layouts(axes, self._exactly(call))
            at = own[0] if len(own) == 1 and has_changed else only_by_sizes(fits.real.shape, self.samples, axes)
            if at is None and first is not None and (is_root or not number):
                at = likeliest(fits.real.shape, self.samples, [first])
            found.append(at if at in own else None)
        return tuple(found)

    def _mixes_in_packed(self, call: Traced) -> bool:
        """Whether samples mix in a packed sequence, which has no layout."""
        return self._outputs[call.stack[-1]][0].mixes_by_rows and not self._is_routed(call)

    def _place_by_rule(self, call: Traced, all_of: Sequence[Comparison]) -> Layout | None:
        """Where a layer's rule finds the samples in its output; None where it can't tell them apart."""
        rule, output = rule_for(call.module), call.outputs[0]
        axes = axes_for(call.module, output)
        fitting: list[Layout] | None = None
        if rule is None or not rule.by_input:
            fitting, _ = self._fitting(call, 0, axes, all_of)
        if call.inputs and (fitting is None or len(fitting) > 1):
            # Too little has changed in the output, of zero weights say; its input may tell.
            told, _ = self._inputs[call.stack[-1]][0].layouts(axes, self._exactly(call))
            fitting = told if fitting is None else [layout for layout in fitting if layout in told]
        return self._choose(call, output, fitting or [], axes, nothing_to_know_by=True)

    def _fitting(
        self, call: Traced, slot: int, axes: Iterable[int], all_of: Sequence[Comparison]
    ) -> tuple[list[Layout], bool]:
        """The layouts that all comparisons allow, and whether the output has changed in any."""
        frame, axes, fitting, has_changed = call.stack[-1], list(axes), None, False
        for comparison in all_of:
            found = comparison._outputs.get(frame, ())
            if slot < len(found):
                own, changed = found[slot].layouts(axes, comparison._exactly(call))
                fitting = own if fitting is None else [layout for layout in fitting if layout in own]
                has_changed |= changed
        return fitting or [], has_changed

    def _exactly(self, call: Traced) -> bool:
        return not call.rounds and call.stack[-1] not in self.noisy

    def _choose(
        self, call: Traced, real: Tensor, fitting: Sequence[Layout], axes: Iterable[int], nothing_to_know_by: bool
    ) -> Layout | None:
        """The layout that is meant among those that fit; None where that can't be known."""
        trusted = [layout for layout in fitting if self._is_trusted(call, layout, real)]
        if len(trusted) < 2 or (nothing_to_know_by and (self.samples == 1 or self.is_unproven)):
            return next(iter(trusted), None)
        by_size = only_by_sizes(real.shape, self.samples, axes)
        return by_size if by_size in trusted else None

    def _is_routed(self, call: Traced) -> bool:
        return call.routed or any(fits.seen < self.traces for fits in self._outputs[call.stack[-1]])

    def _is_trusted(self, call: Traced, layout: Layout, real: Tensor) -> bool:
        """Whether a layout that the values allow is no accident.

        Rows that an operation has chosen by their values may be anyone's in the next forward.  Not so the samples that have
        kept an axis of their own beside others.
        """
        if self._is_routed(call) and (layout.fold or real.ndim < 3):
            return False
        counting = self.whole.tracker.counting
        return not layout.fold or not any(frame in counting for frame in call.stack[:-1])
