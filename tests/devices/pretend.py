"""A pretend accelerator: tensors that say they are on another device, and hold real numbers on the CPU.

A CPU that runs the package's code as it runs on a GPU, so that three mistakes show without one:

- an operation on tensors of two devices raises, as it does on a GPU;
- a number that the host waits for is noted: each waits for all kernels that were queued before it;
- a copy from one device to the other, and a tensor that the package makes on the CPU, are noted.

``Far`` is the tensor: its device is "meta", which every torch has, and it says ``is_cuda``, so that the package takes the
ways that it takes on a GPU.  Every operation goes through ``Pretending``, a dispatch mode, which runs it on the tensors
inside.  Only what the package itself does is noted: what the user's own code asks for is none of its concern.

What it can't show: kernels, streams, precision, and operations that a GPU doesn't have.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import autograd_hacks
from autograd_hacks.forms import cost
from autograd_hacks.support import sweep

aten = torch.ops.aten
PACKAGE = f"{Path(autograd_hacks.__file__).parent}{os.sep}"
TESTS = f"{Path(__file__).parents[1]}{os.sep}"
ELSEWHERE = torch.device("meta")

QUESTIONS = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten.is_nonzero, aten._unique2, aten.unique_dim,
    aten.unique_consecutive, aten.bincount, aten.histc, aten._linalg_check_errors, aten.linalg_eigh,
}  # fmt: skip
"""Operations whose results' numbers or sizes the host has to wait for."""
COPIES = {aten.copy_, aten._to_copy, aten.set_}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index, aten._unsafe_index_put}
OF_NO_DEVICE = {aten.detach, aten.alias, aten.view, aten._unsafe_view, aten.expand, aten.t, aten.transpose, aten.select}

Note = tuple[str, str]
"""What was asked or copied, and where in the package: "forms/lookup.py:_touched"."""


class MixedDevices(RuntimeError):
    """An operation was given tensors of two devices."""


