"""To run a module once more and leave no trace: neither in it nor in the random numbers."""

import copy
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.nn.utils import parametrize

from autograd_hacks.support.parts import part_of
from autograd_hacks.support.restored import restored, switches_kept
from autograd_hacks.support.stance import as_written
from autograd_hacks.support.stores import OF_MODULE, copied, hooks_kept, put_back, replace, state_of, swap

RandomState = dict[str, Tensor]
"""The generators' states by device."""


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """The states of the CPU's generator and of those of the CUDA devices among some."""
    return {"cpu": torch.get_rng_state()} | {
        str(device): torch.cuda.get_rng_state(device) for device in set(devices) if device.type == "cuda"
    }


@contextmanager
def with_random_state(state: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which generators go on from a state; afterwards they are as they were.  Nothing happens without one."""
    before = random_state([torch.device(device) for device in state]) if state else {}
    with restored(partial(_set_random_state, before)):
        _set_random_state(state)
        yield


def _set_random_state(state: Mapping[str, Tensor]) -> None:
    for device, of_device in state.items():
        if device == "cpu":
            torch.set_rng_state(of_device)
        else:
            torch.cuda.set_rng_state(of_device, device)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype that autocast computes in on a device now, or None where it is off."""
    is_on = _may_autocast(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


@cache
def _may_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device)


@contextmanager
def outside_inference() -> Iterator[None]:
    """A context in which gradients can be computed, though not by default, also within ``torch.inference_mode``."""
    if not torch.is_inference_mode_enabled():
        with switches_kept():
            yield
        return
    with switches_kept(), torch.inference_mode(False), torch.no_grad():
        yield


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast computes in a dtype on a device, and nowhere where that is None."""
    if not _may_autocast(device.type) or (dtype is None and not torch.is_autocast_enabled(device.type)):
        return nullcontext()  # to switch off what is off took 4 µs, for each parameter
    return torch.autocast(device.type, dtype, dtype is not None, cache_enabled=False)


@contextmanager
def without_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which products of tensors keep their precision, wherever reading is called from."""
    with ExitStack() as contexts:
        for device in {x.device for x in tensors}:
            contexts.enter_context(autocast_to(None, device))
        yield


def cuda_devices_of(module: nn.Module) -> set[torch.device]:
    """The devices with generators of their own that a module is on."""
    if not torch.cuda.is_initialized():
        return set()
    return {x.device for x in (*module.parameters(), *module.buffers()) if x.device.type == "cuda"}


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """A context in which a module may run; afterwards its buffers and attributes are the same objects with the same values,
    its parameters the same objects with the same memory and gradients, and its own generators go on as if it had not run; so
    do torch's caches of weights, its switches, Python's and NumPy's random numbers, and what users' hooks keep.

    While it runs buffers, tensors and containers that it holds are copies, what it holds twice one copy, and so are those of
    plain objects that hold tensors for it; other objects are its own, and so is the parameters' memory (see
    `autograd_hacks.probe.tracker` for a forward that writes there).
    """
    modules = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    attributes, buffers = [dict(vars(part)) for part in modules], [dict(part._buffers) for part in modules]
    owns = [{name: own[name] for name in own.keys() - OF_MODULE} for own in attributes]  # beside torch's own tables
    parameters = [(p, part_of(p), part_of(p).data, p.grad, p.requires_grad) for p in module.parameters()]
    generators = [(x, x.get_state()) for own in owns for x in own.values() if isinstance(x, torch.Generator)]
    shared: dict[int, Any] = {id(x): x for x in (*module.modules(), *module.parameters())}  # not to be copied
    things = {id(x): s for own in owns for x in own.values() if (s := state_of(x)) is not None}
    states = [(state, dict(state)) for state in things.values()]
    cached, tables = parametrize._cache, [dict(part._parameters) for part in modules]

    def undo() -> None:
        for part, own, tensors, slots in zip(modules, attributes, buffers, tables):
            replace(vars(part), own)
            replace(part._buffers, tensors)
            if any(part._parameters.get(name) is not p for name, p in slots.items()):
                replace(part._parameters, slots)
        for p, held, data, grad, asks in parameters:
            if held.data_ptr() != data.data_ptr():
                held.data = data
            p.grad = grad
            if p.requires_grad != asks:
                p.requires_grad_(asks)
        for generator, state in generators:
            generator.set_state(state)
        put_back(states)
        parametrize._cache = cached

    with with_other_generators(), switches_kept(), hooks_kept(module), as_written(), restored(undo):
        copies = {id(x): x.detach().clone() for tensors in buffers for x in tensors.values() if x is not None}
        for part, own, tensors in zip(modules, owns, buffers):
            part._buffers.update({name: None if x is None else copies[id(x)] for name, x in tensors.items()})
            vars(part).update({name: _copied(x, shared) for name, x in own.items()})
        swap(things.values(), shared)
        for p, *_ in parameters:
            p.grad = None
        # What they keep would be stale here; and by what is kept here, the forward's gradients would go through this graph.
        parametrize._cache = {}
        torch.set_autocast_cache_enabled(False)
        yield


def _copied(value: Any, shared: dict[int, Any]) -> Any:
    """A copy of a tensor or a container, all the way down; anything else as it is."""
    if isinstance(value, nn.Module | nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if value.requires_grad else value.clone()
    if isinstance(value, dict | list | set | deque):
        try:
            return copy.deepcopy(value, shared)
        except Exception:  # what copy says of locks and streams, torch of tensors with a graph, and users' own classes
            return copied(value, shared)
    return value


@contextmanager
def with_other_generators() -> Iterator[None]:
    """A context after which Python's and NumPy's random numbers go on as if it had not been."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()

    def undo() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)

    with restored(undo):
        yield
