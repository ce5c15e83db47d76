"""Independence by analysis: whether the labels of a model's graph show that samples don't mix, for all values."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

import torch
import torch.nn as nn
from torch import Tensor, fx

from autograd_hacks.compiled.labelled import labelled
from autograd_hacks.compiled.labels import Joint, shape
from autograd_hacks.compiled.torch_names import decompositions, ends_of, joint_graph, recurrent_layers_unrolled
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
    ends = ends_of(traced.graph)
    given = {node: axis % len(shape(node)) for node, place in ends.inputs.items() if (axis := axes[place]) is not None}
    gradients = {name: node for name, node in ends.gradients.values() if isinstance(name, str)}
    left = {str(name): node for name, node in ends.written.items()}
    return Joint(traced.graph, samples, given, ends.tangents, gradients, list(ends.outputs.values()), left)
