"""A backward pass's record, and which passes have rows for the same samples.  No mathematics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autograd_hacks.capture.records import Received, Visit
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.support.switch import current_task

if TYPE_CHECKING:
    from autograd_hacks.capture.backward import Receiver


@dataclass(eq=False)
class Losses:
    """What `backward(losses)` knows of its pass, or `backprop_hess` of all its passes.

    shape: of what it was given, N first    what: that was, for people    hess_type: of `backprop_hess`
    complete: whether all its passes have run    arrived: what `backprop_hess`'s passes brought to parameters in all, by the
    recorder's id
    """

    shape: torch.Size
    loss_type: str
    what: str
    hess_type: str | None = None
    recorders: list[Receiver] = field(default_factory=list)
    complete: bool = True
    arrived: dict[int, dict[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return self.shape[0]


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
    owned: set[int] = field(default_factory=set)  # and of those that calls within the model's own forward bring them to
    skipped: set[int] = field(default_factory=set)  # and of those that they would bring them to
    arrived: dict[Tensor, Tensor] = field(default_factory=dict)  # parameters' gradients, while they are to be compared
    blind: tuple[int, tuple[int, ...]] | None = None  # an output of the model in which samples mix, by which it came
    largest: Tensor | None = None  # of all gradients, by magnitude

    @property
    def is_hess(self) -> bool:
        """Whether `backprop_hess` runs it."""
        return self.losses is not None and self.losses.hess_type is not None

    def let_go(self) -> None:
        """Or its visits and it would hold each other."""
        for visit in self.received:
            visit.recomputed_in = None


@dataclass(eq=False)
class Segment:
    """Passes that add, since they come through a forward that others have come through."""

    passes: list[Pass] = field(default_factory=list)
    forwards: set[int] = field(default_factory=set)
    read: bool = False
    replaced: bool = False  # whether the library has put something else into .grad

    def takes(self, current: Pass, visit: Visit) -> bool:
        """Whether a pass that comes through a visit adds to these.  torch.autograd.grad adds nothing to ``.grad``."""
        return visit.forward in self.forwards and all(
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

    def can_be_run_again(self) -> bool:
        return any(
            visit.graph is not None and visit.graph() is not None for earlier in self.passes for visit in earlier.received
        )


ANNOUNCED: dict[int, Losses] = {}
"""The losses of the passes that `backward` runs just now, by graph task: hooks may run in another thread than it."""


@contextmanager
def announced(output: Tensor, losses: Losses) -> Iterator[Tensor]:
    """A context in which the hooks know what a backward pass is for, that begins at the tensor which it gives."""
    # A node of its own in front of all others, which tells the recorders about this pass before any of them records.
    with torch.enable_grad():
        root = output.view_as(output)
    tasks: list[int] = []

    def announce(_: object) -> None:
        tasks.append(current_task())
        ANNOUNCED[tasks[-1]] = losses

    if root.grad_fn is not None:
        root.grad_fn.register_prehook(announce)
    try:
        yield root
    finally:
        for task in tasks:
            ANNOUNCED.pop(task, None)
