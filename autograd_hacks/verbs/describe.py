"""A table of how each parameter's per-sample gradients are known."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn as nn

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.distributed.shards import reading_weights
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.forms import Form
from autograd_hacks.forms.base import kinds_of
from autograd_hacks.probe.plan import Plan
from autograd_hacks.reading.gate import read
from autograd_hacks.rules.table import covered, rule_for
from autograd_hacks.support.display import Shown, Table, with_unit

HEADER = ("parameter", "layer", "how its gradients are known", "form", "samples", "written out")


_MIXES = "Not independent: "


@dataclass(frozen=True)
class Row:
    """One parameter.  form, samples and bytes are known after a backward pass."""

    parameter: str
    layer: str
    how: str
    form: str = ""
    samples: int | None = None
    bytes: int | None = None

    def cells(self) -> tuple[str, ...]:
        samples = "" if self.samples is None else str(self.samples)
        return self.parameter, self.layer, self.how, self.form, samples, with_unit(self.bytes)


@dataclass(frozen=True, repr=False)
class Description(Shown):
    """What `describe` returns.  It prints as a table, in a terminal and in a notebook.

    rows: one for each parameter, in the order of ``named_parameters``    note: why the last backward pass can't be read, or
    nothing    independence: whether samples were shown to be independent, or nothing before the first forward
    """

    rows: Sequence[Row]
    note: str
    independence: str = ""

    def _table(self) -> Table:
        is_said = self.independence.removeprefix(_MIXES) in self.note
        notes = self.note if is_said else "\n".join(note for note in (self.note, self.independence) if note)
        return Table("", [HEADER, *(row.cells() for row in self.rows)], notes, is_whole=True)

    __repr__ = Shown.__str__


def describe(model: nn.Module, trained: bool = False) -> Description:
    """A table of the model's parameters: the layer each belongs to, how its per-sample gradients are known, or why they are
    not, and after a backward pass the form they have, the number of samples, and their size written out.  They are known by
    a layer's rule, or read off autograd's graph, at a node on the way to the input of some layer.  Below it is said whether
    samples were shown to be independent of each other's values, see `add_hooks`.

    trained: whether to leave out frozen parameters, most of a LoRA model's

    It works for models with and without hooks, and raises nothing that reading would: its note says it.
    """
    forms, note = _forms(model)
    plan, is_known = _plan(model)
    modules = dict(model.named_modules())
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, layer in modules.items():
        for name, parameter in covered(layer).items():
            owners.setdefault(parameter, []).append((f"{path}.{name}" if path else name, layer))
    rows = []
    for name, parameter in model.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        readers = owners[parameter]
        layer = next((layer for _, layer in readers if rule_for(layer)), readers[0][1])
        form = forms.get(name)
        how = _how(name, parameter, layer, plan, modules, is_known)
        if form is None and name in forms:
            how += ", not reached by the last backward pass"
        others = [place for place, _ in readers if place != name]
        how += f", shared with {', '.join(others)}" if others else ""
        if form is None:
            rows.append(Row(name, type(layer).__name__, how))
        else:
            size = form.samples * parameter.numel() * parameter.element_size()
            rows.append(Row(name, type(layer).__name__, how, kinds_of(form), form.samples, size))
    return Description(rows, note, _independence(plan) if is_known else "")


def _plan(model: nn.Module) -> tuple[Plan, bool]:
    """The plan of the model's last forward, and whether a probe has made it."""
    try:
        plan = recorder_of(model).record.plan
    except NothingRecorded:
        return Plan(), False
    return plan, bool(plan.outputs)


def _independence(plan: Plan) -> str:
    if plan.is_independent:
        return "Independent: what the model returns for a sample kept its values when other samples were replaced."
    if plan.mixing:
        return _MIXES + plan.mixing
    return (
        "Independent as far as there are gradients; whether by values too is shown with add_hooks(model, independent=True)."
    )


def _forms(model: nn.Module) -> tuple[dict[str, Form | None], str]:
    """The forms after a backward pass, and why there are none."""
    try:
        recorder = recorder_of(model)
        if needed := reading_weights(model, recorder.record.plan.names):
            return {}, f"No forms to show: rows need weights that processes hold parts of ({len(needed)} modules)."
        return read(model, recorder.record.parameters_of(model), recorder, None), ""
    except (RuntimeError, TypeError, ValueError) as error:  # the library's own, and what a rule of the user's may raise
        return {}, f"No forms to show: {error}"


def _how(
    name: str, parameter: nn.Parameter, layer: nn.Module, plan: Plan, modules: dict[str, nn.Module], is_known: bool
) -> str:
    rule = rule_for(layer)
    if not parameter.requires_grad:
        return "frozen"
    if reason := plan.refused.get(name):
        return f"refused: {reason}"
    if reason := plan.disproven.get(name):
        return f"wrong: {reason}"
    parts = [f"graph: {node}" for node in plan.nodes_of(name)]
    if rule is not None and (not parts or name in plan.by_rule):
        parts.insert(0, f"rule {rule.name}")
    if not parts:
        return "graph: the first forward finds out where"
    scaled = ", scaled by the batch: a loss made inside divides by something of all of it" if plan.scaled else ""
    return " and ".join(parts) + scaled
