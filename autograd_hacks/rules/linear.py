"""Linear, Bilinear and PReLU."""

from collections.abc import Mapping

import torch
import torch.nn as nn
from einops import rearrange
from torch import Tensor

from autograd_hacks.forms import Dense, Form, Outer
from autograd_hacks.rules.call import Call, needs_batch
from autograd_hacks.rules.rule import single_input


@single_input
def linear(layer: nn.Linear, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x: N *T I    g: N *T O.  Sample n's gradient is Σₜ g[n, t] ⊗ x̄[n, t], and Σₜ g[n, t] for the bias."""
    needs_batch(x, at_least=2, layout="(N, ..., in_features)")
    if x.ndim == 2:  # `rearrange` would take 8 µs a layer to change nothing
        left, right, total = g, x.conj(), g
    else:
        left, right = rearrange(g, "n ... o -> n (...) o"), rearrange(x, "n ... i -> n (...) i").conj()
        total = left.sum(1)
    forms: dict[str, Form] = {"weight": Outer(left, right)}
    return forms if layer.bias is None else forms | {"bias": Dense(total)}


@single_input
def transposed_linear(layer: nn.Module, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x: N *T I    g: N *T O.  A Linear whose weight is stored as I O, as in GPT-2."""
    needs_batch(x, at_least=2, layout="(N, ..., in_features)")
    left, right = rearrange(x, "n ... i -> n (...) i").conj(), rearrange(g, "n ... o -> n (...) o")
    return {"weight": Outer(left, right), "bias": Dense(right.sum(1))}


def bilinear(layer: nn.Bilinear, call: Call) -> Mapping[str, Form]:
    """x₁: N *T I    x₂: N *T J    g: N *T O.  y = x₁ᵀ W x₂ + b, so a position adds g ⊗ x₁ ⊗ x₂."""
    x1, x2, g = call.argument(0, "input1"), call.argument(1, "input2"), call.grad
    needs_batch(x1, at_least=2, layout="(N, ..., in1_features)")
    x1, x2, left = (rearrange(t, "n ... f -> n (...) f") for t in (x1, x2, g))
    right = rearrange(x1[..., :, None] * x2[..., None, :], "n t i j -> n t (i j)").conj()
    forms: dict[str, Form] = {"weight": Outer(left, right, layer.weight.shape)}
    return forms if layer.bias is None else forms | {"bias": Dense(left.sum(1))}


@single_input
def prelu(layer: nn.PReLU, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x, g: N C *T.  y = x where x > 0, else weight · x; one weight for all, or one for each channel."""
    needs_batch(x, at_least=1, layout="(N, C, ...)")
    slopes = torch.where(x > 0, 0, g * x)
    channels = layer.num_parameters
    if channels == 1:
        return {"weight": Dense(slopes.flatten(1).sum(1, keepdim=True) if x.ndim > 1 else slopes[:, None])}
    needs_batch(x, at_least=2, layout="(N, num_parameters, ...)")
    return {"weight": Dense(slopes.flatten(2).sum(2) if x.ndim > 2 else slopes)}
