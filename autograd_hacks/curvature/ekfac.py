"""Kronecker factors with corrected eigenvalues.

B ⊗ A = (Q_B ⊗ Q_A) (Λ_B ⊗ Λ_A) (Q_B ⊗ Q_A)ᵀ has the eigenvectors of the layer's inputs and of the gradients at its
outputs.  Replace Λ_B ⊗ Λ_A by S = Σₖₙ (Q_Bᵀ Gₖₙ Q_A)² / N, elementwise, for the rows Gₖₙ.  Of all matrices with these
eigenvectors the result is closest to JᵀJ / N in the Frobenius norm, and has its trace.  If a parameter has several blocks
(see `autograd_hacks.curvature.kronecker`), each has its own.

Source: George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis"
(arXiv:1806.03884).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autograd_hacks.curvature.kronecker import inputs_of, products_of, rows_by
from autograd_hacks.curvature.sums import Sums
from autograd_hacks.extending import OneHot, Positions, grads_of, recorder_of
from autograd_hacks.forms import Elementwise, Form, Grouping, InTurn, LinearMap, Lookup, Outer, Sides
from autograd_hacks.support.display import Shown, Table, bytes_of, with_unit


@dataclass(frozen=True, repr=False)
class EKFAC(Shown):
    """(Q_B ⊗ Q_A) diag(S) (Q_B ⊗ Q_A)ᵀ, for a parameter of shape (O, ...), viewed as a matrix O I.

    For a parameter stored as (I, O), ``is_turned``, it is (Q_A ⊗ Q_B) diag(S) (Q_A ⊗ Q_B)ᵀ, and S is I O.  With G blocks all
    three tensors have a leading axis G.
    """

    a: Tensor | None  # Q_A, I I, eigenvectors in columns; None, the identity, if A is diagonal
    b: Tensor | None  # Q_B, O O, in the same way
    values: Tensor  # S, O I, in the parameter's memory order
    name: str  # of the parameter
    is_turned: bool = False  # whether the parameter is stored as I O

    @property
    def sides(self) -> tuple[Tensor | None, Tensor | None]:
        """The eigenvectors on the left and right of the parameter: Q_B and Q_A, or Q_A and Q_B if it is turned."""
        return (self.a, self.b) if self.is_turned else (self.b, self.a)

    def _table(self) -> Table:
        held = bytes_of(x for x in (self.a, self.b, self.values) if x is not None)
        return Table(f"EKFAC of {self.name}: {' × '.join(map(str, self.values.shape))}, {with_unit(held)}")

    def map(self, values: Tensor, shape: torch.Size) -> LinearMap:
        """G ↦ Q_L (D ∘ (Q_Lᵀ G Q_R)) Q_Rᵀ, for a `Metric`.  The inverse (EKFAC + λ)⁻¹ has D = 1 / (``values`` + λ).

        values: D, like ``values``    shape: the parameter's
        """
        left, right = self.sides
        turned = [None if x is None else x.mT for x in self.sides]
        return InTurn([_sides(turned[0], right, shape), Elementwise(values.reshape(shape)), _sides(left, turned[1], shape)])

    def matvec(self, v: Tensor) -> Tensor:
        """The product with v, a tensor of the parameter's shape or ``(..., *shape)``."""
        of = self.values.shape
        found: Tensor = self.map(self.values, of)(v.to(self.values.dtype).reshape(-1, *of), of)
        return found.view(v.shape)


def _sides(left: Tensor | None, right: Tensor | None, shape: torch.Size) -> LinearMap:
    """G ↦ L G R for a parameter that is one matrix, or several below each other."""
    if right is None or right.ndim == 3 or right.shape[0] == shape[1:].numel():
        return Sides(left, right)
    return Sides(None if left is None else left[None], right[None])  # of a matrix whose rows are several axes, one block


class Eigenvalues:
    """S for the parameters that have ``kfac``, by sums that have ended; added up over batches."""

    def __init__(self, sums: Sums) -> None:
        self._model, self.spread, self._lays, self._batch = sums.model, sums.spread, sums.lays, 0
        factors = {name: vars(self._model.get_parameter(name))["kfac"] for name in sums.names}
        # A diagonal matrix has the eigenvectors of the identity.
        self._vectors = {
            n: (None if self._lays[n].is_table else self._of(a), self._of(b))
            for n, (a, b) in ((n, both) for n, both in factors.items() if both is not None)
        }
        self._sums = {n: factors[n][0].new_zeros(self._lays[n].matrix) for n in self._vectors}

    def _of(self, factor: Tensor) -> Tensor:
        """Its eigenvectors, the same on all processes."""
        return self.spread.firsts(torch.linalg.eigh(factor.double()).eigenvectors.to(factor.dtype).contiguous())

    @torch.no_grad()
    def add(self) -> None:
        """The passes of `backprop_hess` that are in the record."""
        grads = grads_of(self._model, recorder_of(self._model), self.spread)
        with grads.reading():
            for name, (a, b) in self._vectors.items():
                lay, total = self._lays[name], self._sums[name]
                if lay.is_by_rows:
                    for some, rows in rows_by(grads[name], lay):
                        total[some] += (rows if b is None else rows @ b).square().sum(0)
                    continue
                for own, samples, at in products_of(grads[name], lay, grads.batches):
                    q_a, q_b = (x if x is None else x[at] for x in (a, b))
                    for form in _rotated(own, q_a, q_b, lay.is_turned, samples):
                        total[at] += form.second_moment(form.new_sums(form.samples) + 1)
        self._batch += grads.batch

    def end(self, last: Callable[[], None] = lambda: None) -> None:
        """last: what there is to add"""
        with self.spread.weights():
            _, (batch,) = self.spread.agreed(last, lambda _: [self._batch], 1)
        for name, total in self.spread.summed(self._sums).items():
            block = EKFAC(*self._vectors[name], total / max(1, batch), name, self._lays[name].is_turned)
            vars(self._model.get_parameter(name))["ekfac"] = block


def _rotated(own: Positions, a: Tensor | None, b: Tensor | None, is_turned: bool, samples: int) -> Iterator[Form]:
    """The rows Q_Bᵀ G Q_A of one block, as it lies in memory, pass by pass.  samples: of the micro-batch"""
    inputs = own.inputs if a is None else inputs_of(own) @ a
    for gradient in (each if b is None else each @ b for each in own.gradients):
        if isinstance(inputs, OneHot):
            form: Form = Lookup(inputs.index, gradient, inputs.entries)
        elif isinstance(inputs, Tensor):
            form = Outer(inputs, gradient) if is_turned else Outer(gradient, inputs)
        yield form if own.owners is None else Grouping(form, own.owners, samples)
