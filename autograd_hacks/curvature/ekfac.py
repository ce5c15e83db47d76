"""Kronecker factors with corrected eigenvalues.

B ⊗ A = (Q_B ⊗ Q_A) (Λ_B ⊗ Λ_A) (Q_B ⊗ Q_A)ᵀ has the eigenvectors of the layer's inputs and of the gradients at its
outputs.  With S = Σₖₙ (Q_Bᵀ Gₖₙ Q_A)² / N in the place of Λ_B ⊗ Λ_A, elementwise, for the rows Gₖₙ, it is the matrix with
these eigenvectors that is closest to JᵀJ / N in the Frobenius norm; its trace is that of JᵀJ / N.

Source: George et al. 2018, "Fast approximate natural gradient descent in a Kronecker-factored eigenbasis"
(arXiv:1806.03884).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import overload

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.curvature.kronecker import with_ones
from autograd_hacks.distributed.spread import Spread
from autograd_hacks.errors import ON_CURVATURE, NothingRecorded
from autograd_hacks.forms import Dense, Form, Outer, group
from autograd_hacks.support.display import Shown, Table, bytes_of, with_unit
from autograd_hacks.verbs.arguments import kind_of
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.per_sample import grads_of

SHARE = 0.1
"""The damping unless told, of the mean eigenvalue: Grosse et al. 2023 (arXiv:2308.03296), section 3.2."""


@dataclass(frozen=True, repr=False)
class EKFAC(Shown):
    """(Q_B ⊗ Q_A) diag(S) (Q_B ⊗ Q_A)ᵀ, for a parameter of shape (O, ...), seen as a matrix O I.

    With ``kfac_bias='joint'`` it is that of a weight with its bias for a last column, O (I + 1), and both have it.
    """

    a: Tensor  # Q_A, I I, eigenvectors in columns
    b: Tensor  # Q_B, O O
    values: Tensor  # S, O I
    names: tuple[str, ...]  # of the parameter, or of weight and bias

    def _table(self) -> Table:
        parts = [("a", "eigenvectors of inputs", self.a), ("b", "eigenvectors of gradients at outputs", self.b)]
        parts.append(("values", "eigenvalues", self.values))
        rows = [(name, what, str(tuple(x.shape)), with_unit(bytes_of([x]))) for name, what, x in parts]
        size = " × ".join(map(str, self.values.shape))
        title = f"EKFAC of {', '.join(self.names)}: {size}, {with_unit(bytes_of(x for *_, x in parts))}"
        return Table(title, [("", "what", "shape", "holds"), *rows])

    def matvec(self, v: Tensor) -> Tensor:
        """The product with v, a tensor of the parameter's shape, or several, ``(..., *shape)``."""
        return self._scaled(v, self.values)

    def solve(self, v: Tensor, damping: float | None = None) -> Tensor:
        """The product of the inverse of this + λ with v, ``(..., *shape)``.

        damping: λ > 0; a tenth of the mean of ``values`` unless told
        Raises ValueError for another damping.
        """
        if damping is not None and not (damping > 0 and isfinite(damping)):
            raise ValueError(f"solve was given damping={damping!r}; expected a number above 0" + ON_CURVATURE)
        return self._scaled(v, 1 / (self.values + (SHARE * self.values.mean() if damping is None else damping)))

    def _scaled(self, v: Tensor, by: Tensor) -> Tensor:
        rows = v.to(by.dtype).reshape(-1, *by.shape)
        return (self.b @ ((self.b.mT @ rows @ self.a) * by) @ self.a.mT).view(v.shape)


