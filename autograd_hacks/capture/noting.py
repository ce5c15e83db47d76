"""The running forward of a hooked model: where it is, and the records of its calls.  No mathematics."""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.calls import Edge, Graph, RecordedCall
from autograd_hacks.capture.derived import Entry
from autograd_hacks.capture.graph import node_of
from autograd_hacks.capture.inner_maps import InnerMaps
from autograd_hacks.capture.open_reads import OpenReads
from autograd_hacks.capture.param_grad import ParamGrad
from autograd_hacks.capture.records import Record
from autograd_hacks.capture.replay import OpenUnits
from autograd_hacks.probe.plan import Plan
from autograd_hacks.support.restored import leave
from autograd_hacks.support.switch import NO_TASK, Switch, current_task
from autograd_hacks.support.trees import tensors_of, version_of
from autograd_hacks.support.untouched import RandomState, autocast_dtype


class Noting:
    """What all calls of a forward have in common."""

    def __init__(self, record: Record, param_grad: ParamGrad, backward: Backward) -> None:
        self.record, self.param_grad, self.backward = record, param_grad, backward
        self.static = Plan()  # of layers that are called by themselves
        self.is_running = False
        self.samples: int | None = None  # N, where the plan knows it
        self._entries: dict[nn.Module, tuple[Entry, Tensor]] = {}  # of the layers that run, with what each was given
        self._random_states: weakref.WeakKeyDictionary[nn.Module, RandomState] = weakref.WeakKeyDictionary()
        self.units = OpenUnits()
        self.maps: dict[nn.Module, InnerMaps] = {}  # of the attention layers that run
        self.reads = OpenReads()
        self._calls: dict[str, int] = {}  # how many there were of each layer, by path
        self._model = nn.Module()  # the hooked one, whose forward runs

    def records(self) -> bool:
        return self._is_on() and torch.is_grad_enabled()

    def _is_on(self) -> bool:
        # Inside torch.func's transforms tensors are of one transform's making, and end with it.
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        self.record.transformed |= transformed
        return Switch.on() and not transformed and not torch._C._get_tracing_state()

    def begin(self, with_gradients: bool) -> None:
        """Numbers a forward.  with_gradients: whether a backward pass may come to it"""
        if not Switch.on() or current_task() != NO_TASK:  # checkpointing computes something again, which is no forward
            return
        record, backward = self.record, self.backward
        record.comparing &= not backward.answered
        record.transformed &= not backward.answered
        if backward.answered and not record.accumulating:
            record.lost = {}
        self.restart()
        record.forwards += 1
        if with_gradients and not record.accumulating and record.segments:
            record.free_what_was_read()
        backward.unanswered += with_gradients
        backward.answered = False

    def restart(self) -> None:
        """Forgets the calls so far, and what a forward that was interrupted has left."""
        self.param_grad.switch_on()
        for layer in list(self.maps):
            self.leave_maps(layer)
        self.reads.leave_all()
        self.units.open, self._calls, self._entries = [], {}, {}

    def leave_maps(self, layer: nn.Module) -> InnerMaps | None:
        """An attention layer has ended: its maps, if it has some."""
        maps = self.maps.get(layer) if self.maps else None
        if maps is not None:
            leave(maps)
            del self.maps[layer]  # last: an interrupt before it has all this done once more
        return maps

    def _call(
        self,
        path: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: Sequence[Tensor],
        edges: Mapping[str, Edge],
        is_compared: bool = False,
        **fields: Any,
    ) -> tuple[RecordedCall, Graph]:
        """The record of a call.

        args, kwargs: outside the graph    edges: as `_edges` gives them
        is_compared: whether to keep the outputs, to compare later ones with them    fields: others of the record
        """
        inputs = [*tensors_of(args), *(tensors_of(kwargs) if kwargs else ())]
        running, graph = self.backward.running, Graph()
        call = RecordedCall(
            path=path,
            layer=layer,
            args=args,
            kwargs=kwargs,
            outputs=tuple([x.detach() for x in outputs]) if is_compared else (),
            training=layer.training,
            precision=autocast_dtype(outputs[0].device),
            edges=edges,
            slots=len(outputs),
            samples=self.samples,
            forward=self.record.forwards,
            is_own=self.is_running or current_task() != NO_TASK,
            recomputed_in=None if running is None else weakref.ref(running),
            versions=[(x, version_of(x)) for x in inputs],
            graph=weakref.ref(graph),
            **fields,
        )
        return call, graph

    def _edges(self, path: str, parameters: Mapping[str, Tensor], others: Container[str] = ()) -> dict[str, Edge]:
        """Where those parameters of a module end the graph that ask for gradients.

        path: the module's    parameters: by their names in it    others: those whose rows other modules give
        """
        edges = {}
        for local, p in parameters.items():
            if p.requires_grad and (name := self.record.name_of(p, path, local)) not in others:
                self.backward.watch(p)
                edges[local] = Edge(name, p, node_of(p))
        return edges

    def _names(self, parameters: Sequence[Tensor]) -> frozenset[str]:
        return frozenset([self.record.name_of(p) for p in parameters]) if parameters else frozenset()

    def _count(self, path: str, ends: bool = True) -> int:
        """How many calls there were before this one in the same forward; `Plan.AGAIN` where checkpointing makes it anew."""
        if current_task() != NO_TASK:
            return Plan.AGAIN
        number = self._calls.get(path, -1) + 1
        if ends:
            self._calls[path] = number
        return number

    def _locate(self, path: str, layer: nn.Module) -> None:
        """Finds out which forward, or which backward, a layer is called in."""
        task, backward = current_task(), self.backward
        if task != NO_TASK:
            backward.enter(task)
            return
        backward.running = None  # left by a pass that failed
        if not (self.is_running or self.units.around(path)):  # it is called by itself, a forward of its own
            self.record.plan, self.samples = self.static, None
            again = backward.answered or id(layer) in backward.called or not backward.called
            self.begin(torch.is_grad_enabled() and again)
        backward.called.add(id(layer))
