"""The context in which code runs: random numbers, autocast, inference mode."""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.support.internals import top_saved_hooks
from autograd_hacks.support.restored import restored, switches_kept

RandomState = dict[str, Tensor]
"""The generators' states by device."""


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """The states of the CPU's generator and of the generators of any CUDA devices in ``devices``."""
    return {"cpu": torch.get_rng_state()} | {
        str(device): torch.cuda.get_rng_state(device) for device in set(devices) if device.type == "cuda"
    }


@contextmanager
def without_collection() -> Iterator[None]:
    """A context without Python's garbage collection, which takes as long as a step if a program has many objects."""
    with restored(gc.enable if gc.isenabled() else gc.disable):
        gc.disable()
        yield


@contextmanager
def with_random_state(state: Mapping[str, Tensor]) -> Iterator[None]:
    """A context in which generators start from a given state.  Restores them afterwards.  Does nothing without a state."""
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
    """The dtype of autocast on a device, or None if autocast is off."""
    return torch.get_autocast_dtype(device.type) if _is_autocast_on(device.type) else None


def _is_autocast_on(device: str) -> bool:
    return _may_autocast(device) and torch.is_autocast_enabled(device)


_may_autocast: Callable[[str], bool] = cache(torch.amp.is_autocast_available)


@contextmanager
def outside_inference() -> Iterator[None]:
    """A context in which gradients can be enabled, even inside ``torch.inference_mode``.  They are off at first."""
    with switches_kept(), ExitStack() as stack:
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
        yield


@contextmanager
def without_autocast(tensors: Iterable[Tensor]) -> Iterator[None]:
    """A context in which products of tensors keep their precision, even if the caller uses autocast."""
    with ExitStack() as contexts:
        for kind in {x.device.type for x in tensors}:
            if _is_autocast_on(kind):  # switching off what is off took 4 µs per parameter
                contexts.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        yield


def plainly_saved() -> AbstractContextManager[object]:
    """A context whose graphs save tensors unchanged, because checkpoints count what a forward saves and match it later."""
    if top_saved_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)


def _as_it_is(x: Tensor) -> Tensor:
    return x


def cuda_devices_of(module: nn.Module) -> set[torch.device]:
    """The devices of a module that have random generators of their own."""
    if not torch.cuda.is_initialized():
        return set()
    return {x.device for x in (*module.parameters(), *module.buffers()) if x.device.type == "cuda"}
