"""The recorded backward passes, as plain data, and which of them add up."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from autograd_hacks.capture.kinds import Within
from autograd_hacks.capture.uses import NodeUse, OutputGrads, Use
from autograd_hacks.errors import A_BATCH, ON_REDUCTION, ON_SEGMENTS, BatchSizeError, NothingRecorded, PerSampleGradientError
from autograd_hacks.forms.directions import along, directions
from autograd_hacks.probe.documents import Documents
from autograd_hacks.support.contexts import autocast_dtype, without_autocast
from autograd_hacks.support.display import bytes_of, with_unit
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.parts import is_part, part_of
from autograd_hacks.support.restored import kept
from autograd_hacks.support.trees import ByTensor, plain, version_of

NO_GRAD = 0, 0
P = TypeVar("P", bound=Tensor)


@dataclass(eq=False)
class Announcement:
    """The facts that `backward(losses)` knows about its pass beforehand, or `backprop_hess` about all its passes."""

    shape: torch.Size  # of the argument, N ...
    loss_type: str
    what: str  # the argument, as text for messages
    hess_type: str | None = None  # set by `backprop_hess`
    complete: bool = True  # whether all its passes have run
    refused: str = ""  # why its passes have no rows
    heard_by: list[Record] = field(default_factory=list)


@dataclass(eq=False)
class Pass:
    """One backward pass, including the passes inside it.  Parameters are known by name."""

    task: int  # autograd's number for it
    losses: Announcement | None
    reduced: frozenset[Any]  # how its loss becomes a number, if that was seen: kinds of nodes
    received: dict[Use, OutputGrads] = field(default_factory=dict)  # the gradients at all uses, in the order of arrival
    calls_of: dict[str, list[Use]] = field(default_factory=dict)  # by parameter, the uses that lead to it
    # The only forward that it goes through, if it reaches all of its parameters, frees its graph and does nothing else: of
    # what comes to the forward's usual calls nothing is left to decide.  And the record's segments, as they were then.
    usual_in: Within | None = None
    segments: Sequence[Segment] = ()
    # What came to uses, but of the usual calls only to one, since what a forward tells is the same for all.
    told_by: dict[Use, OutputGrads] = field(default_factory=dict)
    hooks: list[weakref.ref[Any]] = field(default_factory=list)  # at those that aren't usual calls
    captures: bool = False  # whether torch.autograd.grad runs it, which leaves .grad alone
    higher_order: bool = False  # whether it makes a graph
    mixes: bool = False  # whether it went through a parameter's gradient, which is a sum over the batch
    finished: bool = False
    # By receiver (see `Link`), the gradient that the only known node has made for it, while it is on its way.  If this very
    # tensor arrives, nothing else has changed it or added to it.  With its version.
    made: dict[str | int, tuple[Tensor, int] | None] = field(default_factory=dict)
    # Of other gradients that arrived at parameters, what they are along directions, until rows are compared with it.
    along: dict[str, list[Tensor]] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)  # the parameters whose gradients can't be read
    by_modes: bool = False  # whether a mode computes its gradients, which may do that otherwise
    skipped: set[str] = field(default_factory=set)  # parameters whose gradients the engine doesn't compute
    left: dict[str, int] = field(default_factory=dict)  # of those, how many gradients are still to come to their uses
    beside: set[str] = field(default_factory=set)  # parameters with gradient through outputs of parameters alone
    replaces_unread: bool = False  # whether it replaces rows of an earlier pass that nobody has read
    adds_to_left: bool = False  # whether .grad is as the previous pass left it
    fills_grad: bool = False  # whether some of its gradients are in .grad
    refused: str = ""  # why it has no rows, as text for messages: a hook moved samples, or a loss reads where they mix
    said: set[Any] = field(default_factory=set)  # what was assumed of its model's losses, in words on stderr

    def names(self) -> Set[str]:
        return self.calls_of.keys()

    def received_at(self, use: Use) -> OutputGrads:
        """What came to a use so far, to be added to."""
        if (found := self.received.get(use)) is None:
            found = self.received[use] = self.told_by[use] = OutputGrads([None] * use.slots, [0] * use.slots)
        return found

    def free(self, use: Use) -> None:
        """Frees what came to a use, once it was read."""
        del self.received[use], self.told_by[use]
        if isinstance(use, NodeUse):  # which the graph holds
            use.versions = []

    def brings(self, receiver: str | int, grad: Tensor | None) -> bool:
        """Whether a gradient is what the only known node has made for its receiver."""
        made = self.made.pop(receiver, None)
        return made is not None and made[0] is grad and made[1] == version_of(grad)

    def note_along(self, name: str, grad: Tensor) -> None:
        """Notes a gradient that arrived at a parameter, as a few numbers."""
        if type(grad) is not Tensor or grad.requires_grad:
            if is_part(grad):
                self.untold.add(name)
                return
            grad = part_of(plain(grad))
        is_captured = grad.is_cuda and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        if grad.is_nested or grad.is_meta or is_captured:  # the host may not ask for its numbers
            self.untold.add(name)
            return
        at = directions(name, self.task % 4, grad.shape, grad.dtype, grad.device)
        with without_autocast([grad]) if autocast_dtype(grad.device) is not None else nullcontext():
            self.along.setdefault(name, []).append(along(grad, at))

    @property
    def is_hess(self) -> bool:
        """Whether `backprop_hess` runs it."""
        return self.losses is not None and self.losses.hess_type is not None

    def reduction(self, loss_type: str | None) -> str:
        """How the loss combines the samples' losses: 'mean' or 'sum'.  loss_type: what the reader said, or None"""
        if self.losses is None:
            return loss_type or assumed("mean", self.said, self.reduced)
        if loss_type not in (None, self.losses.loss_type):
            raise ValueError(
                f"loss_type={loss_type!r} was given, but {self.losses.what} used {self.losses.loss_type!r}. Leave "
                "loss_type out: the scale is known." + ON_REDUCTION
            )
        return self.losses.loss_type


