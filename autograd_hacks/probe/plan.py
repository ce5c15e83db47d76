"""How the rows of each parameter come about in the forwards of one signature: by which calls, and where samples are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.probe.layout import Layout, Layouts, only_by_sizes
from autograd_hacks.probe.meetings import Follow
from autograd_hacks.rules.table import axes_for, covered, rule_for

MIXING = "samples mix"
"""How the reason begins, where a parameter is refused for that."""

UNKNOWN = (
    "its layer is called for the first time since the model was probed, and sizes alone don't tell the samples' axis. The "
    "next forward is probed again: repeat the step."
)


HOOKS, DERIVATIVES, EXPAND = MODES = "hooks", "derivatives", "expand"
"""How parameters are read: by layers' rules; the same, and in backward passes of which a graph is made, where other
parameters are read as copies; as copies all, one for each sample."""

UNTRACED = "the model failed when it was probed, in a forward before its own, so that it isn't known whether samples mix"
"""How the reason begins, where a model can't be run once more on its arguments."""


@dataclass
class Unit:
    """A module that is run again for the rows of parameters that no rule gives."""

    parameters: dict[str, str]  # by their names in the module, their names in the model
    why: str  # for people
    calls: Sequence[Layouts] = ()  # the layouts of its outputs, for each call in a forward, or for all
    inputs: Sequence[Layouts] = ()  # the same of the tensors that it is given, where they were looked at
    copies: bool = False  # whether the module changes its arguments
    buffers: Sequence[str] = ()  # those that it changes, by name

    def places_of(self, call: int, inputs: Sequence[Tensor], samples: int) -> Layouts:
        known = self.inputs[min(call, len(self.inputs) - 1)] if self.inputs else ()
        if len(known) != len(inputs):
            known = (Layout(),) * len(inputs)
        return tuple([at if at is not None and at.fits(x, samples) else None for at, x in zip(known, inputs)])

    def layouts_of(self, call: int, outputs: Sequence[Tensor], samples: int | None) -> Layouts:
        known = self.calls[min(call, len(self.calls) - 1)] if self.calls else ()
        if samples is not None and len(known) == len(outputs):
            return known
        return (Layout(),) * len(outputs)


VALUE, RECORDED, EXPANDED, VMAPPED, ROWS, BY_LAYER = "value", "recorded", "expanded", "vmapped", "rows", "by layer"
"""What a call of a function of torch is: one that makes something that follows from parameters alone; or one where that
meets the batch, where rows come of what it is given, a copy of the value for each sample, vmap, labels of rows, or the
layer's own rule."""


@dataclass(frozen=True)
class Read:
    """How a call of a function of torch is read that is given something which follows from parameters."""

    kind: str
    layout: Layout | None  # of its output
    names: frozenset[str]  # the parameters
    operands: Layouts = ()  # of the tensors that it is given but for those
    ndim: int = 0  # of its output
    ranks: tuple[int, ...] = ()  # of the operands that follow from the batch; 0 for others
    draws: bool = False  # whether random numbers are drawn


@dataclass(frozen=True)
class Reading:
    """The parameters that are read where they meet the batch, by operation."""

    names: frozenset[str] = frozenset()
    # By path, by the number of the module's call: the functions in their order.
    calls: Mapping[str, Mapping[int, Sequence[tuple[str, Read]]]] = field(default_factory=dict)
    # By path where samples are in a module's arguments, from which on it is followed whose each row is.
    sources: Mapping[str, Layouts] = field(default_factory=dict)
    carrying: frozenset[str] = frozenset()  # the modules by path in which it is
    earlier: tuple[Reading, ...] = ()  # of plans before, whose calls the last traces have not all shown

    @property
    def paths(self) -> set[str]:
        """The modules in whose own code functions are seen."""
        return {*self.calls, *self.sources, *self.carrying}

    def readers(self, name: str) -> list[str]:
        """The operations that read a parameter, for people."""
        found = {
            f"{function} in {path!r}" if path else f"{function} in the model itself"
            for path, calls in self.calls.items()
            for of in calls.values()
            for function, read in of
            if read.kind not in (VALUE, BY_LAYER) and name in read.names
        }
        return sorted(found)

    def in_order(self, path: str, call: int) -> Sequence[tuple[str, Read]]:
        """The functions of one call of a module; of one that checkpointing makes anew, of all, if they are the same."""
        calls = self.calls.get(path, {})
        if call == Plan.AGAIN and calls:
            first, *others = calls.values()
            return first if all(other == first for other in others) else ()
        return calls.get(call, ())

    def alike(self, path: str, function: str, names: frozenset[str]) -> Read | None:
        """What all calls of a function in a module agree in that were given values of the same parameters.  names: those"""
        of_all = [of for reading in (self, *self.earlier) for of in reading.calls.get(path, {}).values()]
        found = {read for of in of_all for name, read in of if name == function and read.names == names}
        return found.pop() if len(found) == 1 else None

    def without(self, paths: Collection[str]) -> Reading:
        """The same but for some modules."""
        calls = {path: of for path, of in self.calls.items() if path not in paths}
        return replace(self, calls=calls, earlier=tuple([reading.without(paths) for reading in self.earlier]))

    def after(self, earlier: Reading, names: frozenset[str]) -> Reading:
        """The same, and what an earlier one knew of calls that this one's traces have not shown.  names: the parameters that
        may come by them"""
        calls = {path: {**earlier.calls.get(path, {}), **self.calls.get(path, {})} for path in {*earlier.calls, *self.calls}}
        known = (*earlier.earlier[-2:], replace(earlier, earlier=())) if earlier.calls != self.calls else earlier.earlier
        sources, carrying = {**earlier.sources, **self.sources}, earlier.carrying | self.carrying
        return Reading(self.names | (earlier.names & names), calls, sources, carrying, known)


