"""Reduces the processes' own sums to the sums over all.  No mathematics.

A sum over a process's samples is ``Partial`` on the mesh of the processes that have the others.  DTensor turns it into what
the parameter is: whole on each process, by an all-reduce, or a shard, by a reduce-scatter.  Many sums are sent at once, as
in torch's own wrappers, because each communication has a fixed cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autograd_hacks.support.parts import part_of

BUCKET = 25 * 2**20
"""How many bytes are reduced at once, as in DistributedDataParallel."""


class Own(NamedTuple):
    """A process's own sum."""

    name: str
    total: Tensor  # shape
    parameter: Tensor  # the user's parameter, to which the sum belongs


@dataclass
class Buckets:
    """Takes sums one by one, and sends the earlier ones meanwhile."""

    found: dict[str, Tensor] = field(default_factory=dict)
    _open: dict[object, list[Own]] = field(default_factory=dict)
    _sent: list[tuple[list[Own], Tensor]] = field(default_factory=list)

    def add(self, own: Own, mesh: DeviceMesh | None) -> None:
        """Adds a sum.  mesh: of the processes to add up over; None for this process alone"""
        self.found[own.name] = own.total
        if mesh is None:
            return
        placements = placements_of(own.parameter, mesh)
        if not _goes_along(own, placements):
            self.found[own.name] = _alone(own, mesh, placements)
            return
        kind = id(mesh), placements, own.total.dtype, own.total.device
        bucket = self._open.setdefault(kind, [])
        bucket.append(own)
        if sum(other.total.nbytes for other in bucket) >= BUCKET:
            self._sent.append((bucket, _send(self._open.pop(kind), mesh, placements)))

    def end(self, mesh: DeviceMesh | None) -> dict[str, Tensor]:
        """All sums, {name: shape}, each like its parameter: whole, or a shard.  mesh: as for `add`"""
        for bucket in self._open.values():
            assert mesh is not None  # else there would be no sums
            self._sent.append((bucket, _send(bucket, mesh, placements_of(bucket[0].parameter, mesh))))
        for bucket, total in self._sent:
            wait: Any = getattr(total, "wait", None)  # torch's own asynchronous tensors; their views don't wait
            self._unpack(bucket, total if wait is None else wait())
        return self.found

    def _unpack(self, bucket: Sequence[Own], total: Tensor) -> None:
        at, total = 0, total.reshape(-1)
        for name, own, parameter in bucket:
            if not isinstance(parameter, DTensor):
                self.found[name], at = total[at : at + own.numel()].view(own.shape), at + own.numel()
                continue
            shape, ranks = parameter.to_local().shape, parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
            shard = total[at : at + prod(shape)].view(shape).to(part_of(parameter).device)  # the parameter may be offloaded
            at += -(-own.shape[0] // ranks) * prod(own.shape[1:])
            self.found[name] = _placed(shard, parameter)


def placements_of(parameter: Tensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The placements of a parameter on a mesh."""
    return parameter.placements if isinstance(parameter, DTensor) else (Replicate(),) * mesh.ndim


def _goes_along(own: Own, placements: Sequence[Placement]) -> bool:
    """Whether a sum can be reduced in one piece of memory with others."""
    *others, last = placements
    if own.total.requires_grad or any(not at.is_replicate() for at in others):
        return False
    return last.is_replicate() or (type(last) is Shard and last.dim == 0 and own.total.shape == own.parameter.shape)


def _send(bucket: Sequence[Own], mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    if placements[-1].is_replicate():
        flat = torch.cat([own.total.reshape(-1) for own in bucket])
    else:
        flat = torch.cat([_by_rank(own.total, mesh.size(mesh.ndim - 1)) for own in bucket], dim=1)
    partial = DTensor.from_local(flat, mesh, [Partial()] * mesh.ndim, run_check=False)
    return partial.redistribute(placements=placements, async_op=True).to_local()


def _by_rank(total: Tensor, ranks: int) -> Tensor:
    """One row for each process: an equal number of entries of the first axis, with zeros after the last."""
    rows = total.reshape(len(total), -1)
    size = -(-len(total) // ranks)
    if size * ranks > len(rows):
        rows = torch.cat([rows, rows.new_zeros(size * ranks - len(rows), rows.shape[1])])
    return rows.reshape(ranks, -1)


def _alone(own: Own, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    before = own.total.ndim - own.parameter.ndim  # axes before the parameter's, for several sums
    to = [Shard(at.dim + before) if isinstance(at, Shard) else at for at in placements]
    partial = DTensor.from_local(own.total, mesh, [Partial()] * mesh.ndim, run_check=False)
    settled: Any = partial.redistribute(placements=to).to(part_of(own.parameter).device)
    found: Tensor = settled if isinstance(own.parameter, DTensor) else settled.to_local()
    return found


def _placed(shard: Tensor, parameter: DTensor) -> Tensor:
    """A shard as a DTensor like the parameter."""
    layout: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(shard, parameter.device_mesh, parameter.placements, run_check=False, **layout)
