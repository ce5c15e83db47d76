"""A table of how the library computes each parameter's per-sample gradients."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn as nn

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.kinds import Within
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.forms import Form
from autograd_hacks.forms.base import kinds_of
from autograd_hacks.formulas.table import rule_for
from autograd_hacks.reading.gate import read
from autograd_hacks.reading.independence import BY_LABELS, BY_VALUES
from autograd_hacks.support.display import Shown, Table, with_unit

HEADER = ("parameter", "layer", "how its rows are computed", "form", "samples", "written out")
_MIXES = "Not independent: "


@dataclass(frozen=True)
class Row:
    """One parameter.  ``form``, ``samples`` and ``bytes`` are set after a backward pass."""

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
    """The result of `describe`.  It prints as a table in a terminal and in a notebook.

    rows: one for each parameter, in the order of ``named_parameters``
    note: why the last backward pass can't be read; empty if it can
    independence: whether samples were shown to be independent; empty before the first forward
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
    """A table of the model's parameters and of how their per-sample gradients are computed.

    For each parameter it shows the layer, and the rule or the node of autograd's graph that gives the gradients, or why they
    are unavailable.  After a backward pass it also shows their form, the number of samples, and their size when written out.
    The last line says whether samples were shown to be independent of each other's values, see `add_hooks`.

    It works with and without hooks.  It never raises the errors of reading; its note reports them.

    trained: leave out frozen parameters, which are most of a LoRA model's
    """
    forms, note = _forms(model)
    try:
        last, left_out = recorder_of(model).record.last, recorder_of(model).record.left_out
    except NothingRecorded:
        last, left_out = Within(), frozenset()
    owners: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}
    for path, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False, remove_duplicate=False):
            owners.setdefault(parameter, []).append((f"{path}.{name}" if path else name, layer))
    rows = []
    for name, parameter in model.named_parameters():
        if trained and not parameter.requires_grad:
            continue
        readers, form = owners[parameter], forms.get(name)
        layer = next((layer for _, layer in readers if rule_for(layer)), readers[0][1])
        how = "left out by only=" if name in left_out else _how(name, parameter, layer, last)
        if form is None and name in forms:
            how += ", not reached by the last backward pass"
        others = [place for place, _ in readers if place != name]
        how += f", shared with {', '.join(others)}" if others else ""
        found = () if form is None else (kinds_of(form), form.samples, form.samples * parameter.nbytes)
        rows.append(Row(name, type(layer).__name__, how, *found))
    return Description(rows, note, _independence(last))


def _forms(model: nn.Module) -> tuple[dict[str, Form | None], str]:
    """The forms after a backward pass; or no forms, and a note that says why."""
    try:
        recorder = recorder_of(model)
        if needed := ABOVE.gathered(model, frozenset(recorder.record.last.facts.nodes)):
            return {}, f"No forms to show: {len(needed)} modules need whole weights, which are split over processes."
        loss_type = None if any(recorded.losses for recorded in recorder.record.passes) else "mean"
        return read(model, recorder.record.as_seen(recorder.tree.parameters()), recorder, loss_type), ""
    except (RuntimeError, TypeError, ValueError) as error:  # the library's errors, and those of a user's rule
        return {}, f"No forms to show: {error}"


def _independence(last: Within) -> str:
    """Whether samples were shown to be independent; empty if the forward was not checked."""
    if not last.outputs:
        return ""
    if last.kind.is_independent and last.kind.shown in (BY_LABELS, BY_VALUES):
        return f"Independent by analysis: no operation of this forward combines samples, {last.kind.shown}."
    if last.kind.is_independent:
        return "Independent: the model's outputs for a sample did not change when others were replaced or left out."
    along = "Independent along gradients. add_hooks(model, independent=True) also checks paths without a gradient."
    return _MIXES + last.mixing if last.mixing else along


def _how(name: str, parameter: nn.Parameter, layer: nn.Module, last: Within) -> str:
    """How a parameter's gradients are computed.  layer: the one that uses it"""
    if not parameter.requires_grad:
        return "frozen"
    if reason := last.refused.get(name):
        return f"refused: {reason}"
    if reason := last.facts.disproven.get(name):
        return f"wrong: {reason}"
    parts, rule = [f"graph: {node}" for node in last.facts.nodes.get(name, ())], rule_for(layer)
    if rule is not None and (not parts or name in last.facts.covered):
        parts.insert(0, f"rule {rule.name}")
    if not parts:
        return "graph: the first forward finds the node"
    scaled = ", scaled by the batch: the model's own loss is the root of a sum over it" if last.facts.is_scaled else ""
    return " and ".join(parts) + scaled


ABOVE.describe = describe
