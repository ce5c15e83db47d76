"""Detects gradient that reaches the model's graph through tensors that the model did not return.

In a proven step, the gradient that arrives at each node is compared with the gradient that the forward's own nodes passed to
it.  A difference came another way, for example through an attribute that the loss reads."""

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.off_graph import Ran
from autograd_hacks.support.graph import Leaf, Value, made
from autograd_hacks.support.internals import call_at_end, current_node, sequence_number, will_execute
from autograd_hacks.support.layout import candidates, differs, rounding_of
from autograd_hacks.support.sweep import fitted
from autograd_hacks.support.switch import Switch, current_task

OF_MODULE = frozenset(vars(nn.Module()))
"""Attributes that every module has."""

ELSEWHERE = "what a hook, a global or a function keeps"

Key = tuple[int, int] | str
"""The number of a node and of one of its outputs, or a parameter's name."""


def watch(backward: Backward, ran: Ran, samples: int, found: Callable[[], None]) -> None:
    """Watches a forward's graph for gradient from unreturned tensors, and refuses such a pass.  found: is called then"""
    recorded = frozenset(sequence_number(node) for node in ran.graph.nodes)
    doors = _Doors(backward, [weakref.ref(module) for module in ran.modules], recorded, samples, found)
    outputs = {ran.value(slot) for slot, x in enumerate(ran.outputs) if x.grad_fn is not None}
    # A gradient of a value written into a view arrives through the view's base.
    bases = [x._base for x in ran.outputs if x._base is not None]
    outputs |= {Value(x.grad_fn, x.output_nr) for x in bases if x.grad_fn is not None}
    nodes = list(ran.graph.nodes)
    numbers = {node: number for number, node in enumerate(nodes)}
    for number, node in enumerate(nodes):
        if type(node) is Leaf or node in ran.ends:
            continue
        own = frozenset(n for n in range(len(made(node))) if Value(node, n) not in outputs)
        node.register_prehook(partial(doors.arrived, number, own))
        ahead = [
            None if behind is None else ran.leaves.get(behind, (numbers[behind], n)) for behind, n in node.next_functions
        ]
        node.register_hook(partial(doors.left, ahead))


class _Doors:
    def __init__(
        self,
        backward: Backward,
        modules: list[weakref.ref[nn.Module]],
        recorded: frozenset[int],  # the graph's nodes, by torch's own numbers
        samples: int,
        found: Callable[[], None],
    ) -> None:
        self.backward, self.modules, self.recorded, self.samples, self.found = backward, modules, recorded, samples, found
        self.brought: dict[int, dict[Key, Tensor]] = {}  # by the pass's task

    def _hears(self) -> bool:
        return self.backward.hears() and not self.backward.record.comparing and not torch.is_grad_enabled()

    def _of_task(self) -> dict[Key, Tensor]:
        task = current_task()
        if task not in self.brought:
            self.brought[task] = {}
            call_at_end(partial(self._forget, task))
        return self.brought[task]

    def _forget(self, task: int) -> None:
        del self.brought[task]

    def left(self, ahead: list[Key | None], grads: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...]) -> None:
        """Called after a node has run.  Adds up the gradients that it passes on."""
        if not self._hears():
            return
        brought, node = self._of_task(), current_node()
        for place, (key, grad) in enumerate(zip(ahead, grads)):
            if key is not None and grad is not None:
                behind, number = node.next_functions[place]
                at: dict[Any, Tensor] = brought
                if isinstance(key, str):
                    at = self.backward.enter(current_task()).handed
                elif behind is None or type(behind) is Leaf:
                    continue
                if behind is not None:
                    grad = fitted(grad, Value(behind, number))
                    at[key] = at[key] + grad if key in at else grad

    def arrived(self, number: int, own: frozenset[int], grads: tuple[Tensor | None, ...]) -> None:
        """Called before a node runs, with its gradients.  own: the outputs of the node that the model has not returned"""
        if not self._hears():
            return
        brought = self._of_task()
        for n, grad in enumerate(grads):
            expected = brought.pop((number, n), None)
            if grad is None or n not in own or self._is_same(grad, expected):
                continue
            node = current_node()
            if expected is None or not self._is_hooked(node, n, grad, expected):
                self.backward.enter(current_task()).side_door = self._name_of(node)
                self.found()

    def _is_same(self, grad: Tensor, expected: Tensor | None) -> bool:
        if expected is None:
            return not bool(grad.detach().any()) if grad.layout == torch.strided and not grad.is_nested else False
        if grad is expected or grad.layout != torch.strided or grad.is_nested:
            return True
        if grad.data_ptr() == expected.data_ptr() and grad.shape == expected.shape and grad.stride() == expected.stride():
            return True
        return torch.equal(grad, expected) or not bool(_differ(grad, expected).any())

    def _is_hooked(self, node: Node, number: int, grad: Tensor, expected: Tensor) -> bool:
        """Whether a user's hook explains the difference, and works sample by sample."""

        def hooked(x: Tensor) -> Tensor:
            edge = GradientEdge(node, number)
            with Switch.paused_here():
                return torch.autograd.grad(edge, edge, x, retain_graph=True)[0]

        if bool(_differ(hooked(expected), grad).any()):
            return False
        if self.samples < 2:
            return True
        half = torch.arange(self.samples, device=grad.device) % 2 == 0
        for at in candidates(expected.shape, self.samples, range(expected.ndim)):
            kept = at.over(expected, half)
            if not bool((_differ(hooked(expected.where(kept, 0)), grad) & kept).any()):
                return True
        return False

    def _name_of(self, node: Node) -> str:
        """The unreturned tensor through which the pass came to a node, as text for messages."""
        found = ELSEWHERE
        models = (model for own in self.modules if (model := own()) is not None)
        for path, module in (pair for model in models for pair in model.named_modules()):
            for name, value in vars(module).items():
                for where, x in _tensors_in(value, f"{path}.{name}" if path else name) if name not in OF_MODULE else ():
                    if x.grad_fn is node:
                        found = where
                    elif x.grad_fn is not None and self._came_by(x.grad_fn):
                        return where
        return found

    def _came_by(self, node: Node) -> bool:
        """Whether the running pass comes through a node on which the outputs don't depend."""
        return sequence_number(node) not in self.recorded and will_execute(node)


def _differ(x: Tensor, y: Tensor) -> Tensor:
    return differs(x, y, rounding_of(x))


def _tensors_in(value: Any, where: str, depth: int = 3) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif depth and isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors_in(part, f"{where}[{key!r}]", depth - 1)
    elif depth and isinstance(value, list | tuple):
        for n, part in enumerate(value):
            yield from _tensors_in(part, f"{where}[{n}]", depth - 1)
