"""Products of the batch with a parameter: Linear, Bilinear, products of matrices, and experts."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from autograd_hacks.forms import Dense, Form, Outer
from autograd_hacks.forms.terms import of_experts
from autograd_hacks.formulas.call import Call
from autograd_hacks.formulas.met import Met
from autograd_hacks.support.layout import POSITIONS


def linear(met: Met) -> Form | None:
    """x: N *T I    g: N *T O.  Sample n's gradient is Σₜ g[n, t] ⊗ x̄[n, t], and Σₜ g[n, t] for the bias."""
    return met.summed(met.grad) if met.place == 2 else Outer(met.grad, met.kept("input").conj(), met.shape)


def bilinear(met: Met) -> Form | None:
    """x₁: N *T I    x₂: N *T J    g: N *T O.  y = x₁ᵀ W x₂ + b, so a position adds g ⊗ x₁ ⊗ x₂."""
    if met.place == 2:
        return met.summed(met.grad)
    pairs = met.kept("input1")[..., :, None] * met.kept("input2")[..., None, :]
    return Outer(met.grad, pairs.conj().flatten(-2), met.shape)


def both(layer: object, call: Call, x: Tensor) -> Mapping[str, Tensor]:
    return {"input1": call.argument(0, "input1"), "input2": call.argument(1, "input2")}


def matrix_product(met: Met, names: Sequence[str | None]) -> Form | None:
    """y = x W or y = W x for two matrices, possibly with an addend; or y = x v.

    names: for each input of the node, the name under which it is saved; None for the addend
    """
    name = names[met.place]
    if name is None:
        return met.summed(met.grad_times("beta"))
    on_right = met.place == len(names) - 1
    if met.layout.axis != (0 if on_right else 1) or met.layout.fold == POSITIONS:
        return None
    other = met.kept(next(n for n in names if n not in (None, name)))
    x, g = met.first(other).conj(), met.first(met.grad_times("alpha") if len(names) > 2 else met.grad)
    if on_right:
        return Outer(x, g if x.ndim == g.ndim else g[..., None], met.shape, gradient=1)
    x, g = (y.mT if y.ndim > 2 else y for y in (x, g))
    return Outer(g, x, met.shape)


def batched_product(met: Met, names: Sequence[str | None]) -> Form | None:
    """y[b] = x[b] W[b] or W[b] x[b], with the samples on an axis of the other matrix.  names: see `matrix_product`"""
    if (name := names[met.place]) is None:
        return met.summed(met.grad_times("beta"))
    on_right = met.place == len(names) - 1
    if met.layout.axis != (1 if on_right else 2):
        return None
    x = met.first(met.kept(next(n for n in names if n not in (None, name)))).conj()
    g = met.first(met.grad_times("alpha") if len(names) > 2 else met.grad)
    if met.layout.fold:  # (N, B, T, ·), or (N, B, ·, T)
        return Dense(x.mT @ g if on_right else g @ x.mT)
    return Dense(x[..., :, None] * g[..., None, :] if on_right else g[..., :, None] * x[..., None, :])


def grouped_product(met: Met, owners: Tensor) -> Form | None:
    """y = x W[e], where expert e has the rows from offs[e - 1] to offs[e].  x: M I    W: E I O"""
    x, ends = met.kept("self").conj(), met.kept("offs")
    is_other = met.place != 1 or x.ndim != 2 or len(met.shape) != 3 or ends is None
    return None if is_other else of_experts(x, met.grad, ends, owners, met.samples)
