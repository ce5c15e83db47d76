"""From a comparison of traces to a plan: which calls give the rows of which parameters, or why none do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autograd_hacks.errors import where
from autograd_hacks.probe.compare import Compared, Comparison
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.locate import ReadDecision
from autograd_hacks.probe.meetings import Follow
from autograd_hacks.probe.plan import HOOKS, MIXING, Plan, Unit, static_units
from autograd_hacks.probe.tracker import Stack
from autograd_hacks.rules.table import rule_for


class Decision:
    """What a comparison says of each parameter, by its name in the model."""

    def __init__(self, comparison: Comparison, others: Sequence[Comparison], told_by: int | None) -> None:
        self.comparison, self.told_by, self.compared = comparison, told_by, comparison.calls(others)
        self.facts = comparison.whole.tracker
        self.read = ReadDecision(comparison, others)
        self.reads = {name: uses for name, uses in self.facts.reads.items() if name not in self.read.reading.names}
        self.calls: dict[str, list[Compared]] = {}
        self._inside: dict[str, dict[str, str]] = {}  # by a module's path its parameters
        self.unplaced: dict[str, set[Stack]] = {}  # calls whose rule can't tell the samples apart
        for call in self.compared:
            self.calls.setdefault(call.path, []).append(call)
            if not call.placed and (call.missing or call.traced.from_batch):
                past = call.path in comparison.whole.meetings.follow.unruled or not call.traced.from_batch
                for name in call.owned - (self.read.reading.names if past else set()):
                    self.unplaced.setdefault(name, set()).add(call.traced.stack)
        self.chosen = {
            name: paths
            for name in (*self.reads, *self.unplaced)
            if (paths := self._around(name, {*self.reads.get(name, ()), *self.unplaced.get(name, ())}))
        }
        lost = [stacks for name, stacks in self.unplaced.items() if name not in self.chosen]
        first = [call for call in self.compared if any(call.traced.stack in stacks for stacks in lost)][:1]
        whole = [call for call in self.calls.get("", ()) if any(call.mixing) and not any(call.layouts)]
        self.mixed = [*first, *whole]

    @property
    def cost(self) -> tuple[bool, int]:
        """What the better of two axes has less of: samples that mix, and parameters whose rules can't tell them apart."""
        return bool(self.mixed), len(self.unplaced)

    def follow(self, before: Follow) -> Follow:
        """What further traces are to follow: layers' parameters whose rules can't tell the samples apart, and what makes an
        axis for samples."""
        unruled = {call.path for call in self.compared if call.owned and not call.placed and call.traced.from_batch}
        names = {n for call in self.compared if call.path in unruled for n in call.owned & self.comparison.tracer.trained}
        return replace(
            before,
            names=before.names | names,
            forced=before.forced | self.read.conflicts,
            rows=before.rows | self.read.routed,
            unruled=before.unruled | (unruled if names else set()),
        )

    def plan(self) -> Plan:
        comparison, whole = self.comparison, self.calls[""][-1]
        plan = Plan(
            mode=comparison.tracer.mode,
            axis=comparison.axis,
            told_by=self.told_by,
            model=whole.layouts,
            reading=self.read.reading,
            unused=frozenset(comparison.tracer.names.values()) - self.facts.uses,
            followed=comparison.whole.meetings.follow,
            refused=self._refused(),
            mixed_outputs=[slot for slot, mixes in enumerate(whole.mixing) if mixes],
            unproven=comparison.is_unproven,
            unplaced={call.path for call in self.compared if call.owned and (not call.placed or self._is_read(call))},
        )
        # The modules that this forward has shown must be run again, each for the parameters read inside; beside layers that
        # can't tell samples apart also for those that it has not read: an expert that no sample has chosen.
        unused = set(comparison.tracer.names.values()) - self.facts.uses
        trained = comparison.tracer.trained
        chosen = [(n, path) for n, paths in self.chosen.items() if plan.mode == HOOKS or n in trained for path in paths]
        for name, path in chosen:
            unit = plan.units.setdefault(path, self._unit(path, self._why(name, path)))
            unit.parameters |= self._named(path, {name} | (unused if name in self.unplaced else set()))
        # What none covers, a later forward may read; where copies are read it would run for nothing.
        of_none = static_units(comparison.tracer.model) if plan.mode == HOOKS else {}
        for path, static in of_none.items():
            if unread := {local: name for local, name in static.parameters.items() if name not in self.facts.uses}:
                plan.units.setdefault(path, self._unit(path, static.why)).parameters |= unread
        for call in self.compared:
            if call.owned and call.placed and not self._is_read(call):
                paths = {frame.path for frame in call.traced.stack}
                again = {name for name in call.owned if paths & self.chosen.get(name, set())}
                plan.by_rule |= call.owned - plan.refused.keys() - again
                known: list[Layout | None] = list(plan.layouts.get(call.path, ()))
                plan.layouts[call.path] = [*known, call.layouts[0]]
        return plan

    def _is_read(self, call: Compared) -> bool:
        """Whether a layer's parameters are read by operation, since its rule couldn't tell the samples apart."""
        return call.path in self.comparison.whole.meetings.follow.unruled and bool(call.owned & self.read.reading.names)

    def _named(self, path: str, names: Collection[str]) -> dict[str, str]:
        """Parameters by their names in the module at a path, as far as it has them."""
        if path not in self._inside:
            first, module = self.comparison.tracer.names, self.calls[path][0].traced.module
            self._inside[path] = {local: first[p] for local, p in module.named_parameters()}
        return {local: name for local, name in self._inside[path].items() if name in names}

    def _around(self, name: str, uses: set[Stack]) -> set[str]:
        """The modules to run again: around each use the innermost that tells the samples apart, and of nested ones the
        outermost.  Empty where there is none around some use."""
        found = [self._innermost(name, use) for use in uses]
        paths = {unit[-1].path for unit in found if unit}
        return {next(frame.path for frame in unit if frame.path in paths) for unit in found} if all(found) else set()

    def _innermost(self, name: str, use: Stack) -> Stack:
        for depth in range(len(use), 0, -1):
            calls = self.calls.get(use[depth - 1].path, [])
            if calls and all(self._tells_apart(call, name) for call in calls):
                return use[:depth]
        return ()

    def _tells_apart(self, call: Compared, name: str) -> bool:
        """Whether running a call again gives rows for a parameter."""
        if not call.traced.has_plain_arguments or not self._named(call.path, {name}):
            return False
        follows = not call.missing and call.traced.from_batch
        told = [layout is not None for layout in call.layouts] if follows else [False]
        # What else the model returns may be without samples, as long as no loss comes that way; that is seen later.
        return any(told) if len(call.traced.stack) == 1 else all(told)

    def _refused(self) -> dict[str, str]:
        refused = {}
        for name in (*self.unplaced, *self.reads):
            if name in self.chosen:
                continue
            if self.mixed:
                refused[name] = _mixing(self.mixed[0], self.comparison.samples)
            else:
                readers = sorted({stack[-1].path for stack in self.reads.get(name, ()) if stack})
                refused[name] = (
                    f"it is read past a rule (in {', '.join(map(repr, readers))}), and no module around that returns the "
                    "samples apart. If the loss is computed inside the model, compute it outside."
                )
        return refused

    def _unit(self, path: str, why: str) -> Unit:
        calls = self.calls.get(path, [])
        return Unit(
            parameters={},
            why=why,
            calls=[call.layouts for call in calls],
            inputs=[self.comparison.arguments_of(call.traced) for call in calls],
            copies=any(call.traced.changes_arguments for call in calls),
            buffers=sorted({name for call in calls for name in call.traced.buffers}),
        )

    def _why(self, name: str, path: str) -> str:
        if (lost := self.read.lost.get(name)) is not None:
            return lost
        if name in self.unplaced:
            return "its layer can't tell the samples apart"
        readers = sorted({stack[-1].path for stack in self.reads[name]})
        return "read there past a rule" if readers == [path] else f"read past a rule in {', '.join(map(repr, readers))}"


