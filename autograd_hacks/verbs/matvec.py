"""Products with JᵀJ, and what they lead to, without a matrix of the parameters' size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any, SupportsFloat

import torch
from torch import Tensor

from autograd_hacks.distributed.cut import refuse_curvature
from autograd_hacks.errors import ON_CURVATURE, BlockTooLarge, NothingRecorded, needed
from autograd_hacks.forms import BUDGET, Form
from autograd_hacks.support.kinds import is_number
from autograd_hacks.verbs.everyone import Everyone

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator

LIMIT = 2**30
"""Bytes that a block may have, unless told another number."""


class Curvature(Everyone):
    """What the rows J of N samples say of curvature: JᵀJ / N.

    After an ordinary backward pass a row is the gradient of a sample's loss, and JᵀJ / N the empirical Fisher matrix.  After
    `backprop_hess` there is a row for each of its vectors and each sample, and JᵀJ / N is the generalised Gauss-Newton
    matrix (GGN), which for a likelihood ('CrossEntropy', 'BinaryCrossEntropy', 'LeastSquares') is the Fisher matrix too.
    """

    batch: int
    hess_type: str | None

    @abstractmethod
    def dot(self, v: Mapping[str, Tensor], budget: int = BUDGET) -> Tensor:
        """J v̄."""

    @abstractmethod
    def gram(self) -> Tensor:
        """J Jᵀ."""

    @abstractmethod
    def _by_row(self, w: Tensor) -> Tensor:
        """Weights in the order of the rows."""

    def fisher_matvec(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """F v for the Fisher matrix F = Σₙ gₙ gₙᵀ / N.

        It is the empirical one after an ordinary backward pass; after `backprop_hess` the true one, or its estimate by
        labels that were drawn.

        v: {name: shape} for all parameters, as gradients are.  Returns the same.
        Raises as ``dot`` does, and NothingRecorded for the rows of a Jacobian, which has no likelihood.
        Source: Kunstner et al. 2019, "Limitations of the empirical Fisher approximation" (arXiv:1905.12558).
        """
        if self.hess_type == "Jacobian":
            raise NothingRecorded("the rows are those of a Jacobian, which has no likelihood: use ggn_matvec for JᵀJ v / N")
        return self._narrowed(self._matvec(v))

    def ggn_matvec(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """G v for the generalised Gauss-Newton matrix G = Σₙ Jₙᵀ Hₙ Jₙ / N, after `backprop_hess`.

        v: {name: shape} for all parameters, as gradients are.  Returns the same.
        Raises as ``dot`` does, and NothingRecorded after an ordinary backward pass.
        Source: Schraudolph 2002, "Fast curvature matrix-vector products for second-order gradient descent".
        """
        if self.hess_type is None:
            raise NothingRecorded(
                "these are the gradients of the samples' losses, of which the empirical Fisher matrix is made "
                "(fisher_matvec), and not the Gauss-Newton matrix: run backprop_hess(output) instead of loss.backward()."
            )
        return self._narrowed(self._matvec(v))

    def _matvec(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """JᵀJ v / N, in what forms add up in: single precision at the least."""
        self._check_real()
        with self.summing(lambda: None, lambda _: [self.batch], 1) as (_, (count,)):
            return self._transposed(self.dot(v) / max(1, count))

    def _transposed(self, w: Tensor) -> dict[str, Tensor]:
        """Jᵀ w, in what forms add up in."""
        w = self._by_row(w)
        with self.reading():
            sums = ((name, form.weighted_sum(w.to(form.like.device, form.sum_dtype))) for name, form in self.items())
            return self.spread.settled(sums)

    def _narrowed(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the parameters' dtypes."""
        return {name: value.to(self[name].like.dtype) for name, value in found.items()}

    def natural_gradient(
        self, v: Mapping[str, Tensor], damping: float | None = None, limit: float = LIMIT
    ) -> dict[str, Tensor]:
        """(JᵀJ / N + λ)⁻¹ v, by way of J Jᵀ, which has a row for each row of J.

        v: {name: shape}, a gradient say    damping: λ > 0; the rounding of v and of JᵀJ is divided by it, so that single
        precision wants it well above 10⁻⁶ of the largest eigenvalue    limit: bytes that J Jᵀ may have, in double precision
        Raises as ``dot`` does, TypeError without a damping, ValueError for one that is not above 0, BlockTooLarge for too
        many rows.
        Source: the identity of Woodbury 1950; Ren and Goldfarb 2019, arXiv:1906.02353.
        """
        self._check_alone("natural_gradient")
        if damping is None:
            raise TypeError(
                f"natural_gradient was given no damping. JᵀJ / N has rank {self._axes.rows} at most, a row for each pass "
                "and sample, and can't be inverted without. Add λ > 0 to it, natural_gradient(v, damping=1e-2) say, and try "
                "powers of ten: large makes the step v / λ, small follows the curvature of these samples alone."
                + ON_CURVATURE
            )
        damping = _number("natural_gradient", damping)
        if not damping > 0:
            raise ValueError(f"natural_gradient was given damping={damping!r}; expected a number above 0" + ON_CURVATURE)
        self._check_real()
        check_limit(limit)
        if (size := 8 * self._axes.rows**2) > limit:
            raise BlockTooLarge(
                f"J Jᵀ has {self._axes.rows:,} rows, a row for each pass and sample, and {size / 2**20:,.0f} MiB; the "
                f"limit is {limit / 2**20:,.0f} MiB. Draw vectors, backprop_hess(output, samples=1); or use conjugate "
                "gradients, scipy.sparse.linalg.cg(grads.as_linear_operator(damping), ...); or raise limit."
            )
        products, count = self.gram().double().reshape(self._axes.rows, self._axes.rows), max(1, self.batch)
        products.diagonal().add_(count * damping)
        along = self.dot(v)
        inside = torch.linalg.solve(products, along.double().flatten()) if len(products) else along
        spread = self._transposed(inside.view(along.shape))
        return self._narrowed({name: (v[name].to(spread[name]) - spread[name]) / damping for name in self})

    def block(self, name: str, other: str | None = None, limit: float = LIMIT) -> Tensor:
        """The block of JᵀJ / N for two parameters, of shape ``(*shape, *other_shape)``.

        name, other: the parameters', as ``named_parameters`` has them; one for the diagonal block
        limit: bytes that the block may have
        Raises KeyError for a name that is none of a parameter that trains, BlockTooLarge for a larger block.
        """
        self._check_alone("block")
        for each in (name, name if other is None else other):
            if each not in self:
                raise KeyError(f"block was given {each!r}; expected the name of a parameter that trains: {', '.join(self)}")
        mine, theirs = self[name], self[name if other is None else other]
        self._check_real()
        check_limit(limit)
        check_size({f"{name} × {name if other is None else other}": mine.shape.numel() * theirs.shape.numel()}, mine, limit)
        with self.reading():
            return mine.cross(theirs).view(*mine.shape, *theirs.shape) / max(1, self.batch)

    def to_vector(self, v: Mapping[str, Tensor]) -> Tensor:
        """{name: shape} as one vector, P: the parameters in order, as ``torch.nn.utils.parameters_to_vector`` has them."""
        return torch.cat([v[name].flatten() for name in self])

    def from_vector(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector, P, as {name: shape}; the inverse of `to_vector`."""
        size = sum(form.shape.numel() for form in self.values())
        if vector.shape != (size,):
            raise ValueError(
                f"from_vector was given shape {tuple(vector.shape)}; expected ({size},), a number per parameter"
                + ON_CURVATURE
            )
        parts = vector.split([form.shape.numel() for form in self.values()])
        return {name: part.view(form.shape) for part, (name, form) in zip(parts, self.items())}

    def as_linear_operator(self, damping: float = 0.0) -> LinearOperator:
        """JᵀJ / N + λ as a ``scipy.sparse.linalg.LinearOperator``, (P, P), for ``eigsh``, ``cg`` and ``svds``.

        damping: λ ≥ 0    Vectors are laid out as `to_vector` and `from_vector` say.
        Raises ImportError without scipy, ValueError for another damping.
        """
        with needed("curvature"):
            from scipy.sparse.linalg import LinearOperator

        self._check_alone("as_linear_operator")
        damping = _number("as_linear_operator", damping)
        if not damping >= 0:
            raise ValueError(
                f"as_linear_operator was given damping={damping!r}; expected 0 or a number above it" + ON_CURVATURE
            )
        self._check_real()
        like = next(iter(self.values())).like
        size = sum(form.shape.numel() for form in self.values())

        def matvec(x: Any) -> Any:
            if x.dtype.kind == "c":
                return matvec(x.real) + 1j * matvec(x.imag)
            v = torch.as_tensor(x.reshape(-1).copy(), device="cpu").to(like.device, dtype)
            return (self.to_vector(self._matvec(self.from_vector(v))) + damping * v).cpu().numpy()

        dtype = torch.promote_types(like.dtype, torch.float32)  # NumPy has no bfloat16
        of = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        return LinearOperator((size, size), matvec=matvec, rmatvec=matvec, dtype=of)

    def _check_real(self) -> None:
        refuse_curvature(bool(self.cuts))
        for name, form in self.items():
            if form.like.is_complex():
                raise TypeError(
                    f"parameter {name!r} is complex; curvature is there for real parameters alone" + ON_CURVATURE
                )


def _number(what: str, damping: Any) -> float:
    """A damping as a number."""
    is_number = isinstance(damping, SupportsFloat) and not isinstance(damping, bool)
    if not is_number or (isinstance(damping, Tensor) and damping.numel() != 1) or not isfinite(float(damping)):
        raise ValueError(f"{what} was given damping={damping!r}; expected a number" + ON_CURVATURE)
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