_PATIENCE = 16
"""For so many forwards a pass with derivatives in it is waited for, to compare the sums of its rows."""


@dataclass
class Plan:
    """What holds for all forwards of a signature.  Parameters are known by their first name in the model."""

    AGAIN: ClassVar[int] = -1
    """The number of a call that a backward pass makes anew, so that it can't be known which one it was."""

    mode: str = HOOKS
    axis: int | None = None  # of the samples in the model's arguments; None where the user has said it for each
    told_by: int | None = None  # which argument tells how many samples there are, where it isn't the first
    model: Layouts = ()  # of the model's outputs
    layouts: dict[str, Sequence[Layout | None]] = field(default_factory=dict)  # by a layer's path, call by call
    units: dict[str, Unit] = field(default_factory=dict)  # modules that are run again, by path
    unplaced: set[str] = field(default_factory=set)  # the layers by path in which rules can't tell the samples apart
    by_rule: set[str] = field(default_factory=set)  # the parameters that some rule's call gives rows of
    reading: Reading = field(default_factory=Reading)  # what is read by operation
    unused: frozenset[str] = frozenset()  # the parameters that its traces have not used
    followed: Follow | None = None  # what its traces have followed for that
    refused: dict[str, str] = field(default_factory=dict)  # why a parameter has no rows
    mixed_outputs: Sequence[int] = ()  # the model's outputs by number in which samples mix
    incomplete: bool = False  # whether a call has come that the plan doesn't know
    unproven: bool = False  # whether the samples were all alike, so that their axis is the likeliest alone
    unread: bool = False  # whether a backward pass has gone by that nobody read
    # Parameters whose rows' sums were compared with the gradients that arrived, in a step of this plan.
    summed: set[str] = field(default_factory=set)
    deepest: int = 0  # of how many derivatives the passes were whose rows' sums were compared
    forwards: int = 1  # of its signature, so far
    largest: int = 0  # the largest N that was traced
    shared: frozenset[int] = frozenset()  # the arguments that have no samples, by number: see `Batch`
    opened: frozenset[str] = frozenset()  # parameters that were zero, and that noise stands for when it is proven
    disproven: dict[str, str] = field(default_factory=dict)  # why a parameter's rows are wrong, as the proof has found
    pending: bool = True  # whether it is to be proven before this forward
    has_doors: bool = False  # whether the model keeps tensors with a graph beside those that it returns
    scaled: bool = False  # whether a loss made inside the model divides by something of the whole batch
    unsure: bool = False  # whether the last proof has left something open, where a gradient was zero, say

    def layouts_of(self, path: str, call: int, layer: nn.Module, outputs: Sequence[Tensor], samples: int | None) -> Layouts:
        """Where the samples are in what a layer with a rule returned."""
        if not samples:  # without any there are no rows to place
            return ()
        known = self.layouts.get(path, ())
        if call == Plan.AGAIN and known and all(layout == known[0] for layout in known):
            return (known[0],)
        if 0 <= call < len(known):
            layout = known[call]
            self.incomplete |= layout is None or not layout.fits(outputs[0], samples)  # the next forward is traced again
            return (layout,)
        self.incomplete = True
        return (only_by_sizes(outputs[0].shape, samples, axes_for(layer, outputs[0])),)

    def is_due(self, samples: int) -> bool:
        """Whether the forward that begins is traced anew: proofs belong to one point of training, and to one size."""
        larger = samples >= (3 if self.largest < 3 else 2 * self.largest)
        few = self.largest < 3 and is_power_of_two(self.forwards)  # two samples prove little
        return self.incomplete or is_milestone(self.forwards) or larger or few

    def follow(self, earlier: Plan) -> None:
        """Takes the place of an earlier plan, and what that knew of calls that this one's forward has not made, of layers
        that are skipped at random say."""
        self.forwards, self.largest, self.unread = earlier.forwards, earlier.largest, earlier.unread
        self.deepest = earlier.deepest
        if earlier.unproven:
            return
        held = {n for unit in self.units.values() for n in unit.parameters.values()} - self.unused
        names = earlier.reading.names - held - self.refused.keys()
        self.reading = self.reading.after(earlier.reading.without(self.layouts), names)
        for path, known in earlier.layouts.items():
            mine = self.layouts.get(path, ())
            self.layouts[path] = [*mine, *known[len(mine) :]]
        for path, unit in earlier.units.items():
            if path not in self.units or not self.units[path].calls:
                self.units[path] = unit
        for path, unit in self.units.items():
            left = {local: n for local, n in unit.parameters.items() if n not in self.reading.names}
            self.units[path] = replace(unit, parameters=left)
        self.units = {path: unit for path, unit in self.units.items() if unit.parameters}

    def layouts_of_model(self, model: nn.Module, outputs: Sequence[Tensor]) -> Layouts:
        """Where the samples are in the model's own outputs."""
        if len(self.model) == len(outputs):
            return self.model
        rule = rule_for(model)
        axes = rule.axes(model) if rule is not None and rule.axes is not None else ()
        places = [*axes, *[0] * len(outputs)]
        return tuple(Layout(axis) if x.ndim > axis else None for x, axis in zip(outputs, places))

    def keeps_arrived(self, name: str) -> bool:
        """Whether the gradient that arrives at a parameter is kept, to compare the sum of its rows with: at first,
        and always where they come of running a module again."""
        return (
            self.mode == EXPAND
            or self.awaits_sum(name)
            or any(name in unit.parameters.values() for unit in self.units.values())
        )

    def awaits_sum(self, name: str) -> bool:
        """Whether a parameter's rows are to be compared with the gradient that arrives."""
        return name not in self.summed and not self.unread

    @property
    def awaits_derivatives(self) -> bool:
        """Whether the sums of rows of a pass with derivatives in it are still to be compared, if one comes."""
        return self.mode == DERIVATIVES and not self.deepest and self.forwards <= _PATIENCE


