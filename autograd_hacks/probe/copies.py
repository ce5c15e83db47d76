"""Copies of a forward's arguments."""

from types import FunctionType, NoneType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_map

from autograd_hacks.errors import ProbeFailed
from autograd_hacks.support.stores import duplicate
from autograd_hacks.support.trees import is_packed, like_its_kind, opened

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

PLAIN = (NoneType, bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, torch.Size)

_SHARED = (torch.Generator, nn.Module, torch.device, FunctionType, type)
"""Whose state a forward doesn't change, or is put back by other means."""


def copies(arguments: Arguments) -> Arguments:
    """Arguments that a forward may change without the user's own being changed.  What is given twice stays one."""
    made: dict[int, Tensor] = {}

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if id(leaf) not in made:
                copied = like_its_kind(leaf, leaf.detach().clone())
                # No leaf, which couldn't be written to.
                made[id(leaf)] = like_its_kind(leaf, copied.requires_grad_().clone()) if leaf.requires_grad else copied
            return made[id(leaf)]
        if is_packed(leaf):
            return leaf._replace(data=copy(leaf.data))
        if isinstance(leaf, (*PLAIN, *_SHARED)):
            return leaf
        try:
            return duplicate(leaf)
        except Exception as error:  # whatever the user's own class raises
            raise ProbeFailed(
                f"the model was given an object of type {type(leaf).__name__}, which the probe, one more forward, can't "
                f"copy ({type(error).__name__}: {error}) and might change. Give the model tensors; or do without the "
                "probe: add_hooks(model, probe=False), which takes axis 0 of every layer's input for the batch."
            ) from error

    copied: Arguments = tree_map(copy, opened(arguments), is_leaf=is_packed)
    return copied
