"""Side doors: what a forward has left in the model or in users' hooks, and by which a loss may come past its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autograd_hacks.support.stores import OF_MODULE, stores_of
from autograd_hacks.support.trees import is_packed, tensors_of

_ELSEWHERE = "what a hook, a global or a function keeps"

_WATCHED = "watched by autograd_hacks"

Door = tuple[str, Callable[[Tensor], None], Tensor]
"""Where it is, for people; what puts another tensor there; the tensor."""


def doors_of(model: nn.Module, output: Any) -> list[Door]:
    """Tensors with a graph that the model's attributes, its code, its users' hooks and functions that it has returned hold,
    but for its outputs."""
    outputs = tensors_of(output)
    known, nodes = {id(x) for x in outputs}, {x.grad_fn for x in outputs}
    functions = [leaf for leaf in tree_leaves(output, is_packed) if isinstance(leaf, FunctionType | MethodType | partial)]
    return [door for door in _held(model, functions) if id(door[2]) not in known and door[2].grad_fn not in nodes]


def watch_doors(doors: Sequence[Door], hear: Callable[[str, tuple[Tensor | None, ...]], None]) -> None:
    """Has gradients that come by doors heard of.  Copies take the tensors' places, since those are used inside too."""
    copies: dict[int, Tensor] = {}
    for where, put, x in doors:
        if id(x) not in copies:
            copies[id(x)] = copy = x.clone()
            notes: Any = copy.grad_fn
            notes.metadata[_WATCHED] = True
            notes.register_prehook(partial(hear, where))
        put(copies[id(x)])


def _held(model: nn.Module, functions: Sequence[Any]) -> Iterator[Door]:
    for path, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            state = {name: x for name, x in vars(module).items() if name not in OF_MODULE}
            yield from _in_box(f"{path}.{{}}" if path else "{}", vars(module), state)
    cells, boxes, spaces = stores_of(model, functions)
    for cell in cells:
        if isinstance(cell.cell_contents, Tensor):
            yield from _if_graph(_ELSEWHERE, partial(setattr, cell, "cell_contents"), cell.cell_contents)
        elif isinstance(cell.cell_contents, dict | list):
            yield from _in_box(_ELSEWHERE, cell.cell_contents, cell.cell_contents)
    for space, name in spaces:
        yield from _in_box(_ELSEWHERE, space, {name: space[name]})
    for box in boxes:
        if isinstance(box, dict | list):
            yield from _in_box(_ELSEWHERE, box, box)


def _in_box(where: str, box: Any, entries: Any) -> Iterator[Door]:
    """box: a dictionary or list    entries: those of it that count"""
    for key, x in list(entries.items() if isinstance(entries, dict) else enumerate(entries)):
        place = where.format(key)
        if isinstance(x, Tensor):
            yield from _if_graph(place, partial(box.__setitem__, key), x)
        elif type(x) in (dict, list):
            yield from _in_box(f"{place}[{{!r}}]" if "{" not in place else place, x, x)


def _if_graph(where: str, put: Callable[[Tensor], None], x: Tensor) -> Iterator[Door]:
    notes: Any = x.grad_fn
    if notes is not None and _WATCHED not in notes.metadata:  # that of an earlier forward
        yield where, put, x
