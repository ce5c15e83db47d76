"""To run a module once more and leave no trace: neither in it nor in the random numbers."""

import copy
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.support.trees import OF_MODULE

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
    with torch.random.fork_rng([device for device in state if device != "cpu"], enabled=bool(state)):
        for device, of_device in state.items():
            if device == "cpu":
                torch.set_rng_state(of_device)
            else:
                torch.cuda.set_rng_state(of_device, device)
        yield


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
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast computes in a dtype on a device, and nowhere where that is None."""
    if not _may_autocast(device.type) or (dtype is None and not torch.is_autocast_enabled(device.type)):
        return nullcontext()  # to switch off what is off took 4 µs, for each parameter
    return torch.autocast(device.type, dtype, dtype is not None, cache_enabled=False)


def without_autocast(parameter: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep a parameter's precision, wherever reading is called from."""
    return autocast_to(None, parameter.device)


def cuda_devices_of(module: nn.Module) -> set[torch.device]:
    """The devices with generators of their own that a module is on."""
    if not torch.cuda.is_initialized():
        return set()
    return {x.device for x in (*module.parameters(), *module.buffers()) if x.device.type == "cuda"}


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """A context in which a module may run; afterwards its buffers and attributes are the same objects with the same values,
    its parameters the same objects with the same memory and gradients, and its own generators go on as if it had not run.

    While it runs buffers, tensors and containers that it holds are copies, what it holds twice one copy; other objects are
    its own, and so is the parameters' memory (see `autograd_hacks.probe.tracker` for a forward that writes there).
    """
    modules = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    attributes, buffers = [dict(vars(part)) for part in modules], [dict(part._buffers) for part in modules]
    parameters = [(p, p.data, p.grad) for p in module.parameters()]
    generators = [(x, x.get_state()) for own in attributes for x in own.values() if isinstance(x, torch.Generator)]
    shared: dict[int, Any] = {id(x): x for x in (*module.modules(), *module.parameters())}  # not to be copied
    copies = {id(x): x.detach().clone() for tensors in buffers for x in tensors.values() if x is not None}
    try:
        for part, own, tensors in zip(modules, attributes, buffers):
            part._buffers.update({name: None if x is None else copies[id(x)] for name, x in tensors.items()})
            vars(part).update({name: _copied(x, shared) for name, x in own.items() if name not in OF_MODULE})
        for p, _, _ in parameters:
            p.grad = None
        yield
    finally:
        for part, own, tensors in zip(modules, attributes, buffers):
            vars(part).clear()
            vars(part).update(own)
            part._buffers.clear()
            part._buffers.update(tensors)
        for p, data, grad in parameters:
            if p.data_ptr() != data.data_ptr():
                p.data = data
            p.grad = grad
        for generator, state in generators:
            generator.set_state(state)


def _copied(value: Any, shared: dict[int, Any]) -> Any:
    """A copy of a tensor or a container, all the way down; anything else as it is."""
    if isinstance(value, nn.Module | nn.Parameter):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone() if value.requires_grad else value.clone()
    if isinstance(value, dict | list | set | deque):
        try:
            return copy.deepcopy(value, shared)
        except (TypeError, RuntimeError):  # what copy says of locks and streams, and torch of tensors with a graph
            return type(value)(value) if type(value) in (dict, list, set, deque) else value
    return value


@contextmanager
def with_other_generators() -> Iterator[None]:
    """A context after which Python's and NumPy's random numbers go on as if it had not been."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(arrays)
