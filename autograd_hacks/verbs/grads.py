"""`PerSampleGrads`: algebra on the matrix J of a whole model, without writing J out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from math import prod
from typing import Literal, overload

import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_METRICS, ON_NOISE, ON_VERBS
from autograd_hacks.forms import BUDGET, Dense, Form, Grouping, LinearMap, scale
from autograd_hacks.forms.composite import without_factor
from autograd_hacks.forms.mapped import mapped
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.display import Shown
from autograd_hacks.support.parts import whole_of
from autograd_hacks.support.patterns import matches
from autograd_hacks.support.ranges import checked
from autograd_hacks.support.trees import versions_of
from autograd_hacks.verbs import arguments, matrix
from autograd_hacks.verbs.arguments import check_kind
from autograd_hacks.verbs.matrix import Matrix
from autograd_hacks.verbs.statistics import NoiseScale, noise_scales

Kind = Literal["signs", "sjlt"]
WITHIN: ContextVar[list[str] | None] = ContextVar("products within a batch", default=None)
"""Verbs that compare rows of a batch with each other note it here, for `over`."""


class PerSampleGrads(Matrix):
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

    Each verb takes ``max_bytes``, which it may use beside its result.  A module that has to run again also takes what its
    own forward and backward pass need.  Read before ``optimizer.step()``: a verb raises StaleRecord if an activation,
    or a weight of a module that has to run again, was overwritten.
    """

    __repr__ = Shown.__str__

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a PerSampleGrads refers to its model's activations and can't be copied or pickled; take dense()")

    def dense(self) -> dict[str, Tensor]:
        """J written out, ``{name: (N, *shape)}``."""
        with self.reading():
            return self._each(lambda _, form: form.dense())

    @overload
    def norms(self, per_parameter: Literal[False] = False, max_bytes: int = BUDGET) -> Tensor: ...
    @overload
    def norms(self, per_parameter: Literal[True], max_bytes: int = BUDGET) -> dict[str, Tensor]: ...
    @checked(ON_VERBS)
    def norms(self, per_parameter: bool = False, max_bytes: int = BUDGET) -> Tensor | dict[str, Tensor]:
        """The 2-norm of each sample's gradient, N: the square root of the diagonal of J Jᵀ.

        per_parameter: return {name: N} instead    max_bytes: bytes to use beside the result

        Source: Goodfellow 2015 (arXiv:1510.01799); for layers with positions Li et al. 2022 (arXiv:2110.05679), section 4.
        """
        with self.reading():
            if per_parameter:
                return self._each(lambda _, form: form.norms(max_bytes))
            forms, factor = without_factor(self)
            return self._placed(matrix.norms_of(forms, self._row_count, max_bytes) * abs(factor))

    @checked(ON_VERBS)
    def dot(self, v: Mapping[str, Tensor], max_bytes: int = BUDGET) -> Tensor:
        """J v̄, the inner product ⟨gₙ, v⟩ of each sample's gradient with a direction, N.

        For complex parameters it is Σ gₙ v̄, as in `gram`; the change of the loss along v is its real part.

        v: the direction, {name: shape} for every trainable parameter, whole or in shards
        max_bytes: bytes to use beside the result

        Raises ValueError for a missing or an extra entry, and for an entry of the wrong shape.
        """
        arguments.check_direction(v, self)
        along = {name: whole_of(x).to(self[name].like.device).conj().resolve_conj() for name, x in v.items()}
        return self._read(lambda name, form: form.dot(along[name], max_bytes))

    @checked(ON_VERBS)
    def weighted_sum(self, w: Tensor, max_bytes: int = BUDGET) -> dict[str, Tensor]:
        """Jᵀ w, the weighted sum Σₙ wₙ gₙ, {name: shape}.

        w: N weights; or (K, N) for K sums at once, which returns ``{name: (K, *shape)}``

        Raises ValueError for weights of the wrong shape, TypeError if ``w`` is not a floating-point tensor.
        """
        with self.summing(lambda: self._by_row(w, several=True)) as (by_row, _):
            return self.spread.settled(self._totals(by_row, max_bytes, narrow=True))

    @checked(ON_VERBS)
    def gram(self, other: PerSampleGrads | None = None, max_bytes: int = BUDGET) -> Tensor:
        """J J′ᴴ, the inner products ⟨gₙ, g′ₘ⟩ of all pairs of samples, (N, M).

        For the rows of `per_sample_jacobian` this is the empirical neural tangent kernel.

        other: the gradients of another batch of the same model; by default these gradients themselves
        max_bytes: bytes to use beside the result

        Raises ValueError for the gradients of another model.
        """
        other = self if other is None else other
        if other is self and (taken := WITHIN.get()) is not None:
            taken.append("gram")
        check_kind("gram", ON_VERBS, PerSampleGrads, "per_sample_grads(model) of another batch", other=other)
        if self._model != other._model or self.keys() != other.keys():
            is_other = self._model != other._model
            wrong = "belong to another model" if is_other else f"are {arguments.differing(list(other), list(self))}"
            raise ValueError(f"gram: the other gradients {wrong}; expected two batches of one model" + ON_VERBS)
        if differing := [name for name, form in self.items() if form.shape != other[name].shape]:
            raise ValueError(
                f"gram: for {differing[0]!r} the other gradients have shape {tuple(other[differing[0]].shape)}; expected "
                f"{tuple(self[differing[0]].shape)}, as here: apply preconditioned(metric) to both." + ON_METRICS
            )
        with self.reading(), other.reading():
            total = self._added(lambda name, form: form.gram(other[name], max_bytes), other._row_count)
            return other._placed(total, total.ndim - 1)

    @checked(ON_VERBS)
    def second_moment(
        self, w: Tensor | None = None, max_bytes: int = BUDGET, *, about: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """The weighted sum of squares Σₙ wₙ (gₙ - v)², elementwise, {name: shape}.

        With weights of 1/N it is the diagonal of the empirical Fisher matrix.  With the mean as v, divided by N - 1, it is
        the variance over the samples.

        w: N weights, all 1 by default    max_bytes: bytes to use beside the result
        about: v, {name: shape} for every trainable parameter; zero by default

        Raises as `weighted_sum` and `dot` do.
        """
        if about is not None:
            arguments.check_direction(about, self, "second_moment")
        whole = {name: whole_of(x).to(self[name].like.device) for name, x in (about or {}).items()}
        with self.summing(lambda: None if w is None else self._by_row(w)) as (w, _):
            return self.spread.settled(matrix.second_moments(self, w, whole, max_bytes).items())

    @checked(ON_VERBS)
    def reduce(self, f: Callable[[Tensor], Tensor], max_bytes: int = BUDGET) -> dict[str, Tensor]:
        """The sum Σₙ f(gₙ) of an elementwise function of the gradients, {name: shape}.

        Examples are the sum of the samples' signs, of their magnitudes, or of their clamped entries.  After `group`, gₙ is
        the sum of a group's rows.

        f: an elementwise function: ``torch.sign``, ``torch.abs``, ``lambda g: g.clamp(-1, 1)``, or ``lambda g: g > 0`` to
        count. It gets a matrix of any size, a part of the rows, and returns a tensor of the same shape. About 1,024 entries
        of each part are also passed to it beside other entries, to check that each result depends on its own entry only

        For half-precision parameters the sums are in single precision, also over processes.
        Raises TypeError if ``f`` is not a function, ValueError if it isn't elementwise or overwrites its argument.
        Source: Roulet and Agarwala 2025, "Per-example gradients: a new frontier for understanding and improving
        optimizers" (arXiv:2510.00236), which takes optimizers' signs and squares inside the mean over samples.
        """
        check_kind("reduce", ON_VERBS, Callable, "an elementwise function: torch.sign", f=f)

        def here() -> dict[str, Tensor]:  # f may fail on one process alone
            with without_autocast(self._by_device.values()):
                return {name: form.reduce(arguments.elementwise(f, name), max_bytes) for name, form in self.items()}

        with self.summing(here) as (sums, _):
            return self.spread.settled(sums.items(), narrow=False)

    @overload
    def noise_scale(self, per_parameter: Literal[False] = False, max_bytes: int = BUDGET) -> NoiseScale: ...
    @overload
    def noise_scale(self, per_parameter: Literal[True], max_bytes: int = BUDGET) -> dict[str, NoiseScale]: ...
    @checked(ON_NOISE)
    def noise_scale(self, per_parameter: bool = False, max_bytes: int = BUDGET) -> NoiseScale | dict[str, NoiseScale]:
        """The gradient noise scale tr Σ / ‖G‖² of one batch: `NoiseScale.scale`, with its two terms.

        per_parameter: return {name: NoiseScale} instead    max_bytes: bytes to use beside the result

        Raises ValueError for fewer than two samples, and for rows of `per_sample_jacobian`; NothingRecorded for the rows of
        `backprop_hess`.
        Source: McCandlish et al. 2018, "An empirical model of large-batch training" (arXiv:1812.06162), appendix A.1 with
        batches of 1 and N samples.
        """
        each = noise_scales(self, max_bytes)
        return each if per_parameter else NoiseScale(*(matrix.added(parts, ()) for parts in zip(*each.values())))

    @checked(ON_VERBS)
    def group(self, ids: Tensor, groups: int | None = None) -> PerSampleGrads:
        """Sums of rows with the same id: one row for each user, or each document.

        ids: N integers, one for each sample
        groups: the number of rows; each id must then be in [0, groups). By default there is one row for each distinct id,
        in the order of the ids

        Raises ValueError for ids of the wrong shape or out of range, TypeError if they are not integers.
        """
        ids, groups = arguments.numbered(ids, groups, self.samples)
        ids = self._rows_of(ids, groups)
        forms = {n: Grouping(form, ids.to(form.like.device), groups * prod(self.entries)) for n, form in self.items()}
        return self.with_forms(forms, groups)

    def select(self, index: slice | Tensor) -> PerSampleGrads:
        """The rows of some samples.

        For the rows of `backprop_hess` it selects rows and keeps ``batch``, so curvature is still divided by the same
        number.

        index: a slice, a mask of N booleans, or sample numbers (negative ones count from the end)
        Raises IndexError for a mask of another length, or for numbers out of range; TypeError for any other index.
        """
        chosen = arguments.chosen_samples(index, self.samples)
        rows = self._rows_of(chosen, self.samples)
        return self.with_forms({n: form[rows.to(form.like.device)] for n, form in self.items()}, len(chosen))

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

    @checked(ON_VERBS)
    def project(self, dim: int, seed: int = 0, max_bytes: int = BUDGET, *, kind: Kind = "signs") -> Tensor:
        """J R, the rows projected by a random map R, (N, dim).

        R keeps inner products in expectation: ⟨gₙ R, gₘ R⟩ ≈ ⟨gₙ, gₘ⟩.  It depends only on ``kind``, ``seed``, ``dim``, and
        each parameter's name and shape, so projections of any two batches can be compared.

        dim: the number of coordinates    seed: the seed of R    max_bytes: bytes to use beside the result
        kind: "signs", where coordinate k of a matrix G is uₖᵀ G vₖ / √dim with random signs u and v; or "sjlt", a sparse
        map that adds each number to one coordinate (see `forms.SparseMap`) and is much faster. The squared length
        of a projected unit gradient has a standard deviation of at most √(8 / dim) with signs, reached by matrices of rank
        one, and of about √(6 / dim) with a sparse map

        A parameter's own projection is that of ``per_sample_grads(model, only=name)``.  For small matrices Pᵀ Gₙ Q take
        ``grads.preconditioned(Metric.low_rank(model, rank)).dense()``.

        Raises ValueError for a ``dim`` below 1, and for an unknown kind.
        Source: Park et al. 2023, "TRAK" (arXiv:2303.14186); Choe et al. 2024, "LoGra" (arXiv:2405.13954), for uᵀ G v; Hu et
        al. 2025, "GraSS" (arXiv:2505.18976), for sparse maps.
        """
        maps = matrix.random_maps("project", dim, seed, kind)
        return self._read(lambda name, form: form.project(maps(name, form), max_bytes), dim)

    @checked(ON_VERBS)
    def gram_of_all(self) -> Tensor:
        """The inner products ⟨gₙ, g′ₘ⟩ of this process's N samples with all M samples of all processes, (N, M).

        Columns are in the order of the processes.  All processes must call it together.  Written-out rows go to each
        process, one parameter at a time.
        """
        with self.summing(lambda: None, self.samples) as (_, count):
            products = (form.gram(Dense(self.spread.everyones(form.dense()))) for form in self.values())
            return matrix.added(products, (self.samples, int(count)))

    def local(self) -> PerSampleGrads:
        """The same rows.  Sums are then over the samples of this process only."""
        return self._read_as(self._forms, self.samples, self._of._replace(spread=self.spread.local()))

    # For other modules.

    def with_forms(self, forms: Mapping[str, Form], samples: int) -> PerSampleGrads:
        """These gradients with other forms, for example with some of the rows."""
        batches = self.batches if self.hess_type else [samples]
        return self._read_as(forms, samples, self._of._replace(batches=batches))

    def _read_as(self, forms: Mapping[str, Form], samples: int, of: matrix.Of) -> PerSampleGrads:
        made = PerSampleGrads(forms, samples, of)
        made._versions = [*self._versions, *made._versions]
        return made


def _maps_of(
    metric: Mapping[str | nn.Parameter, LinearMap], named: Sequence[tuple[str, Tensor]], names: Sequence[str]
) -> dict[str, LinearMap]:
    """{name: map} for some names, of the model's parameters with all their names.

    Raises ValueError for a parameter without a map or with several maps, and for a pattern that matches nothing; TypeError
    for what is no map.
    """
    each = {f"map {number}": by for number, by in enumerate(metric.values())}
    check_kind("preconditioned", ON_METRICS, LinearMap, "a Metric, whose maps are linear", **each)
    found: dict[str, LinearMap] = {}
    by_id = {id(p): name for name, p in named if name in names}
    for key, by in metric.items():
        is_pattern = isinstance(key, str)
        meant = [name for name in names if matches(name, key)] if isinstance(key, str) else [by_id.get(id(key), "")]
        if is_pattern and (not meant or found.keys() & meant):
            wrong = "matches what an earlier key does" if meant else f"matches none of {arguments.some(names)}"
            raise ValueError(f"preconditioned: the metric's key {key!r} {wrong}" + ON_METRICS)
        found |= dict.fromkeys(meant, by)
    if missing := [name for name in names if name not in found]:
        raise ValueError(
            f"preconditioned: the metric has no map for {arguments.some(missing)}. Give them a map, None for the identity; "
            "or leave them out: per_sample_grads(model, only=...)." + ON_METRICS
        )
    return {name: found[name] for name in names}
