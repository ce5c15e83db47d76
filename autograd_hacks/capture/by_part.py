"""Rows of layers whose parameters are split over processes: the layer's rule, applied to this process's part."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.uses import LayerCall, OutputGrads
from autograd_hacks.capture.wrappers import gathering
from autograd_hacks.errors import ShardedParameters, UnseenGradient, where
from autograd_hacks.forms import Dense, Form
from autograd_hacks.rules.rule import Rule
from autograd_hacks.rules.table import covered, rule_for
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.parts import Cut, has_parts, is_part, may_have_parts, settled
from autograd_hacks.support.trees import map_tensors, modules_of, tensors_of

CUT = (nn.Linear, nn.Embedding)
"""Layers whose rule also holds for a part of their parameters, given the matching part of x and g."""


@dataclass(eq=False, kw_only=True)
class PartCall(LayerCall):
    """A call of a layer that is split, with this process's part of it.

    A parameter may be split over a mesh: then the rule gives the rows of this process's part.  Or all processes may hold the
    whole parameter while the gradient at the output is split, for example along the sequence: then each process has rows of
    its own positions, and these are added up over processes.
    """

    def _forms(self, grads: OutputGrads) -> Mapping[str, Form]:
        own = OutputGrads([None if g is None else settled(g) for g in grads.at], grads.versions, grads.reached)
        args, kwargs = map_tensors(settled, self.args), map_tensors(settled, dict(self.kwargs))
        forms = dict(LayerCall._forms(replace(self, args=args, kwargs=kwargs), own))
        summed = [name for name in forms if _adds_up(self, self.edges[name].parameter, grads.first)]
        return forms | _added({name: forms[name] for name in summed}, grads.first)


def _adds_up(call: LayerCall, parameter: Tensor, g: Tensor) -> bool:
    """Whether the processes hold the same parameter but have rows of different positions."""
    if not is_part(parameter) or not is_part(g):
        return False
    own, out = Cut.of(parameter), Cut.of(g)
    if own.mesh != out.mesh:
        raise ShardedParameters(
            f"{where(call.path, call.layer)}: a parameter is split over {own.mesh}, but the gradient at the layer's output "
            f"is split over {out.mesh}. Expected the same mesh for both."
        )
    return any(mine.is_replicate() and theirs.is_shard() for mine, theirs in zip(own.places, out.places))


def _added(forms: Mapping[str, Form], g: Tensor) -> dict[str, Form]:
    """Rows added up over the processes that split a gradient, in one step for all parameters of a layer."""
    if not forms:
        return {}
    rows = [form.dense().flatten(1) for form in forms.values()]
    total = torch.cat(rows, 1)
    for group in Cut.of(g).groups:
        dist.all_reduce(total, group=group)
    parts = total.split([x.shape[1] for x in rows], 1)
    return {name: Dense(part.reshape(len(part), *form.shape)) for (name, form), part in zip(forms.items(), parts)}


def check_cut(
    path: str, layer: nn.Module, rule: Rule, parameters: Mapping[str, Tensor], outputs: Sequence[Tensor], at: Layout | None
) -> None:
    """Raises ShardedParameters if a layer's parts give no rows.  at: where the samples are in its first output"""
    places: list[Any] = [p for p in parameters.values() if is_part(p)]
    if rule.recomputes or (not isinstance(layer, CUT) and any(x.is_shard() for p in places for x in p.placements)):
        raise ShardedParameters(
            f"{where(path, layer)}: its parameters ({', '.join(parameters)}) are split over processes, and its rule can't "
            "read parts. Only Linear and Embedding may be split (ColwiseParallel, RowwiseParallel); other layers need the "
            "same parameters on all processes. Keep this layer whole, or freeze it: requires_grad_(False)."
        )
    axis = 0 if at is None else at.axis
    out: Any = next((x for x in outputs if is_part(x)), None)
    if out is not None and any(place.is_shard(axis) for place in out.placements):
        raise ShardedParameters(
            f"{where(path, layer)}: its output, of shape {tuple(out.shape)}, is split along axis {axis}, which is the "
            "batch, so each process has the rows of some samples only. Give each process a tensor of its own samples and "
            "use DistributedDataParallel or fully_shard. With split layers, all processes need the same batch."
        )


def check_forward(model: nn.Module, arguments: Any) -> Sequence[tuple[str, Tensor]]:
    """The trainable parameters that are split inside layers, with their names.

    Raises if the forward can't be followed: TypeError for a DTensor among its arguments, ShardedParameters for parts of
    parameters that no layer's rule covers, UnseenGradient with context parallelism.
    """
    if not may_have_parts():
        return []
    if _is_context_parallel():
        raise UnseenGradient(
            "torch.distributed.tensor.experimental.context_parallel is on, so each process has only some positions of "
            "every sample, and this process sees only a part of a sample's gradient. Leave the context, or split layers "
            "along their features or heads instead (ColwiseParallel, RowwiseParallel, SequenceParallel)."
        )
    for x in tensors_of(arguments):
        if is_part(x):
            raise TypeError(
                f"the hooked model got a DTensor of shape {tuple(x.shape)}; expected this process's local tensor. Call "
                "x.to_local(), and give the first layer's style the layout (input_layouts=...)."
            )
    if not has_parts(model):
        return []
    others = {id(p) for part in gathering(model) for p in part.parameters()}  # their whole tensors are known later
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in others)
    parts = [(name, p) for name, p in trained if is_part(p)]
    ruled = {id(p) for module in (modules_of(model) if parts else ()) if rule_for(module) for p in covered(module).values()}
    refuse_parts([name for name, p in parts if id(p) not in ruled])
    return parts


def _is_context_parallel() -> bool:
    """Whether attention currently exchanges keys and values around a ring of processes."""
    ring = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if ring is None:
        return False
    dispatcher: Any = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    return ring._sdpa_handler in dispatcher._custom_op_handlers.values()


def refuse_parts(names: Sequence[str]) -> None:
    """Raises ShardedParameters for parts of parameters that no layer's rule would read."""
    if names:
        raise ShardedParameters(
            f"{', '.join(names)}: split over processes, and no layer's rule covers it, or its rule can't separate the "
            "samples. Functions of DTensors are not followed. Use a layer that has a rule (Linear, Embedding, norms; see "
            "register_rule), keep the parameter whole on each process, or freeze it: requires_grad_(False)."
        )
