"""Quantities of parameters that are cut over processes, in tensor parallel: each process has its part's, which add up."""

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
"""The process groups over which a parameter is cut, one after the other; none for one that all have alike."""

T = TypeVar("T")


def cuts_of(model: nn.Module, record: Record) -> dict[str, Cut]:
    """Of a model's parameters those of which layers have parts, or that they have as DTensors that aren't cut, by name."""
    if not has_parts(model):
        return {}
    sharded = {id(p) for part in gathering(model) for p in part.parameters()}  # which layers have something else for
    return {name: Cut.of(p) for name, p in record.parameters_of(model).items() if is_part(p) and id(p) not in sharded}


def over_samples(mesh: Any, seen: Tensor) -> Any:
    """The mesh over which samples are spread: a parameter's without the axes over which layers have parts of it.

    seen: what layers have in its place
    """
    if not is_part(seen):
        return mesh
    within = Cut.of(seen).mesh.mesh_dim_names or ()
    return mesh[tuple(name for name in mesh.mesh_dim_names or () if name not in within)]


def refuse_curvature(is_cut: bool) -> None:
    """Raises ShardedParameters where parameters are cut."""
    if is_cut:
        raise ShardedParameters(
            "some parameters are DTensors, of which this process has a part, and curvature is there for whole parameters "
            "alone. gram(), dot(v) and weighted_sum(w) after an ordinary backward pass, and per_sample_jacobian, add up "
            "over processes."
        )


def whole_sum(found: Mapping[str, T], cuts: Mapping[str, Cut], add: Callable[[Mapping[str, T]], Tensor]) -> Tensor:
    """What adds up over parameters, by one sum over the processes that have parts; of what all have alike it counts once.

    found: something of each parameter    add: adds that up over parameters
    """
    if not cuts:
        return add(found)
    parts = [_over(groups, add(own)) for groups, own in _by_groups(found, cuts).items()]
    return reduce(lambda total, part: total + part.to(total.device), parts)


def whole_norms(norms: Mapping[str, T], cuts: Mapping[str, Cut], join: Callable[[Mapping[str, T]], Tensor]) -> Tensor:
    """The norms of rows, N: squares add up, in double precision, in which they don't overflow.

    norms: of the parts, of each parameter    join: the norms of several together
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
    """The same of each parameter, {name: N}, by one sum for all that are cut in one way."""
    whole = dict(norms)
    for groups, own in _by_groups(norms, cuts).items() if cuts else ():
        if groups:
            squares = _over(groups, torch.stack([x.double().square() for x in own.values()]))
            whole |= {name: x.sqrt().to(own[name].dtype) for name, x in zip(own, squares)}
    return whole


def _by_groups(found: Mapping[str, T], cuts: Mapping[str, Cut]) -> dict[Groups, dict[str, T]]:
    """What there is of parameters by name, apart for each way of being cut, in the same order on all processes."""
    apart: dict[Groups, dict[str, T]] = {}
    for name, value in found.items():
        apart.setdefault(cuts[name].groups if name in cuts else (), {})[name] = value
    return apart


def _over(groups: Groups, part: Tensor) -> Tensor:
    """The sum of what processes have."""
    for group in groups:
        part = part.contiguous()
        dist.all_reduce(part, group=group)
    return part


def over_stages(norms: Tensor, record: Record) -> Tensor:
    """The norms of rows over all stages of the pipeline that has run a model, N, by one sum; as they are where none has.

    norms: of this stage's parameters
    """
    stage = None if record.stage is None else record.stage()
    if stage is None:
        return norms
    if stage.num_stages > stage.group_size:
        raise NotReduced(
            f"this model is one of {stage.num_stages} stages of a pipeline over {stage.group_size} processes, and a "
            "sample's norm is over all. Add up the squares of per_sample_grads(stage).norms() over the stages here and over "
            "processes by torch.distributed.all_reduce, and give each clip_grad1_norm_(stage, ...) the root: norms=..."
        )
    return _over((stage.group,), norms.double().square()).sqrt().to(norms.dtype)
