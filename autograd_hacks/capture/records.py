"""What is recorded, as plain data: backward passes, and which of these add up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.uses import OutputGrads, Use
from autograd_hacks.errors import ON_REDUCTION, ON_SEGMENTS, BatchSizeError, NothingRecorded, PerSampleGradientError
from autograd_hacks.probe.documents import Documents
from autograd_hacks.probe.plan import Plan
from autograd_hacks.support.by_tensor import ByTensor
from autograd_hacks.support.display import bytes_of, with_unit
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.parts import part_of
from autograd_hacks.support.restored import kept
from autograd_hacks.support.trees import parameters_of, version_of

NO_GRAD = 0, 0
P = TypeVar("P", bound=Tensor)


@dataclass(eq=False)
class Announcement:
    """What `backward(losses)` says of its pass beforehand, or `backprop_hess` of all its passes."""

    shape: torch.Size  # of what it was given, N ...
    loss_type: str
    what: str  # that was, for people
    hess_type: str | None = None  # of `backprop_hess`
    complete: bool = True  # whether all its passes have run
    heard_by: list[Record] = field(default_factory=list)
    arrived: dict[Record, dict[str, Tensor]] = field(default_factory=dict)  # at parameters, over all its passes


@dataclass(eq=False)
class Pass:
    """One backward pass, with those that checkpointing runs inside it.  Parameters are known by name."""

    task: int  # autograd's number for it
    losses: Announcement | None
    received: dict[Use, OutputGrads] = field(default_factory=dict)
    calls_of: dict[str, list[Use]] = field(default_factory=dict)  # by parameter the calls that lead to it
    captures: bool = False  # whether torch.autograd.grad runs it, which leaves .grad alone
    forwards_before: int = 0  # since the pass before it
    higher_order: bool = False  # whether it makes a graph
    mixes: bool = False  # whether it came through the gradient of a parameter, a sum over the batch
    ambiguous: bool = False  # whether its calls are recomputed, and it can't be known which of several forwards' they are
    finished: bool = False
    arrived: dict[str, Tensor] = field(default_factory=dict)  # parameters' gradients, while they are to be compared
    # By parameter the calls whose rows' sum was compared with the gradient as it arrived, which was not kept.
    settled: dict[str, set[Use]] = field(default_factory=dict)
    handed: dict[str, Tensor] = field(default_factory=dict)  # by parameter, what nodes hand to it: see `side_doors.py`
    reader: Any = None  # what settles, while the pass runs
    taken: set[str] = field(default_factory=set)  # the parameters that were handed on before they were arrived at
    # Parameters whose gradients uses don't bring, and those that some bring all the same: see `capture/lean.py`.
    skipped: set[str] = field(default_factory=set)
    brought: set[str] = field(default_factory=set)
    replaces_unread: bool = False  # whether the rows of an earlier pass, which nobody has read, made way for its own
    adds_to_left: bool = False  # whether .grad is as the pass before it has left it
    fills_grad: bool = False  # whether some of its gradients are in .grad
    side_door: str = ""  # what the model keeps and has not returned, and the pass's gradient came by
    mixed_output: bool = False  # whether it came through an output of the model whose samples mix

    @property
    def is_hess(self) -> bool:
        """Whether `backprop_hess` runs it."""
        return self.losses is not None and self.losses.hess_type is not None

    def reduction(self, loss_type: str | None) -> str:
        """How its loss was made of the samples' losses: 'mean' or 'sum'.  loss_type: what the reader says of it, or None"""
        if self.losses is None:
            return loss_type or "mean"
        if loss_type not in (None, self.losses.loss_type):
            raise ValueError(
                f"loss_type is {loss_type!r}, but by {self.losses.what} it was {self.losses.loss_type!r}. Leave "
                "loss_type out: the scale is known." + ON_REDUCTION
            )
        return self.losses.loss_type


