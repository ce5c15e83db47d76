"""The plan of all forwards of one kind: where the samples are in the outputs of layers and nodes, and what has no rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from autograd_hacks.probe.known_tapes import Tapes
from autograd_hacks.probe.tape import MIXING as MIXING
from autograd_hacks.support.layout import Layouts

if TYPE_CHECKING:
    from autograd_hacks.probe.documents import Documents

AXES, ROWS, ENTRIES, NOT_OF_BATCH = "axes", "rows", "entries", "not of the batch"
"""The kinds of a `Place`.  AXES: axes of tensors.  ROWS, ENTRIES: rows or entries whose samples depend on values.  In each
forward, the nodes that selected them show the samples, or passes do.  NOT_OF_BATCH: depends on parameters only."""


@dataclass(frozen=True)
class Place:
    """Where the samples are in the tensors that a use made.

    layouts: for each of its tensors, if ``kind`` is AXES
    is_decided: whether other values would have shown the same
    was_empty: whether the tensors were empty, for example because no rows were selected, so that nothing is known
    is_unseen: whether all gradients were zero, so that nothing is known about later ones
    """

    kind: str
    layouts: Layouts = ()
    is_decided: bool = True
    was_empty: bool = False
    is_unseen: bool = False


class Steady(dict[Any, Any]):
    """A temporary cache that copies leave out, because it holds types of nodes."""

    def __reduce__(self) -> tuple[type[Steady], tuple[()]]:
        return Steady, ()


@dataclass
class Plan:
    """Everything that holds for all forwards of a signature.  Parameters are known by their first name in the model."""

    AGAIN: ClassVar[int] = -1
    """The number of a call that a backward pass repeats, so that it is unknown which call it was."""

    # Results of proofs.
    axis: int | None = None  # the samples' axis in the model's arguments; None if the user gave each one
    counted_leaf: int | None = None  # the argument that shows N, if not the first
    counted_at: int | None = None  # the output that shows N, if no argument does
    outputs: Layouts = ()  # where samples are in the model's outputs
    calls: dict[str, list[Place | None]] = field(default_factory=dict)  # of layers with rules, by path, call by call
    meetings: dict[Hashable, list[Place]] = field(default_factory=dict)  # of nodes, by what leads there: see `Keys`
    nodes: dict[str, list[str]] = field(default_factory=dict)  # by parameter, the nodes that read it, for messages
    inner: set[Hashable] = field(default_factory=set)  # uses of values that depend on parameters only, also behind the use
    # Uses that meet the batch or are inner, depending on the taker's other operands.
    alike: set[Hashable] = field(default_factory=set)
    names: frozenset[str] = frozenset()  # the parameters that are read from the graph
    refused: dict[str, str] = field(default_factory=dict)  # why a parameter has no rows
    disproven: dict[str, str] = field(default_factory=dict)  # why a parameter's rows are wrong
    leaks: dict[str, str] = field(default_factory=dict)  # why a parameter has no rows of documents
    packed: int = 0  # the largest number of documents in a sample when that was proven
    untold: str = ""  # why an output's entries can't be assigned to documents, for messages
    mixed_outputs: Sequence[int] = ()  # the numbers of the model's outputs in which samples mix
    mixing: str = ""  # how samples mix, for messages
    by_rule: set[str] = field(default_factory=set)  # the parameters for which some layer's rule gives rows
    created: dict[Hashable, Any] = field(default_factory=dict)  # by use, the plans of graphs that passes make there
    # Whether nodes that may move samples left them in place: by proofs with the same result, for several sizes.
    places_left: frozenset[tuple[bool | int, ...]] = frozenset()
    kinds: frozenset[Hashable] = frozenset()  # the nodes of these proofs: their names and axes
    checkpoints: list[Place] = field(default_factory=list)  # of reentrant checkpoints, in the order of the graph
    hypothesis: Any = None  # where the samples were in the last forward, if no samples were mixed
    read_as: Any = None  # what laws said of that forward, if it was kept
    returns_parameters: bool = False  # whether some output depends on parameters only
    is_labelled: bool = False  # whether each forward is proven, because nothing else shows the samples of some rows
    is_independent: bool = False  # whether outputs were shown not to depend on other samples' values
    why_unshown: str | None = None  # why the analysis didn't show that; "" if it did
    why_untaped: str = ""  # why the last tape's labels didn't show that
    has_doors: bool = False  # whether the model keeps tensors with a graph that it doesn't return
    scaled: bool = False  # whether a loss inside the model divides by something of the whole batch
    shared: frozenset[int] = frozenset()  # the numbers of the arguments without samples: see `Batch`

    # State since then.
    forwards: int = 0  # of its signature, so far
    largest: int = 0  # the largest N that was proven
    replaced: int = 0  # the largest N for which every sample was replaced while every other one was kept
    pending: bool = True  # whether the running forward must be proven
    unsure: bool = False  # whether the last proof left something open, for example at a zero gradient
    derives: bool | None = None  # whether passes made graphs; None before the first pass
    zeros: dict[str, int] = field(default_factory=dict)  # all-zero parameters, with the versions last seen
    unread: bool = False  # whether some backward pass was not read
    shown: set[str] = field(default_factory=set)  # parameters whose weighted rows added up in the last proof
    # Parameters whose rows' sums were compared with the arrived gradients in a step of this plan.
    summed: set[str] = field(default_factory=set)
    # By path and number, what the next forward is expected to repeat in layer calls: see `capture/forward.py`.
    steady: Steady = field(default_factory=Steady)
    # By the batch's sizes, graphs in which everything was found: see `capture/same_graph.py`.
    graphs: Steady = field(default_factory=Steady)
    tapes: Tapes = field(default_factory=Tapes)  # of forwards whose samples were shown to be independent

    def place_of(self, path: str, number: int) -> Place | None:
        """The place of a call of a layer with a rule; None if it is unknown."""
        known = self.calls.get(path, ())
        if number == Plan.AGAIN:
            return known[0] if known and all(place == known[0] for place in known) else None
        return known[number] if number < len(known) else None

    def nodes_of(self, name: str) -> list[str]:
        """The nodes that read a parameter, for messages."""
        return list(dict.fromkeys(self.nodes.get(name, ())))

    def set_place(self, path: str, number: int, place: Place) -> None:
        known = self.calls.setdefault(path, [])
        known += [None] * (number + 1 - len(known))
        known[number] = place

    def is_due(self, samples: int, once: bool = False) -> bool:
        """Whether the beginning forward must be proven, because a proof holds for one point of training and one size.

        once: whether one proof is enough
        """
        if once:
            return self.is_labelled or self.forwards == 1
        larger = samples >= (3 if self.largest < 3 else 2 * self.largest)
        few = self.largest < 3 and is_power_of_two(self.forwards)  # two samples prove little
        return (
            self.is_labelled
            or is_milestone(self.forwards)
            or (self.unsure and is_second_try(self.forwards))
            or larger
            or few
            or (self.packed > 1 and is_power_of_two(self.forwards))  # masks are data, and may differ between batches
        )

    def knows(self, documents: Documents | None) -> bool:
        """Whether a proof had as many documents in a sample as these have.  A single document can't leak."""
        return documents is None or documents.most <= 1 or (documents.most < 2 * self.packed and not self.leaks)

    def keeps_arrived(self, name: str) -> bool:
        """Whether the gradient that arrives at a parameter is kept, to compare it with the sum of its rows."""
        return name not in self.summed and not self.unread

    def has_opened(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether parameters that were all zero in the proof, and hid what is behind them, no longer are."""
        for name, version in list(self.zeros.items()):
            p = parameters.get(name)
            if p is not None and p._version != version:
                if bool(p.detach().any()):
                    return True
                self.zeros[name] = p._version
        return False


def is_milestone(forwards: int) -> bool:
    """Whether a proof is due by number: in forwards 1, 2, 16, 128, 1024, ... of a signature."""
    return forwards == 1 or (is_power_of_two(forwards) and forwards.bit_length() % 3 == 2)


def is_second_try(forwards: int) -> bool:
    """Whether to try again what the last proof left open: in forwards 4, 32, 256, ... of a signature."""
    return is_power_of_two(forwards) and forwards.bit_length() % 3 == 0


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
