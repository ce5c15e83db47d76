"""What per-sample gradients say, without writing them out: algebra on J for the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.distributed.spread import whole_of
from autograd_hacks.errors import ON_CURVATURE, ON_METRICS, BlockTooLarge, NothingRecorded, needed
from autograd_hacks.forms import BUDGET, Form, scale
from autograd_hacks.forms.mapped import mapped
from autograd_hacks.forms.numerics import row_norms
from autograd_hacks.support.display import Shown
from autograd_hacks.support.trees import version_of
from autograd_hacks.verbs import arguments, matrix, statistics
from autograd_hacks.verbs.algebra import Algebra
from autograd_hacks.verbs.arguments import LIMIT, kind_of
from autograd_hacks.verbs.metric import Metric
from autograd_hacks.verbs.statistics import NoiseScale

if TYPE_CHECKING:
    from scipy.sparse.linalg import LinearOperator


class PerSampleGrads(Algebra):
    """The matrix J of a whole model, N samples by all parameters that train: a form for each parameter, by name.

    It owns what it was made from, so that later steps don't change it.  Row n is the gradient of sample n's loss, as
    `compute_grad1` says it; a parameter that the loss didn't reach has rows of zeros.  Sums are taken, and handed out, in
    single precision where parameters have half, but for `dense` and `weighted_sum`, which return the parameter's dtype.

    samples: N, how many rows    reached: the names of the parameters that the loss reached
    loss_type: 'mean' or 'sum', how the loss was reduced over the batch    batch: how many samples there were
    hess_type: what `backprop_hess` was told, if these are its rows, one for each pass and sample, row k · N + n being pass
    k's of sample n; 'Jacobian' for those of `per_sample_jacobian`; else None
    entries: of `per_sample_jacobian`, the shape of a sample's output; verbs then have these axes behind that of the samples,
    where (N,) is said below, and a form has row k · N + n for entry k of sample n

    Of curvature the rows say JᵀJ / N: after an ordinary backward pass the empirical Fisher matrix, after `backprop_hess` the
    generalised Gauss-Newton matrix (GGN), which for a likelihood ('CrossEntropy', 'BinaryCrossEntropy', 'LeastSquares') is
    the Fisher matrix too.

    Each verb takes ``budget``, the bytes that it may use beside its result (and, for modules that are run again, beside
    what their own forward and backward pass need).  Each raises StaleRecord where something that the gradients are made of
    was overwritten since: an activation, or for modules that are run again a weight.  So read before ``optimizer.step()``.
    """

    __repr__ = Shown.__str__

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a PerSampleGrads refers to what its model has seen, and can't be copied or pickled; take dense()")

    # Noise and directions.

    def variance(self, budget: int = BUDGET) -> dict[str, Tensor]:
        """The unbiased variance over the samples, elementwise, {name: shape}: Σₙ (gₙ - ḡ)² / (N - 1).

        Raises ValueError for fewer than two samples, and for rows of an output's entries.
        """
        with self._counted("variance") as samples:
            means = statistics.means(self, self.spread, samples, budget)
            return statistics.variances(self, means, self.spread, samples, budget)

    def snr(self, budget: int = BUDGET) -> dict[str, Tensor]:
        """The signal to noise ratio of each number's gradient, {name: shape}: ḡ² over `variance`.

        It is that of one sample: a step's has N times as much.  0 where no sample has a gradient, infinite where all have
        the same.
        Raises as `variance` does.
        Source: Liu et al. 2020, "Understanding why neural networks generalize well through GSNR" (arXiv:2001.07384).
        """
        with self._counted("snr") as samples:
            return statistics.signal_to_noise(self, self.spread, samples, budget)

    @overload
    def noise_scale(self, per_parameter: Literal[False] = False, budget: int = BUDGET) -> NoiseScale: ...
    @overload
    def noise_scale(self, per_parameter: Literal[True], budget: int = BUDGET) -> dict[str, NoiseScale]: ...
    def noise_scale(self, per_parameter: bool = False, budget: int = BUDGET) -> NoiseScale | dict[str, NoiseScale]:
        """The gradient noise scale tr Σ / ‖G‖², `NoiseScale.scale`, with both numbers, from one batch.

        per_parameter: whether to return {name: NoiseScale} instead
        Raises as `variance` does, and NothingRecorded for rows that are no gradients of losses.
        Source: McCandlish et al. 2018, "An empirical model of large-batch training" (arXiv:1812.06162), appendix A.1 with
        batches of 1 and N samples.
        """
        if self.hess_type is not None and not self.entries:
            raise NothingRecorded(
                "noise_scale: these are the rows of backprop_hess, and no gradients of losses. Run loss.backward() instead."
            )
        with self._counted("noise_scale") as samples:
            each = statistics.noise_scales(self, self.spread, samples, budget)
        if per_parameter:
            return each
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        return NoiseScale(*(sum((x.to(parts[0].device) for x in parts), zero) for parts in zip(*each.values())))

    def cosine(self, other: PerSampleGrads | Mapping[str, Tensor] | None = None, budget: int = BUDGET) -> Tensor:
        """The cosine of the angle between gradients, (N, M), or with a direction, N; 0 for a gradient of zeros.

        other: the gradients of another batch by the same model, these themselves unless told; or a direction, {name: shape}
        Raises as ``gram`` and ``dot`` do.
        """
        other = self if other is None else other
        if not isinstance(other, PerSampleGrads):
            arguments.check_direction(other, self._shapes())
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
        # By rows of length one, whose products stay in the range of numbers.
        some = self.select(again)
        mine, yours = some._by_row(matrix.nonzero(n[again])), theirs._by_row(matrix.nonzero(m))
        units = some._between(theirs, lambda name, form: matrix.unit_products(form, theirs[name], mine, yours, budget))
        return cosines.index_put((again,), units)

    def scaled(self, w: Tensor) -> PerSampleGrads:
        """The rows wₙ gₙ, lazily.  w: N.  Raises as ``second_moment`` does for other weights."""
        w = self._by_row(w)
        return self.with_forms({name: scale(form, w.to(form.like.device)) for name, form in self.items()}, self.samples)

    def preconditioned(self, metric: Metric) -> PerSampleGrads:
        """The rows M gₙ, for a linear map M of each parameter's gradients: a `PerSampleGrads` again, with all verbs.

        metric: of all parameters here, see `Metric`: an optimizer's scaling, Kronecker factors, low-rank projections

        A map L G R changes the factors of products, and nothing of a parameter's size is written; other maps are applied
        within a verb's budget, to some rows at a time, and to sums in ``dot`` and ``weighted_sum``.  Inner products in a
        metric are ``grads.preconditioned(metric).gram(others)``: M goes to the side with fewer samples, M^½ to both.

        Raises ValueError for a parameter without a map, for one that doesn't fit a parameter's shape, and where a layer is
        cut over processes.
        """
        if not isinstance(metric, Metric):
            raise TypeError(f"preconditioned was given {kind_of(metric)}; expected a Metric" + ON_METRICS)
        if self.cuts:
            raise ValueError(
                f"preconditioned: {next(iter(self.cuts))} is cut over processes, and a map needs all of it. Take dense()"
                + ON_METRICS
            )
        model = self._model()
        named = [] if model is None else list(model.named_parameters(remove_duplicate=False))
        maps, forms = metric._of(named, list(self)), dict[str, Form]()
        with self.reading():
            for name, form in self.items():
                try:
                    forms[name] = mapped(form, maps[name])
                except ValueError as error:
                    raise ValueError(f"preconditioned: the metric has for {name!r} {error}" + ON_METRICS) from error
        made = self.with_forms(forms, self.samples)
        made._versions += [(name, x, version_of(x)) for name, by in maps.items() for x in by.tensors()]
        return made

    _by_token: Callable[[nn.Module], PerSampleGrads] | None = None
    """What `tokens` reads, where these are of a record."""

    def tokens(self) -> PerSampleGrads:
        """The contributions of single positions to these rows: row (n, t) of a layer's weight is what its position t adds to
        sample n's gradient.  Verbs have an axis T behind that of the samples then: ``norms`` is (N, T).

        Over t they add up to the rows of samples.  They are not the gradients of tokens' own losses, which reach the
        positions before them, too: take these by `per_sample_jacobian` of the losses.  Each layer has positions of its own:
        what the embedding did with a word, and what the last layer made of its place.

        Known for Linear, Embedding, and norm layers on (N, T, ...), and transformers' Conv1D.  For parameters that are read
        off the graph hook the model by ``add_hooks(model, segments='tokens')``, whose rows are these at once.

        Raises NothingRecorded where the backward pass's record was freed; BatchSizeError and UnsupportedLayer for a layer
        whose positions can't be told apart (recurrent ones, convolutions, what runs on one position a sample).
        """
        model = self._model()
        if self._by_token is None or model is None:
            raise NothingRecorded(
                "tokens() is for what per_sample_grads(model) has returned, before it is selected, grouped, scaled or "
                "preconditioned; do that with what tokens() returns."
            )
        return self._by_token(model)

    # Curvature.

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
        damping = arguments.check_damping("natural_gradient", damping, self._row_count)
        self._check_real()
        arguments.check_limit(limit)
        if (size := 8 * self._row_count**2) > limit:
            raise BlockTooLarge(
                f"J Jᵀ has {self._row_count:,} rows, a row for each pass and sample, and {size / 2**20:,.0f} MiB; the "
                f"limit is {limit / 2**20:,.0f} MiB. Draw vectors, backprop_hess(output, samples=1); or use conjugate "
                "gradients, scipy.sparse.linalg.cg(grads.as_linear_operator(damping), ...); or raise limit."
            )
        products, count = self.gram().double().reshape(self._row_count, self._row_count), max(1, self.batch)
        products.diagonal().add_(count * damping)
        along = self.dot(v)
        inside = torch.linalg.solve(products, along.double().flatten()) if len(products) else along
        back = self._transposed(inside.view(along.shape))
        return self._narrowed({name: (v[name].to(x) - x) / damping for name, x in back.items()})

    def block(self, name: str, other: str | None = None, limit: float = LIMIT) -> Tensor:
        """The block of JᵀJ / N for two parameters, of shape ``(*shape, *other_shape)``.

        name, other: the parameters', as ``named_parameters`` has them; one for the diagonal block
        limit: bytes that the block may have
        Raises KeyError for a name that is none of a parameter that trains, BlockTooLarge for a larger block.
        """
        self._check_alone("block")
        other = name if other is None else other
        mine, theirs = self[name], self[other]
        self._check_real()
        arguments.check_limit(limit)
        arguments.check_size({f"{name} × {other}": mine.shape.numel() * theirs.shape.numel()}, mine, limit)
        with self.reading():
            return mine.cross(theirs).view(*mine.shape, *theirs.shape) / max(1, self.batch)

    def to_vector(self, v: Mapping[str, Tensor]) -> Tensor:
        """{name: shape} as one vector, P: the parameters in order, as ``torch.nn.utils.parameters_to_vector`` has them."""
        return torch.cat([v[name].flatten() for name in self])

    def from_vector(self, vector: Tensor) -> dict[str, Tensor]:
        """One vector, P, as {name: shape}; the inverse of `to_vector`."""
        sizes = [form.shape.numel() for form in self.values()]
        if vector.shape != (sum(sizes),):
            raise ValueError(
                f"from_vector was given shape {tuple(vector.shape)}; expected ({sum(sizes)},), a number per parameter"
                + ON_CURVATURE
            )
        return {name: part.view(form.shape) for part, (name, form) in zip(vector.split(sizes), self.items())}

    def as_linear_operator(self, damping: float = 0.0) -> LinearOperator:
        """JᵀJ / N + λ as a ``scipy.sparse.linalg.LinearOperator``, (P, P), for ``eigsh``, ``cg`` and ``svds``.

        damping: λ ≥ 0    Vectors are laid out as `to_vector` and `from_vector` say.
        Raises ImportError without scipy, ValueError for another damping.
        """
        self._check_alone("as_linear_operator")
        damping = arguments.check_damping("as_linear_operator", damping)
        self._check_real()

        with needed("curvature"):
            from scipy.sparse.linalg import LinearOperator
        like = next(iter(self.values())).like
        dtype = torch.promote_types(like.dtype, torch.float32)  # NumPy has no bfloat16

        def product(x: Any) -> Any:
            if x.dtype.kind == "c":
                return product(x.real) + 1j * product(x.imag)
            v = torch.as_tensor(x.reshape(-1).copy(), device="cpu").to(like.device, dtype)
            return (self.to_vector(self._matvec(self.from_vector(v))) + damping * v).cpu().numpy()

        size, of = sum(form.shape.numel() for form in self.values()), torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
        return LinearOperator((size, size), matvec=product, rmatvec=product, dtype=of)

    def _matvec(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """JᵀJ v / N, in what forms add up in: single precision at the least."""
        self._check_real()
        with self.summing(lambda: None, self.batch) as (_, count):
            return self._transposed(self.dot(v) / max(1, count))

    def _narrowed(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """In the parameters' dtypes."""
        return {name: x.to(self[name].like.dtype) for name, x in sums.items()}
