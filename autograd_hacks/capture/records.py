"""A call of a module in a forward pass, and the hooks in the graph through which backward passes come to it.

No mathematics.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.capture.param_grad import anchored
from autograd_hacks.probe.layout import Layout
from autograd_hacks.support.trees import map_tensors, tensors_of, version_of
from autograd_hacks.support.untouched import RandomState, cuda_devices_of, random_state

if TYPE_CHECKING:
    from autograd_hacks.capture.attention import Map
    from autograd_hacks.capture.forward import Recorder
    from autograd_hacks.capture.passes import Pass

Versions = list[tuple[Tensor, int]]


class Graph:
    """What only a graph holds on to."""


@dataclass(eq=False)
class Visit:
    """One call of a layer.  It holds detached aliases, which keep memory alive but no graph."""

    path: str
    layer: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: dict[str, tuple[Tensor, Node]]  # those that train and whose rows it gives, each with its end of the graph
    outputs: int
    forward: int  # which forward of the model
    is_own: bool  # whether it was within that, and the layer not called by itself or by another model
    recomputed_in: Pass | None  # the backward pass that makes this call again, for checkpointing
    versions: Versions
    training: bool
    state: dict[str, tuple[Tensor, int]]  # the parameters that its rows may depend on, and buffers
    random_state: RandomState | None  # before the call, for a layer that draws random numbers in it
    results: list[Tensor]  # what came out, for a layer that is recomputed
    precision: torch.dtype | None  # autocast's, where the call ran under it
    inside: Map | None  # for a linear map inside a layer, which it has instead of the layer's rule
    skipped: frozenset[int]  # the ids of its parameters of which autograd computes no ordinary gradients
    is_first: bool  # whether no other forward hook came before ours
    samples: int | None  # N, where the model's own arguments tell it
    layouts: tuple[Layout | None, ...]  # where they are in each output; with N
    is_doubtful: bool = False  # whether samples seem to mix in it, so that each must be seen to be its own
    is_doubted: bool = False  # whether samples may not be run by themselves
    replay: Replay | None = None  # for a module whose rows come of running it again, and not by a rule
    graph: weakref.ref[Graph] | None = None  # dead when no backward pass can come through this call any more


@dataclass(frozen=True)
class Replay:
    """A call of a module as it begins, kept to be run again.

    modes: the training flag of each module inside    copies: whether it changes its arguments    buffers: those that the
    call changes, as they were before it
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random_state: RandomState
    modes: tuple[bool, ...]
    copies: bool
    buffers: dict[str, Tensor]

    @staticmethod
    def of(
        path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], copies: bool, buffers: Iterable[str]
    ) -> Replay:
        """copies: whether the call changes its arguments    buffers: those that it changes, by name"""
        keep = _copy if copies else Tensor.detach
        return Replay(
            path=path,
            module=module,
            args=map_tensors(keep, args),
            kwargs=map_tensors(keep, kwargs),
            random_state=random_state(cuda_devices_of(module)),
            copies=copies,
            modes=tuple(part.training for part in module.modules()),
            buffers={name: _copy(module.get_buffer(name)) for name in buffers},
        )


@dataclass(eq=False)
class Received:
    """What one backward pass brought to one visit."""

    grads: list[Tensor | None]
    reached: set[str] = field(default_factory=set)
    versions: Versions = field(default_factory=list)


def attach(recorder: Recorder, visit: Visit, output: Any, is_compared: bool, parameters: Sequence[Tensor] = ()) -> Any:
    """Asks the graph for the gradients at a call's outputs.  Returns the output.

    is_compared: whether the visit keeps the output, to compare a later one with it
    parameters: those that were switched off in the call
    """
    outputs = tensors_of(output)
    if len(outputs) > 1 or is_compared or not all(_keeps_its_node(x) for x in outputs):
        # One output may be computed from another, as an LSTM's h from its c.  The gradient at a copy is that of the
        # uses outside the layer alone; and the user may overwrite the copy, where the result is to be compared or a
        # view's node would be lost.
        output = map_tensors(lambda x: x.clone() if x.grad_fn is not None or parameters else x, output)
        outputs = tensors_of(output)
    graph = Graph()
    visit.graph = weakref.ref(graph)
    if parameters:
        slots = count()

        def anchor(x: Tensor) -> Tensor:
            at = AtNode(recorder, visit, graph, next(slots), 0, x.shape)
            return anchored(x, at, parameters) if x.is_floating_point() or x.is_complex() else x

        return map_tensors(anchor, output)
    for slot, x in enumerate(outputs):
        if x.grad_fn is not None:
            source = x if x._base is None else x._base
            assert source.grad_fn is not None  # what is no reshaped base has been copied
            source.grad_fn.register_prehook(AtNode(recorder, visit, graph, slot, source.output_nr, x.shape))
    return output


class AtNode:
    """A hook on the node of a layer's output, or of the base that the output is a view of.

    On the node and not on the tensor, since it so sees the gradient that the layer's own backward will use, after the
    user's hooks on the tensor, and since in-place operations after the layer can't move it: they give a view another node,
    but leave its base's in the graph.
    """

    def __init__(self, recorder: Recorder, visit: Visit, graph: Graph, slot: int, output_nr: int, shape: torch.Size) -> None:
        self.recorder, self.slot, self.output_nr, self.shape = recorder, slot, output_nr, shape
        self.held: tuple[Visit, Graph] | None = visit, graph

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        if self.held is None:
            return
        grad = grads[self.output_nr]
        if grad is not None and grad.shape != self.shape:
            grad = grad.reshape(self.shape)
        self.recorder.receive(self.held[0], self.slot, grad)
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self.held = None  # autograd frees what it saved, and a loss that is kept must not keep the inputs


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _keeps_its_node(output: Tensor) -> bool:
    """Whether an output is no view, or its base reshaped and nothing else: the gradients at both are the same numbers."""
    if output._base is None or output.grad_fn is None:
        return True
    is_reshaped = output.grad_fn.name() in ("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0")
    return is_reshaped and output._base.grad_fn is not None and output.grad_fn.next_functions[0][0] is output._base.grad_fn


def versions_of(tensors: list[Tensor]) -> Versions:
    return [(x, version_of(x)) for x in tensors]
