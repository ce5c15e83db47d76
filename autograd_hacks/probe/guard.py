"""Keeps a trace from writing where the model's parameters are, or what it has returned."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autograd_hacks.support.parts import part_of
from autograd_hacks.support.restored import restored
from autograd_hacks.support.trees import holds_numbers

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11

Kept = dict[StorageWeakRef, list[weakref.ref[Tensor]]]
"""By memory what `WriteGuard.keep` has returned of it, in any trace, while nothing has written there and it is held."""


_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class WriteGuard(TorchDispatchMode):
    """Sees each operation, those inside scripted code and C++ included, before it writes.

    parameters: whose numbers are to stay, by name    kept: see `Kept`
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        chosen: Any = cls
        return super().__new__(_uncompiled(chosen) if "torch._dynamo" in sys.modules else cls)

    def __init__(self, parameters: Mapping[str, Tensor], kept: Kept) -> None:
        super().__init__()
        self.parameters: dict[StorageWeakRef, list[str]] = {}
        self._places: dict[str, tuple[int, int] | None] = {}
        self._overwritten: dict[StorageWeakRef, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._kept = kept
        for name, parameter in parameters.items():
            if (key := memory_of(parameter)) is not None:
                self.parameters.setdefault(key, []).append(name)
                self._places[name] = place_of(parameter)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler, which takes more than a second, and ask it at each operation.
        return False

    def parameters_in(self, tensor: Tensor) -> list[str]:
        """The names of the parameters that have memory with a tensor in common."""
        key = memory_of(tensor)
        names = [] if key is None else self.parameters.get(key, [])
        if len(names) < 2 or (place := place_of(tensor)) is None:
            return names
        start, end = place
        return [name for name in names if (own := self._places[name]) is None or (own[0] < end and start < own[1])]

    def keep(self, tensor: Tensor) -> Tensor:
        """The tensor with the numbers that it has now.  It is copied once a later operation writes to its memory."""
        tensor = part_of(tensor)
        if tensor.is_nested or tensor.layout in _SPARSE:
            return comparable(tensor)
        key = memory_of(tensor)
        if key is None or key in self.parameters or tensor.nbytes != tensor.untyped_storage().nbytes():
            return tensor.detach().clone()  # a part of more memory would keep all of it
        kept = tensor.detach()
        self._kept.setdefault(key, []).append(weakref.ref(kept))
        return kept

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.protect(func, args, kwargs)
        return func(*args, **kwargs)

    @contextmanager
    def protecting(self) -> Iterator[None]:
        """A context in which this is on; afterwards the parameters have the numbers that they had."""
        with restored(self.restore), self:
            yield

    def restore(self) -> None:
        """Gives the parameters the numbers that they had."""
        for storage, kept in self._overwritten.values():
            storage.copy_(kept)

    def protect(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Copies what is in a parameter's or a kept tensor's memory, before the first operation that writes there.

        Returns what an operation writes to.
        """
        places, names = _written(func)
        if not places and not names:
            return []
        written = tree_leaves([args[n] for n in places if n < len(args)] + [kwargs.get(name) for name in names])
        for x in written:
            key = memory_of(x) if isinstance(x, Tensor) else None
            for held in self._kept.pop(key, ()) if key is not None else ():
                if (kept := held()) is not None:
                    kept.data = kept.clone()
            if key in self.parameters and key not in self._overwritten:
                storage = part_of(x).untyped_storage()
                self._overwritten[key] = storage, storage.clone()
        return written


def comparable(tensor: Tensor) -> Tensor:
    """The numbers of a tensor of any layout."""
    tensor = part_of(tensor)
    if tensor.is_nested:
        return torch.zeros((), device=tensor.device)  # of no shape that could be compared
    return tensor.detach().to_dense() if tensor.layout in _SPARSE else tensor.detach()


@cache
def _uncompiled(cls: type[Any]) -> type[Any]:
    """The same class, which torch's compiler leaves alone once it is there: it compiles what a compiled function calls."""
    own = {"_should_skip_dynamo": classmethod(lambda cls: True), "__torch_dispatch__": cls.__torch_dispatch__}
    return type(cls.__name__, (cls,), own)


def memory_of(tensor: Tensor) -> StorageWeakRef | None:
    """The memory that a tensor is a view of; None where torch doesn't tell it."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):  # inside a vmap of the model's own
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if tensor.layout == torch.jagged:
        tensor = tensor._values  # type: ignore[assignment]  # of Tensor it is a method
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        tensor = part_of(tensor)
        if not holds_numbers(tensor):
            return None
        with torch._C.DisableTorchFunctionSubclass():
            return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None
    if tensor.layout in _SPARSE:
        tensor = tensor._values() if tensor.layout == torch.sparse_coo else tensor.values()
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None


def place_of(tensor: Tensor) -> tuple[int, int] | None:
    """From where to where in its memory a tensor has its numbers, in bytes; None for what is no plain tensor."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
        return None
    start = int(tensor.storage_offset())
    end = start + 1 + sum(int(size - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride()))
    return start * tensor.itemsize, (end if tensor.numel() else start) * tensor.itemsize


@cache
def _written(func: Any) -> tuple[list[int], list[str]]:
    """The arguments that an operation writes to: their places and names."""
    written = [
        (n, argument.name)
        for n, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [n for n, _ in written], [name for _, name in written]
