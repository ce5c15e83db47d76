"""What holds for all forwards of a kind: where the samples are in what layers and nodes made, and what has no rows."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from autograd_hacks.support.layout import Layout, Layouts

if TYPE_CHECKING:
    from autograd_hacks.probe.documents import Documents

MIXING = "samples mix"
"""How it begins to be said that they do."""

AXES, ROWS, ENTRIES, NOT_OF_BATCH = "axes", "rows", "entries", "not of the batch"
"""What a `Place` is: axes of tensors; rows, or entries, whose samples depend on the values, and are asked of the nodes that
have chosen the rows, or told by passes, in each forward; something that follows from parameters alone."""


@dataclass(frozen=True)
class Place:
    """Where the samples are in what a use made.

    layouts: in each of its tensors, where ``kind`` is AXES    is_decided: whether other values would have told the same
    was_empty: whether there was nothing in them, as where no rows were chosen, so that nothing is known of others
    is_unseen: whether gradients came that were zero for every sample, so that nothing is known of those to come
    """

    kind: str
    layouts: Layouts = ()
    is_decided: bool = True
    was_empty: bool = False
    is_unseen: bool = False


class Steady(dict[Any, Any]):
    """What is at hand only, and left out of copies: it holds kinds of nodes."""

    def __reduce__(self) -> tuple[type[Steady], tuple[()]]:
        return Steady, ()


@dataclass
class Plan:
    """What holds for all forwards of a signature.  Parameters are known by their first name in the model."""

    AGAIN: ClassVar[int] = -1
    """The number of a call that a backward pass makes anew, so that it can't be known which one it was."""

    # What proofs have found.
    axis: int | None = None  # of the samples in the model's arguments; None where the user has said it for each
    counted_leaf: int | None = None  # which argument tells N, where it isn't the first
    counted_at: int | None = None  # which output tells N, where no argument does
    outputs: Layouts = ()  # where samples are in the model's outputs
    calls: dict[str, list[Place | None]] = field(default_factory=dict)  # of layers with rules, by path, call by call
    meetings: dict[Hashable, list[Place]] = field(default_factory=dict)  # of nodes, by what leads there: see `Keys`
    nodes: dict[str, list[str]] = field(default_factory=dict)  # by parameter the nodes that read it, for people
    inner: set[Hashable] = field(default_factory=set)  # uses of values behind which there are parameters alone
    names: frozenset[str] = frozenset()  # the parameters that are read off the graph
    refused: dict[str, str] = field(default_factory=dict)  # why a parameter has no rows
    disproven: dict[str, str] = field(default_factory=dict)  # why a parameter's rows are wrong
    leaks: dict[str, str] = field(default_factory=dict)  # why a parameter has no rows of documents
    packed: int = 0  # how many documents there were in a sample, at most, when that was proven
    untold: str = ""  # why documents can't be told in some output, for people
    mixed_outputs: Sequence[int] = ()  # the model's outputs by number in which samples mix
    mixing: str = ""  # how they do, for people
    why_unproven: str = ""  # why nothing could be proven, where that is so
    by_rule: set[str] = field(default_factory=set)  # the parameters that some layer's rule gives rows of
    created: dict[Hashable, Any] = field(default_factory=dict)  # by use the plans of graphs that passes make there
    # Which nodes that may move samples have left them where they were: by proofs that found the same, at several sizes.
    places_left: frozenset[tuple[bool | int, ...]] = frozenset()
    spans: tuple[int, ...] = ()  # how many nodes there were from one layer's call to the next, and to the outputs
    checkpoints: list[Place] = field(default_factory=list)  # of reentrant ones, in the order of the graph
    returns_parameters: bool = False  # whether something that the model returns follows from parameters alone
    is_labelled: bool = False  # whether each forward is proven, since nothing else tells whose some rows are
    is_independent: bool = False  # whether it was shown that outputs don't depend on the values of other samples
    why_unshown: str | None = None  # why analysis didn't show it; "" where it did
    has_doors: bool = False  # whether the model keeps tensors with a graph beside those that it returns
    scaled: bool = False  # whether a loss made inside the model divides by something of the whole batch
    shared: frozenset[int] = frozenset()  # the arguments that have no samples, by number: see `Batch`

    # What has happened since.
    forwards: int = 0  # of its signature, so far
    largest: int = 0  # the largest N that was proven
    replaced: int = 0  # the largest N whose samples were replaced, each while every other was kept
    pending: bool = True  # whether the forward that runs is to be proven
    unsure: bool = False  # whether the last proof has left something open, where a gradient was zero, say
    derives: bool | None = None  # whether graphs were made of backward passes; None before the first
    zeros: dict[str, int] = field(default_factory=dict)  # parameters that were all zero, with the versions last seen
    unread: bool = False  # whether a backward pass has gone by that nobody read
    shown: set[str] = field(default_factory=set)  # parameters whose rows, randomly weighted, added up in the last proof
    # Parameters whose rows' sums were compared with the gradients that arrived, in a step of this plan.
    summed: set[str] = field(default_factory=set)
    # Of layers' calls, by path and number, what the next forward is expected to repeat: see `capture/forward.py`.
    steady: Steady = field(default_factory=Steady)
    # By the sizes of batches, graphs in which all was found: see `capture/same_graph.py`.
    graphs: Steady = field(default_factory=Steady)

    def place_of(self, path: str, number: int) -> Place | None:
        """Of a call of a layer with a rule; None where it isn't known."""
        known = self.calls.get(path, ())
        if number == Plan.AGAIN:
            return known[0] if known and all(place == known[0] for place in known) else None
        return known[number] if number < len(known) else None

    def nodes_of(self, name: str) -> list[str]:
        """The nodes that read a parameter, for people."""
        return list(dict.fromkeys(self.nodes.get(name, ())))

    def set_place(self, path: str, number: int, place: Place) -> None:
        known = self.calls.setdefault(path, [])
        known += [None] * (number + 1 - len(known))
        known[number] = place

    def is_due(self, samples: int, once: bool = False) -> bool:
        """Whether the forward that begins is proven: proofs belong to one point of training, and to one size.

        once: whether one is enough
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
            or (self.packed > 1 and is_power_of_two(self.forwards))  # masks are data, and no two batches need have alike
        )

    def knows(self, documents: Documents | None) -> bool:
        """Whether a proof had documents packed as closely as these: of a single one nothing can leak."""
        return documents is None or documents.most <= 1 or (documents.most < 2 * self.packed and not self.leaks)

    def keeps_arrived(self, name: str) -> bool:
        """Whether the gradient that arrives at a parameter is kept, to compare the sum of its rows with."""
        return name not in self.summed and not self.unread

    def has_opened(self, parameters: Mapping[str, Tensor]) -> bool:
        """Whether parameters that were all zero when the plan was proven, and hid what is behind them, are so no more."""
        for name, version in list(self.zeros.items()):
            p = parameters.get(name)
            if p is not None and p._version != version:
                if bool(p.detach().any()):
                    return True
                self.zeros[name] = p._version
        return False


def is_milestone(forwards: int) -> bool:
    """Whether plans are proven: in forwards 1, 2, 16, 128, 1024, ... of a signature."""
    return forwards == 1 or (is_power_of_two(forwards) and forwards.bit_length() % 3 == 2)


def is_second_try(forwards: int) -> bool:
    """Whether what the last proof has left open is tried again: in forwards 4, 32, 256, ... of a signature."""
    return is_power_of_two(forwards) and forwards.bit_length() % 3 == 0


def is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def by_axis(shape: Sequence[int], axis: int) -> Layout | None:
    """Where samples are that are taken to be on an axis."""
    return Layout(axis) if len(shape) > axis else None
