"""A table of how each parameter's per-sample gradients are known."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
    try:
        plan, left_out = recorder_of(model).record.plan, recorder_of(model).record.left_out
    except NothingRecorded:
        plan, left_out = Plan(), frozenset()
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, layer in model.named_modules():
        for name, parameter in covered(layer).items():
            owners.setdefault(parameter, []).append((f"{path}.{name}" if path else name, layer))
    rows = []
    for name, parameter in model.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        readers, form = owners[parameter], forms.get(name)
        layer = next((layer for _, layer in readers if rule_for(layer)), readers[0][1])
        how = "left out by only=" if name in left_out else _how(name, parameter, layer, plan)
        if form is None and name in forms:
            how += ", not reached by the last backward pass"
        others = [place for place, _ in readers if place != name]
        how += f", shared with {', '.join(others)}" if others else ""
        found: tuple[Any, ...] = ()
        if form is not None:
            found = kinds_of(form), form.samples, form.samples * parameter.numel() * parameter.element_size()
        rows.append(Row(name, type(layer).__name__, how, *found))
    return Description(rows, note, _independence(plan))


def _forms(model: nn.Module) -> tuple[dict[str, Form | None], str]:
    """The forms after a backward pass, and why there are none."""
    try:
        recorder = recorder_of(model)
        if needed := reading_weights(model, recorder.record.plan.names):
            return {}, f"No forms to show: rows need weights that processes hold parts of ({len(needed)} modules)."
        return read(model, recorder.record.parameters_of(model), recorder, None), ""
    except (RuntimeError, TypeError, ValueError) as error:  # the library's own, and what a rule of the user's may raise
        return {}, f"No forms to show: {error}"


def _independence(plan: Plan) -> str:
    """Whether samples were shown to be independent; nothing where no probe has made the plan."""
    if not plan.outputs:
        return ""
    if plan.is_independent and plan.why_unshown == "":
        return "Independent by analysis: no operation in the model's graph takes samples together, whatever the values are."
    if plan.is_independent:
        return "Independent: what the model returns for a sample kept its values when other samples were replaced."
    if plan.mixing:
        return _MIXES + plan.mixing
    return (
        "Independent as far as there are gradients; whether by values too is shown with add_hooks(model, independent=True)."
    )


def _how(name: str, parameter: nn.Parameter, layer: nn.Module, plan: Plan) -> str:
    """How a parameter's gradients are known.  layer: that reads it"""
    if not parameter.requires_grad:
        return "frozen"
    if reason := plan.refused.get(name):
        return f"refused: {reason}"
    if reason := plan.disproven.get(name):
        return f"wrong: {reason}"
    parts, rule = [f"graph: {node}" for node in plan.nodes_of(name)], rule_for(layer)
    if rule is not None and (not parts or name in plan.by_rule):
        parts.insert(0, f"rule {rule.name}")
    if not parts:
        return "graph: the first forward finds out where"
    scaled = ", scaled by the batch: a loss made inside divides by something of all of it" if plan.scaled else ""
    return " and ".join(parts) + scaled
