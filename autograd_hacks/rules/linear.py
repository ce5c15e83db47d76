"""Linear, Bilinear and PReLU."""

from collections.abc import Mapping

import torch
import torch.nn as nn
from einops import rearrange
from torch import Tensor

from autograd_hacks.forms import Dense, Form, Outer
from autograd_hacks.rules.call import Call, needs_batch
from autograd_hacks.rules.rule import single_input


def product(left: Tensor, right: Tensor, shape: torch.Size | None = None) -> Outer:
    """left: N *T O    right: N *T I.  Sample n's gradient is Σₜ left[n, t] ⊗ right[n, t]."""
    if left.ndim > 2:  # else `rearrange` would take 8 µs a layer to change nothing
        left, right = rearrange(left, "n ... o -> n (...) o"), rearrange(right, "n ... i -> n (...) i")
    return Outer(left, right, shape)


def added(g: Tensor, last: int | None = None) -> Form:
    """g: N *T *S.  What is added, on the `last` axes, or on axis 1, the channels, where `last` is None."""
    shared = range(1, g.ndim - last) if last else range(2, g.ndim)
    return Dense(g.sum(tuple(shared)) if len(shared) else g)


@single_input
def linear(layer: nn.Linear, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x: N *T I    g: N *T O.  Sample n's gradient is Σₜ g[n, t] ⊗ x̄[n, t], and Σₜ g[n, t] for the bias."""
    needs_batch(x, at_least=2, layout="(N, ..., in_features)")
    weight = product(g, x.conj())
    forms: dict[str, Form] = {"weight": weight}
    return forms if layer.bias is None else forms | {"bias": Dense(g if g.ndim == 2 else weight.left.sum(1))}


@single_input
def transposed_linear(layer: nn.Module, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x: N *T I    g: N *T O.  A Linear whose weight is stored as I O, as in GPT-2."""
    needs_batch(x, at_least=2, layout="(N, ..., in_features)")
    weight = product(x.conj(), g)
    return {"weight": weight, "bias": Dense(weight.right.sum(1))}


def bilinear(layer: nn.Bilinear, call: Call) -> Mapping[str, Form]:
    """x₁: N *T I    x₂: N *T J    g: N *T O.  y = x₁ᵀ W x₂ + b, so a position adds g ⊗ x₁ ⊗ x₂."""
    x1, x2 = call.argument(0, "input1"), call.argument(1, "input2")
    needs_batch(x1, at_least=2, layout="(N, ..., in1_features)")
    weight = product_of_three(call.grad, x1, x2)
    forms: dict[str, Form] = {"weight": weight}
    return forms if layer.bias is None else forms | {"bias": Dense(weight.left.sum(1))}


def product_of_three(g: Tensor, x1: Tensor, x2: Tensor) -> Outer:
    """g: N *T O    x₁: N *T I    x₂: N *T J.  A position adds g ⊗ x̄₁ ⊗ x̄₂."""
    pairs = (x1[..., :, None] * x2[..., None, :]).conj()
    return product(g, pairs.flatten(-2), torch.Size((g.shape[-1], *pairs.shape[-2:])))


@single_input
def prelu(layer: nn.PReLU, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x, g: N C *T.  y = x where x > 0, else weight · x; one weight for all, or one for each channel."""
    needs_batch(x, at_least=1, layout="(N, C, ...)")
    if layer.num_parameters > 1:
        needs_batch(x, at_least=2, layout="(N, num_parameters, ...)")
    return {"weight": slopes(x, g, layer.num_parameters)}


def slopes(x: Tensor, g: Tensor, channels: int) -> Form:
    """x, g: N C *T, or N *T for one channel of all.  Where x < 0, g x is added."""
    products = torch.where(x > 0, 0, g * x)
    if channels == 1:
        return Dense(products.flatten(1).sum(1, keepdim=True) if x.ndim > 1 else products[:, None])
    return Dense(products.flatten(2).sum(2) if x.ndim > 2 else products)
