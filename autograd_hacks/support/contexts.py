"""The context in which code runs: random numbers, autocast and TF32, inference mode, compiled or as it is written."""

import gc
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.support.internals import COMPILER, is_any_autocast_on, set_grad_enabled, top_saved_hooks
from autograd_hacks.support.restored import restored, switches

RandomState = dict[str, Tensor]
"""The generators' states by device."""


def random_state(devices: Iterable[torch.device]) -> RandomState:
    """The states of the CPU's generator and of the generators of any CUDA devices in ``devices``."""
    return {"cpu": torch.get_rng_state()} | {
        str(device): torch.cuda.get_rng_state(device) for device in set(devices) if device.type == "cuda"
    }


def drawn_from(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Generator:
    """The generator from which an operation of PyTorch draws."""
    device = torch.device(kwargs.get("device") or next((x.device for x in args if isinstance(x, Tensor)), "cpu"))
    own = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    return kwargs.get("generator") or own


def is_seeded(draws: torch.Generator) -> bool:
    """Whether nothing was drawn from a generator since it got its seed."""
    is_hidden = draws.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    seeded = draws if is_hidden else torch.Generator(draws.device).manual_seed(draws.initial_seed())
    return not is_hidden and torch.equal(draws.get_state(), seeded.get_state())


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
    return torch.get_autocast_dtype(device.type) if is_any_autocast_on() and _is_autocast_on(device.type) else None


def _is_autocast_on(device: str) -> bool:
    return _may_autocast(device) and torch.is_autocast_enabled(device)


_may_autocast: Callable[[str], bool] = cache(torch.amp.is_autocast_available)


def outside_inference() -> AbstractContextManager[None]:
    """A context in which gradients can be enabled, even inside ``torch.inference_mode``.  They are off at first."""
    is_inside = torch.is_inference_mode_enabled()
    return _outside(is_inside) if is_inside or not _HERE.is_outside else nullcontext()  # an open one puts switches back


@contextmanager
def _outside(is_inside: bool) -> Iterator[None]:
    undo = switches(partial(setattr, _HERE, "is_outside", False))
    with restored(undo), torch.inference_mode(False) if is_inside else nullcontext():
        _HERE.is_outside = True
        set_grad_enabled(torch.is_grad_enabled() and not is_inside)
        yield


class _Here(threading.local):
    is_outside = False


_HERE = _Here()
"""Whether `outside_inference` is open in this thread."""


def without_autocast(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """A context in which products of tensors keep their precision, even if the caller uses autocast."""
    return _without_autocast({x.device.type for x in tensors}) if is_any_autocast_on() else nullcontext()


@contextmanager
def _without_autocast(devices: Iterable[str]) -> Iterator[None]:
    with ExitStack() as contexts:
        for kind in filter(_is_autocast_on, devices):  # switching off what is off took 4 µs per parameter
            contexts.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        yield


def plainly_saved() -> AbstractContextManager[object]:
    """A context whose graphs save tensors unchanged, because checkpoints count what a forward saves and match it later."""
    if top_saved_hooks(False) is None:
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def cuda_devices_of(module: nn.Module) -> set[torch.device]:
    """The devices of a module that have random generators of their own."""
    return {x.device for x in (*module.parameters(), *module.buffers()) if x.device.type == "cuda"}


# How products in single precision round their factors: to TF32, with a ten-bit mantissa, if torch's settings allow it.

MATMUL, CONV, RNN = "matmul", "conv", "rnn"
UNITS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""By torch's name of the rounded format: its unit in the last place, for 1."""

_CUDNN: Any = torch.backends.cudnn  # its settings have no types
_SETTINGS: dict[str, dict[str, Any]] = {
    "cuda": {MATMUL: torch.backends.cuda.matmul, CONV: _CUDNN.conv, RNN: _CUDNN.rnn},
    "cpu": {kind: getattr(torch.backends.mkldnn, kind) for kind in (MATMUL, CONV, RNN)},
}


def unit_of_products(x: Tensor, kinds: Iterable[str]) -> float:
    """The unit to which products on x's device may round their factors; 0 if they keep all digits.

    By default cuDNN rounds the factors of convolutions and recurrent layers to TF32.  For other products, this depends on
    ``torch.set_float32_matmul_precision`` and ``allow_tf32``.

    kinds: of products
    """
    if x.dtype not in (torch.float32, torch.complex64):
        return 0.0
    settings = _SETTINGS.get(x.device.type, {})
    return max((UNITS.get(settings[kind].fp32_precision, 0.0) for kind in kinds if kind in settings), default=0.0)


# Code that torch.compile has compiled.

_OPEN: set[object] = set()  # contexts of all threads: if two overlapped, torch would forget the older setting
_STANCE: list[Any] = []  # undoes the first one
_LOCK = threading.RLock()


@contextmanager
def as_written(wanted: bool = True) -> Iterator[None]:
    """A context in which compiled functions and modules run as they are written, everywhere in the process.

    wanted: False does nothing
    """
    if not wanted or COMPILER not in sys.modules:  # it takes a second to import
        yield
        return
    mine = object()

    def leave() -> None:
        with _LOCK:
            _OPEN.discard(mine)
            if _STANCE and not _OPEN:
                _STANCE[0].__exit__(None, None, None)
                _STANCE.clear()

    with restored(leave):
        with _LOCK:
            _OPEN.add(mine)
            if not _STANCE:
                _STANCE.append(torch.compiler.set_stance("force_eager"))
        yield
