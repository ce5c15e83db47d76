"""Tensors that are split over processes: DTensors, and tensors that a collective has not filled yet."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.support.trees import modules_of

_WHOLE = {Tensor, nn.Parameter, nn.Buffer}


def is_part(x: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(x) in _WHOLE:
        return False
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and imported already if there are any
    return tensors is not None and isinstance(x, tensors.DTensor)


def may_have_parts() -> bool:
    """Whether DTensors are possible at all."""
    return "torch.distributed.tensor" in sys.modules


def has_parts(model: nn.Module) -> bool:
    """Whether some of a model's parameters are DTensors."""
    own = (p for module in modules_of(model) for p in module._parameters.values()) if may_have_parts() else ()
    return any(p is not None and is_part(p) for p in own)


def part_of(x: Tensor) -> Tensor:
    """The part of a tensor that this process holds, without its graph; x itself if it is whole.

    The part's version doesn't count writes to the whole tensor.
    """
    if type(x) in _WHOLE:
        return x
    own: Any = x
    own = own._local_tensor if is_part(x) else own
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(own, collectives.AsyncCollectiveTensor):
        own = own.wait()
    return own


def settled(x: Tensor) -> Tensor:
    """The same, after adding up a sum whose terms are on several processes.  All processes must call it, in the same
    order."""
    whole: Any = x
    if is_part(x) and any(place.is_partial() for place in whole.placements):
        replicate = _tensors().Replicate()
        places = [replicate if place.is_partial() else place for place in whole.placements]
        x = whole.detach().redistribute(placements=places)
    return part_of(x)


def own_of(x: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor, split like another of its shape.  All processes must call it, in the same order."""
    return Cut.of(like).own(x) if is_part(like) else part_of(x)


def cut_as(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that all processes have, as a DTensor split like another one of its shape; x itself if that is whole."""
    return Cut.of(like).whole(x) if is_part(like) else x


def joined(part: Tensor, like: Tensor) -> Tensor:
    """The DTensor of the parts that processes hold, split like another one; the part itself if that is whole."""
    return Cut.of(like).joined(part) if is_part(like) else part


@dataclass(frozen=True)
class Cut:
    """How a tensor is split over processes."""

    mesh: Any
    places: tuple[Any, ...]  # for each axis of the mesh
    shape: torch.Size  # of the whole

    @classmethod
    def of(cls, x: Tensor) -> Cut:
        """x: a DTensor"""
        whole: Any = x
        return cls(whole.device_mesh, tuple(whole.placements), torch.Size(x.shape))

    @property
    def groups(self) -> tuple[Any, ...]:
        """The process groups over which it is split."""
        cut = [axis for axis, place in enumerate(self.places) if place.is_shard() and self.mesh.size(axis) > 1]
        return tuple([self.mesh.get_group(axis) for axis in cut])

    def whole(self, x: Tensor) -> Tensor:
        """A tensor of this shape that all processes have, as a DTensor with this split.  Without communication."""
        return _tensors().distribute_tensor(x, self.mesh, self.places, src_data_rank=None)

    def own(self, x: Tensor) -> Tensor:
        """This process's part of a tensor of this shape, which is a DTensor or the same on all processes."""
        other: Any = x
        if is_part(x) and other.device_mesh == self.mesh:
            return part_of(other.redistribute(self.mesh, self.places))
        x = other.full_tensor() if is_part(x) else x
        return part_of(self.whole(x))

    def joined(self, part: Tensor) -> Tensor:
        """The DTensor of the parts that processes hold.  part: may have more axes at the front"""
        more = part.shape[: part.ndim - len(self.shape)]
        shape = torch.Size((*more, *self.shape))
        places = [_moved(place, len(more)) for place in self.places]
        kept = {"run_check": False, "shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        return _tensors().DTensor.from_local(part, self.mesh, places, **kept)

    def start(self, axis: int) -> int:
        """The start of this process's part on an axis."""
        if axis >= len(self.shape) or not any(place.is_shard(axis) for place in self.places):
            return 0
        places = [_tensors().Shard(0) if place.is_shard(axis) else _tensors().Replicate() for place in self.places]
        own = Cut(self.mesh, tuple(places), self.shape[axis : axis + 1]).own(torch.arange(self.shape[axis], device="cpu"))
        return int(own[0]) if len(own) else 0


def _moved(place: Any, axes: int) -> Any:
    """The placement of a tensor on a mesh if the tensor has more axes at the front."""
    if not (axes and hasattr(place, "dim")):  # torch's is_shard() is False for a tensor that is split again
        return place
    strides = {"split_factor": place.split_factor} if hasattr(place, "split_factor") else {}  # if split again
    return type(place)(place.dim + axes, **strides)


def _tensors() -> Any:
    return sys.modules["torch.distributed.tensor"]
