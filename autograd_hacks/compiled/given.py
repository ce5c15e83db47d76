"""Inputs of a compiled backward pass from outside of its graph: weights, directions, and memory for rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.errors import ON_COMPILING, NothingRecorded
from autograd_hacks.forms import Outer
from autograd_hacks.support.memory import Pool


class Given:
    """The inputs of a step by name, and the pool with the memory of earlier rows."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.pool = Pool()
        self.key = id(self)
        _EVERY[self.key] = self


_EVERY: weakref.WeakValueDictionary[int, Given] = weakref.WeakValueDictionary()


@torch.library.custom_op("autograd_hacks::given", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _given(like: Tensor, key: int, name: str, sizes: Sequence[int]) -> Tensor:
    found = _EVERY[key].tensors.get(name)
    if found is None or list(found.shape) != list(sizes):
        was = "nothing" if found is None else f"shape {tuple(found.shape)}"
        raise NothingRecorded(
            f"compiled step: {name} was given {was}; expected a tensor of shape {tuple(sizes)}. Set step.weights or "
            "step.direction before the backward pass." + ON_COMPILING
        )
    return found.detach().to(like).clone()


@_given.register_fake
def _(like: Tensor, key: int, name: str, sizes: Sequence[int]) -> Tensor:
    return like.new_empty(tuple(sizes))


def given(like: Tensor, by: Given, name: str, sizes: Sequence[int]) -> Tensor:
    """The input of this name, in the device and dtype of ``like``.  It is looked up in each pass."""
    found: Tensor = _given(like, by.key, name, sizes)
    return found


@torch.library.custom_op("autograd_hacks::rows_of_products", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _rows_of_products(left: Tensor, right: Tensor, key: int, name: str, shape: Sequence[int]) -> Tensor:
    form = Outer(left, right, torch.Size(shape))
    return form.dense(_EVERY[key].pool.take(name, (form.samples, *form.shape), left))


@_rows_of_products.register_fake
def _(left: Tensor, right: Tensor, key: int, name: str, shape: Sequence[int]) -> Tensor:
    return left.new_empty((left.shape[0], *shape))


def rows_of(form: Outer, by: Given, name: str) -> Tensor:
    """Rows, in an earlier pass's memory if nothing else refers to it: new memory costs more than the arithmetic."""
    left, right = form.held
    found: Tensor = _rows_of_products(left, right, by.key, name, list(form.shape))
    return found
