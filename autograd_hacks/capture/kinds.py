"""What is known of a forward: when it begins, when it was read, and what is kept for the next one of its kind."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from autograd_hacks.formulas.table import rule_for
from autograd_hacks.graph.memo import Memo
from autograd_hacks.graph.trace import Plan
from autograd_hacks.probe.batch import Batch, BatchDim
from autograd_hacks.probe.documents import Documents
from autograd_hacks.probe.known_tapes import Tapes
from autograd_hacks.support.copies import Copy
from autograd_hacks.support.internals import global_hooks
from autograd_hacks.support.layout import Layout, Layouts, is_time_first
from autograd_hacks.support.parts import has_parts
from autograd_hacks.support.trees import is_packed

NESTED = (
    "the model was given a nested tensor or makes one, but rules need tensors of one shape. Give it a padded tensor, "
    "x.to_padded_tensor(0.0), and a mask for the padding."
)

_TRAINING, _NESTED, _META = attrgetter("training"), attrgetter("is_nested"), attrgetter("is_meta")
Parts = Callable[..., Any]
"""The model's arguments for some samples alone, from their numbers and the arguments for all."""
OWN = 2
"""How many forward hooks of the library's a layer with a rule has that is the model.  Others may mix samples."""
MOST = 32
"""How many kinds of forwards a model has.  Dictionary keys and lengths of lists may make another kind of each forward."""


@dataclass
class Kind:
    """What is kept of the forwards of one kind.  No label: whose gradients are is found in each
    forward, and `Kinds.memo` compares before it believes an earlier walk.

    Values of samples may mix without a gradient, where no graph shows it: of that there is a record.
    """

    hypothesis: Any = None  # where the samples were in the last forward, to be tried first
    plan: Plan | None = None  # of the last forward's graph, if it was one of before
    derives: bool | None = None  # whether passes made graphs; None before the first pass
    pending: bool = True  # whether the next forward must be shown to be independent
    is_independent: bool = False  # whether outputs were shown not to depend on other samples' values
    shown: str = ""  # how they were, in the last forward
    dependent: tuple[str, Sequence[int]] | None = None  # how values of samples mix without a gradient, and in which outputs
    tapes: Tapes = field(default_factory=Tapes)  # of forwards whose samples were shown to be independent


class Whose(NamedTuple):
    """Where the samples are in the tensors that a use made: what `Reader` makes of labels, and rows are computed by."""

    layouts: Layouts = ()  # for each tensor, where none are labelled
    labels: Tensor | None = None  # the sample of each row, or of each entry, where values decide
    is_unseen: bool = False  # whether no gradient from the outputs leads to it, or it has no entries


@dataclass
class Facts:
    """What was read of a forward's graph, which is so in each forward with an equal one."""

    calls: Sequence[Whose | None] | None = None  # whose each call's outputs are; None where its rule gives no rows
    nodes: dict[str, list[str]] = field(default_factory=dict)  # by parameter, the nodes that read it, for messages
    covered: frozenset[str] = frozenset()  # the parameters for which some layer's rule gives rows
    disproven: Mapping[str, str] = field(default_factory=dict)  # why a parameter's rows are wrong
    returns_parameters: bool = False  # whether some output depends on parameters only
    is_scaled: bool = False  # whether a loss inside the model is the root of a sum over the batch

    @cached_property
    def plain(self) -> list[bool]:
        """For each call, whether its only output has the samples first."""
        return [own is not None and own.layouts == (Layout(),) and not own.is_unseen for own in self.calls or ()]


class Unknown(NamedTuple):
    """What laws don't show of a forward whose samples must be independent."""

    why: str = ""
    at: int | None = None  # the number of the operation at which they don't
    meets: bool = False  # whether they say that samples meet there
    sites: Collection[tuple[Any, ...]] = ()  # if they show all else, what they don't