@dataclass(eq=False)
class Segment:
    """Passes whose rows are of the same samples and add up, since they come through a forward that others came through."""

    passes: list[Pass] = field(default_factory=list)
    forwards: set[int] = field(default_factory=set)
    read: bool = False
    replaced: bool = False  # whether the library has put something else into .grad

    def takes(self, current: Pass, call: Use) -> bool:
        """Whether a pass that comes through a call adds to these.  torch.autograd.grad adds nothing to ``.grad``."""
        return call.forward in self.forwards and all(
            other.captures == current.captures or current.is_hess or other.is_hess for other in self.passes
        )

    @property
    def hess_type(self) -> str | None:
        """What `backprop_hess` was told, if it has run these passes.  Raises NothingRecorded where it has run some alone."""
        types = {None if recorded.losses is None else recorded.losses.hess_type for recorded in self.passes}
        if len(types) > 1:
            raise NothingRecorded(
                "the record holds the passes of backprop_hess and an ordinary backward pass of the same forward, whose rows "
                "mean different things. Call autograd_hacks.clear_backprops(model) between the two."
            )
        return next(iter(types), None)

    def check_takes(self, current: Pass) -> None:
        """Raises where a second `backprop_hess` begins before what the one before has left is read, or cleared."""
        for other in self.passes:
            if current.is_hess and other.is_hess and other.losses is not current.losses:
                raise NothingRecorded(
                    "backprop_hess has run before, and its passes are still in the record, not read yet or of this very "
                    "forward. Call clear_backprops(model) to throw them away; or read them (compute_hess, per_sample_grads) "
                    "and run the model anew; or, for several batches, run them within accumulate(model)."
                )

    def batch_size(self) -> int:
        """The number of samples that all calls and loss vectors share.  Raises BatchSizeError with all of them otherwise."""
        told: list[tuple[Use | Announcement, int]] = []
        for recorded in self.passes:
            if recorded.is_hess and any(call.documents is not None for call in recorded.received):
                raise BatchSizeError(
                    f"{recorded.losses and recorded.losses.what} has rows of samples' entries, and the model was hooked "
                    "with segments, for rows of documents. Call add_hooks(model), without segments, before the forward."
                    + ON_SEGMENTS
                )
            if recorded.losses:
                told.append((recorded.losses, recorded.losses.shape[0]))
            told += [(call, call.batch_size(grads)) for call, grads in reversed(recorded.received.items())]
        if len({size for _, size in told}) > 1:
            sizes: dict[str, int] = {}
            for teller, size in told:
                sizes.setdefault(teller.what, size)
            listing = "; ".join(f"{what}: {size}" for what, size in sizes.items())
            raise BatchSizeError(
                f"the numbers of samples disagree, so that rows can't be matched: {listing}. Expected one number for all: "
                "let axis 0 be the batch in every layer's input, and give losses one entry for each sample."
            )
        return told[0][1]

    def can_be_run_again(self) -> bool:
        return any(call.graph() is not None for recorded in self.passes for call in recorded.received)