@overload
def ekfac_solve(model: nn.Module, v: PerSampleGrads, damping: float | None = None) -> PerSampleGrads: ...
@overload
def ekfac_solve(model: nn.Module, v: Mapping[str, Tensor], damping: float | None = None) -> dict[str, Tensor]: ...
def ekfac_solve(
    model: nn.Module, v: PerSampleGrads | Mapping[str, Tensor], damping: float | None = None
) -> PerSampleGrads | dict[str, Tensor]:
    """(EKFAC + λ)⁻¹ v, parameter by parameter, after ``compute_hess(model, kind='ekfac')`` or `compute_hess_over`.

    v: {name: shape}, a gradient say, or ``{name: (..., *shape)}``, returned alike; or the per-sample gradients of a batch,
    of which each row is taken: ``train.gram(ekfac_solve(model, test))`` are influences. They are written out, N × P numbers
    damping: λ > 0; for each parameter a tenth of its mean eigenvalue unless told

    Raises NothingRecorded for a parameter without EKFAC, ValueError for another damping, or tensors of another shape.
    Source: Grosse et al. 2023, "Studying large language model generalization with influence functions" (arXiv:2308.03296).
    """
    parameters = dict(model.named_parameters())
    blocks = {n: vars(parameters[n])["ekfac"] for n in v if "ekfac" in vars(parameters.get(n, nn.Module()))}
    if missing := [name for name in v if name not in blocks]:
        raise NothingRecorded(
            f"{missing[0]} has no ekfac. Run backprop_hess(output) and compute_hess(model, kind='ekfac'), or "
            "compute_hess_over(model, loader, kind='ekfac'), of a loss that reaches it; or leave it out: "
            "per_sample_grads(model, only=...)."
        )
    wanted = {name: block.names for name, block in blocks.items()}
    if apart := [(name, names) for name, names in wanted.items() if any(other not in v for other in names)]:
        raise ValueError(
            f"ekfac_solve was given {apart[0][0]!r} alone, and {' and '.join(apart[0][1])} have one block; give both"
            + ON_CURVATURE
        )
    if isinstance(v, PerSampleGrads):
        with v.reading():
            rows = _solved(
                blocks, {name: form.matrix().view(-1, *form.shape) for name, form in v.items()}, parameters, damping
            )
            return v.with_forms({name: Dense(x) for name, x in rows.items()}, v.samples)
    for name, x in v.items():
        shape = parameters[name].shape
        if not isinstance(x, Tensor) or x.shape[x.ndim - len(shape) :] != shape:
            raise ValueError(
                f"ekfac_solve was given {kind_of(x)} for {name!r}; expected shape {tuple(shape)}, or (..., that)"
                + ON_CURVATURE
            )
    return _solved(blocks, v, parameters, damping)


def _solved(
    blocks: Mapping[str, EKFAC], v: Mapping[str, Tensor], parameters: Mapping[str, Tensor], damping: float | None
) -> dict[str, Tensor]:
    """v, block by block."""
    solved: dict[str, Tensor] = {}
    for names, block in {block.names: block for block in blocks.values()}.items():
        axes = [max(1, parameters[name].ndim) for name in names]
        # ... O I, a vector being one column
        columns = [v[n].unsqueeze(-1) if k == 1 else v[n].flatten(v[n].ndim - k + 1) for n, k in zip(names, axes)]
        parts = block.solve(torch.cat(columns, -1), damping).split([x.shape[-1] for x in columns], -1)
        solved |= {name: x.reshape(v[name].shape).to(v[name].dtype) for name, x in zip(names, parts)}
    return {name: solved[name] for name in v}


class Eigenvalues:
    """S for parameters that have ``kfac``, added up over batches."""

    def __init__(self, model: nn.Module, names: Sequence[str], joint: Mapping[str, str], spread: Spread) -> None:
        """joint: {bias: weight} of those that have one block"""
        self._model, self.spread, self._batch = model, spread, 0
        self._names = {weight: (weight, bias) for bias, weight in joint.items()}
        factors = {name: vars(model.get_parameter(name)).get("kfac") for name in names}
        self._vectors = {name: (self._of(ab[0]), self._of(ab[1])) for name, ab in factors.items() if ab is not None}
        self._sums = {name: a.new_zeros(len(b), len(a)) for name, (a, b) in self._vectors.items()}

    def _of(self, factor: Tensor) -> Tensor:
        """Its eigenvectors, alike on all processes."""
        return self.spread.firsts(torch.linalg.eigh(factor.double()).eigenvectors.to(factor.dtype).contiguous())

    @torch.no_grad()
    def add(self) -> None:
        """The passes of `backprop_hess` that are in the record."""
        grads = grads_of(self._model, recorder_of(self._model), self.spread)
        with grads.reading():
            for name, (a, b) in self._vectors.items():
                parts = grads[name].parts if len(grads.batches) > 1 else [grads[name]]
                for part, samples in zip(parts, grads.batches):
                    for form in _rotated(part.wide(), a, b, samples, name in self._names):
                        self._sums[name] += form.second_moment(form.new_sums(form.samples) + 1)
        self._batch += grads.batch

    def end(self, last: Callable[[], None] = lambda: None) -> None:
        """last: what there is to add"""
        with self.spread.weights():
            _, (batch,) = self.spread.agreed(last, lambda _: [self._batch], 1)
        for name, total in self.spread.summed(self._sums).items():
            a, b = self._vectors[name]
            names = self._names.get(name, (name,))
            for each in names:
                vars(self._model.get_parameter(each))["ekfac"] = EKFAC(a, b, total / max(1, batch), names)


def _rotated(form: Form, a: Tensor, b: Tensor, samples: int, joint: bool) -> list[Form]:
    """The rows Q_Bᵀ G Q_A, O I, in forms of some of them each.  samples: of the micro-batch"""
    if len(form.shape) < 2:
        values = form.matrix() @ b
        return [Outer(values, values.new_ones(len(values), 1))]
    factors = form.factors()
    assert factors is not None  # or there would be no ``kfac``
    gradients, inputs, rows = factors
    right = (with_ones(inputs) if joint else inputs) @ a
    outers = (Outer(gradient @ b, right) for gradient in gradients)
    return [outer if rows is None else group(outer, rows, samples) for outer in outers]
