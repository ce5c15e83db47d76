"""Kronecker factors of a layer's Gauss-Newton block: JᵀJ / N ≈ B ⊗ A.

Row n of pass k is Σₜ bₖₙₜ ⊗ aₙₜ, with aₙₜ the input and bₖₙₜ the gradient at the output, for T positions that share
the weight.

expand   A = Σₙₜ aₙₜ aₙₜᵀ / (N T)        B = Σₖₙₜ bₖₙₜ bₖₙₜᵀ / N        positions as if they were samples
reduce   A = Σₙ ān ānᵀ / N, ā = Σₜ aₜ / T    B = Σₖₙ b̂ₖₙ b̂ₖₙᵀ / N, b̂ = Σₜ bₜ    a sample as if it had one position

A bias's own block is exactly the B of reduce.  With ``kfac_bias='shared'`` it has the B of its layer's weight, as in
curvlinops, which for expand takes positions for samples; with ``kfac_bias='joint'`` it is one more column of that weight,
whose input is 1, as in kronfluence.

Sources: Martens and Grosse 2015 (arXiv:1503.05671), section 3; Grosse and Martens 2016 (arXiv:1602.01407), for convolutions;
Eschenhagen et al. 2023 (arXiv:2311.00636), sections 3.2 and 3.3, for the two treatments.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import UnsupportedLayer, where
from autograd_hacks.forms import Form

APPROXIMATIONS = ("expand", "reduce")
BIASES = ("exact", "shared", "joint")


class Factors(NamedTuple):
    """N T A, (I, I), the sum over positions, and N B, (O, O), that over samples; both may be added up over batches."""

    a: Tensor
    b: Tensor
    positions: int


def factors_of(
    form: Form, kfac_approx: str, batches: Sequence[int], out: Tensor | None = None, joint: bool = False
) -> Factors | None:
    """Of a Linear's or a convolution's weight or bias; None where the form has no Kronecker factors.

    batches: the numbers of samples of the micro-batches that the form has the rows of    out: memory for A, if there is one
    joint: whether the inputs have a 1 behind them
    """
    parts = form.parts if len(batches) > 1 else [form]
    total: Factors | None = None
    for part, samples in zip(parts, batches):
        if (each := _of_batch(part, kfac_approx, samples, joint, out)) is None:
            return None
        total = each if total is None else Factors(total.a + each.a, total.b + each.b, total.positions + each.positions)
    return total


def _of_batch(form: Form, kfac_approx: str, samples: int, joint: bool, out: Tensor | None) -> Factors | None:
    if len(form.shape) < 2:  # a bias, whose block is B itself
        values = form.wide().matrix()
        return Factors(values.new_ones(1, 1), values.mT @ values, 1)
    if (products := form.wide().factors()) is None:
        return None
    gradients, inputs, rows = products
    inputs = with_ones(inputs) if joint else inputs
    if kfac_approx == "reduce" and inputs.shape[1]:  # without positions the loss did not reach the parameter
        shares = _added(torch.ones_like(inputs[..., :1]), rows, samples).clamp(min=1)
        inputs = (_added(inputs, rows, samples) / shares)[:, None]
        gradients = [_added(b, rows, samples)[:, None] for b in gradients]
    b = gradients[0].new_zeros(2 * gradients[0].shape[2:])
    for gradient in gradients:
        _add_products(b, gradient)
    a = inputs.new_empty(2 * inputs.shape[2:]) if out is None or out.dtype != inputs.dtype else out
    return Factors(_add_products(a.zero_(), inputs), b, inputs.shape[0] * inputs.shape[1])


def _add_products(total: Tensor, x: Tensor) -> Tensor:
    """total + Σₙₜ xₙₜ xₙₜᵀ, in place.  x: N T F"""
    if x.is_contiguous() or x.shape[1] == 1:
        rows = x.flatten(0, 1)
        return total.addmm_(rows.mT, rows)
    return total.addbmm_(x.mT, x)  # windows lie in memory the other way around, sample by sample


def _added(x: Tensor, rows: Tensor | None, samples: int) -> Tensor:
    """The sums over a sample's positions, N F.  x: M T F    rows: the sample of each of the M, themselves unless told"""
    total = x.sum(1)
    return total if rows is None else total.new_zeros(samples, total.shape[1]).index_add_(0, rows, total)


def with_ones(inputs: Tensor) -> Tensor:
    """N T (I + 1).  inputs: N T I"""
    return torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)


# Layers.


def otherwise(kind: str) -> str:
    """What to do about parameters without factors.  kind: that was asked for"""
    return f"Name the others, parameters=[...] with kind={kind!r}; or take kind='diag' or 'full' for it."


def weights_by_bias(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """{bias: weight} of the layers that have both of these, and that no other layer shares.  names: some parameters'"""
    by_id = {id(model.get_parameter(name)): name for name in names}
    layers = [{what: by_id.get(id(p)) for what, p in layer._parameters.items()} for layer in model.modules()]
    count = Counter(name for layer in layers for name in layer.values())
    pairs = [(layer.get("bias"), layer.get("weight")) for layer in layers]
    return {bias: weight for bias, weight in pairs if bias and weight and count[bias] == count[weight] == 1}


def weight_of(model: nn.Module, bias: str, reached: Collection[str]) -> str:
    """The name of the weight whose B a bias shares."""
    parameter = model.get_parameter(bias)
    weights = [layer._parameters["weight"] for layer in model.modules() if layer._parameters.get("bias") is parameter]
    names = [name for name in reached if len(weights) == 1 and model.get_parameter(name) is weights[0]]
    if not names:
        raise UnsupportedLayer(
            f"{bias} is to share the factor of its layer's weight (kfac_bias='shared'), which is frozen, or was not "
            "reached, or is one of several. Take kfac_bias='exact'."
        )
    return names[0]


def check_layers(model: nn.Module, reached: Collection[str], kind: str) -> None:
    """Raises UnsupportedLayer for parameters of layers without factors.  kind: that was asked for"""
    wanted, refused = {id(model.get_parameter(name)): name for name in reached}, {}
    for path, layer in model.named_modules():
        for parameter in layer._parameters.values():
            if id(parameter) in wanted and not _has_factors(layer):
                refused[wanted[id(parameter)]] = where(path, layer)
    if refused:
        listing = "; ".join(f"{name} of {place}" for name, place in refused.items())
        raise UnsupportedLayer(
            "these parameters have no Kronecker factors, which Linear and convolutions without groups have: "
            f"{listing}. {otherwise(kind)}"
        )


def _has_factors(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.groups == 1)
