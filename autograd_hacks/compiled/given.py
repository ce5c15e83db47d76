"""Tensors that a compiled backward pass is given from outside of its graph: weights, directions."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.errors import ON_COMPILING, NothingRecorded


class Given:
    """What a step was given, by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.key = id(self)
        _EVERY[self.key] = self


_EVERY: weakref.WeakValueDictionary[int, Given] = weakref.WeakValueDictionary()


@torch.library.custom_op("autograd_hacks::given", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _given(like: Tensor, key: int, name: str, sizes: Sequence[int]) -> Tensor:
    found = _EVERY[key].tensors.get(name)
    if found is None or list(found.shape) != list(sizes):
        was = "nothing" if found is None else f"shape {tuple(found.shape)}"
        raise NothingRecorded(
            f"a compiled step was given {was} as {name}; expected a tensor of shape {tuple(sizes)}. Set step.weights, or "
            "step.direction, before the backward pass." + ON_COMPILING
        )
    return found.detach().to(like).clone()


@_given.register_fake
def _(like: Tensor, key: int, name: str, sizes: Sequence[int]) -> Tensor:
    return like.new_empty(tuple(sizes))


def given(like: Tensor, by: Given, name: str, sizes: Sequence[int]) -> Tensor:
    """A tensor by its name, of the device and dtype of another; asked for in each pass."""
    found: Tensor = _given(like, by.key, name, sizes)
    return found