@dataclass(eq=False)
class Within:
    """One forward, or another graph: what all uses in it share, and what was read of it.

    Parameters are known by their first name in the model."""

    forward: int = 0  # the forward's number
    kind: Kind = field(default_factory=Kind)
    samples: int | None = None  # N, if its own arguments or outputs show it
    documents: Documents | None = None  # whose rows are wanted, instead of samples'
    facts: Facts = field(default_factory=Facts)
    leaves: Mapping[int, Node] = field(default_factory=dict)  # where parameters (id) end the graph, once that was read
    axis: int | None = None  # the samples' axis in the model's arguments; None if the user gave each one
    counted_at: int | None = None  # the output that shows N, if no argument does
    places: Sequence[Any] = ()  # where samples are in the model's outputs, as `Returned` has it; None where nothing says it
    refused: Mapping[str, str] = field(default_factory=dict)  # why a parameter has no rows
    mixing: str = ""  # how samples mix
    failed: Exception | None = None  # the check of this, where other processes are to know when rows are read
    mixed_outputs: Sequence[int] = ()  # the numbers of the model's outputs in which they do
    unknown: Unknown = field(default_factory=Unknown)
    untold: str = ""  # why an output's entries can't be assigned to documents
    mixes_at: str = ""  # the name of a node at which samples mix, whether or not parameters are behind it
    ways: dict[int, Any] = field(default_factory=dict)  # back from values to their parameters, by `Way` (id), since a pass
    compared: set[str] | None = None  # the parameters whose rows need not be compared with gradients; None for all
    unsure: frozenset[str] = frozenset()  # those whose rows are compared in each step, since they may be of other values

    def is_new(self, name: str) -> bool:
        """Whether a parameter's rows are to be compared for the first time."""
        return self.compared is not None and name not in self.compared and name not in self.unsure

    @property
    def outputs(self) -> Layouts:
        """The layouts of the outputs that have one."""
        return tuple([at if isinstance(at, Layout) else None for at in self.places])

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Says that parameters have no rows, and that the samples are unknown."""
        self.refused, self.samples = dict.fromkeys(names, why), None


class Known(NamedTuple):
    """The facts that are known when a forward begins whose graph is to be read."""

    batch: Batch  # the arguments
    axis: int | None  # of the samples in the arguments, as the user gave it
    copy: Copy | None  # of the model and the leaves of the batch, if a check is to run it


class Kinds:
    """The kinds of forwards of one hooked model.

    batch_dim, independent, replace: see `add_hooks`
    probes: whether forwards are read by their graphs
    """

    def __init__(
        self, model: nn.Module, batch_dim: BatchDim, probes: bool, independent: bool = False, replace: Parts | None = None
    ) -> None:
        self.batch_dim, self.probes, self.independent, self.replace = batch_dim, probes, independent, replace
        self.is_covered = not uncovered(model)  # whether layers with rules cover all its parameters
        self.static = Kind(pending=False)  # for layers called by themselves, and if no graph is read
        self.seen: dict[object, Kind] = {}  # by what tells them apart, the last one used last
        self.memo = Memo()  # of the laws' walks
        self._is_whole = not independent  # whether lazy layers have their parameters, which tapes and runs need
        self.losses: dict[Any, Any] = {}  # of losses that keep samples apart, what shows it: see `reading/beyond.py`
        self.mixing_sites: set[Any] = set()  # what no law shows, in forwards in which samples were seen to mix

    def doubt(self) -> None:
        """Makes the next forward of each kind show that its samples are independent, if that is asked."""
        for kind in self.seen.values():
            kind.pending = True

    def for_copy(self, independent: bool, within: Within | None, knows: bool) -> "Kinds":
        """The kinds of a copy of the model, each of which must show its independence once more.

        independent: see `add_hooks`
        within: the forward that the copy repeats, if its graph is to be read and its samples are where they were then
        knows: whether what the copy shows is known of the model, too
        """
        own = copy(self)
        own.static, own.memo, own.independent = Kind(pending=False), Memo(), independent
        own.seen = self.seen if knows else {key: replace(kind, tapes=Tapes()) for key, kind in self.seen.items()}
        own.doubt()
        if within is not None:
            own.probes, own.batch_dim = True, self.batch_dim if within.axis is None else within.axis
        return own

    def look(
        self, within: Within, model: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any],
        tensors: Sequence[Tensor], modules: Sequence[nn.Module],
    ) -> Known | None:  # fmt: skip
        """What is known of a forward that begins; None if no graph is to be read.  Notes its kind, and N, in it.

        path: of the called module    tensors: those among the arguments    modules: its own, and itself"""
        within.kind, within.samples = self.static, None
        if any(map(_NESTED, tensors)):
            within.kind = Kind()
            within.refuse([name for name, _ in model.named_parameters()], NESTED)
            return None
        # A layer by itself mixes nothing that its rule doesn't know.  If no rule covers it, samples are searched anyway.
        reads, hooks = self.probes or self.independent, [*model._forward_hooks, *global_hooks]
        is_alone = self.batch_dim == 0 and len(hooks) <= OWN and rule_for(model)
        if (self.is_covered and not reads) or is_alone:
            return None
        by_name = self.batch_dim if isinstance(self.batch_dim, dict) else {}
        own = inspect.signature(model.forward).parameters if by_name else {}
        names = [*own, *(by_name if any(p.kind is p.VAR_KEYWORD for p in own.values()) else ())]
        batch = Batch.of(args, kwargs, self.batch_dim if not path else 0, names)
        axis = 0 if path else self.batch_dim if isinstance(self.batch_dim, int) else None
        if not self._is_whole:
            self._is_whole = not any(p is not None and is_lazy(p) for m in modules for p in m._parameters.values())
        if not self._is_whole or any(map(_META, tensors)):  # without numbers, forwards can't be read
            return None
        is_bag = batch.is_ragged and any(isinstance(module, nn.EmbeddingBag) for module in modules)
        axis = None if is_bag else axis  # entries are packed
        samples, is_empty = batch.samples(axis), axis == 0 and 0 in [x.numel() for x in tensors]
        if samples == 0 or (is_empty and batch.samples(1) == 0 and runs_time_first(modules, batch)):
            within.samples = 0
            return None
        key = path, batch.signature(), samples == 1, tuple(map(_TRAINING, modules))
        kind = self.seen[key] = self.seen.pop(key) if key in self.seen else Kind()
        if len(self.seen) > MOST:
            del self.seen[next(iter(self.seen))]
        if (known := kind.hypothesis) is not None and (known.axis, known.counted_leaf) != (axis, None):
            samples = batch.samples(known.axis, known.counted_leaf)
        # Parts of parameters are gathered when the forward has ended, and copied then.
        is_kept = self.independent and kind.pending and not has_parts(model)
        within.kind, within.samples = kind, samples
        return Known(batch, axis, Copy(model, batch.leaves) if is_kept else None)


def runs_time_first(modules: Sequence[nn.Module], batch: Batch) -> bool:
    """Whether the samples may be on axis 1 of the arguments, because some layer has them there."""
    return any(map(is_time_first, modules)) and not any(map(is_packed, batch.leaves))


def uncovered(model: nn.Module) -> set[nn.Module]:
    """The modules with parameters of their own for which no layer rule gives rows."""
    rules = ((layer, rule_for(layer)) for layer in model.modules())
    by_rule = {id(p) for layer, rule in rules if rule is not None for p in layer._parameters.values()}
    return {m for m in model.modules() if any(p is not None and id(p) not in by_rule for p in m._parameters.values())}
