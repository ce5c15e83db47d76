"""Tensors of which each process holds a part: DTensors, and tensors that a collective still fills."""

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
    tensors = sys.modules.get("torch.distributed.tensor")  # takes a second to import, and has been where there are any
    return tensors is not None and isinstance(x, tensors.DTensor)


def may_have_parts() -> bool:
    """Whether there may be DTensors at all."""
    return "torch.distributed.tensor" in sys.modules


def has_parts(model: nn.Module) -> bool:
    """Whether some of a model's parameters are DTensors."""
    own = (p for module in modules_of(model) for p in module._parameters.values()) if may_have_parts() else ()
    return any(p is not None and is_part(p) for p in own)


def part_of(x: Tensor) -> Tensor:
    """What this process holds of a tensor, outside of its graph; x itself where it is whole.

    A part's version doesn't count what is written to the whole.
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
    """The same, where processes have parts of a sum once these are added up.  All call it, in one order."""
    whole: Any = x
    if is_part(x) and any(place.is_partial() for place in whole.placements):
        replicate = _tensors().Replicate()
        places = [replicate if place.is_partial() else place for place in whole.placements]
        x = whole.detach().redistribute(placements=places)
    return part_of(x)


def own_of(x: Tensor, like: Tensor) -> Tensor:
    """This process's part of a tensor, as another one of its shape is cut.  All call it, in one order."""
    return Cut.of(like).own(x) if is_part(like) else part_of(x)


def cut_as(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that all processes have alike, as a DTensor that is cut as another of its shape; x where that is whole."""
    return Cut.of(like).whole(x) if is_part(like) else x


def joined(part: Tensor, like: Tensor) -> Tensor:
    """The DTensor of the parts that processes hold, cut as another one; the part where that is whole.  See `Cut.joined`"""
    return Cut.of(like).joined(part) if is_part(like) else part


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut over processes."""

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
        """The process groups along which it is cut."""
        cut = [axis for axis, place in enumerate(self.places) if place.is_shard() and self.mesh.size(axis) > 1]
        return tuple([self.mesh.get_group(axis) for axis in cut])

    def whole(self, x: Tensor) -> Tensor:
        """A tensor of its shape that all processes have alike, as one that is cut so, without a word between them."""
        return _tensors().distribute_tensor(x, self.mesh, self.places, src_data_rank=None)

    def own(self, x: Tensor) -> Tensor:
        """This process's part of a tensor of its shape, a DTensor or one that all have alike."""
        other: Any = x
        if is_part(x) and other.device_mesh == self.mesh:
            return part_of(other.redistribute(self.mesh, self.places))
        x = other.full_tensor() if is_part(x) else x
        return part_of(self.whole(x))

    def joined(self, part: Tensor) -> Tensor:
        """The DTensor of the parts that processes hold.  part: may have more axes, in front"""
        more = part.shape[: part.ndim - len(self.shape)]
        shape = torch.Size((*more, *self.shape))
        places = [_moved(place, len(more)) for place in self.places]
        kept = {"run_check": False, "shape": shape, "stride": torch.empty(shape, device="meta").stride()}
        return _tensors().DTensor.from_local(part, self.mesh, places, **kept)

    def start(self, axis: int) -> int:
        """Where on an axis this process's part begins."""
        if axis >= len(self.shape) or not any(place.is_shard(axis) for place in self.places):
            return 0
        places = [_tensors().Shard(0) if place.is_shard(axis) else _tensors().Replicate() for place in self.places]
        own = Cut(self.mesh, tuple(places), self.shape[axis : axis + 1]).own(torch.arange(self.shape[axis], device="cpu"))
        return int(own[0]) if len(own) else 0


def _moved(place: Any, axes: int) -> Any:
    """Where a tensor lies on an axis of a mesh that has more axes in front."""
    if not (axes and hasattr(place, "dim")):  # torch says is_shard() of none that is cut once more
        return place
    strides = {"split_factor": place.split_factor} if hasattr(place, "split_factor") else {}  # of what was cut once more
    return type(place)(place.dim + axes, **strides)


def _tensors() -> Any:
    return sys.modules["torch.distributed.tensor"]
