"""Quantities of parameters split over processes (tensor parallel): each process has its part's, and these are added up."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.records import Record
from autograd_hacks.capture.wrappers import gathering
from autograd_hacks.errors import NotReduced, ShardedParameters
from autograd_hacks.support.parts import Cut, has_parts, is_part

Groups = tuple[Any, ...]
"""The process groups over which a parameter is split, in order; empty if all processes have the whole parameter."""

T = TypeVar("T")


def cuts_of(model: nn.Module, record: Record) -> dict[str, Cut]:
    """By name, the parameters that are split inside layers, or that layers have as unsplit DTensors."""
    if not has_parts(model):
        return {}
    sharded = {id(p) for part in gathering(model) for p in part.parameters()}  # layers get whole tensors instead
    return {name: Cut.of(p) for name, p in record.parameters_of(model).items() if is_part(p) and id(p) not in sharded}


def over_samples(mesh: Any, seen: Tensor) -> Any:
    """The mesh over which samples are spread: the parameter's mesh without the axes over which layers have parts.

    seen: the tensor that layers have instead of the parameter
    """
    if not is_part(seen):
        return mesh
    within = Cut.of(seen).mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name not in within)]


def refuse_curvature(is_cut: bool) -> None:
    """Raises ShardedParameters if parameters are split."""
    if is_cut:
        raise ShardedParameters(
            "some parameters are DTensors, and this process has only a part of them; curvature needs whole parameters. "
            "Available over processes: gram(), dot(v) and weighted_sum(w) after an ordinary backward pass, and "
            "per_sample_jacobian."
        )


def whole_sum(found: Mapping[str, T], cuts: Mapping[str, Cut], add: Callable[[Mapping[str, T]], Tensor]) -> Tensor:
    """A quantity that is a sum over parameters, with one all-reduce over the processes that have parts.

    Unsplit parameters count once.
    found: a value for each parameter
    add: adds values up over parameters
    """
    if not cuts:
        return add(found)
    parts = [_over(groups, add(own)) for groups, own in _by_groups(found, cuts).items()]
    return reduce(lambda total, part: total + part.to(total.device), parts)


def whole_norms(norms: Mapping[str, T], cuts: Mapping[str, Cut], join: Callable[[Mapping[str, T]], Tensor]) -> Tensor:
    """The norms of rows, N.  Their squares are added up in double precision, in which they don't overflow.

    norms: of this process's part of each parameter
    join: the norm over several parameters together
    """
    if not cuts:
        return join(norms)
    kept: list[torch.dtype] = []

    def squared(own: Mapping[str, T]) -> Tensor:
        joint = join(own)
        kept.append(joint.dtype)
        return joint.double().square()

    whole = whole_sum(norms, cuts, squared).sqrt()
    return whole.to(reduce(torch.promote_types, kept))


def each_norms(norms: Mapping[str, Tensor], cuts: Mapping[str, Cut]) -> dict[str, Tensor]:
    """The same for each parameter, {name: N}, with one all-reduce for all that are split in the same way."""
    whole = dict(norms)
    for groups, own in _by_groups(norms, cuts).items() if cuts else ():
        if groups:
            squares = _over(groups, torch.stack([x.double().square() for x in own.values()]))
            whole |= {name: x.sqrt().to(own[name].dtype) for name, x in zip(own, squares)}
    return whole


def _by_groups(found: Mapping[str, T], cuts: Mapping[str, Cut]) -> dict[Groups, dict[str, T]]:
    """Values of parameters by name, grouped by the way they are split, in the same order on all processes."""
    apart: dict[Groups, dict[str, T]] = {}
    for name, value in found.items():
        apart.setdefault(cuts[name].groups if name in cuts else (), {})[name] = value
    return apart


def _over(groups: Groups, part: Tensor) -> Tensor:
    """The sum over the processes of the groups."""
    for group in groups:
        part = part.contiguous()
        dist.all_reduce(part, group=group)
    return part


def over_stages(norms: Tensor, record: Record) -> Tensor:
    """The norms of rows, N, over all stages of the pipeline that ran the model, by one all-reduce.  Without a pipeline they
    don't change.

    norms: of this stage's parameters
    """
    stage = None if record.stage is None else record.stage()
    if stage is None:
        return norms
    if stage.num_stages > stage.group_size:
        raise NotReduced(
            f"this model is one of {stage.num_stages} stages of a pipeline over {stage.group_size} processes, but a "
            "sample's norm is over all stages. Add up the squares of per_sample_grads(stage).norms() over this process's "
            "stages, and over processes by torch.distributed.all_reduce. Then pass the root to each "
            "clip_grad1_norm_(stage, ...): norms=..."
        )
    return _over((stage.group,), norms.double().square()).sqrt().to(norms.dtype)
