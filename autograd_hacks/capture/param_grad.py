"""Layers whose ordinary weight gradients autograd doesn't compute: ``add_hooks(param_grad=False)``.  No mathematics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import OTHER_MODES, HigherOrderError, ParamGradSkipped
from autograd_hacks.support.by_tensor import ByTensor
from autograd_hacks.support.restored import restored


class ParamGrad:
    """Of one hooked model: whether autograd computes ordinary gradients of its parameters, and where it does not.

    names: of the model's parameters
    """

    def __init__(self, names: ByTensor[str]) -> None:
        self.wanted = True  # as add_hooks(param_grad=...) says
        self.skips = False  # whether the layers of the running forward that a rule covers go without
        self.awaited: frozenset[str] = frozenset()  # the parameters that need ordinary gradients all the same
        self.names = names
        self._off: list[tuple[nn.Module, list[Tensor]]] = []  # running layers and their parameters
        self._swapped: dict[nn.Module, dict[str, nn.Parameter | None]] = {}  # parameters in whose place others stand
        self.keeps: dict[str, Tensor | None] = {}  # what .grad is to be again, by the parameter's name

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which ordinary gradients are computed."""
        with restored(partial(vars(self).update, wanted=self.wanted, skips=self.skips)):
            self.wanted, self.skips = True, False
            yield

    def switch_off(self, layer: nn.Module, parameters: Sequence[Tensor], swaps: bool = False) -> None:
        """Has parameters not ask for gradients while their layer runs, so that autograd keeps nothing for them.

        parameters: those that `may_skip`    swaps: whether other tensors stand in their place, for a graph that is made of a
        backward pass, in which they ask again
        """
        off = [p for p in parameters if p.requires_grad]
        self._off.append((layer, off))  # first, for what an interrupt may leave
        self._swapped[layer] = {name: p for name, p in layer._parameters.items() if swaps and any(p is x for x in off)}
        detached: dict[str, Any] = {name: p.detach() for name, p in self._swapped[layer].items() if p is not None}
        layer._parameters.update(detached)
        for parameter in off:
            parameter.requires_grad_(False)

    def end_layer(self, layer: nn.Module) -> list[Tensor]:
        """Switches a layer's parameters on again, and those of layers inside that have failed.  Returns its parameters."""
        if not self._off or not any(running is layer for running, _ in self._off):
            return []
        while True:
            running, parameters = self._undo()
            if running is layer:
                return parameters

    def switch_on(self) -> None:
        """Switches all on again."""
        while self._off:
            self._undo()

    def _undo(self) -> tuple[nn.Module, list[Tensor]]:
        layer, parameters = self._off[-1]
        layer._parameters.update(self._swapped.pop(layer, {}))
        for parameter in parameters:
            parameter.requires_grad_(True)
        self._off.pop()  # last: an interrupt before it has all this done once more
        return layer, parameters

    def keep(self, parameter: Tensor, name: str) -> None:
        """Hears of an ordinary gradient that is about to arrive, which is only wanted to compare rows with."""
        if parameter in self.names:
            self.keeps[name] = parameter.grad
            parameter.grad = None

    def put_back(self, parameter: Tensor) -> None:
        """Hears that it has arrived, and leaves ``.grad`` as it was."""
        if (name := self.names.get(parameter)) in self.keeps:
            parameter.grad = self.keeps.pop(name or "")

    def may_skip(self, parameter: Tensor) -> bool:
        """Whether a parameter may go without: it is the model's own, and not a tensor in its place, and nobody else waits
        for its gradient."""
        before, after = parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)
        return parameter in self.names and len(before or ()) <= 1 and len(after or ()) <= 1  # one is the library's own

    def check_graph(self) -> None:
        """Raises for a backward pass through layers without gradients of their parameters, of which a graph is made."""
        if torch.is_grad_enabled():
            raise HigherOrderError(
                "a backward pass ran with create_graph=True through layers whose parameters are in no graph "
                f"(add_hooks(param_grad=False)), so that its terms would be missing. {OTHER_MODES}"
            )

    def check_captured(self, parameters: Sequence[Tensor]) -> None:
        """Raises where ordinary gradients are asked for.  parameters: those that torch.autograd.grad captures"""
        if not self.wanted and any(map(self.may_skip, parameters)):
            raise ParamGradSkipped(
                "torch.autograd.grad was asked for the gradients of parameters, which are not computed: the model was "
                "hooked by add_hooks(param_grad=False). Take them from per_sample_grads(model).weighted_sum(w), or use "
                "param_grad=True."
            )
