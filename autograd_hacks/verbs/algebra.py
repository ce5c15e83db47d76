"""Algebra on the matrix J of a whole model, without writing J out: products, sums, and selections of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from math import prod
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from autograd_hacks.errors import ON_METRICS, ON_VERBS, BlockTooLarge
from autograd_hacks.forms import BUDGET, Dense, Form, group
from autograd_hacks.forms.composite import without_factor
from autograd_hacks.forms.low_rank import LowRank, low_rank
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.parts import whole_of
from autograd_hacks.support.ranges import checked
from autograd_hacks.verbs import arguments, matrix
from autograd_hacks.verbs.arguments import LIMIT, check_kind
from autograd_hacks.verbs.matrix import Matrix

if TYPE_CHECKING:
    from typing import Self

Kind = Literal["signs", "sjlt"]
WITHIN: ContextVar[list[str] | None] = ContextVar("products within a batch", default=None)
"""Verbs that compare rows of a batch with each other note it here, for `over`."""


class Algebra(Matrix):
    """`PerSampleGrads` without statistics, metrics and curvature."""

    def dense(self) -> dict[str, Tensor]:
        """J written out, ``{name: (N, *shape)}``."""
        with self.reading():
            return self._each(lambda _, form: form.dense())

    @overload
    def norms(self, per_parameter: Literal[False] = False, budget: int = BUDGET) -> Tensor: ...
    @overload
    def norms(self, per_parameter: Literal[True], budget: int = BUDGET) -> dict[str, Tensor]: ...
    @checked(ON_VERBS)
    def norms(self, per_parameter: bool = False, budget: int = BUDGET) -> Tensor | dict[str, Tensor]:
        """The 2-norm of each sample's gradient, N: the square root of the diagonal of J Jᵀ.

        per_parameter: return {name: N} instead    budget: bytes to use beside the result

        Source: Goodfellow 2015 (arXiv:1510.01799); for layers with positions Li et al. 2022 (arXiv:2110.05679), section 4.
        """
        with self.reading():
            if per_parameter:
                return self._each(lambda _, form: form.norms(budget))
            forms, factor = without_factor(self)
            return self._placed(matrix.norms_of(forms, self._row_count, budget) * abs(factor))

    @overload
    def dot(self, v: Mapping[str, Tensor], budget: int = BUDGET) -> Tensor: ...
    @overload
    def dot(self, v: Mapping[str, Tensor], budget: int = BUDGET, *, per_parameter: bool) -> dict[str, Tensor]: ...
    @checked(ON_VERBS)
    def dot(
        self, v: Mapping[str, Tensor], budget: int = BUDGET, *, per_parameter: bool = False
    ) -> Tensor | dict[str, Tensor]:
        """J v̄, the inner product ⟨gₙ, v⟩ of each sample's gradient with a direction, N.

        For complex parameters it is Σ gₙ v̄, as in `gram`; the change of the loss along v is its real part.

        v: the direction, {name: shape} for every trainable parameter, whole or in shards
        budget: bytes to use beside the result    per_parameter: return {name: N} instead

        Raises ValueError for a missing or an extra entry, and for an entry of the wrong shape.
        """
        arguments.check_direction(v, self)
        along = {name: whole_of(x).to(self[name].like.device).conj().resolve_conj() for name, x in v.items()}
        return self._read(lambda name, form: form.dot(along[name], budget), per_parameter)

    @checked(ON_VERBS)
    def weighted_sum(self, w: Tensor | Mapping[str, Tensor], budget: int = BUDGET) -> dict[str, Tensor]:
        """Jᵀ w, the weighted sum Σₙ wₙ gₙ, {name: shape}.

        w: N weights; or (K, N) for K sums at once, which returns ``{name: (K, *shape)}``; or {name or pattern: weights} for
        the sums of those parameters only

        Raises ValueError for weights of the wrong shape, for a pattern that matches nothing, and for a parameter that
        several patterns match; TypeError if ``w`` is not a floating-point tensor.
        """
        if isinstance(w, Mapping):
            parts = arguments.parts_by(w, list(self))
            return {n: s for pattern, names in parts for n, s in self._part(names).weighted_sum(w[pattern], budget).items()}
        given = w
        with self.summing(lambda: self._by_row(given, several=True)) as (w, _):
            return self.spread.settled(self._totals(w, budget, narrow=True))

    @overload
    def gram(self, other: Self | None = None, budget: int = BUDGET) -> Tensor: ...
    @overload
    def gram(self, other: Self | None = None, budget: int = BUDGET, *, per_parameter: bool) -> dict[str, Tensor]: ...
    @checked(ON_VERBS)
    def gram(
        self, other: Self | None = None, budget: int = BUDGET, *, per_parameter: bool = False
    ) -> Tensor | dict[str, Tensor]:
        """J J′ᴴ, the inner products ⟨gₙ, g′ₘ⟩ of all pairs of samples, (N, M).

        For the rows of `per_sample_jacobian` this is the empirical neural tangent kernel.

        other: the gradients of another batch of the same model; by default these gradients themselves
        budget: bytes to use beside the result    per_parameter: return {name: (N, M)} instead

        Raises ValueError for the gradients of another model.
        """
        other = self if other is None else other
        if other is self and (taken := WITHIN.get()) is not None:
            taken.append("gram")
        check_kind("gram", ON_VERBS, Algebra, "per_sample_grads(model) of another batch", other=other)
        if self._model != other._model or self.keys() != other.keys():
            is_other = self._model != other._model
            wrong = "belong to another model" if is_other else f"are {arguments.differing(list(other), list(self))}"
            raise ValueError(f"gram: the other gradients {wrong}; expected two batches of one model" + ON_VERBS)
        if differing := [name for name, form in self.items() if form.shape != other[name].shape]:
            raise ValueError(
                f"gram: for {differing[0]!r} the other gradients have shape {tuple(other[differing[0]].shape)}; expected "
                f"{tuple(self[differing[0]].shape)}, as here: apply preconditioned(metric) to both." + ON_METRICS
            )
        if not per_parameter:
            return self._between(other, lambda name, form: form.gram(other[name], budget))
        with self.reading(), other.reading():
            products = self._each(lambda name, form: form.gram(other[name], budget))
            return {name: other._placed(x, x.ndim - 1) for name, x in products.items()}

    @checked(ON_VERBS)
    def gram_of_all(self, dim: int | None = None, seed: int = 0, limit: float = LIMIT) -> Tensor:
        """The inner products ⟨gₙ, g′ₘ⟩ of this process's N samples with all M samples of all processes, (N, M).

        Columns are in the order of the processes.  All processes must call it together.

        dim: project rows to this many coordinates first, as `project` does; N · dim numbers then go to each process. By
        default the products are exact: the written-out rows go to each process, one parameter at a time
        seed: the seed of the projection
        limit: bytes that one parameter's written-out rows may take, 1 GiB by default

        Raises BlockTooLarge, on all processes, if the rows of a parameter exceed the limit.
        Source: Park et al. 2023, "TRAK" (arXiv:2303.14186), for projected rows.
        """
        everyones = self.spread.everyones
        if dim is not None:
            with self.summing(lambda: self.project(dim, seed)) as (projected, _):
                return projected @ everyones(projected).mT
        size = max((form.shape.numel() * form.like.element_size() for form in self.values()), default=0)
        with self.summing(lambda: None, self.samples) as (_, count):
            if count * size > limit:
                raise BlockTooLarge(
                    f"gram_of_all: the rows of all {count:.0f} samples for the largest parameter take "
                    f"{count * size / 2**20:,.0f} MiB; the limit is {limit / 2**20:,.0f} MiB. Raise it, or give dim=4096."
                )
            products = (form.gram(Dense(everyones(form.dense()))) for form in self.values())
            return matrix.added(products, (self.samples, int(count)))

    @checked(ON_VERBS)
    def second_moment(self, w: Tensor | None = None, budget: int = BUDGET) -> dict[str, Tensor]:
        """The weighted sum of squares Σₙ wₙ gₙ², elementwise, {name: shape}.

        With weights of 1/N it is the diagonal of the empirical Fisher matrix.

        w: N weights, all 1 by default    budget: bytes to use beside the result

        Raises as `weighted_sum` does.
        """
        with self.summing(lambda: None if w is None else self._by_row(w)) as (w, _):
            return self.spread.settled(matrix.second_moments(self, w, {}, budget).items())

    @checked(ON_VERBS)
    def reduce(self, f: Callable[[Tensor], Tensor], budget: int = BUDGET) -> dict[str, Tensor]:
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
                return {name: form.reduce(arguments.elementwise(f, name), budget) for name, form in self.items()}

        with self.summing(here) as (sums, _):
            return self.spread.settled(sums.items(), narrow=False)

    @overload
    def project(
        self, dim: int, seed: int = 0, budget: int = BUDGET, *, kind: Kind = "signs", entries: int = 1
    ) -> Tensor: ...
    @overload
    def project(
        self, dim: int, seed: int = 0, budget: int = BUDGET, *, per_parameter: bool, kind: Kind = "signs", entries: int = 1
    ) -> dict[str, Tensor]: ...
    @checked(ON_VERBS)
    def project(
        self,
        dim: int,
        seed: int = 0,
        budget: int = BUDGET,
        *,
        per_parameter: bool = False,
        kind: Kind = "signs",
        entries: int = 1,
    ) -> Tensor | dict[str, Tensor]:
        """J R, the rows projected by a random map R, (N, dim).

        R keeps inner products in expectation: ⟨gₙ R, gₘ R⟩ ≈ ⟨gₙ, gₘ⟩.  It depends only on ``kind``, ``entries``, ``seed``,
        ``dim``, and each parameter's name and shape, so projections of any two batches can be compared.

        dim: the number of coordinates    seed: the seed of R    budget: bytes to use beside the result
        per_parameter: return {name: (N, dim)} instead, a projection of each parameter
        kind: "signs", where coordinate k of a matrix G is uₖᵀ G vₖ / √dim with random signs u and v; or "sjlt", a sparse
        map that adds each number to ``entries`` coordinates (see `forms.SparseMap`) and is much faster. The squared length
        of a projected unit gradient has a standard deviation of at most √(8 / dim) with signs, reached by matrices of rank
        one, and of about √(6 / dim) with a sparse map
        entries: coordinates per number in a sparse map, 1 by default; must divide ``dim``

        For small matrices Pᵀ Gₙ Q take ``grads.preconditioned(Metric.low_rank(model, rank)).dense()``.

        Raises ValueError for a ``dim`` below 1, for an unknown kind, and for ``entries`` below 1 or that don't divide
        ``dim``.
        Source: Park et al. 2023, "TRAK" (arXiv:2303.14186); Choe et al. 2024, "LoGra" (arXiv:2405.13954), for uᵀ G v; Hu et
        al. 2025, "GraSS" (arXiv:2505.18976), for sparse maps.
        """
        maps = matrix.random_maps("project: dim", dim, seed, kind, entries)
        return self._read(lambda name, form: form.project(maps(name, form), budget), per_parameter, dim)

    @checked(ON_VERBS)
    def low_rank(self, rank: int, budget: int = BUDGET) -> dict[str, LowRank]:
        """The best low-rank approximation of each sample's gradient, {name: (left, right)}.

        The gradient is approximated by Σᵣ left[n, :, r] right[n, :, r]ᵀ, with left (N, O, R) and right (N, I, R) for a
        parameter seen as a matrix O × I, and R = min(rank, O, I).  A vector has I = 1.  A gradient over T positions has rank
        at most T, so ``rank`` ≥ T is exact.  ``over(..., out="folder")`` writes the factors, and `Store` takes inner
        products of them.

        rank: the largest number of terms    budget: bytes to use beside the result

        Raises ValueError for a rank below 1, and for rows of output entries.
        Source: Li et al. 2026, "LoRIF" (arXiv:2601.21929).
        """
        if self.entries:
            raise ValueError("low_rank: these are rows of output entries; expected one row per sample." + ON_VERBS)
        with self.reading():
            return {name: low_rank(form, rank, budget) for name, form in self.items()}

    @checked(ON_VERBS)
    def group(self, ids: Tensor, groups: int | None = None) -> Self:
        """Sums of rows with the same id: one row for each user, or each document.

        ids: N integers, one for each sample
        groups: the number of rows; each id must then be in [0, groups). By default there is one row for each distinct id,
        in the order of the ids

        Raises ValueError for ids of the wrong shape or out of range, TypeError if they are not integers.
        """
        ids, groups = arguments.numbered(ids, groups, self.samples)
        ids = self._rows_of(ids, groups)
        forms = {n: group(form, ids.to(form.like.device), groups * prod(self.entries)) for n, form in self.items()}
        return self.with_forms(forms, groups)

    def select(self, index: slice | Tensor) -> Self:
        """The rows of some samples.

        For the rows of `backprop_hess` it selects rows and keeps ``batch``, so curvature is still divided by the same
        number.

        index: a slice, a mask of N booleans, or sample numbers (negative ones count from the end)
        Raises IndexError for a mask of another length, or for numbers out of range; TypeError for any other index.
        """
        chosen = arguments.chosen_samples(index, self.samples)
        rows = self._rows_of(chosen, self.samples)
        return self.with_forms({n: form[rows.to(form.like.device)] for n, form in self.items()}, len(chosen))

    def with_forms(self, forms: Mapping[str, Form], samples: int) -> Self:
        """These gradients with other forms, for example with some of the rows."""
        batches = self.batches if self.hess_type else [samples]
        kept = self.reached, self.loss_type, self._model, self.hess_type
        made = type(self)(forms, samples, *kept, batches, self.entries, self.spread)
        made._versions = [*self._versions, *made._versions]
        return made

    def _part(self, names: Iterable[str]) -> Self:
        return self.with_forms({name: self[name] for name in names}, self.samples)

    def local(self) -> Self:
        """The same rows.  Sums are then over the samples of this process only."""
        made = self.with_forms(self._forms, self.samples)
        made.batches, made.batch, made.spread = self.batches, self.batch, self.spread.local()
        return made