def _mixing(call: Compared, samples: int) -> str:
    place, rule = where(call.path, call.traced.module), rule_for(call.traced.module)
    if rule is not None and rule.mixes is not None and (told := rule.mixes(call.traced.module, call.traced.module.training)):
        return f"{MIXING}: {place} {told}"
    if call.traced.routed:
        return (
            f"{MIXING}, or may: the rows of {place} are chosen by their values, and no module around it returns the samples "
            "in places of their own, so that rows can't be told to be anyone's."
        )
    shapes = [tuple(x.shape) for x in call.traced.outputs]
    if not any(size % samples == 0 for shape in shapes for size in shape):
        return (
            f"{MIXING}, or may: the output of {place}, of shape {', '.join(map(str, shapes))}, has no axis with a place for "
            f"each of the {samples} samples. It may have been given a part of the batch, h[: n // 2] say, and whose is not "
            "known: give it all samples, and choose from what it returns, torch.where(mask, a(h), b(h)). If the batch is "
            "not on axis 0 of the model's input, say where it is: add_hooks(model, batch_dim=...)."
        )
    return (
        f"{MIXING}: when some samples of the batch were replaced by others, the output of {place} changed for the rest too, "
        "whichever of its axes was taken for the batch. They have no gradients of their own then. If the batch is not on "
        "axis 0 of the model's input, say where it is: add_hooks(model, batch_dim=...), a tree for several arguments, None "
        "for an argument without samples. Or else two of its axes have as "
        "many entries as there are samples, and nearly nothing changed, behind dead units say, by which to tell them apart: "
        "give the first batch another size."
    )
