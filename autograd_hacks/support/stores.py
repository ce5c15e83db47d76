"""What user's hooks and plain objects keep, put aside while a module runs once more."""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_leaves

from autograd_hacks.support.restored import restored

_GLOBAL = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks")

_BOXES = (dict, list, set, deque)

_ATOMS = (nn.Module, Tensor, torch.Generator, torch.ScriptObject, ModuleType, BuiltinFunctionType, FunctionType, type)
"""What isn't looked into for attributes."""

OF_MODULE = frozenset(vars(nn.Module()))
"""The attributes of every module."""

Slots = list[tuple[dict[str, Any], dict[str, Any]]]
"""Attributes or globals, and what they hold."""


def copied(value: Any, shared: dict[int, Any]) -> Any:
    """A copy of a tensor, and of a container all the way down, but not of the objects in it.  shared: copies by id"""
    if id(value) in shared or type(value) is nn.Parameter:
        return shared.get(id(value), value)
    if isinstance(value, Tensor) and value.grad_fn is None:
        shared[id(value)] = value.clone().detach()
    elif type(value) is tuple:
        shared[id(value)] = tuple([copied(x, shared) for x in value])
    elif isinstance(value, dict | list | set | deque):
        try:
            shared[id(value)] = found = copy.copy(value)  # before what is in it, which may be itself
            if not isinstance(found, set):
                for key, x in list(found.items() if isinstance(found, dict) else enumerate(found)):
                    found[key] = copied(x, shared)
        except Exception:  # whatever the user's own class raises
            shared[id(value)] = value
    return shared.get(id(value), value)


def duplicate(value: Any) -> Any:
    """A copy of a user's object, all the way down, outside any graph; raises whatever its class does."""
    memo: dict[int, Any] = {}
    seen, waiting = {id(value): value}, [value]
    while waiting:  # deepcopy takes no tensor of a graph
        thing = waiting.pop()
        if isinstance(thing, Tensor) and thing.grad_fn is not None:
            memo[id(thing)] = thing.detach().clone()
        inside = list(state.values()) if (state := state_of(thing)) is not None else []
        inside += (
            thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list | tuple | set | deque) else ()
        )
        fresh = {id(x): x for x in inside if id(x) not in seen}
        seen |= fresh
        waiting += fresh.values()
    return copy.deepcopy(value, memo)


def state_of(thing: Any) -> dict[str, Any] | None:
    """The attributes of a user's plain object; None where it has none of its own, or torch knows it."""
    if isinstance(thing, _ATOMS) or type(thing).__module__.startswith(("torch.", "autograd_hacks.")):
        return None
    found = getattr(thing, "__dict__", None)
    return found if isinstance(found, dict) else None


def swap(states: Iterable[dict[str, Any]], shared: dict[int, Any]) -> None:
    """Puts copies into objects' attributes, where an object has tensors in them."""
    for state in states:
        if state and any(isinstance(leaf, Tensor) for leaf in tree_leaves(state)):
            state.update({name: copied(value, shared) for name, value in state.items()})


def put_back(slots: Slots) -> None:
    for state, kept in slots:
        if state.keys() != kept.keys() or any(state[name] is not value for name, value in kept.items()):
            replace(state, kept)


def replace(state: dict[str, Any], kept: dict[str, Any]) -> None:
    """Makes a dictionary what it was, in its order."""
    if list(state) != list(kept):
        state.clear()
    state.update(kept)


@contextmanager
def hooks_kept(module: nn.Module) -> Iterator[None]:
    """A context in which users' hooks on a module, its children and all modules may run.

    Afterwards the hooks are the same, and what they keep by closures, attributes and globals is what it was.  While they run
    they have copies of that.
    """
    everywhere: list[Any] = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tables = [table for part in everywhere for name, table in vars(part).items() if "_hooks" in name and table is not None]
    tables = [table for table in tables if isinstance(table, dict)] + [getattr(torch_module, name) for name in _GLOBAL]
    kept = [(table, dict(table)) for table in tables]
    cells, boxes, spaces = _stores(hook for _, table in kept for hook in table.values() if callable(hook))
    shared: dict[int, Any] = {id(part): part for part in (*module.modules(), *module.parameters())}
    contents = [(cell, cell.cell_contents) for cell in cells]
    filled = [(box, copy.copy(box)) for box in boxes]
    names = [(space, name, space[name]) for space, name in spaces]

    def undo() -> None:
        for table, before in kept:
            replace(table, before)
        for cell, content in contents:
            cell.cell_contents = content
        for box, content in filled:
            _refill(box, content)
        for space, name, value in names:
            space[name] = value

    with restored(undo):
        for cell, content in contents:
            cell.cell_contents = copied(content, shared)
        for box, content in filled:
            _refill(box, copied(content, shared))
        for space, name, value in names:
            space[name] = copied(value, shared)
        yield


def stores_of(
    module: nn.Module, functions: Iterable[Any] = ()
) -> tuple[list[Any], list[Any], list[tuple[dict[str, Any], str]]]:
    """Where a module's own code, users' hooks and some functions keep something: cells, boxes, and globals by name."""
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tables = [table for part in parts for table in (part._forward_hooks, part._forward_pre_hooks)]
    forwards = {type(part).forward for part in parts if not type(part).__module__.startswith("torch.")}
    return _stores([*forwards, *functions, *(hook for table in tables for hook in table.values() if callable(hook))])


def _stores(hooks: Iterable[Any]) -> tuple[list[Any], list[Any], list[tuple[dict[str, Any], str]]]:
    """Where hooks may keep something: closures' cells, containers and objects' attributes, and globals that their code
    mentions."""
    cells: list[Any] = []
    boxes: list[Any] = []
    spaces: list[tuple[dict[str, Any], str]] = []
    seen: set[int] = set()
    waiting = list(hooks)
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or (getattr(thing, "__module__", None) or "").partition(".")[0] in ("torch", "autograd_hacks"):
            continue
        seen.add(id(thing))
        if isinstance(thing, MethodType):
            waiting += [thing.__self__, thing.__func__]
        elif isinstance(thing, partial):
            waiting += [thing.func, *thing.args, *thing.keywords.values()]
        elif isinstance(thing, FunctionType):
            waiting += [x for x in thing.__defaults__ or () if isinstance(x, _BOXES)]
            full = [cell for cell in thing.__closure__ or () if _is_full(cell)]
            cells += [cell for cell in full if not any(cell is other for other in cells)]
            space, code = thing.__globals__, thing.__code__
            mentioned = [name for name in code.co_names if name in space and not isinstance(space[name], ModuleType | type)]
            spaces += [(space, name) for name in mentioned]
            inside = [cell.cell_contents for cell in full] + [space[name] for name in mentioned]
            waiting += [x for x in inside if not isinstance(x, _BOXES)]  # those are in a place that is put back
        elif isinstance(thing, nn.Module):
            spaces += [(vars(thing), name) for name in vars(thing) if name not in OF_MODULE]
        elif isinstance(thing, _BOXES):
            boxes.append(thing)
        elif (state := state_of(thing)) is not None:
            boxes.append(state)
    return cells, boxes, spaces


def _refill(box: Any, content: Any) -> None:
    if isinstance(box, dict):
        replace(box, content)
    elif list(map(id, box)) != list(map(id, content)):
        box.clear()
        (box.update if isinstance(box, set) else box.extend)(content)


def _is_full(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # that is how one asks
    except ValueError:
        return False
    return True