def assumed(what: str, said: set[Any], reduced: frozenset[Any] = frozenset()) -> str:
    """'mean' or 'sum', which is assumed of a loss of which nobody said it.

    Says so on stderr, unless it was ``said`` of a loss that became a number in the same way."""
    if (what, reduced) not in said:
        said.add((what, reduced))
        print(
            f"autograd_hacks: no loss_type was given, so the loss is assumed to be the {what} of the samples' losses. Rows "
            "of others are wrong: give loss_type='sum' or 'mean', scale=1/K for loss / K, and N losses to "
            "autograd_hacks.backward for class weights or ignored targets. "
            f"loss_type={what!r} hides this line" + ON_REDUCTION.replace("\nM", ". M"),
            file=sys.stderr,
        )
    return what


def disagreement(sizes: Mapping[str, int]) -> BatchSizeError:
    """The error for different numbers of samples.  sizes: {a call or the losses, as text: its number}"""
    listing = "; ".join(f"{what}: {size}" for what, size in sizes.items())
    return BatchSizeError(
        f"the numbers of samples disagree, so rows can't be matched: {listing}. Expected the same number for all. Axis 0 "
        f"must be the batch in every layer's input, and losses need one entry per sample. {A_BATCH} If arguments pack "
        "samples of other sizes along an axis (graphs, bags, patches), no axis of theirs is the batch: add_hooks(model, "
        "batch_dim=None)."
    )


