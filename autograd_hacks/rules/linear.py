"""Linear, Bilinear, PReLU, and LinearCrossEntropyLoss."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.forms import Dense, Form, Outer
from autograd_hacks.rules.rule import Call, needs_batch, single_input


def product(left: Tensor, right: Tensor, shape: torch.Size | None = None, gradient: int = 0) -> Outer:
    """left: N *T O    right: N *T I.  Sample n's gradient is Σₜ left[n, t] ⊗ right[n, t].

    gradient: which of the two is the gradient, 0 or 1
    """
    if left.ndim > 3:
        left, right = left.flatten(1, -2), right.flatten(1, -2)
    return Outer(left, right, shape, gradient)


def added(g: Tensor, last: int | None = None) -> Form:
    """g: N *T *S.  The gradient of an addend on the `last` axes, or on axis 1 (channels) if `last` is None."""
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
    weight = product(x.conj(), g, gradient=1)
    return {"weight": weight, "bias": Dense(weight.right.sum(1))}


def bilinear(layer: nn.Bilinear, call: Call) -> Mapping[str, Form]:
    """x₁: N *T I    x₂: N *T J    g: N *T O.  y = x₁ᵀ W x₂ + b, so a position adds g ⊗ x₁ ⊗ x₂."""
    x1, x2 = call.argument(0, "input1"), call.argument(1, "input2")
    needs_batch(x1, at_least=2, layout="(N, ..., in1_features)")
    pairs = (x1[..., :, None] * x2[..., None, :]).conj()
    weight = product(call.grad, pairs.flatten(-2), layer.weight.shape)
    forms: dict[str, Form] = {"weight": weight}
    return forms if layer.bias is None else forms | {"bias": Dense(weight.left.sum(1))}


@single_input
def prelu(layer: nn.PReLU, x: Tensor, g: Tensor) -> Mapping[str, Form]:
    """x, g: N C *T.  y = x where x > 0, else weight · x; one weight for all, or one for each channel."""
    needs_batch(x, at_least=1, layout="(N, C, ...)")
    if layer.num_parameters > 1:
        needs_batch(x, at_least=2, layout="(N, num_parameters, ...)")
    products = torch.where(x > 0, 0, g * x)
    return {"weight": added(products if layer.num_parameters > 1 else products.reshape(len(x), 1, x.shape[1:].numel()))}


def linear_cross_entropy(layer: Any, call: Call) -> Mapping[str, Form]:
    """x: N I    target: N *S, or N C *S.  The loss is computed again from the logits, N C *S, a linear map of x.

    The reduction comes after the logits, so the gradient at a sample's logits belongs to that sample alone."""
    x, target = call.argument(0, "input").detach(), call.argument(1, "target")
    needs_batch(x, at_least=2, layout="(N, in_features)")
    settings = {"reduction": layer.reduction, "label_smoothing": layer.label_smoothing}
    if layer.weight is not None:
        settings["weight"] = call.read("weight")
    if layer.ignore_index is not None and not target.is_floating_point():
        settings["ignore_index"] = layer.ignore_index
    bias = None if layer.linear.bias is None else call.read("linear.bias")
    with call.running_again():
        y = F.linear(x, call.read("linear.weight"), bias).requires_grad_()
        loss = F.cross_entropy(y.view(len(x), layer.num_classes, *layer.out_features), target, **settings)
        call.check_same(call.outputs, [loss])
        (g,) = torch.autograd.grad(loss, y, call.grad)
    return {"linear.weight": product(g, x), "linear.bias": Dense(g)}
