"""Linear: y = x Wᵀ + b."""

from collections.abc import Mapping

import torch.nn as nn
from einops import rearrange
from torch import Tensor

from autograd_hacks.forms import Dense, Form, Outer
from autograd_hacks.rules.call import needs_batch, single_input


@single_input
def linear(layer: nn.Linear, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x: N *T I    g: N *T O.  Sample n's gradient is Σₜ g[n, t] ⊗ x[n, t]; the bias sees Σₜ g[n, t]."""
    needs_batch(x, at_least=2, layout="(N, ..., in_features)")
    left, right = rearrange(g, "n ... o -> n (...) o"), rearrange(x, "n ... i -> n (...) i")
    forms: dict[str, Form] = {"weight": Outer(left, right)}
    if layer.bias is not None:
        forms["bias"] = Dense(left.sum(1))
    return forms
