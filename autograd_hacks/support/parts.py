"""Tensors of which each process holds a part: DTensors, and tensors that a collective still fills."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

_WHOLE = {Tensor, nn.Parameter, nn.Buffer}


def is_part(x: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(x) in _WHOLE:
        return False
    tensors = sys.modules.get("torch.distributed.tensor")  # takes a second to import, and has been where there are any
    return tensors is not None and isinstance(x, tensors.DTensor)


def part_of(x: Tensor) -> Tensor:
    """What this process holds of a tensor, outside of its graph; x itself where it is whole.

    A part's version doesn't count what is written to the whole.
    """
    if type(x) in _WHOLE:
        return x
    own: Any = x._local_tensor if is_part(x) else x  # type: ignore[attr-defined]
    collectives = sys.modules.get("torch.distributed._functional_collectives")
    if collectives is not None and isinstance(own, collectives.AsyncCollectiveTensor):
        own = own.wait()
    return own  # type: ignore[no-any-return]


def settled(x: Tensor) -> Tensor:
    """The same, where processes have parts of a sum once these are added up.  All call it, in one order."""
    whole: Any = x
    if is_part(x) and any(place.is_partial() for place in whole.placements):
        replicate = sys.modules["torch.distributed.tensor"].Replicate()
        places = [replicate if place.is_partial() else place for place in whole.placements]
        x = whole.detach().redistribute(placements=places)
    return part_of(x)


def cut_as(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that all processes have alike, as a DTensor that is cut as another of its shape; x where that is whole."""
    if not is_part(like) or is_part(x):
        return x
    whole: Any = like
    tensors: Any = sys.modules["torch.distributed.tensor"]
    return tensors.distribute_tensor(x, whole.device_mesh, whole.placements, src_data_rank=None)  # type: ignore[no-any-return]


def joined(part: Tensor, like: Tensor) -> Tensor:
    """A DTensor of the parts that processes hold, cut as another tensor; the part where that is whole.

    part: may have more axes, in front of the other's
    """
    if not is_part(like):
        return part
    whole: Any = like
    tensors: Any = sys.modules["torch.distributed.tensor"]
    more = part.shape[: part.ndim - like.ndim]
    shape = torch.Size((*more, *like.shape))
    places = [tensors.Shard(place.dim + len(more)) if place.is_shard() else place for place in whole.placements]
    stride = torch.empty(shape, device="meta").stride()
    kept = {"run_check": False, "shape": shape, "stride": stride}
    return tensors.DTensor.from_local(part, whole.device_mesh, places, **kept)  # type: ignore[no-any-return]


def first_of(like: Tensor) -> int:
    """Where on axis 0 a tensor's part begins."""
    whole: Any = like
    if not is_part(like) or not any(place.is_shard(0) for place in whole.placements):
        return 0
    tensors: Any = sys.modules["torch.distributed.tensor"]
    places = [place if place.is_shard(0) else tensors.Replicate() for place in whole.placements]
    rows = torch.arange(like.shape[0], device=part_of(like).device)
    own = part_of(tensors.distribute_tensor(rows, whole.device_mesh, places, src_data_rank=None))
    return int(own[0]) if len(own) else 0
