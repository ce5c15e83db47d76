"""A call as plain data, and what a backward pass brought to it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from autograd_hacks.errors import where
from autograd_hacks.forms import Form, Zero
from autograd_hacks.probe.layout import Layouts
from autograd_hacks.rules.call import Call
from autograd_hacks.support.parts import part_of

Versions = list[tuple[Tensor, int]]
"""Tensors with how often they had been overwritten."""


class Graph:
    """Held by a call's hooks in the graph and by nothing else: dead when no backward pass can come there any more."""


class Edge(NamedTuple):
    """A parameter and its end of the graph."""

    name: str  # the parameter's first name in the model
    parameter: Tensor
    node: Node


class Way(Protocol):
    """How the rows of a call come about."""

    def forms(self, call: RecordedCall, grads: OutputGrads) -> Mapping[str, Form]:
        """{name in the layer: form} for the parameters that a pass has reached, a row for each sample."""

    def rows(self, call: RecordedCall, grads: OutputGrads) -> int:
        """How many rows the call had, where the model's arguments don't tell its samples."""

    def with_input(self, call: RecordedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall:
        """The call as if it had been given something else."""


class Turning(Protocol):
    """Makes calls of a call, of passes of which a graph is made."""

    def turn(self, call: RecordedCall, grad: Tensor, shape: torch.Size, receive: Any) -> Tensor:
        """What is to go on in the place of a gradient at the call's output."""

    def forget(self) -> None:
        """The pass is over."""


@dataclass(eq=False, kw_only=True)
class RecordedCall(Call):
    """A call of a layer in a forward: what its rule reads, and where it stands in the graph.

    It holds detached aliases, which keep memory alive but no graph.
    """

    way: Way  # to its rows: by the layer's rule, by an inner linear map, or by running the module again
    edges: Mapping[str, Edge]  # of the parameters that train and whose rows it gives, by their names in the layer
    slots: int  # how many tensors the call returned
    samples: int | None  # N, where the model's own arguments tell it
    layouts: Layouts  # where they are in each output; with N
    forward: int  # which forward of the model
    is_own: bool  # whether it was within that, and the layer not called by itself or by another model
    recomputed_in: weakref.ref[Any] | None  # the backward pass that makes this call again, for checkpointing
    versions: Versions  # of its inputs
    graph: weakref.ref[Graph]
    is_first: bool = True  # whether no other forward hook came before ours
    skipped: frozenset[str] = frozenset()  # the names of its parameters of which autograd computes no ordinary gradients
    # Where gradient leaves it again, if a pass of which a graph is made is to be noted as a call of its own, ...
    entry: Turning | None = None
    turns: Sequence[str] = ()  # ... and the parameters, by their names in the layer, that have rows there
    order: int = 0  # how many such passes it took to make it
    is_lost: bool = True  # whether what such a pass through it adds to rows goes unnoticed

    def batch_size(self, grads: OutputGrads) -> int:
        """How many samples the call saw: as many as the model was given, or else as many as it has rows."""
        return self.way.rows(self, grads) if self.samples is None else self.samples

    def forms(self, grads: OutputGrads) -> Mapping[str, Form]:
        """{name in the layer: form} for the parameters that a pass has reached, a row for each sample."""
        if grads.live is not None:
            self = self.way.with_input(self, *grads.live)
        if self.samples == 0:  # on whichever axis
            edges = {local: part_of(self.edges[local].parameter).detach() for local in grads.reached}
            return {local: Zero(0, p.shape, p) for local, p in edges.items()}
        return self.way.forms(self, grads)

    @property
    def what(self) -> str:
        """The call, for people."""
        return f"{where(self.path, self.layer)}, input {', '.join(str(tuple(x.shape)) for x, _ in self.versions)}"


@dataclass(eq=False, slots=True)
class OutputGrads:
    """What one backward pass brought to one call."""

    at: list[Tensor | None]  # for each tensor that the call returned
    versions: list[int]  # of these
    reached: tuple[str, ...] = ()  # the parameters that the pass goes on to, by their names in the layer
    # The call's arguments in their graph, where the gradients are in theirs, too: the rows can be differentiated.
    live: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None

    @property
    def first(self) -> Tensor:
        """That of the first output that the pass came by."""
        return next(grad for grad in self.at if grad is not None)

    @property
    def length(self) -> float:
        """The 2-norm of them all."""
        return sum(float(part_of(grad).abs().double().square().sum()) for grad in self.at if grad is not None) ** 0.5
