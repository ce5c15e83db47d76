"""The way to the rows of layers whose parameters are cut over processes: of this process's part, as its rule says it."""

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
"""Layers whose rule is right for a part of their parameters, given the part of x and g that belongs to it."""


@dataclass(eq=False, kw_only=True)
class PartCall(LayerCall):
    """A call of a layer of which this process holds a part.

    Let a parameter be cut over a mesh.  Where it is cut, the rule gives that part of its rows.  Where processes have it
    alike and the gradient at the output is cut, along a sequence say, each has rows of its own positions, which add up.
    """

    def _forms(self, grads: OutputGrads) -> Mapping[str, Form]:
        own = OutputGrads([None if g is None else settled(g) for g in grads.at], grads.versions, grads.reached)
        args, kwargs = map_tensors(settled, self.args), map_tensors(settled, dict(self.kwargs))
        forms = dict(LayerCall._forms(replace(self, args=args, kwargs=kwargs), own))
        summed = [name for name in forms if _adds_up(self, self.edges[name].parameter, grads.first)]
        return forms | _added({name: forms[name] for name in summed}, grads.first)


def _adds_up(call: LayerCall, parameter: Tensor, g: Tensor) -> bool:
    """Whether processes that have a parameter alike have rows of different positions."""
    if not is_part(parameter) or not is_part(g):
        return False
    own, out = Cut.of(parameter), Cut.of(g)
    if own.mesh != out.mesh:
        raise ShardedParameters(
            f"a parameter of {where(call.path, call.layer)} is cut over {own.mesh}, and the gradient at the layer's "
            f"output over {out.mesh}. Rows can be put together over one mesh alone."
        )
    return any(mine.is_replicate() and theirs.is_shard() for mine, theirs in zip(own.places, out.places))


def _added(forms: Mapping[str, Form], g: Tensor) -> dict[str, Form]:
    """Rows added up over the processes among which a gradient is cut, at once for all of a layer's parameters."""
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
    """Raises ShardedParameters for a layer whose parts give no rows.  at: where the samples are in its first output"""
    places: list[Any] = [p for p in parameters.values() if is_part(p)]
    if rule.recomputes or (not isinstance(layer, CUT) and any(x.is_shard() for p in places for x in p.placements)):
        raise ShardedParameters(
            f"{where(path, layer)} has parameters that are cut over processes ({', '.join(parameters)}), and there are no "
            "per-sample gradients of its parts: Linear and Embedding may be cut (ColwiseParallel, RowwiseParallel), and "
            "others' parameters be alike on all processes. Leave this layer whole, or freeze it: requires_grad_(False)."
        )
    axis = 0 if at is None else at.axis
    out: Any = next((x for x in outputs if is_part(x)), None)
    if out is not None and any(place.is_shard(axis) for place in out.placements):
        raise ShardedParameters(
            f"the output of {where(path, layer)}, of shape {tuple(out.shape)}, is cut along axis {axis}, where the samples "
            "are, so that each process has the rows of some. Give each process a tensor of its own samples, and use "
            "DistributedDataParallel or fully_shard; over what cuts layers all processes have the same batch."
        )


def check_forward(model: nn.Module, arguments: Any) -> Sequence[tuple[str, Tensor]]:
    """The parameters that train and that layers have parts of, by name.

    Raises where a forward can't be followed: TypeError for a DTensor among its arguments, ShardedParameters for parts of
    parameters that no layer's rule covers, UnseenGradient in context parallel.
    """
    if not may_have_parts():
        return []
    if _is_context_parallel():
        raise UnseenGradient(
            "torch.distributed.tensor.experimental.context_parallel is on: each process has some positions of every sample, "
            "and a sample's gradient is a sum over processes of which this one knows a part. Cut layers along their features"
            " or heads instead (ColwiseParallel, RowwiseParallel, SequenceParallel), or leave the context."
        )
    for x in tensors_of(arguments):
        if is_part(x):
            raise TypeError(
                f"a hooked model was given a DTensor of shape {tuple(x.shape)}; expected what each process holds: call "
                "x.to_local(), and let the first layer's style say how it is cut (input_layouts=...)."
            )
    if not has_parts(model):
        return []
    others = {id(p) for part in gathering(model) for p in part.parameters()}  # whose stand-ins are known later
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in others)
    parts = [(name, p) for name, p in trained if is_part(p)]
    ruled = {id(p) for module in (modules_of(model) if parts else ()) if rule_for(module) for p in covered(module).values()}
    refuse_parts([name for name, p in parts if id(p) not in ruled])
    return parts


def _is_context_parallel() -> bool:
    """Whether attention goes around a ring of processes now."""
    ring = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    if ring is None:
        return False
    dispatcher: Any = sys.modules["torch.distributed.tensor"].DTensor._op_dispatcher
    return ring._sdpa_handler in dispatcher._custom_op_handlers.values()


def refuse_parts(names: Sequence[str]) -> None:
    """Raises ShardedParameters for parts of parameters that would be read by other ways than layers' rules."""
    if names:
        raise ShardedParameters(
            f"processes hold parts of {', '.join(names)}, which no layer's rule covers, or its rule can't tell the samples "
            "apart: what functions do with DTensors is not followed. Put it into a layer with a rule (Linear, Embedding, "
            "norms; see register_rule), keep it whole on each process, or freeze it: requires_grad_(False)."
        )
