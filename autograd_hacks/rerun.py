"""To run a module once more and leave no trace: neither in it nor in the random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

RandomState = dict[str, Tensor]
"""The generators' states by device."""

_OF_MODULE = frozenset(vars(nn.Module()))


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
    is_on = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_on else None


def autocast_to(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """A context in which autocast computes in a dtype on a device, and nowhere where that is None."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, dtype, dtype is not None, cache_enabled=False)


def devices_of(module: nn.Module) -> set[torch.device]:
    return {x.device for x in (*module.parameters(), *module.buffers())}


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """A context in which a module may run; afterwards its buffers and attributes are the same objects with the same values.

    Buffers are copied, and so are lists, dictionaries and sets that it holds, not what these hold.
    """
    modules = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    attributes = [dict(vars(part)) for part in modules]
    kept = [{name: _copied(x) for name, x in own.items() if name not in _OF_MODULE} for own in attributes]
    buffers = [dict(part._buffers) for part in modules]
    for part, own in zip(modules, buffers):
        part._buffers.update({name: None if x is None else x.detach().clone() for name, x in own.items()})
    try:
        yield
    finally:
        for part, before, contents, own in zip(modules, attributes, kept, buffers):
            vars(part).clear()
            vars(part).update(before)
            part._buffers.clear()
            part._buffers.update(own)
            for name, copy in contents.items():
                if copy is not None:
                    _fill(before[name], copy)


def _copied(value: Any) -> Any:
    return type(value)(value) if type(value) in (list, dict, set) else None


def _fill(container: Any, contents: Any) -> None:
    container.clear()
    container.extend(contents) if isinstance(container, list) else container.update(contents)
