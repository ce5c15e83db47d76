"""Memory of an earlier step, to be reused: fresh memory costs more than arithmetic.

On two cores 307 MB took 62 ms to write into new pages and 18 ms into held ones.  CUDA's allocator holds pages itself.
"""

import sys
import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from autograd_hacks.support.internals import uses_of

SMALL = 64 * 1024
"""Up to this many bytes, allocating (1 µs) is faster than checking whether old memory may be reused (6 µs)."""


class Pool:
    """Memory by key.  A tensor that the pool made and got back is reused if nobody else holds it."""

    def __init__(self) -> None:
        self._made: dict[str, weakref.ref[Tensor]] = {}
        self._held: dict[str, list[Tensor]] = {}

    def give_back(self, key: str, tensor: Tensor | None) -> None:
        """Takes memory back if the pool made it."""
        if tensor is not None and key in self._made and self._made[key]() is tensor:
            self._held[key] = [tensor]

    def take(self, key: str, shape: Sequence[int], like: Tensor) -> Tensor:
        """A tensor to write into, with the given shape and the dtype and device of ``like``."""
        box = self._held.pop(key) if key in self._held else None
        if box is not None and _is_free(box, prod(shape) * like.itemsize, like):
            return box[0].resize_(tuple(shape))  # in the same memory
        box = None  # free the old memory before allocating the new
        new = like.new_empty(tuple(shape))
        if new.nbytes >= SMALL:
            self._made[key] = weakref.ref(new)
        return new

    def clear(self) -> None:
        """Frees all memory."""
        self._held.clear()


def _is_free(box: list[Tensor], size: int, like: Tensor) -> bool:
    """Whether a tensor can be reused for a new one, of so many bytes, with the dtype and device of ``like``.

    Batches may have other sizes, so its memory may be up to twice as large.

    box: a list that contains only the tensor; no other list or name may hold it
    """
    old = box[0]
    if vars(old) or weakref.getweakrefcount(old) > 1:  # one belongs to the pool
        return False
    del old
    if _holders(box) != _FREE:
        return False
    old = box[0]
    is_like = old.dtype == like.dtype and old.device == like.device and not (old.requires_grad or old.is_inference())
    return is_like and old.is_cpu and old.is_contiguous() and size <= old.untyped_storage().nbytes() <= 2 * size


def _holders(box: list[Tensor]) -> tuple[int, ...]:
    """Who holds the tensor (names, lists), its storage (views, numpy, processes; names), its C++ side (graphs, DLPack)."""
    tensor = box[0]
    storage = tensor.untyped_storage()  # made anew in 1 µs
    return (
        sys.getrefcount(tensor),
        uses_of(storage),
        storage.is_shared(),
        tensor._use_count(),  # type: ignore[attr-defined]  # torch has it untyped
        sys.getrefcount(storage),
    )


_FREE = _holders([torch.empty(1, device="cpu")])