@dataclass(eq=False)
class Segment:
    """Passes through the same forwards.  Their rows belong to the same samples and add up."""

    passes: list[Pass] = field(default_factory=list)
    forwards: set[int] = field(default_factory=set)
    read: bool = False
    replaced: bool = False  # whether the library has replaced .grad

    def takes(self, current: Pass, forward: int) -> bool:
        """Whether a pass through a forward adds to this segment.  torch.autograd.grad adds nothing to ``.grad``."""
        return forward in self.forwards and all(
            other.captures == current.captures or current.is_hess or other.is_hess for other in self.passes
        )

    @property
    def leaves_unread(self) -> bool:
        """Whether a pass that replaces it leaves rows in ``.grad`` that nobody has read: its own, or those that it replaced
        itself, if it is of torch.autograd.grad, which adds nothing to ``.grad``."""
        captures = all(own.captures for own in self.passes)
        return any(own.replaces_unread for own in self.passes) if captures else not self.read

    @property
    def hess_type(self) -> str | None:
        """The ``hess_type`` of `backprop_hess`, or None.  Raises NothingRecorded if it ran only some passes."""
        types = {None if recorded.losses is None else recorded.losses.hess_type for recorded in self.passes}
        if len(types) > 1:
            raise NothingRecorded(
                "the record has passes of backprop_hess and an ordinary backward pass, of the same forward. Their rows mean "
                "different things. Call autograd_hacks.clear_backprops(model) between them."
            )
        return next(iter(types), None)

    def check_takes(self, current: Pass) -> None:
        """Raises if a second `backprop_hess` begins before the passes of the first are read or cleared."""
        for other in self.passes:
            if current.is_hess and other.is_hess and other.losses is not current.losses:
                raise NothingRecorded(
                    "backprop_hess: the passes of an earlier call are still in the record, unread or from this forward. To "
                    "discard them, call clear_backprops(model). To keep them, read them (compute_hess, per_sample_grads) "
                    "and run the model again. For several batches, use accumulate(model)."
                )

    def batch_size(self) -> int:
        """The number of samples, if all calls and losses agree.  Else raises BatchSizeError, which lists all numbers."""
        told = list[int]()
        for recorded in self.passes:
            if recorded.is_hess and any(call.within.documents is not None for call in recorded.told_by):
                raise BatchSizeError(
                    f"{recorded.losses and recorded.losses.what} gives rows of samples' entries, but "
                    "add_hooks(segments=...) asks for rows of documents. Call add_hooks(model) without segments before the "
                    "forward." + ON_SEGMENTS
                )
            told += [recorded.losses.shape[0]] if recorded.losses else []
            told += [call.batch_size(grads) for call, grads in reversed(recorded.told_by.items())]
        if len({*told}) > 1:
            sizes = {recorded.losses.what: recorded.losses.shape[0] for recorded in self.passes if recorded.losses}
            every = (pair for recorded in self.passes for pair in reversed(recorded.received.items()))
            counts = [(use, use.batch_size(grads)) for use, grads in every]
            count, is_same = counts[0][1], len({size for _, size in counts}) == 1
            if is_same and all(
                use.within.documents is not None and not use.within.documents.is_of_tokens for use, _ in counts
            ):
                raise BatchSizeError(
                    f"backward was given {next(size for size in sizes.values() if size != count)} losses, but the batch "
                    f"packs {count} documents; expected {count} losses, one for each document (segments=...), in the "
                    "batch's order." + ON_SEGMENTS
                )
            for use, size in counts:
                sizes.setdefault(use.what, size)
            raise disagreement(sizes)
        return told[0]

    def can_be_run_again(self) -> bool:
        hooks = [hook for recorded in self.passes for hook in recorded.hooks]
        return any(own is not None and own.use is not None for own in [hook() for hook in hooks])


