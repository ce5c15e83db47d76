"""How the rows of each parameter come about in the forwards of one signature: by which calls, and where samples are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.probe.layout import Layout, only_by_sizes
from autograd_hacks.rules.table import axes_for, covered, rule_for

MIXING = "samples mix"
"""How the reason begins, where a parameter is refused for that."""

UNKNOWN = (
    "its layer is called for the first time since the model was probed, and sizes alone don't tell the samples' axis. The "
    "next forward is probed again: repeat the step."
)

Layouts = tuple[Layout | None, ...]
"""For each tensor that a call returned where its samples are, None where it has none."""


@dataclass
class Unit:
    """A module that is run again for the rows of parameters that no rule gives.

    parameters: by their names in the module    why: for people    calls: the layouts, for each call in a forward, or for all
    copies: whether the module changes its arguments    buffers: those that it changes, by name
    is_doubtful: whether samples seem to mix inside, though not in what comes out    doubted: whether the rows of samples by
    themselves have once not added up, where those of the whole batch's graph did
    """

    parameters: dict[str, Tensor]
    why: str
    calls: Sequence[Layouts] = ()
    copies: bool = False
    buffers: Sequence[str] = ()
    is_doubtful: bool = False
    doubted: bool = False

    def layouts_of(self, call: int, outputs: Sequence[Tensor], samples: int | None) -> Layouts:
        known = self.calls[min(call, len(self.calls) - 1)] if self.calls else ()
        if samples is not None and len(known) == len(outputs):
            return known
        return (Layout(),) * len(outputs)


@dataclass
class Plan:
    """What holds for all forwards of a signature.

    axis: of the samples in the model's arguments; None where they say it themselves
    told_by: which argument tells how many they are, where it isn't the first    model: the layouts of its outputs
    layouts: by a layer's path, for each call in a forward    units: by path
    unplaced: the layers in which rules can't tell the samples apart    by_rule: the ids of the parameters that some rule's
    call gives rows of    spread: lookups whose output is the same for all samples    refused: why there are no rows, by the
    parameter's id    blind: the model's outputs by number in which samples mix    stale: whether a call has come that the
    plan doesn't know    assumed: whether the samples were all alike, so that their axis is the likeliest alone
    checked: whether the rows' sums were once compared with the gradients that arrived    watched: whether these are kept
    until they are
    """

    AGAIN: ClassVar[int] = -1
    """The number of a call that a backward pass makes anew, so that it can't be known which one it was."""

    axis: int | None = None
    told_by: int | None = None
    model: Layouts = ()
    layouts: dict[str, Sequence[Layout]] = field(default_factory=dict)
    units: dict[str, Unit] = field(default_factory=dict)
    unplaced: set[str] = field(default_factory=set)
    by_rule: set[int] = field(default_factory=set)
    spread: frozenset[str] = frozenset()
    refused: dict[int, str] = field(default_factory=dict)
    blind: Sequence[int] = ()
    stale: bool = False
    assumed: bool = False
    checked: bool = False
    watched: bool = True

    def layouts_of(self, path: str, call: int, layer: nn.Module, outputs: Sequence[Tensor], samples: int | None) -> Layouts:
        """Where the samples are in what a layer with a rule returned."""
        if samples is None:
            return ()
        if path in self.spread:
            return (Layout(),)
        known = self.layouts.get(path, ())
        if call == Plan.AGAIN and known and all(layout == known[0] for layout in known):
            return (known[0],)
        if 0 <= call < len(known):
            self.stale |= not known[call].fits(outputs[0], samples)  # the next forward is probed again
            return (known[call],)
        self.stale = True
        return (only_by_sizes(outputs[0].shape, samples, axes_for(layer, outputs[0])),)

    def inherit(self, earlier: Plan) -> None:
        """Takes over what an earlier plan knew of calls that this one's forward has not made, of layers that are skipped at
        random say."""
        for path, known in earlier.layouts.items():
            mine = self.layouts.get(path, ())
            self.layouts[path] = [*mine, *known[len(mine) :]]
        for path, unit in earlier.units.items():
            if path not in self.units or not self.units[path].calls:
                self.units[path] = unit

    def layouts_of_model(self, model: nn.Module, outputs: Sequence[Tensor]) -> Layouts:
        """Where the samples are in the model's own outputs."""
        if len(self.model) == len(outputs):
            return self.model
        rule = rule_for(model)
        places = [*(() if rule is None or rule.axes is None else rule.axes(model)), *[0] * len(outputs)]
        return tuple(Layout(axis) if x.ndim > axis else None for x, axis in zip(outputs, places))

    def is_watched(self, parameter: Tensor) -> bool:
        """Whether the gradient that arrives at a parameter is kept, to compare the sum of its rows with: at first for all,
        always where they come of a replay."""
        if self.watched or not self.units:
            return self.watched
        return any(parameter is p for unit in self.units.values() for p in unit.parameters.values())


def static_units(model: nn.Module) -> dict[str, Unit]:
    """Units that can be told without a forward: each module with parameters that no rule covers, or where it is never
    called, as containers and parametrisations aren't, the module around it."""
    modules = dict(model.named_modules())
    by_rule = {id(p) for layer in modules.values() if rule_for(layer) for p in covered(layer).values()}
    units: dict[str, Unit] = {}
    for path, owner in modules.items():
        for name, parameter in owner._parameters.items():
            if parameter is None or id(parameter) in by_rule:
                continue
            place, inside = path, name
            while place and not _is_called(place, modules):
                place, _, last = place.rpartition(".")
                inside = f"{last}.{inside}"
            unit = units.setdefault(place, Unit({}, f"no rule covers a {type(modules[place]).__name__} with {name!r}"))
            unit.parameters[inside] = parameter
    return units


def _is_called(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module has a forward of its own that a model would call on its samples."""
    module = modules[path]
    if "parametrizations" in path.split(".") or isinstance(module, torch.jit.ScriptModule):
        return False
    return getattr(type(module), "forward", None) is not nn.Module.forward
