"""Batches that are spread over processes, and weights that are sharded over them.

No mathematics.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from autograd_hacks.distributed.agreement import agreed, from_all
from autograd_hacks.distributed.shards import alone, check_shards, reading_weights, whole
from autograd_hacks.errors import ON_PROCESSES, NotReduced
from autograd_hacks.extending import ABOVE, Recorder, Spread, Where, gathering, has_processes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


_GATHERED: weakref.WeakKeyDictionary[nn.Module, frozenset[int]] = weakref.WeakKeyDictionary()
"""By model, the ids of the ``fully_shard`` modules whose weights are gathered for reading now."""


@dataclass(eq=False)
class Sharded(Spread):
    """A batch of this process, of a model whose weights may be sharded."""

    model: weakref.ref[nn.Module] | None = None
    needed: Sequence[nn.Module] = ()  # the modules whose weights are gathered for reading
    shards: Mapping[str, int] = field(default_factory=dict)  # how often each shard had been overwritten

    def check(self) -> None:
        if self.needed:
            check_shards(self.parameters, self.shards)

    def weights(self) -> AbstractContextManager[None]:
        model = self.model() if self.model is not None and self.needed else None
        held = frozenset[int]() if model is None else _GATHERED.get(model, frozenset())
        missing = [part for part in self.needed if id(part) not in held]
        return nullcontext() if model is None or not missing else _gathered(model, missing, held)


@contextmanager
def _gathered(model: nn.Module, missing: list[nn.Module], held: frozenset[int]) -> Iterator[None]:
    _GATHERED[model] = held | {id(part) for part in missing}
    try:
        with whole(missing):
            yield
    finally:
        _GATHERED[model] = held


@dataclass(eq=False)
class OverMesh(Sharded):
    """A batch that several processes share."""

    mesh: DeviceMesh

    def local(self) -> Sharded:
        return Sharded(self.parameters, None, self.model, self.needed, self.shards)

    def agreed(
        self, own: Callable[[], T], counts: Callable[[T], Sequence[float]] = lambda _: (), size: int = 0
    ) -> tuple[T, Sequence[float]]:
        return agreed(own, counts, size, self.mesh)

    def settled(self, sums: Iterable[tuple[str, Tensor]], narrow: bool = True) -> dict[str, Tensor]:
        own = ((name, total, self.parameters[name]) for name, total in sums)
        return _reduced(((name, total.to(p.dtype) if narrow else total, p) for name, total, p in own), self.mesh)

    def summed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return _reduced(((name, x, x) for name, x in sums.items()), self.mesh)

    def from_all(self, mine: T) -> list[T]:
        return from_all(mine, self.mesh)

    def firsts(self, x: Tensor) -> Tensor:
        for group in self.mesh.get_all_groups():
            dist.broadcast(x, dist.get_global_rank(group, 0), group)
        return x

    def everyones(self, rows: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor, Shard

        counts = self.from_all(len(rows))
        padded = rows.new_zeros(max(counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = DTensor.from_local(padded, self.mesh, [Shard(0)] * self.mesh.ndim, run_check=False).full_tensor()
        return torch.cat([part[:count] for part, count in zip(parts.split(max(1, max(counts))), counts)])


def _reduced(sums: Iterable[tuple[str, Tensor, Tensor]], mesh: DeviceMesh) -> dict[str, Tensor]:
    """sums: by name, each with a tensor that has the result's placement"""
    from autograd_hacks.distributed.buckets import OwnSum, reduced

    return reduced((OwnSum(*own) for own in sums), mesh)


def spread_of(model: nn.Module, recorder: Recorder, group: Where) -> Spread:
    """The processes that have samples of the latest record.  group: see `Where`"""
    parameters, parts = recorder.tree.parameters(), gathering(model)
    needed = reading_weights(model, recorder.record.read_past) if parts else []
    mesh = _mesh(parameters, recorder, group) if group is not False and has_processes() else None
    more = weakref.ref(model), needed, recorder.record.shards
    return Sharded(parameters, None, *more) if mesh is None else OverMesh(parameters, mesh, *more)


_MESHES: weakref.WeakKeyDictionary[nn.Module, DeviceMesh] = weakref.WeakKeyDictionary()
"""{wrapper: its mesh}"""


def _mesh(parameters: Mapping[str, Tensor], recorder: Recorder, group: Where) -> DeviceMesh | None:
    from torch.distributed.device_mesh import DeviceMesh

    device = next((p.device.type for p in parameters.values()), "cpu")
    sharded = [p for name, p in parameters.items() if name in recorder.record.gathered and p.requires_grad]
    if isinstance(group, DeviceMesh | dist.ProcessGroup) and sharded:
        raise ValueError(
            "process_group was given, but fully_shard has split this model, so sums go to the processes that hold the "
            "parts. Leave it out, or use process_group=False for the sums of this process's samples only." + ON_PROCESSES
        )
    if isinstance(group, DeviceMesh):
        return group
    if isinstance(group, dist.ProcessGroup):
        return DeviceMesh.from_group(group, device)
    if group is not None:
        expected = "a torch.distributed.ProcessGroup or a DeviceMesh, False for this process only, or None for all"
        raise TypeError(f"process_group is {group!r}; expected {expected}" + ON_PROCESSES)
    if sharded:
        first: Any = sharded[0]
        return first.device_mesh
    wrapper = recorder.reduction.wrapper_of({n for segment in recorder.record.segments for n in segment.forwards})
    if wrapper is None:
        return None
    if wrapper._join_config.enable:
        raise NotReduced(
            "sums over samples can't be computed within ddp.join(), where some processes may have ended. Give all processes "
            "the same number of steps, with empty batches at the end; or use process_group=False, for this process's "
            "samples."
        )
    if wrapper not in _MESHES:
        _MESHES[wrapper] = DeviceMesh.from_group(wrapper.process_group, device)
    return _MESHES[wrapper]


ABOVE.spread_of, ABOVE.alone, ABOVE.gathered = spread_of, alone, reading_weights
