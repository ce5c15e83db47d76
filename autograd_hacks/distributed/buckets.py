"""Reduces the processes' own sums to the sums over all.  No mathematics.

A sum over a process's samples is ``Partial`` on the mesh of the processes that have the others.  DTensor turns it into what
the parameter is: whole on each process, by an all-reduce, or a shard, by a reduce-scatter.  Many sums are sent at once, as
in torch's own wrappers, because each communication has a fixed cost.
"""

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autograd_hacks.support.parts import part_of

BUCKET = 25 * 2**20
"""How many bytes are reduced at once, as in DistributedDataParallel."""


class OwnSum(NamedTuple):
    """A process's own sum."""

    name: str
    total: Tensor  # shape
    parameter: Tensor  # the user's parameter, to which the sum belongs

    def placements(self, mesh: DeviceMesh) -> tuple[Placement, ...]:
        """Where the result is."""
        return self.parameter.placements if isinstance(self.parameter, DTensor) else (Replicate(),) * mesh.ndim


def reduced(sums: Iterable[OwnSum], mesh: DeviceMesh) -> dict[str, Tensor]:
    """The sums over all processes, {name: shape}, each like its parameter.  One is taken while earlier ones are sent."""
    found: dict[str, Tensor] = {}
    waiting: dict[object, list[OwnSum]] = {}
    sent: list[tuple[list[OwnSum], Tensor]] = []
    for own in sums:
        found[own.name], placements = own.total, own.placements(mesh)
        if not _is_bucketed(own, placements):
            found[own.name] = _reduced_alone(own, mesh, placements)
            continue
        kind = placements, own.total.dtype, own.total.device
        bucket = waiting.setdefault(kind, [])
        bucket.append(own)
        if sum(other.total.nbytes for other in bucket) >= BUCKET:
            sent.append((bucket, _send(waiting.pop(kind), mesh)))
    sent += [(bucket, _send(bucket, mesh)) for bucket in waiting.values()]
    for bucket, total in sent:
        found.update(_taken_apart(bucket, part_of(total).reshape(-1)))  # views of what has not arrived don't wait for it
    return found


def _taken_apart(bucket: Sequence[OwnSum], total: Tensor) -> Iterator[tuple[str, Tensor]]:
    at = 0
    for name, own, parameter in bucket:
        if not isinstance(parameter, DTensor):
            yield name, total[at : at + own.numel()].view(own.shape)
            at += own.numel()
            continue
        shape, ranks = parameter.to_local().shape, parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
        shard = total[at : at + prod(shape)].view(shape).to(part_of(parameter).device)  # the parameter may be offloaded
        at += -(-own.shape[0] // ranks) * prod(own.shape[1:])
        layout: dict[str, Any] = {"shape": parameter.shape, "stride": parameter.stride()}
        yield name, DTensor.from_local(shard, parameter.device_mesh, parameter.placements, run_check=False, **layout)


def _is_bucketed(own: OwnSum, placements: Sequence[Placement]) -> bool:
    """Whether a sum can be reduced in one piece of memory with others."""
    *others, last = placements
    if own.total.requires_grad or any(not at.is_replicate() for at in others):
        return False
    return last.is_replicate() or (type(last) is Shard and last.dim == 0 and own.total.shape == own.parameter.shape)


def _send(bucket: Sequence[OwnSum], mesh: DeviceMesh) -> Tensor:
    placements = bucket[0].placements(mesh)
    if placements[-1].is_replicate():
        flat = torch.cat([own.total.reshape(-1) for own in bucket])
    else:
        # A row for each process: an equal number of entries of the first axis, with zeros after the last.
        totals, ranks = [own.total.reshape(len(own.total), -1) for own in bucket], mesh.size(mesh.ndim - 1)
        flat = torch.cat([F.pad(x, (0, 0, 0, -len(x) % ranks)).reshape(ranks, -1) for x in totals], dim=1)
    partial = DTensor.from_local(flat, mesh, [Partial()] * mesh.ndim, run_check=False)
    return partial.redistribute(placements=placements, async_op=True).to_local()


def _reduced_alone(own: OwnSum, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    before = own.total.ndim - own.parameter.ndim  # axes before the parameter's, for several sums
    to = [Shard(at.dim + before) if isinstance(at, Shard) else at for at in placements]
    partial = DTensor.from_local(own.total, mesh, [Partial()] * mesh.ndim, run_check=False)
    settled: Any = partial.redistribute(placements=to).to(part_of(own.parameter).device)
    found: Tensor = settled if isinstance(own.parameter, DTensor) else settled.to_local()
    return found
