"""Models whose samples don't mix in training, made from models with BatchNorm."""

from copy import deepcopy
from math import gcd
from typing import Any

import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm

from autograd_hacks.errors import ON_PRIVATE, where

_KINDS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
_GROUPS = 32
"""Source: Wu and He 2018, "Group normalization" (arXiv:1803.08494), section 4.1."""


def without_batch_norm(model: nn.Module) -> nn.Module:
    """A copy of a model in which a GroupNorm replaces each BatchNorm.  Give the copy's parameters to the optimizer.

    A GroupNorm takes the BatchNorm's weight and bias, with device and dtype, its eps, training mode and hooks.  Running
    statistics are gone, so outputs change: a trained model needs fine-tuning.  The number of groups is the greatest common
    divisor of 32 and the number of channels; for BatchNorm1d, whose input may have no positions, it is 1.

    Raises TypeError, with the layer's path, for subclasses of BatchNorm, which may do more, and for lazy or scripted ones;
    ValueError for BatchNorm1d of a single feature.
    """
    made: dict[int, Any] = {}  # by identity, as deepcopy has it
    for path, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) or "BatchNorm" in getattr(layer, "original_name", ""):  # the latter is scripted
            made[id(layer)] = _group_norm(path, layer, made)
    return deepcopy(model, made)


def _group_norm(path: str, layer: Any, made: dict[int, Any]) -> nn.Module:
    if type(layer) not in _KINDS:
        raise TypeError(
            f"without_batch_norm: {where(path, layer)} may do more than nn.BatchNorm. Replace it yourself, by nn.GroupNorm "
            "and what else it does; run a lazy one once, and script a module afterwards." + ON_PRIVATE
        )
    channels, is_flat = layer.num_features, type(layer) is nn.BatchNorm1d
    if is_flat and channels == 1:  # normalised by itself, a number is 0
        raise ValueError(f"without_batch_norm: {where(path, layer)} has a single feature. Remove it." + ON_PRIVATE)
    own = nn.GroupNorm(1 if is_flat else gcd(_GROUPS, channels), channels, layer.eps, affine=False)
    own.affine, own.weight, own.bias = layer.affine, deepcopy(layer.weight, made), deepcopy(layer.bias, made)
    vars(own).update({name: deepcopy(x, made) for name, x in vars(layer).items() if "hooks" in name})
    return own.train(layer.training)