def is_milestone(forwards: int) -> bool:
    """Whether plans are made, proven and compared anew: in forwards 2, 16, 128, 1024, ... of a signature."""
    return is_power_of_two(forwards) and forwards.bit_length() % 3 == 2


def is_second_try(forwards: int) -> bool:
    """Whether what the last proof has left open is tried again: in forwards 4, 32, 256, ... of a signature."""
    return is_power_of_two(forwards) and forwards.bit_length() % 3 == 0


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def static_units(model: nn.Module) -> dict[str, Unit]:
    """Units that can be told without a forward: each module with parameters that no rule covers, or where it is never
    called, as containers and parametrisations aren't, the module around it."""
    modules, first = dict(model.named_modules()), {p: name for name, p in model.named_parameters()}
    by_rule = {first[p] for layer in modules.values() if rule_for(layer) for p in covered(layer).values()}
    units: dict[str, Unit] = {}
    for path, owner in modules.items():
        for name, parameter in owner._parameters.items():
            if parameter is None or first[parameter] in by_rule:
                continue
            place, inside = path, name
            while place and not _is_called(place, modules):
                place, _, last = place.rpartition(".")
                inside = f"{last}.{inside}"
            unit = units.setdefault(place, Unit({}, f"no rule covers a {type(modules[place]).__name__} with {name!r}"))
            unit.parameters[inside] = first[parameter]
    return units


def _is_called(path: str, modules: dict[str, nn.Module]) -> bool:
    """Whether a module has a forward of its own that a model would call on its samples."""
    module = modules[path]
    if "parametrizations" in path.split(".") or isinstance(module, torch.jit.ScriptModule):
        return False
    return getattr(type(module), "forward", None) is not nn.Module.forward