class Far(Tensor):
    """A tensor of the pretend accelerator.  inner: its numbers, on the CPU"""

    inner: Tensor
    is_cuda, is_meta, is_cpu = True, False, False
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Far:
        found = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=ELSEWHERE, requires_grad=False,
        )  # fmt: skip
        found.inner = inner
        return found

    @classmethod
    def __torch_dispatch__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(f, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"Far(shape={tuple(self.shape)}, dtype={self.dtype})"

    # What torch takes from a tensor's memory, where no operation is dispatched.

    def tolist(self) -> Any:
        note("tolist")
        return self.inner.tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert a tensor of the pretend accelerator to NumPy; copy it to the host first")

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Far:
        note("copy to the device")
        return Far(torch.tensor(data, dtype=dtype or self.dtype))

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()


_notes: list[Note] | None = None


def note(what: str) -> None:
    if _notes is not None and (place := caller()) is not None:
        _notes.append((what, place))


def caller() -> str | None:
    """The innermost function of the package that is running, unless one of the tests' runs in it: the user's code."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file.removeprefix(PACKAGE)}:{frame.f_code.co_name}"
        if file.startswith(TESTS) and file != __file__:
            return None
        frame = frame.f_back
    return None


class Threads(ThreadPoolExecutor):
    """Modes are a thread's own."""

    def submit(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        def pretended() -> Any:
            with Pretending():
                return run(*args, **kwargs)

        return super().submit(pretended)


class Pretending(TorchDispatchMode):
    """Runs every operation on the device that its tensors say.  Factories with ``device=ELSEWHERE`` make tensors of it."""

    def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(f, args, kwargs or {})


@contextmanager
def pretending() -> Iterator[None]:
    """The mode, and the cost model as it is with a GPU."""
    kept, known = cost._costs_of, cost.Costs(**json.loads(cost.TABLE.read_text())["cuda"])
    made = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        """`torch.tensor`, which fills a tensor before any mode hears of it."""
        if device is None or torch.device(device).type != ELSEWHERE.type:
            return made(data, device=device, **options)
        note("copy to the device")
        return Far(made(data, **options))

    cost._costs_of = lambda device: known if device.type == ELSEWHERE.type else kept(device)  # type: ignore[assignment]
    torch.tensor, sweep.ThreadPoolExecutor = tensor, Threads  # type: ignore[misc]
    try:
        with Pretending():
            yield
    finally:
        cost._costs_of, torch.tensor, sweep.ThreadPoolExecutor = kept, made, ThreadPoolExecutor  # type: ignore[misc]


@contextmanager
def noted() -> Iterator[Counter[Note]]:
    """What the package asks the device and copies within.  Filled in at the end."""
    global _notes
    found: Counter[Note] = Counter()
    _notes = []
    try:
        yield found
    finally:
        found.update(_notes)
        _notes = None


def placed(model: nn.Module) -> nn.Module:
    """The model with its parameters and buffers on the pretend accelerator."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                far = moved.setdefault(id(p), nn.Parameter(Far(p.detach().clone()), p.requires_grad))
                module._parameters[name] = far
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Far(buffer.clone())
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    return model


def near(x: Tensor) -> Tensor:
    """Its numbers, as a tensor of the CPU; nothing is noted."""
    return x.inner if isinstance(x, Far) else x


def leaves(x: Any) -> Iterator[Any]:
    """What is in tuples, lists and dictionaries.  (torch's own pytree takes several times as long.)"""
    if isinstance(x, (tuple, list)):
        for part in x:
            yield from leaves(part)
    elif isinstance(x, dict):
        yield from leaves(tuple(x.values()))
    else:
        yield x


def mapped(by: Callable[[Any], Any], x: Any) -> Any:
    """The same, with a function of each leaf in its place."""
    if isinstance(x, dict):
        return {key: mapped(by, part) for key, part in x.items()}
    return type(x)([mapped(by, part) for part in x]) if isinstance(x, (tuple, list)) else by(x)


def run(f: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """An operation, on the device that its tensors or its ``device=`` say."""
    packet, tensors = f.overloadpacket, [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    far, told = [x for x in tensors if isinstance(x, Far)], kwargs.get("device")
    if told is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    is_far = bool(far) if told is None else torch.device(told).type == ELSEWHERE.type
    if packet in COPIES:
        is_far = _copied(packet, args, told, is_far)
    elif packet in INDEXING:
        is_far = _indexed(f, args)
    elif far:
        _refuse_mixed(f, tensors)
    if far and (packet in QUESTIONS or (packet is aten.repeat_interleave and kwargs.get("output_size") is None)):
        note(str(packet).removeprefix("aten."))
    if is_far and isinstance(kwargs.get("generator"), torch.Generator):
        raise MixedDevices(f"{f} was given a generator of the CPU for a tensor of the accelerator, in {caller()}")
    found = f(*mapped(near, args), **mapped(near, kwargs))
    if not is_far:
        if not far and packet not in (*COPIES, *OF_NO_DEVICE) and any(isinstance(x, Tensor) for x in leaves(found)):
            note("tensor on the CPU")
        return found
    if torch.Tag.inplace_view in f.tags:  # transpose_ and the like: the outer tensor's shape changes, too
        with no_dispatch():
            f(*args, **kwargs)
    own = {id(x.inner): x for x in far}  # what is changed in place stays the same tensor
    return mapped(lambda x: x if not isinstance(x, Tensor) else own[id(x)] if id(x) in own else Far(x), found)


def _copied(packet: Any, args: tuple[Any, ...], told: Any, is_far: bool) -> bool:
    if packet is aten.copy_:
        target, source = (isinstance(x, Far) for x in args[:2])
    else:
        source = isinstance(args[0], Far)
        target = source if told is None else is_far
    if source != target:
        note("copy to the host" if source else "copy to the device")
    return target


def _indexed(f: Any, args: tuple[Any, ...]) -> bool:
    is_far = isinstance(args[0], Far)
    for index in (x for x in args[1] if x is not None):
        if isinstance(index, Far) and not is_far:
            raise MixedDevices(f"{f}: a tensor of the CPU is indexed by one of the accelerator, in {caller()}")
        if is_far and index.dtype == torch.bool:
            note("index by a mask")
        if is_far and not isinstance(index, Far):
            note("copy to the device")
    for values in args[2:3]:
        if isinstance(values, Tensor) and values.ndim and isinstance(values, Far) != is_far:
            raise MixedDevices(f"{f}: values are on another device than what they are put into, in {caller()}")
    return is_far


def _refuse_mixed(f: Any, tensors: Iterable[Tensor]) -> None:
    """A number of the CPU, without axes, may stand beside tensors of a device, and is copied there."""
    others = [x for x in tensors if not isinstance(x, Far)]
    takes_no_number = f.overloadpacket in (aten.cat, aten.stack, aten.mm, aten.bmm)
    if any(x.ndim or takes_no_number for x in others):
        shapes = [(type(x).__name__, tuple(x.shape)) for x in tensors]
        raise MixedDevices(f"{f}: expected all tensors on the same device, found {shapes}, in {caller()}")
    if others:
        note("copy to the device")
