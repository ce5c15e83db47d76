"""Tensors of several processes: shards, which are DTensors, and tensors that a collective has not filled yet."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ShardedParameters

_WHOLE = {Tensor, nn.Parameter, nn.Buffer}


def is_part(x: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    if type(x) in _WHOLE:
        return False
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and imported already if there are any
    return tensors is not None and isinstance(x, tensors.DTensor)


def may_have_parts() -> bool:
    """Whether DTensors are possible at all: they lie on a mesh of processes."""
    return "torch.distributed.tensor" in sys.modules and dist.is_available() and dist.is_initialized()


def has_parts(model: nn.Module) -> bool:
    """Whether some of a model's parameters are DTensors."""
    own = (p for module in model.modules() for p in module._parameters.values()) if may_have_parts() else ()
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


def undivided(x: Tensor) -> Tensor:
    """A tensor that a collective may not have filled yet, filled.

    Raises ShardedParameters for a DTensor, whose numbers may be a part of a sum over processes."""
    if is_part(x):
        raise ShardedParameters(
            f"the model computes with a DTensor of shape {tuple(x.shape)}, so this process may have only a part of a "
            "sample's gradient. Use ordinary tensors; for several processes, torch.distributed.fsdp.fully_shard or "
            "DistributedDataParallel."
        )
    return part_of(x)


def sharded_as(x: Tensor, like: Tensor) -> Tensor:
    """A tensor that all processes have, as a shard like another one of its shape; x itself if that is whole."""
    if not is_part(like):
        return x
    whole: Any = like
    place = sys.modules["torch.distributed.tensor"].distribute_tensor
    return place(x, whole.device_mesh, whole.placements, src_data_rank=None)


def whole_of(x: Tensor) -> Tensor:
    """The whole tensor, gathered from the processes' shards.  All must call it at once."""
    gather = getattr(x, "full_tensor", None)
    found: Tensor = x if gather is None else gather()
    return found


def memory_of(x: Tensor) -> int:
    """An address that differs for tensors in different memory; for tensors without memory, the object's id."""
    if x.is_nested or x.layout != torch.strided or x.is_meta:
        return id(x)
    try:
        return part_of(x).untyped_storage().data_ptr()
    except RuntimeError:  # wrappers of tensors, and tensors that are traced
        return id(x)
