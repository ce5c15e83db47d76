"""The processes over which a batch is spread: rows belong to one process, sums over samples to all.

Here one process has the whole batch.  `distributed` registers its own functions in `ABOVE` when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.recorder import Recorder

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


Where: TypeAlias = "ProcessGroup | DeviceMesh | bool | None"
"""The processes that have the other samples: a group of them; False for none; None for those on which the model runs."""

T = TypeVar("T")


@dataclass(eq=False)
class Spread:
    """The processes that have the samples of one batch: this one alone."""

    parameters: Mapping[str, Tensor]  # of the model by name, as the user has them, for example shards
    mesh: DeviceMesh | None = None  # the processes to add up over; None for this process alone

    def local(self) -> Spread:
        """The same batch, for sums over this process's samples."""
        return self

    def check(self) -> None:
        """Raises StaleRecord if sharded weights on which rows depend have changed since the forward."""

    def reading(self) -> AbstractContextManager[None]:
        """A context in which rows may be read.  If rows need sharded weights, all processes must enter it at once."""
        self.check()
        return self.weights()

    def weights(self) -> AbstractContextManager[None]:
        """A context in which the sharded weights that rows need are gathered, once for everything inside.
        It is for code that may fail on one process, so that no other process waits."""
        return nullcontext()

    def agreed(
        self, own: Callable[[], T], counts: Callable[[T], Sequence[float]] = lambda _: (), size: int = 0
    ) -> tuple[T, Sequence[float]]:
        """What this process finds, and counts of it, ``size`` of them, over all processes.  If one fails, all raise."""
        found = own()
        return found, counts(found)

    def settled(self, sums: Iterable[tuple[str, Tensor]], narrow: bool = True) -> dict[str, Tensor]:
        """The sums over all processes: {name: shape}, each like its parameter, whole or a shard.

        sums: by name; taken one by one, while the earlier ones are sent
        narrow: return them in the parameters' dtypes, if there are other processes
        """
        return dict(sums)

    def summed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all processes, whole on each process."""
        return dict(sums)

    def from_all(self, mine: T) -> list[T]:
        """The value of each process, in the processes' order.  All must call it at once."""
        return [mine]

    def firsts(self, x: Tensor) -> Tensor:
        """The tensor of the first process, on all processes.  All must call it at once."""
        return x

    def everyones(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in the processes' order.  All must call it at once.  rows: N ..."""
        return rows


def spread_of(model: nn.Module, recorder: Recorder, group: Where = None) -> Spread:
    """The processes that have samples of the latest record.  group: see `Where`"""
    found: Spread = ABOVE.spread_of(model, recorder, group)
    return found


def _together(model: nn.Module, recorder: Recorder, read: Callable[[], bool], check: Callable[[], None]) -> None:
    if read():
        check()


ABOVE.learn, ABOVE.together, ABOVE.alone = lambda *_: None, _together, lambda _: nullcontext()
ABOVE.spread_of, ABOVE.gathered = lambda _, recorder, __: Spread(recorder.tree.parameters()), lambda *_: []
