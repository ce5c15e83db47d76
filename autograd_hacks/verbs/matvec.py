"""Products with JᵀJ, and blocks of it: what they are given, and how SciPy sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor

from autograd_hacks.distributed.cut import refuse_curvature
from autograd_hacks.errors import ON_CURVATURE, BlockTooLarge, needed
from autograd_hacks.forms import Form
from autograd_hacks.support.kinds import is_number
from autograd_hacks.support.parts import Cut
from autograd_hacks.verbs.matrix import Forms

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

LIMIT = 2**30
"""Bytes that a block, or other processes' rows, may have, unless told another number."""


def linear_operator(size: int, like: Tensor, product: Callable[[Tensor], Tensor]) -> LinearOperator:
    """A symmetric matrix, (P, P), for SciPy.  product: that with a vector of P numbers    like: a tensor of their kind"""
    with needed("curvature"):
        from scipy.sparse.linalg import LinearOperator

    dtype = torch.promote_types(like.dtype, torch.float32)  # NumPy has no bfloat16

    def matvec(x: Any) -> Any:
        if x.dtype.kind == "c":
            return matvec(x.real) + 1j * matvec(x.imag)
        return product(torch.as_tensor(x.reshape(-1).copy(), device="cpu").to(like.device, dtype)).cpu().numpy()

    of = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    return LinearOperator((size, size), matvec=matvec, rmatvec=matvec, dtype=of)


def check_real(forms: Forms, cuts: Mapping[str, Cut]) -> None:
    """Raises for parameters that curvature is not there for: complex ones, and parts of larger ones."""
    refuse_curvature(bool(cuts))
    for name, form in forms.items():
        if form.like.is_complex():
            raise TypeError(f"parameter {name!r} is complex; curvature is there for real parameters alone" + ON_CURVATURE)


def check_damping(what: str, damping: Any, rank: int | None = None) -> float:
    """A damping as a number.  rank: at most that of what can't be inverted without; None where it may be 0"""
    if damping is None and rank is not None:
        raise TypeError(
            f"{what} was given no damping. JᵀJ / N has rank {rank} at most, a row for each pass and sample, and can't be "
            f"inverted without. Add λ > 0 to it, {what}(v, damping=1e-2) say, and try powers of ten: large makes the step "
            "v / λ, small follows the curvature of these samples alone." + ON_CURVATURE
        )
    is_one = isinstance(damping, SupportsFloat) and not isinstance(damping, bool)
    if not is_one or (isinstance(damping, Tensor) and damping.numel() != 1) or not isfinite(float(damping)):
        raise ValueError(f"{what} was given damping={damping!r}; expected a number" + ON_CURVATURE)
    if float(damping) < 0 or (float(damping) == 0 and rank is not None):
        least = "0 or a number above it" if rank is None else "a number above 0"
        raise ValueError(f"{what} was given damping={damping!r}; expected {least}" + ON_CURVATURE)
    return float(damping)


def check_limit(limit: object) -> None:
    if not is_number(limit):
        raise TypeError(f"limit is {limit!r}; expected a number of bytes, 2**30 say, or float('inf')" + ON_CURVATURE)


def check_size(sizes: Mapping[str, int], form: Form, limit: float) -> None:
    """Raises BlockTooLarge for more bytes than a block may have.  sizes: numbers in a block, by its name for people"""
    largest = max(sizes, key=lambda name: sizes[name])
    size = sizes[largest] * form.sum_dtype.itemsize
    if size > limit:
        raise BlockTooLarge(
            f"the block {largest} has {size / 2**20:,.0f} MiB, and the limit is {limit / 2**20:,.0f} MiB. Take its diagonal "
            "(compute_hess(model, kind='diag')), Kronecker factors (kind='kfac'), or products with it "
            "(per_sample_grads(model).ggn_matvec(v)); or raise limit."
        )
