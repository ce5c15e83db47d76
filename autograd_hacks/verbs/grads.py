"""`PerSampleGrads`: statistics, metrics and curvature from the matrix J of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_CURVATURE, ON_METRICS, ON_VERBS, BlockTooLarge, NothingRecorded, needed
from autograd_hacks.forms import BUDGET, Form, LinearMap, scale
from autograd_hacks.forms.mapped import mapped
from autograd_hacks.forms.numerics import row_norms
from autograd_hacks.support.display import Shown
from autograd_hacks.support.parts import whole_of
from autograd_hacks.support.ranges import checked
from autograd_hacks.support.trees import versions_of
from autograd_hacks.verbs import arguments, matrix
from autograd_hacks.verbs.arguments import LIMIT, check_kind
from autograd_hacks.verbs.statistics import Statistics

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class PerSampleGrads(Statistics):
    """The matrix J of a whole model: N samples by all trainable parameters.

    It maps each parameter's name to a form.  Row n is the gradient of sample n's loss, as in `compute_grad1`; a parameter
    that the loss didn't reach has rows of zeros.  Later steps don't change it.  For half-precision parameters, sums are
    computed and returned in single precision; `dense` and `weighted_sum` return the parameter's dtype.

    samples: N, the number of samples
    reached: the names of the parameters that the loss reached
    loss_type: 'mean' or 'sum', how the loss was reduced over the batch
    hess_type: the ``hess_type`` of `backprop_hess`, 'Jacobian' for `per_sample_jacobian`, None for ordinary gradients. Row
    k · N + n of `backprop_hess` belongs to pass k and sample n
    entries: the shape of one sample's output for `per_sample_jacobian`, else (). Where (N,) is written below, verbs then
    return ``(N, *entries)``. Row k · N + n of a form belongs to entry k and sample n

    ``batch`` is the number of samples in the batch.

    The curvature matrix of the rows is JᵀJ / N.  After an ordinary backward pass it is the empirical Fisher matrix.  After
    `backprop_hess` it is the generalised Gauss-Newton matrix (GGN), which equals the Fisher matrix for a likelihood
    ('CrossEntropy', 'BinaryCrossEntropy', 'LeastSquares').

    Each verb takes ``budget``, the bytes that it may use beside its result.  A module that has to run again also takes what
    its own forward and backward pass need.  Read before ``optimizer.step()``: a verb raises StaleRecord if an activation,
    or a weight of a module that has to run again, was overwritten.
    """

    __repr__ = Shown.__str__

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a PerSampleGrads refers to its model's activations and can't be copied or pickled; take dense()")

    @checked(ON_VERBS)
    def cosine(self, other: PerSampleGrads | Mapping[str, Tensor] | None = None, budget: int = BUDGET) -> Tensor:
        """The cosines between gradients, (N, M); or between gradients and a direction, N.  A zero gradient has cosine 0.

        other: the gradients of another batch of the same model; or a direction, {name: shape}; by default these gradients
        themselves

        Raises as `gram` and `dot` do.
        """
        other = self if other is None else other
        if not isinstance(other, PerSampleGrads):
            arguments.check_direction(other, self)
            wide = {name: whole_of(x).to(torch.promote_types(x.dtype, torch.float32)) for name, x in other.items()}
            length = matrix.nonzero(matrix.joint_norms([row_norms(x.reshape(1, -1)).cpu() for x in wide.values()], 1))
            along = self.dot({name: x / length.to(x.device) for name, x in wide.items()}, budget)
            return along / matrix.nonzero(self.norms(budget=budget))
        theirs, products = other, self.gram(other, budget)  # checks the other
        n = self.norms(budget=budget)
        m = n if other is self else other.norms(budget=budget)
        cosines = products / matrix.nonzero(n).view(*n.shape, *[1] * m.ndim) / matrix.nonzero(m)
        again = matrix.leave_range(n, m)[:, None].flatten(1).any(1).nonzero()[:, 0]
        if not len(again):
            return cosines
        # Rows of length one have products that neither overflow nor underflow.
        some = self.select(again)
        mine, yours = some._by_row(matrix.nonzero(n[again])), theirs._by_row(matrix.nonzero(m))
        units = some._between(theirs, lambda name, form: matrix.unit_products(form, theirs[name], mine, yours, budget))
        return cosines.index_put((again,), units)

    def scaled(self, w: Tensor) -> PerSampleGrads:
        """The rows wₙ gₙ, lazily.

        w: N weights
        Raises as `second_moment` does for the weights.
        """
        w = self._by_row(w)
        return self.with_forms({name: scale(form, w.to(form.like.device)) for name, form in self.items()}, self.samples)

    def preconditioned(self, metric: Mapping[str | nn.Parameter, LinearMap]) -> PerSampleGrads:
        """The rows M gₙ for a linear map M of each parameter's gradients: a `PerSampleGrads` with all verbs.

        A map G ↦ L G R is applied to the factors of products, so nothing of a parameter's size is written.  Other maps are
        applied to some rows at a time within a verb's budget; ``dot`` and ``weighted_sum`` apply them to sums.  For inner
        products in a metric take ``grads.preconditioned(metric).gram(others)``: apply M to the side with fewer samples, or
        M^½ to both sides.

        metric: a map for every parameter, by the parameter, its name or a pattern, see `Metric`: an optimizer's scaling,
        Kronecker factors, low-rank projections

        Raises ValueError for a parameter without a map, and for a map that doesn't fit a parameter's shape.
        """
        check_kind("preconditioned", ON_METRICS, Mapping, "a Metric", metric=metric)
        model = self._model()
        named = [] if model is None else list(model.named_parameters(remove_duplicate=False))
        maps, forms = _maps_of(metric, named, list(self)), dict[str, Form]()
        with self.reading():
            for name, form in self.items():
                try:
                    forms[name] = mapped(form, maps[name])
                except ValueError as error:
                    raise ValueError(f"preconditioned, {name!r}: the metric has {error}" + ON_METRICS) from error
        made = self.with_forms(forms, self.samples)
        made._versions += [(name, x, n) for name, by in maps.items() for x, n in versions_of(by.tensors())]
        return made

    _by_token: Callable[[nn.Module], PerSampleGrads] | None = None
    """The function that `tokens` calls; None if these rows were not read from a record."""

    def tokens(self) -> PerSampleGrads:
        """The contribution of each position to these rows: position t of a layer adds row (n, t) to sample n's gradient.

        Verbs return an axis T after the samples: ``norms`` is (N, T).  Summed over t, the rows are those of the samples.
        Positions are those of each layer: for the embedding a row shows the contribution of a word, for the last layer that
        of its place in the sequence.  The rows are not the gradients of the tokens' losses, which also reach earlier
        positions; for these take `per_sample_jacobian` of the losses.

        Supported are Linear, Embedding and norm layers on (N, T, ...), and transformers' Conv1D.  For parameters that are
        read from the graph, hook the model by ``add_hooks(model, segments='tokens')``; its rows are already these.

        Raises NothingRecorded if the record of the backward pass was freed; BatchSizeError and UnsupportedLayer for a layer
        whose positions can't be distinguished (recurrent layers, convolutions, layers that run on one position per sample).
        """
        model = self._model()
        if self._by_token is None or model is None:
            raise NothingRecorded("call tokens() on per_sample_grads(model) itself, and select, group or scale afterwards.")
        return self._by_token(model)

    # Curvature.

    def fisher_matvec(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """F v for the Fisher matrix F = Σₙ gₙ gₙᵀ / N, {name: shape}.

        After an ordinary backward pass F is the empirical Fisher matrix; after `backprop_hess` it is the true one, or its
        estimate from sampled labels.

        v: {name: shape} for every trainable parameter

        Raises as `dot` does, and NothingRecorded for the rows of `per_sample_jacobian`, which have no likelihood.
        Source: Kunstner et al. 2019, "Limitations of the empirical Fisher approximation" (arXiv:1905.12558).
        """
        if self.hess_type == "Jacobian":
            raise NothingRecorded("fisher_matvec: a Jacobian has no likelihood. Use ggn_matvec for JᵀJ v / N.")
        return self._narrowed(self._matvec(v))

    def ggn_matvec(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """G v for the generalised Gauss-Newton matrix G = Σₙ Jₙᵀ Hₙ Jₙ / N, {name: shape}.  Call it after `backprop_hess`.

        v: {name: shape} for every trainable parameter

        Raises as `dot` does, and NothingRecorded after an ordinary backward pass.
        Source: Schraudolph 2002, "Fast curvature matrix-vector products for second-order gradient descent".
        """
        if self.hess_type is None:
            raise NothingRecorded(
                "ggn_matvec: these rows are gradients of losses. Run backprop_hess(output) instead, or take fisher_matvec."
            )
        return self._narrowed(self._matvec(v))

    @checked(ON_CURVATURE)
    def natural_gradient(
        self, v: Mapping[str, Tensor], damping: float | None = None, limit: float = LIMIT
    ) -> dict[str, Tensor]:
        """(JᵀJ / N + λ)⁻¹ v, computed from J Jᵀ, {name: shape}.

        v: {name: shape} for every trainable parameter, for example a gradient
        damping: λ > 0. Rounding errors of v and of JᵀJ are divided by it, so in single precision choose it well above 10⁻⁶
        of the largest eigenvalue
        limit: bytes that J Jᵀ may take in double precision, 1 GiB by default

        Raises as `dot` does, TypeError without a damping, ValueError for a damping that is not above 0, BlockTooLarge for
        too many rows.
        Source: the identity of Woodbury 1950; Ren and Goldfarb 2019 (arXiv:1906.02353).
        """
        self._check_alone("natural_gradient")
        if damping is None:
            raise TypeError(
                f"natural_gradient: damping is missing; expected λ > 0, because JᵀJ / N has rank {self._row_count} at most. "
                "Start with damping=1e-2 and try powers of ten: with a large one the step is close to v / λ." + ON_CURVATURE
            )
        if (size := 8 * self._row_count**2) > limit:
            raise BlockTooLarge(
                f"natural_gradient: J Jᵀ has {self._row_count:,} rows and takes {size / 2**20:,.0f} MiB; the limit is "
                f"{limit / 2**20:,.0f} MiB. Raise limit; or sample vectors, backprop_hess(output, samples=1); or use "
                "conjugate gradients, scipy.sparse.linalg.cg(grads.as_linear_operator(damping), ...)."
            )
        products, count = self.gram().double().reshape(self._row_count, self._row_count), max(1, self.batch)
        products.diagonal().add_(count * float(damping))
        along = self.dot(v)
        inside = torch.linalg.solve(products, along.double().flatten()) if len(products) else along
        back = self._transposed(inside.view(along.shape))
        return self._narrowed({name: (v[name].to(x) - x) / damping for name, x in back.items()})

    @checked(ON_CURVATURE)
    def block(self, name: str, other: str | None = None, limit: float = LIMIT) -> Tensor:
        """The block of JᵀJ / N for two parameters, of shape ``(*shape, *other_shape)``.

        name: a parameter's name, as in ``named_parameters``
        other: the other parameter's name; by default the same one, for the diagonal block
        limit: bytes that the block may take, 1 GiB by default

        Raises KeyError for a name that is not a trainable parameter, BlockTooLarge for a larger block.
        """
        self._check_alone("block")
        other = name if other is None else other
        mine, theirs = self[name], self[other]
        arguments.check_size({f"{name} × {other}": mine.shape.numel() * theirs.shape.numel()}, mine, limit)
        with self.reading():
            return mine.cross(theirs).view(*mine.shape, *theirs.shape) / max(1, self.batch)

    def to_vector(self, v: Mapping[str, Tensor]) -> Tensor:
        """{name: shape} as one vector, P.  Parameters are in the order of ``torch.nn.utils.parameters_to_vector``."""
        return torch.cat([v[name].flatten() for name in self])

    def from_vector(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector, P, as {name: shape}: the inverse of `to_vector`."""
        sizes = [form.shape.numel() for form in self.values()]
        if vector.shape != (sum(sizes),):
            shape = tuple(vector.shape)
            raise ValueError(f"from_vector was given shape {shape}; expected ({sum(sizes)},)" + ON_CURVATURE)
        return {name: part.view(form.shape) for part, (name, form) in zip(vector.split(sizes), self.items())}

    @checked(ON_CURVATURE)
    def as_linear_operator(self, damping: float = 0.0) -> LinearOperator:
        """JᵀJ / N + λ as a ``scipy.sparse.linalg.LinearOperator``, (P, P), for ``eigsh``, ``cg`` and ``svds``.

        Its vectors have the layout of `to_vector` and `from_vector`.

        damping: λ ≥ 0

        Raises ImportError without scipy, ValueError for a negative damping.
        """
        self._check_alone("as_linear_operator")
        with needed("curvature"):
            from scipy.sparse.linalg import LinearOperator
        like = next(iter(self.values())).like
        dtype = torch.promote_types(like.dtype, torch.float32)  # NumPy has no bfloat16

        def product(x: Any) -> Any:
            if x.dtype.kind == "c":
                return product(x.real) + 1j * product(x.imag)
            v = torch.as_tensor(x.reshape(-1).copy(), device="cpu").to(like.device, dtype)
            return (self.to_vector(self._matvec(self.from_vector(v))) + float(damping) * v).cpu().numpy()

        size, of = sum(form.shape.numel() for form in self.values()), torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        return LinearOperator((size, size), matvec=product, rmatvec=product, dtype=of)

    def _matvec(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """JᵀJ v / N in the forms' accumulation dtype, at least single precision."""
        self._check_real()
        with self.summing(lambda: None, self.batch) as (_, count):
            return self._transposed(self.dot(v) / max(1, count))

    def _narrowed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same in the parameters' dtypes."""
        return {name: x.to(self[name].like.dtype) for name, x in sums.items()}


def _maps_of(
    metric: Mapping[str | nn.Parameter, LinearMap], named: Sequence[tuple[str, Tensor]], names: Sequence[str]
) -> dict[str, LinearMap]:
    """{name: map} for some names, of the model's parameters with all their names.

    Raises ValueError for a parameter without a map or with several maps, for a pattern that matches nothing, and if no
    parameter of the metric is the model's; TypeError for what is no map.
    """
    each = {f"map {number}": by for number, by in enumerate(metric.values())}
    check_kind("preconditioned", ON_METRICS, LinearMap, "a Metric, whose maps are linear", **each)
    by_id = {id(key): by for key, by in metric.items() if not isinstance(key, str)}
    found = {name: by_id[id(p)] for name, p in named if id(p) in by_id and name in names}
    if by_id and not any(id(p) in by_id for _, p in named):
        raise ValueError("preconditioned was given a metric of parameters that are another model's" + ON_METRICS)
    patterns = [key for key in metric if isinstance(key, str)]
    for pattern, own in arguments.parts_by(patterns, names, "the metric") if patterns else ():
        found |= dict.fromkeys(own, metric[pattern])
    if missing := [name for name in names if name not in found]:
        raise ValueError(
            f"preconditioned: the metric has no map for {arguments.some(missing)}. Give them a map, None for the identity; "
            "or leave them out: per_sample_grads(model, only=...)." + ON_METRICS
        )
    return {name: found[name] for name in names}