@dataclass(eq=False)
class Record:
    """The backward passes of one hooked model that can be read, and everything needed to read them."""

    segments: list[Segment] = field(default_factory=list)
    unseen: dict[str, int] = field(default_factory=dict)  # parameters with gradient by an unseen way: after which forward
    superseded: list[Segment] = field(default_factory=list)  # replaced segments that the running pass may still reach
    superseded_unseen: dict[str, int] = field(default_factory=dict)
    why_empty: str = ""  # why there is nothing to read, if that needs an explanation
    # Why gradient may come by an unseen way, if something is known: torch.func or a backward pass ran a layer.
    why_unseen: str = ""
    comparing: bool = False  # whether a created graph may lead around the hooks to the parameters
    # For `verify`: the arguments of the model's last forward with gradients.  Tensors are weak references.
    arguments: tuple[Any, Any] | None = None
    accumulating: bool = False
    forwards: int = 0
    said: set[Any] = field(default_factory=set)  # see `Pass`
    last: Within = field(default_factory=Within)  # the running forward, or the last one that was recorded
    returned: list[tuple[torch.Size, Layout | None]] = field(default_factory=list)  # the last outputs' shapes and layouts
    names: ByTensor[str] = field(default_factory=ByTensor)  # the model's parameters: their first names in it
    others: ByTensor[str] = field(default_factory=ByTensor)  # tensors that replaced a parameter
    documents: Documents | None = None  # the documents packed into the last forward's samples, if rows are per document
    left_out: frozenset[str] = frozenset()  # names of parameters without rows: see `add_hooks(only=...)`
    gathered: dict[str, Tensor] = field(default_factory=dict)  # by name, what replaces shards while layers run
    cut: dict[str, Tensor] = field(default_factory=dict)  # the shards, and the parameters that are whole
    mesh: Any = None  # of the processes that hold the shards
    is_settled: bool = False  # whether processes that share the model were found to have hooked it alike
    read_past: frozenset[str] = frozenset()  # parameters in shards that some process reads from the graph
    shards: dict[str, int] = field(default_factory=dict)  # how often the shards had been overwritten in the last forward
    # Takes a parameter's rows while the pass runs.  Gets the pass, the name, and the gradient if it is computed.
    on_arrival: Callable[[Pass, str, Tensor | None], None] | None = None

    def clear(self, why: str = "") -> None:
        """why: for messages, why there is nothing to read"""
        self.segments, self.unseen, self.why_empty, self.arguments = [], {}, why, None
        self.superseded, self.superseded_unseen = [], {}

    def mark_read(self) -> None:
        """Says that all passes were read, also if reading then fails."""
        for segment in self.segments:
            segment.read = True

    def file(self, current: Pass, forward: int) -> None:
        """Puts a pass through a forward into a segment.

        A pass through a forward of an existing segment adds to that segment.  A pass through other forwards only replaces
        all segments, or begins a new one while accumulating.
        """
        home = next((segment for segment in self.segments if current in segment.passes), None)
        # 1. Does the forward belong to another segment, including replaced ones?
        target = next((s for s in (*self.segments, *self.superseded) if s is not home and s.takes(current, forward)), None)
        # 2. A second backprop_hess must not replace the unread passes of the first.
        for segment in self.segments if current.is_hess and home is None else ():
            if segment is target or not (self.accumulating or segment.read):
                segment.check_takes(current)
        if home is not None and target is not None:
            # 3. The pass began in another segment and comes here too: join both, at the place of the target.
            target.passes += home.passes
            target.forwards |= home.forwards
            others = self.superseded if target in self.superseded else self.segments
            current.replaces_unread = False
            self.segments, home = [segment for segment in others if segment is not home], target
            self.unseen = self.superseded_unseen | self.unseen
        elif home is None:
            # 4. This is the pass's first call: it adds to the segment that was found, or begins a new one.
            home = target or Segment(forwards={forward})
            home.passes.append(current)
            if target is None and self.accumulating:
                self.segments = [*self.segments, home]
            elif target is None:
                current.replaces_unread = not current.is_hess and any(segment.leaves_unread for segment in self.segments)
                # The pass may still reach the segment that it replaces, if a graph leads there: several losses of one
                # forward, some with layers that were called later.  So keep that segment until the pass ends.
                if any(s.can_be_run_again() for s in self.segments):
                    self.superseded, self.superseded_unseen = self.segments, self.unseen
                self.segments = [home]
                self.unseen = {name: after for name, after in self.unseen.items() if after == self.forwards}
        home.forwards.add(forward)

    @property
    def passes(self) -> list[Pass]:
        return [recorded for segment in self.segments for recorded in segment.passes]

    def witnesses(self) -> list[Use]:
        """The uses that tell what forwards and passes were."""
        return [use for segment in self.segments for recorded in segment.passes for use in recorded.told_by]

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """A context with an empty record.  Restores the old one afterwards."""
        with kept(self):
            self.clear()
            self.accumulating, self.on_arrival = False, None
            yield

    def free_what_was_read(self) -> None:
        """Frees the activations of passes that were read, so that two steps' records are never alive together."""
        if not [segment for segment in self.segments if not segment.read or segment.can_be_run_again()]:
            self.segments = []
            self.why_empty = (
                "the last backward pass was read already, and its record was freed when the next forward pass with "
                "gradients began. Read everything before that, from one per_sample_grads(model), or run the forward under "
                "torch.no_grad."
            )

    @property
    def hess_type(self) -> str | None:
        """The ``hess_type`` of `backprop_hess` if it ran all passes, or None.  Raises NothingRecorded if they differ."""
        found = {segment.hess_type for segment in self.segments}
        if len(found) > 1:
            raise NothingRecorded(
                f"the accumulated passes are of different kinds: {', '.join(sorted(map(str, found)))} (None: an ordinary "
                "backward pass). Their rows mean different things. Accumulate each kind by itself."
            )
        return next(iter(found), None)

    def cells(self) -> list[tuple[str, str]]:
        """Everything that can be read, as pairs of text for messages: a description, and the memory it takes."""
        passes = self.passes
        if not passes:
            return [("recorded", self.why_empty or ("no backward pass yet" if self.forwards else "no forward pass yet"))]
        received = [(call, grads) for recorded in passes for call, grads in recorded.received.items()]
        held = [x for call, grads in received for x in (*(x for x, _ in call.versions), *grads.at) if x is not None]
        try:
            size = f"{sum(segment.batch_size() for segment in self.segments if segment.passes)} samples"
        except PerSampleGradientError:
            size = "numbers of samples that disagree"
        count = f"{len(passes)} backward pass{'es' * (len(passes) > 1)}"
        return [("recorded", f"{size}, {count}"), ("holds", with_unit(bytes_of(held)))]

    def reduction(self, loss_type: str | None) -> str:
        """How the losses of all passes were reduced.  Raises ValueError if they differ.  loss_type: what the reader said"""
        found = {recorded.reduction(loss_type) for recorded in self.passes}
        if len(found) > 1:
            raise ValueError(
                "some accumulated losses are means and some are sums. Reduce all losses in the same way. Those of "
                "loss.backward() are assumed to be means: if they are sums, pass loss_type='sum'. For derivatives of rows "
                "run the first pass by torch.autograd.grad(loss, parameters, create_graph=True): its rows are not added to "
                "the others." + ON_REDUCTION
            )
        return found.pop()

    def own_among(self, tensors: Iterable[Tensor], *more: ByTensor[str]) -> list[Tensor]:
        """Those that are the model's parameters.  more: or among these"""
        tensors, gathered = [*tensors], set(map(id, self.gathered.values()))
        found = map(any, zip(*[own.of(tensors) for own in (self.names, *more)]))
        return [x for x, is_own in zip(tensors, found) if is_own or (gathered and id(x) in gathered)]

    def as_seen(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's parameters by name, without those left out, as layers see them: whole, if processes hold shards."""
        asked = dict(self.asked(parameters))
        return asked | {name: x for name, x in self.gathered.items() if name in asked} if self.gathered else asked

    def trained(self, parameters: Mapping[str, Tensor], path: str) -> dict[str, Tensor]:
        """The same for trainable parameters.  Also works for those of a part, at a path, with the names used here."""
        return self.as_seen({self.name_of(p, path, name): p for name, p in parameters.items() if p.requires_grad})

    def asked(self, named: Mapping[str, P]) -> Mapping[str, P]:
        """The parameters that aren't left out, by name."""
        return {name: p for name, p in named.items() if name not in self.left_out} if self.left_out else named

    def state_of_grad(self, name: str, parameter: Tensor) -> tuple[int, int] | None:
        """A value that changes when .grad does (or a shard's .grad); None for a sparse .grad."""
        if (grad := self.cut.get(name, parameter).grad) is None:
            return NO_GRAD
        grad = part_of(grad)
        return (grad.data_ptr(), version_of(grad)) if grad.layout == torch.strided else None

    def name_of(self, parameter: Tensor, path: str = "", local: str = "") -> str:
        """A parameter's first name in the model.

        A tensor that replaces a parameter, as in functional_call or by later assignment, gets a name of its own.
        path: the layer's    local: the parameter's name in the layer"""
        if (name := self.names.get(parameter) or self.others.get(parameter)) is None:
            self.others[parameter] = name = f"{path}.{local}".lstrip(".") + f", another tensor ({id(parameter)})"
        return name
