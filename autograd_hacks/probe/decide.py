"""From a survey to a plan: which calls give the rows of which parameters, or why none do."""

from __future__ import annotations

from autograd_hacks.capture.graph import ends_of
from autograd_hacks.errors import where
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import MIXING, Plan, Unit, static_units
from autograd_hacks.probe.trace import Seen, Survey
from autograd_hacks.probe.tracker import Stack
from autograd_hacks.rules.table import rule_for


def plan_of(survey: Survey) -> Plan:
    """The plan for all forwards of this signature, by the hypothesis under which no samples mix and the most rules can tell
    them apart; the visits of this forward are changed to follow it."""
    verdicts = [Verdict(survey, number) for number in range(len(survey.hypotheses))]
    return min(verdicts, key=lambda verdict: (bool(verdict.mixed), len(verdict.unplaced))).plan()


class Verdict:
    """What a survey says under one of its hypotheses."""

    def __init__(self, survey: Survey, number: int) -> None:
        self.survey, self.number, self.reads = survey, number, survey.tracker.reads
        self.calls: dict[str, list[Seen]] = {}
        self.unplaced: dict[int, set[Stack]] = {}  # by a parameter's id, calls whose rule can't tell the samples apart
        for call in survey.calls:
            self.calls.setdefault(call.stack[-1].path, []).append(call)
            if not call.placed[number] and (call.probed is None or call.probed.from_batch):
                for parameter in call.owned:
                    self.unplaced.setdefault(parameter, set()).add(call.stack)
        self.chosen = {
            parameter: units
            for parameter in (*self.reads, *self.unplaced)
            if (units := self._around(parameter, {*self.reads.get(parameter, ()), *self.unplaced.get(parameter, ())}))
        }
        lost = [stacks for parameter, stacks in self.unplaced.items() if parameter not in self.chosen]
        first = [call for call in survey.calls if any(call.stack in stacks for stacks in lost)][:1]
        whole = [call for call in self.calls.get("", ()) if any(call.mixing[number]) and not any(call.layouts[number])]
        self.mixed = [*first, *whole]

    def plan(self) -> Plan:
        survey = self.survey
        samples = survey.hypotheses[self.number].samples
        begun = survey.recorder.plan
        plan = Plan(
            axis=survey.hypotheses[self.number].axis,
            told_by=begun.told_by,
            refused=self._refused(),
            spread=begun.spread,
            assumed=begun.assumed,
        )
        whole = self.calls[""][-1]
        plan.model = whole.layouts[self.number]
        plan.blind = [slot for slot, mixes in enumerate(whole.mixing[self.number]) if mixes]
        plan.unplaced = {call.stack[-1].path for call in survey.calls if call.owned and not call.placed[self.number]}
        for parameter, stacks in self.chosen.items():
            for path in {stack[-1].path for stack in stacks}:
                named = self.calls[path][0].module.named_parameters()
                unit = plan.units.setdefault(path, self._unit(path, self._why(parameter, path)))
                unit.parameters |= {name: p for name, p in named if id(p) == parameter}
                unit.is_doubtful |= any(
                    call.stack in self.unplaced.get(parameter, ()) and not (call.probed and call.probed.routed)
                    for call in self.survey.calls
                )
        for path, static in static_units(survey.model).items():  # what this forward has not read; a later one may
            unread = {name: p for name, p in static.parameters.items() if id(p) not in survey.tracker.uses}
            if unread:
                plan.units.setdefault(path, self._unit(path, static.why)).parameters |= unread
        for parameter in self.unplaced.keys() & self.chosen.keys():  # experts that no sample has chosen yet
            for path in {stack[-1].path for stack in self.chosen[parameter]}:
                named = self.calls[path][0].module.named_parameters()
                plan.units[path].parameters |= {name: p for name, p in named if id(p) not in survey.tracker.uses}
        for call in survey.calls:
            unit_of = plan.units.get(call.stack[-1].path)
            if call.unit is not None:
                parameters = {} if unit_of is None else {n: p for n, p in unit_of.parameters.items() if p.requires_grad}
                call.unit.is_doubtful = unit_of is not None and unit_of.is_doubtful
                call.unit.parameters, call.unit.layouts, call.unit.samples = (
                    ends_of(parameters),
                    call.layouts[self.number],
                    samples,
                )
                if not parameters:  # it needn't be kept
                    call.unit.args, call.unit.kwargs, call.unit.results, call.unit.versions = (), {}, [], []
            if call.visit is not None:
                self._settle(call, plan, samples)
            layout = call.layouts[self.number][0] if call.owned else None
            if layout is not None and call.placed[self.number]:
                known: list[Layout] = list(plan.layouts.get(call.stack[-1].path, ()))
                plan.layouts[call.stack[-1].path] = [*known, layout]
        return plan

    def _settle(self, call: Seen, plan: Plan, samples: int) -> None:
        """Leaves a rule's visit what no unit around it gives, and notes where its samples are."""
        visit, paths = call.visit, {frame.path for frame in call.stack}
        assert visit is not None
        visit.parameters = {
            name: (p, end)
            for name, (p, end) in visit.parameters.items()
            if call.placed[self.number]
            and id(p) not in plan.refused
            and not any(unit[-1].path in paths for unit in self.chosen.get(id(p), ()))
        }
        plan.by_rule.update(id(p) for p, _ in visit.parameters.values())
        visit.layouts, visit.samples = call.layouts[self.number], samples

    def _around(self, parameter: int, uses: set[Stack]) -> set[Stack]:
        """The calls to run again: around each use the innermost that tells the samples apart, and of nested ones the
        outermost.  Empty where there are none around some use."""
        found = [self._innermost(parameter, use) for use in uses]
        paths = {unit[-1].path for unit in found if unit}
        return (
            {next(unit[: depth + 1] for depth, frame in enumerate(unit) if frame.path in paths) for unit in found if unit}
            if all(found)
            else set()
        )

    def _innermost(self, parameter: int, use: Stack) -> Stack:
        for depth in range(len(use), 0, -1):
            calls = self.calls.get(use[depth - 1].path, [])
            if calls and all(self._tells_apart(call, parameter) for call in calls):
                return use[:depth]
        return ()

    def _tells_apart(self, call: Seen, parameter: int) -> bool:
        """Whether running a call again gives rows for a parameter."""
        if not call.replayable or all(id(p) != parameter for p in call.module.parameters()):
            return False
        told = self._output_tells_apart(call)
        # What else the model returns may be without samples, as long as no loss comes that way; that is seen later.
        return any(told) if len(call.stack) == 1 else all(told)

    def _output_tells_apart(self, call: Seen) -> list[bool]:
        """For each output whether samples have places of their own in it."""
        if call.probed is None or not call.probed.from_batch:
            return [False]
        return [layout is not None for layout in call.layouts[self.number]]

    def _refused(self) -> dict[int, str]:
        refused = {}
        for parameter in (*self.unplaced, *self.reads):
            if parameter in self.chosen:
                continue
            if self.mixed:
                refused[parameter] = _mixing(self.mixed[0])
            else:
                readers = sorted({stack[-1].path for stack in self.reads.get(parameter, ()) if stack})
                refused[parameter] = (
                    f"it is read past a rule (in {', '.join(map(repr, readers))}), and no module around that returns the "
                    "samples apart. If the loss is computed inside the model, compute it outside."
                )
        return refused

    def _unit(self, path: str, why: str) -> Unit:
        calls = self.calls.get(path, [])
        probed = [call.probed for call in calls if call.probed is not None]
        return Unit(
            parameters={},
            why=why,
            calls=[call.layouts[self.number] for call in calls],
            copies=any(known.copies for known in probed),
            buffers=sorted({name for known in probed for name in known.buffers}),
        )

    def _why(self, parameter: int, path: str) -> str:
        if parameter in self.unplaced:
            return "its layer can't tell the samples apart"
        readers = sorted({stack[-1].path for stack in self.reads[parameter]})
        return "read there past a rule" if readers == [path] else f"read past a rule in {', '.join(map(repr, readers))}"


def _mixing(call: Seen) -> str:
    place = where(call.stack[-1].path, call.module)
    rule = rule_for(call.module)
    if rule is not None and rule.mixes is not None and (told := rule.mixes(call.module, call.module.training)):
        return f"{MIXING}: {place} {told}"
    if call.probed is not None and call.probed.routed:
        return (
            f"{MIXING}, or may: the rows of {place} are chosen by their values, and no module around it returns the samples "
            "in places of their own, so that rows can't be told to be anyone's."
        )
    return (
        f"{MIXING}: when some samples of the batch were replaced by others, the output of {place} changed for the rest too, "
        "whichever of its axes was taken for the batch. They have no gradients of their own then. If the batch is not on "
        "axis 0 of the model's input, say where it is: add_hooks(model, batch_dim=...). Or else two of its axes have as "
        "many entries as there are samples, and nearly nothing changed, behind dead units say, by which to tell them apart: "
        "give the first batch another size."
    )
