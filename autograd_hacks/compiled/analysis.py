"""Independence by analysis: whether the labels of a model's graph show that samples don't mix, for all values."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.nn as nn
from torch import Tensor, fx

from autograd_hacks.compiled import operations as operations  # which register rules
from autograd_hacks.compiled import products as products
from autograd_hacks.compiled import routed as routed
from autograd_hacks.compiled.labels import Joint, labelled, shape
from autograd_hacks.compiled.torch_names import (
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
    decompositions,
    joint_graph,
    recurrent_layers_unrolled,
)
from autograd_hacks.errors import PerSampleGradientError
from autograd_hacks.probe.batch import Batch
from autograd_hacks.support.copies import Marks
from autograd_hacks.support.trees import tensors_of


def why_unshown(model: nn.Module, batch: Batch, axis: int | None, samples: int) -> str:
    """Why the analysis can't show that outputs and buffers don't depend on other samples; "" if it shows that.

    model, batch: copies; the model may change itself, and everything that it reaches through the arguments
    axis: see `Batch.axes_of_samples`
    samples: see `Batch.axes_of_samples`
    """
    places = [n for n, leaf in enumerate(batch.leaves) if isinstance(leaf, Tensor)]
    try:
        with ExitStack() as stack, torch.enable_grad():
            stack.enter_context(recurrent_layers_unrolled())
            tensors = [batch.leaves[n].detach() for n in places]
            traced = joint_graph(stack, _OfTensors(model, batch, places), tensors, decompositions())
            axes = batch.axes_of_samples(axis, samples)
            joint = _joint(traced, [axes[n] for n in places], samples)
            if any(samples in getattr(traced, str(node.target)).shape for node in traced.graph.find_nodes(op="get_attr")):
                return "the model reads a tensor that is not an argument, a parameter or a buffer"
            labelled(joint)
    except PerSampleGradientError as error:
        return str(error)
    except Exception as error:  # whatever the model or torch raises for tensors without values
        return f"{type(error).__name__}: {error}"
    return ""


class _OfTensors(nn.Module):
    """A model as a function of the tensors in its arguments."""

    def __init__(self, model: nn.Module, batch: Batch, places: list[int]) -> None:
        super().__init__()
        self.model, self._batch, self._places = model, batch, places
        self._marks = Marks([*model.modules()])  # a trace runs it several times, and counters must not go on

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._batch.leaves)
        for place, x in zip(self._places, tensors):
            leaves[place] = x
        args, kwargs = replace(self._batch, leaves=leaves).arguments()
        self._marks.put_on()
        return tuple(tensors_of(self.model(*args, **kwargs)))


def _joint(traced: fx.GraphModule, axes: list[int | None], samples: int) -> Joint:
    given, tangents, found = dict[fx.Node, int](), dict[fx.Node, fx.Node](), dict[str, fx.Node]()
    last = traced.graph.output_node()
    pairs = [(node, kind) for node, kind in zip(last.args[0], last.meta["desc"]) if isinstance(node, fx.Node)]  # type: ignore
    outputs = {kind.idx: node for node, kind in pairs if isinstance(kind, PlainAOTOutput)}
    for node in traced.graph.find_nodes(op="placeholder"):
        kind = node.meta["desc"]
        if isinstance(kind, TangentAOTInput):
            tangents[node] = outputs[getattr(kind.output, "idx", 0)]
        elif isinstance(kind, PlainAOTInput) and (axis := axes[kind.idx]) is not None:
            given[node] = axis % len(shape(node))
    for node, kind in pairs:
        if isinstance(kind, GradAOTOutput) and isinstance(kind.grad_of, ParamAOTInput):
            found[kind.grad_of.target] = node
    left = {kind.mutated_input.expr(): node for node, kind in pairs if isinstance(kind, InputMutationAOTOutput)}
    return Joint(traced.graph, samples, given, tangents, found, list(outputs.values()), left)
