"""A backward pass's record, and which passes have rows for the same samples.  No mathematics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from autograd_hacks.visits import Received, Visit

if TYPE_CHECKING:
    from autograd_hacks.receiver import Receiver


@dataclass(eq=False)
class Losses:
    """What `backward(losses)` knows of its pass."""

    samples: int
    loss_type: str
    recorders: list[Receiver] = field(default_factory=list)


@dataclass(eq=False)
class Pass:
    """One backward pass, with those that checkpointing runs inside it."""

    task: int
    losses: Losses | None
    received: dict[Visit, Received] = field(default_factory=dict)
    captures: bool = False  # torch.autograd.grad, which leaves .grad alone
    forwards_before: int = 0  # since the pass before it
    higher_order: bool = False
    ambiguous: bool = False  # recomputed, and it can't be known which of several forwards
    finished: bool = False
    reached: set[int] = field(default_factory=set)  # the ids of the parameters that its visits bring gradients to
    skipped: set[int] = field(default_factory=set)  # and of those that they would bring them to
    arrived: dict[Tensor, Tensor] = field(default_factory=dict)  # parameters' gradients, while they are to be compared
    blind: tuple[int, tuple[int, ...]] | None = None  # an output of the model in which samples mix, by which it came
    largest: Tensor | None = None  # of all gradients, by magnitude

    def let_go(self) -> None:
        """Or its visits and it would hold each other."""
        for visit in self.received:
            visit.recomputed_in = None


@dataclass(eq=False)
class Segment:
    """Passes that add, since they come through a forward that others have come through."""

    passes: list[Pass] = field(default_factory=list)
    forwards: set[int] = field(default_factory=set)

    def takes(self, current: Pass, visit: Visit) -> bool:
        """Whether a pass that comes through a visit adds to these.  torch.autograd.grad adds nothing to ``.grad``."""
        return visit.forward in self.forwards and all(other.captures == current.captures for other in self.passes)

    def can_be_run_again(self) -> bool:
        return any(
            visit.graph is not None and visit.graph() is not None for earlier in self.passes for visit in earlier.received
        )


ANNOUNCED: dict[int, Losses] = {}
"""The losses of the passes that `backward` runs just now, by graph task: hooks may run in another thread than it."""
