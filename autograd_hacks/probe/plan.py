"""The plan of all forwards of one kind: where the samples are in the outputs of layers and nodes, and what has no rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autograd_hacks.probe.known_tapes import Tapes
from autograd_hacks.probe.tape import MIXING as MIXING
from autograd_hacks.support.layout import Layouts

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


@dataclass
class Plan:
    """What is kept of the forwards of a kind.  Parameters are known by their first name in the model."""

    # What the last forward showed.
    axis: int | None = None  # the samples' axis in the model's arguments; None if the user gave each one
    counted_leaf: int | None = None  # the argument that shows N, if not the first
    counted_at: int | None = None  # the output that shows N, if no argument does
    outputs: Layouts = ()  # where samples are in the model's outputs
    nodes: dict[str, list[str]] = field(default_factory=dict)  # by parameter, the nodes that read it, for messages
    names: frozenset[str] = frozenset()  # the parameters that are read from the graph
    refused: dict[str, str] = field(default_factory=dict)  # why a parameter has no rows
    disproven: dict[str, str] = field(default_factory=dict)  # why a parameter's rows are wrong
    untold: str = ""  # why an output's entries can't be assigned to documents, for messages
    mixed_outputs: Sequence[int] = ()  # the numbers of the model's outputs in which samples mix
    mixing: str = ""  # how samples mix, for messages
    by_rule: set[str] = field(default_factory=set)  # the parameters for which some layer's rule gives rows
    hypothesis: Any = None  # where the samples were in the last forward, if no samples were mixed
    read_as: Any = None  # what laws said of that forward, if it was kept
    returns_parameters: bool = False  # whether some output depends on parameters only
    dependent: tuple[str, Sequence[int]] | None = None  # how values of samples mix without a gradient, and in which outputs
    is_independent: bool = False  # whether outputs were shown not to depend on other samples' values
    why_unshown: str | None = None  # why the analysis didn't show that; "" if it did
    why_untaped: str = ""  # why the last tape's labels didn't show that
    scaled: bool = False  # whether a loss inside the model divides by something of the whole batch
    shared: frozenset[int] = frozenset()  # the numbers of the arguments without samples: see `Batch`

    # State since then.
    forwards: int = 0  # of its kind, so far
    replaced: int = 0  # the largest N for which every sample was replaced while every other one was kept
    pending: bool = True  # whether the running forward must be shown to be independent
    derives: bool | None = None  # whether passes made graphs; None before the first pass
    tapes: Tapes = field(default_factory=Tapes)  # of forwards whose samples were shown to be independent

    def nodes_of(self, name: str) -> list[str]:
        """The nodes that read a parameter, for messages."""
        return list(dict.fromkeys(self.nodes.get(name, ())))
