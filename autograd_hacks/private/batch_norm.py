"""Models whose samples don't mix in training, made from models with BatchNorm."""

from copy import deepcopy
from math import gcd
from typing import Any

import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm

from autograd_hacks.errors import ON_PRIVATE, where


def without_batch_norm(model: nn.Module) -> nn.Module:
    """A copy of a model in which a GroupNorm replaces each BatchNorm.  Give the copy's parameters to the optimizer.

    A GroupNorm takes the BatchNorm's weight and bias, with device and dtype, its eps, training mode and hooks.  Running
    statistics are gone, so outputs change: a trained model needs fine-tuning.  The number of groups is the greatest common
    divisor of 32 and the number of channels; for BatchNorm1d, whose input may have no positions, it is 1.

    Raises TypeError, with the layer's path, for subclasses of BatchNorm, which may do more, for lazy or scripted ones, and
    for BatchNorm1d of a single feature.
    Source: Wu and He 2018, "Group normalization" (arXiv:1803.08494), section 4.1, for 32 groups.
    """
    made: dict[int, Any] = {}  # by identity, as deepcopy has it
    layer: Any
    for path, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm) and "BatchNorm" not in getattr(layer, "original_name", ""):  # of a scripted one
            continue
        if type(layer) not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm) or (
            type(layer) is nn.BatchNorm1d and layer.num_features == 1  # a number that is normalised by itself is 0
        ):
            raise TypeError(
                f"without_batch_norm: {where(path, layer)} does other things than nn.BatchNorm, or has a single feature. "
                "Replace it yourself, by nn.GroupNorm and what else it does; run a lazy one once, and script a module "
                "afterwards." + ON_PRIVATE
            )
        groups = 1 if type(layer) is nn.BatchNorm1d else gcd(32, layer.num_features)
        made[id(layer)] = own = nn.GroupNorm(groups, layer.num_features, layer.eps, layer.affine).train(layer.training)
        vars(own).update(deepcopy({name: x for name, x in vars(layer).items() if "hooks" in name}, made))
        own.weight, own.bias = deepcopy((layer.weight, layer.bias), made)
    return deepcopy(model, made)
