"""Products with the curvature matrix JᵀJ / N of per-sample gradients, and with its inverse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from autograd_hacks import PerSampleGrads
from autograd_hacks.errors import ON_CURVATURE, NotReduced, needed
from autograd_hacks.support.ranges import checked

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


def matvec(grads: PerSampleGrads, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """JᵀJ v / N over the samples of all processes, {name: shape}.

    After an ordinary backward pass JᵀJ / N is the empirical Fisher matrix.  After `backprop_hess` it is the Gauss-Newton
    matrix; with drawn labels, an estimate of it.  After `per_sample_jacobian` there is no loss in it.

    v: {name: shape} for every trainable parameter

    Raises as ``grads.dot`` does, and TypeError for complex parameters.
    Sources: Schraudolph 2002, "Fast curvature matrix-vector products for second-order gradient descent"; Kunstner et al.
    2019, "Limitations of the empirical Fisher approximation" (arXiv:1905.12558).
    """
    return {name: x.to(grads[name].like.dtype) for name, x in _wide(grads, v).items()}


@checked(ON_CURVATURE)
def natural_gradient(grads: PerSampleGrads, v: Mapping[str, Tensor], damping: float) -> dict[str, Tensor]:
    """(JᵀJ / N + λ)⁻¹ v, computed from J Jᵀ, {name: shape}.

    v: {name: shape} for every trainable parameter, for example a gradient
    damping: λ > 0. Start with 10⁻² and try powers of ten: with a large one the result is close to v / λ. Rounding errors of
    v and of JᵀJ are divided by it, so in single precision choose it well above 10⁻⁶ of the largest eigenvalue

    J Jᵀ takes 8 bytes for each pair of rows.  If that is too much, draw vectors, ``backprop_hess(output, draws=1)``, or
    use conjugate gradients, ``scipy.sparse.linalg.cg(linear_operator(grads, damping), ...)``.

    Raises as ``grads.dot`` does, TypeError for complex parameters, and NotReduced if processes share the batch.
    Source: the identity of Woodbury 1950; Ren and Goldfarb 2019 (arXiv:1906.02353).
    """
    _check(grads, "natural_gradient", alone=True)
    along = grads.dot(v)
    products = grads.gram().double().reshape(along.numel(), along.numel())
    products.diagonal().add_(max(1, grads.batch) * float(damping))
    inside = torch.linalg.solve(products, along.double().flatten()) if len(products) else along
    back = grads.wide_sum(inside.view(along.shape))
    return {name: ((v[name].to(x) - x) / damping).to(grads[name].like.dtype) for name, x in back.items()}


@checked(ON_CURVATURE)
def linear_operator(grads: PerSampleGrads, damping: float = 0.0) -> LinearOperator:
    """JᵀJ / N + λ as a ``scipy.sparse.linalg.LinearOperator``, (P, P), for ``eigsh``, ``cg`` and ``svds``.

    Its vectors have the parameters one after the other, as in ``torch.nn.utils.parameters_to_vector``.

    damping: λ ≥ 0

    Raises ImportError without scipy, ValueError for a negative damping; TypeError and NotReduced as `natural_gradient` does.
    """
    _check(grads, "linear_operator", alone=True)
    with needed("curvature"):
        from scipy.sparse.linalg import LinearOperator
    like = next(iter(grads.values())).like
    dtype = torch.promote_types(like.dtype, torch.float32)  # NumPy has no bfloat16
    sizes = [form.shape.numel() for form in grads.values()]

    def product(x: Any) -> Any:
        if x.dtype.kind == "c":
            return product(x.real) + 1j * product(x.imag)
        vector = torch.as_tensor(x.reshape(-1).copy(), device="cpu").to(like.device, dtype)
        v = {name: part.view(form.shape) for part, (name, form) in zip(vector.split(sizes), grads.items())}
        return (parameters_to_vector(_wide(grads, v).values()) + float(damping) * vector).cpu().numpy()

    of = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return LinearOperator((sum(sizes), sum(sizes)), matvec=product, rmatvec=product, dtype=of)


def _wide(grads: PerSampleGrads, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """JᵀJ v / N in the forms' accumulation dtype, at least single precision."""
    _check(grads, "matvec")
    with grads.summing(lambda: None, grads.batch) as (_, count):
        return grads.wide_sum(grads.dot(v) / max(1, count))


def _check(grads: PerSampleGrads, what: str, alone: bool = False) -> None:
    """Raises TypeError for complex parameters, and NotReduced if other processes have rows, too, and all are needed."""
    for name, form in grads.items():
        if form.like.is_complex():
            raise TypeError(f"parameter {name!r} is complex; curvature exists for real parameters only" + ON_CURVATURE)
    if alone and grads.spread.mesh is not None:
        raise NotReduced(
            f"{what} needs all rows, but {grads.spread.mesh.size()} processes share the batch. Use this one's alone, "
            f"{what}(grads.local(), ...), or products with JᵀJ of all, matvec(grads, v)."
        )