@dataclass(eq=False)
class Record:
    """Of one hooked model: the backward passes that there are to read, and what must be known to read them."""

    segments: list[Segment] = field(default_factory=list)
    unseen: dict[str, int] = field(default_factory=dict)  # parameters with gradient by a way not seen: after which forward
    superseded: list[Segment] = field(default_factory=list)  # which the running pass may yet come through
    superseded_unseen: dict[str, int] = field(default_factory=dict)
    why_empty: str = ""  # why there is nothing to read, where that isn't plain
    transformed: bool = False  # whether torch.func has run a layer since the last pass
    comparing: bool = False  # whether a created graph may lead to the parameters past the hooks
    # Of the model's last forward with gradients, for `verify`: the arguments, tensors by weak reference.
    arguments: tuple[Any, Any] | None = None
    accumulating: bool = False
    stage: weakref.ref[Any] | None = None  # of a pipeline, which ran the last forward
    forwards: int = 0
    plan: Plan = field(default_factory=Plan)  # of the running forward, or of the last
    returned: list[tuple[torch.Size, Layout | None]] = field(default_factory=list)  # the last outputs, and their samples
    # The outputs that are alive: where their samples are, N, and how often they had been overwritten.
    outputs: ByTensor[tuple[Layout | None, int | None, int]] = field(default_factory=ByTensor)
    names: ByTensor[str] = field(default_factory=ByTensor)  # the model's parameters: their first names in it
    others: ByTensor[str] = field(default_factory=ByTensor)  # tensors that stood in a parameter's place
    documents: Documents | None = None  # that were packed into the last forward's samples, where rows are theirs
    left_out: frozenset[str] = frozenset()  # names of parameters that nobody asks for: see `add_hooks(only=...)`
    gathered: dict[str, Tensor] = field(default_factory=dict)  # what stands in the place of shards while layers run, by name
    cut: dict[str, Tensor] = field(default_factory=dict)  # the shards, and what is whole
    mesh: Any = None  # of the processes that hold them
    read_past: frozenset[str] = frozenset()  # the parameters of shards that some process reads off the graph
    shards: dict[str, int] = field(default_factory=dict)  # how often these had been overwritten in the last forward
    # Takes a parameter's rows while the pass runs: gets the pass, the name, and its gradient where that is computed.
    on_arrival: Callable[[Pass, str, Tensor | None], None] | None = None

    def add(self, segment: Segment) -> None:
        """Has a segment behind the others, or where its forward was: a schedule may come to the last micro-batch first."""
        self.segments = [*self.segments, segment]
        if self.stage is not None:
            self.segments.sort(key=lambda own: min(own.forwards))

    def clear(self, why: str = "") -> None:
        """Throws away what was recorded.  why: there is nothing to read then, for people"""
        self.segments, self.unseen, self.why_empty, self.arguments = [], {}, why, None
        self.superseded, self.superseded_unseen = [], {}

    @property
    def passes(self) -> list[Pass]:
        """The recorded ones, of all segments."""
        return [recorded for segment in self.segments for recorded in segment.passes]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A context that leaves the record as it is."""
        with kept(self):
            self.clear()
            self.accumulating, self.on_arrival = False, None
            yield

    def free_what_was_read(self) -> None:
        """Makes room for a forward's activations, so that two steps' records are never alive together."""
        if all(segment.read and not segment.can_be_run_again() for segment in self.segments):
            self.segments = []
            self.why_empty = (
                "the last backward pass has been read already, and its record was freed when a forward pass with gradients "
                "began after it. Take all that you need before that, from one per_sample_grads(model); or run the forward "
                "under torch.no_grad."
            )

    @property
    def hess_type(self) -> str | None:
        """What `backprop_hess` was told, where it has run all recorded passes; None where ordinary backward passes are
        recorded.  Raises NothingRecorded for both, or different ones."""
        found = {segment.hess_type for segment in self.segments}
        if len(found) > 1:
            raise NothingRecorded(
                f"the accumulated passes are of different kinds, {', '.join(sorted(map(str, found)))} (None for an ordinary "
                "backward pass), whose rows mean different things. Accumulate them apart."
            )
        return next(iter(found), None)

    def cells(self) -> list[tuple[str, str]]:
        """What there is to read, for people: in words, and in bytes."""
        passes = self.passes
        if not passes:
            why = "no backward pass yet" if self.forwards else "no forward pass yet"
            return [("recorded", self.why_empty or why)]
        received = [(call, grads) for recorded in passes for call, grads in recorded.received.items()]
        held = [x for call, grads in received for x in (*(x for x, _ in call.versions), *grads.at) if x is not None]
        try:
            size = f"{sum(segment.batch_size() for segment in self.segments if segment.passes)} samples"
        except PerSampleGradientError:
            size = "numbers of samples that disagree"
        count = f"{len(passes)} backward pass{'es' * (len(passes) > 1)}"
        return [("recorded", f"{size}, {count}"), ("holds", with_unit(bytes_of(held)))]

    def reduction(self, loss_type: str | None) -> str:
        """How all passes' losses were reduced.  Raises ValueError where they differ.  loss_type: what the reader says"""
        found = {recorded.reduction(loss_type) for recorded in self.passes}
        if len(found) > 1:
            raise ValueError(
                "some of the accumulated losses were means and some were sums; reduce all in one way" + ON_REDUCTION
            )
        return found.pop()

    def is_parameter(self, x: Tensor) -> bool:
        return x in self.names or any(x is other for other in self.gathered.values())

    def parameters_of(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's parameters by name, but for those left out, as layers see them: whole, where processes hold shards."""
        own = self.asked(parameters_of(model))
        return {name: self.gathered.get(name, p) for name, p in own.items()}

    def trained(self, module: nn.Module, path: str) -> dict[str, Tensor]:
        """The same of those that train, of a part at a path too, by the names that they have here."""
        named = {self.name_of(p, path, name): p for name, p in parameters_of(module).items() if p.requires_grad}
        return {name: self.gathered.get(name, p) for name, p in self.asked(named).items()}

    def asked(self, named: dict[str, P]) -> dict[str, P]:
        """Of parameters by name those that aren't left out."""
        return {name: p for name, p in named.items() if name not in self.left_out} if self.left_out else named

    def held(self, parameters: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Of parameters by name, as layers see them, what this process holds now: its shards, where there are any."""
        if not self.gathered:
            return parameters
        return {n: part_of(self.cut[n]) if n in self.gathered else p for n, p in parameters.items()}

    def state_of_grad(self, name: str, parameter: Tensor) -> tuple[int, int] | None:
        """What tells whether .grad is as it was, a shard's where there is one; None for sparse ones."""
        if (grad := self.cut.get(name, parameter).grad) is None:
            return NO_GRAD
        grad = part_of(grad)
        return (grad.data_ptr(), version_of(grad)) if grad.layout == torch.strided else None

    def name_of(self, parameter: Tensor, path: str = "", local: str = "") -> str:
        """A parameter's first name in the model; for a tensor that stands in its place, as in functional_call, or was put
        there later, a name of its own.  path, local: the layer's, and the parameter's in it"""
        name = self.names.get(parameter) or self.others.get(parameter)
        if name is None:
            self.others[parameter] = name = f"{path}.{local}".lstrip(".") + f", another tensor ({id(parameter)})"
        return name
