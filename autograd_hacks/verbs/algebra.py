"""Algebra on the matrix J of a whole model, none of whose verbs writes it out: products, sums, some of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from math import prod
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from autograd_hacks.distributed.cut import each_norms, whole_norms, whole_sum
from autograd_hacks.errors import ON_METRICS, ON_VERBS, BlockTooLarge
from autograd_hacks.forms import BUDGET, Dense, Form, group
from autograd_hacks.forms.composite import unscaled, without_factor
from autograd_hacks.forms.low_rank import LowRank, low_rank
from autograd_hacks.forms.mapped import mapped
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.verbs import arguments, matrix
from autograd_hacks.verbs.arguments import LIMIT
from autograd_hacks.verbs.matrix import Matrix
from autograd_hacks.verbs.metric import random_sides

if TYPE_CHECKING:
    from typing import Self

WITHIN: ContextVar[list[str] | None] = ContextVar("products within a batch", default=None)
"""Where `over` hears that rows of a batch were compared with each other."""


class Algebra(Matrix):
    """`PerSampleGrads` without statistics and curvature."""

    def dense(self) -> dict[str, Tensor]:
        """J written out, ``{name: (N, *shape)}``."""
        with self.reading():
            rows = {name: self._placed(form.dense()) for name, form in self.items()}
            return {name: self.cuts[name].joined(x) if name in self.cuts else x for name, x in rows.items()}

    @overload
    def norms(self, per_parameter: Literal[False] = False, budget: int = BUDGET) -> Tensor: ...
    @overload
    def norms(self, per_parameter: Literal[True], budget: int = BUDGET) -> dict[str, Tensor]: ...
    def norms(self, per_parameter: bool = False, budget: int = BUDGET) -> Tensor | dict[str, Tensor]:
        """The 2-norm of each sample's gradient, N: the square root of the diagonal of J Jᵀ.

        per_parameter: whether to return {name: N} instead
        Source: Goodfellow 2015, arXiv:1510.01799; over positions Li et al. 2022, arXiv:2110.05679, section 4.
        """
        with self.reading():
            if per_parameter:
                norms = {name: form.norms(budget) for name, form in self.items()}
                return {name: self._placed(x) for name, x in each_norms(norms, self.cuts).items()}
            forms, factor = without_factor(self)
            norms = {name: form.norms(budget) for name, form in forms.items()}
            joined = whole_norms(norms, self.cuts, lambda own: matrix.joint_norms(own.values(), self._row_count))
            return self._placed(joined * abs(factor))

    @overload
    def dot(self, v: Mapping[str, Tensor], budget: int = BUDGET) -> Tensor: ...
    @overload
    def dot(self, v: Mapping[str, Tensor], budget: int = BUDGET, *, per_parameter: bool) -> dict[str, Tensor]: ...
    def dot(
        self, v: Mapping[str, Tensor], budget: int = BUDGET, *, per_parameter: bool = False
    ) -> Tensor | dict[str, Tensor]:
        """J v̄: ⟨gₙ, v⟩ for each sample, N, of complex numbers Σ gₙ v̄, as `gram` has it; the change of its loss along v is
        the real part.

        v: {name: shape} for all parameters, as gradients are, whole or in shards
        per_parameter: whether to return {name: N} instead
        Raises ValueError for directions that are missing, that no parameter has, or of another shape.
        """
        parts = self._direction(v)

        def along(name: str, form: Form) -> Tensor:
            return form.dot(parts[name].to(form.like.device).conj().resolve_conj(), budget)

        with self.reading():
            if per_parameter:
                return self._each({name: along(name, form) for name, form in self.items()})
            return self._added(along)

    def weighted_sum(self, w: Tensor | Mapping[str, Tensor], budget: int = BUDGET) -> dict[str, Tensor]:
        """Jᵀ w: Σₙ wₙ gₙ, {name: shape}.

        w: N; or (K, N) for K sums at once, ``{name: (K, *shape)}``; or {name or pattern: such weights}, of these parameters
        Raises ValueError for weights of another shape, and for patterns that match nothing, or one parameter several times;
        TypeError for what is no floating-point tensor.
        """
        if isinstance(w, Mapping):
            parts = arguments.parts_by(w, list(self))
            return {n: s for pattern, names in parts for n, s in self._part(names).weighted_sum(w[pattern], budget).items()}
        given = w
        with self.summing(lambda: self._by_row(given, several=True)) as (w, _):
            # Weights in what a form adds up in, or better.
            weights: dict[tuple[torch.device, torch.dtype, float], Tensor] = {}

            def total(form: Form) -> Tensor:
                plain, factor = unscaled(form)
                like, dtype = plain.like, plain.sum_dtype
                if (kind := (like.device, dtype, factor)) not in weights:
                    weights[kind] = w.to(like.device, torch.promote_types(w.dtype, dtype)) * factor
                return plain.weighted_sum(weights[kind], budget).to(like.dtype)

            sums = ((name, total(form)) for name, form in self.items())
            return self.spread.settled(sums)

    @overload
    def gram(self, other: Self | None = None, budget: int = BUDGET) -> Tensor: ...
    @overload
    def gram(self, other: Self | None = None, budget: int = BUDGET, *, per_parameter: bool) -> dict[str, Tensor]: ...
    def gram(
        self, other: Self | None = None, budget: int = BUDGET, *, per_parameter: bool = False
    ) -> Tensor | dict[str, Tensor]:
        """J J′ᴴ: ⟨gₙ, g′ₘ⟩ for each pair of samples, (N, M).  Of `per_sample_jacobian` the empirical tangent kernel.

        other: the gradients of another batch by the same model; these themselves unless told
        per_parameter: whether to return {name: (N, M)} instead
        Raises ValueError for the gradients of another model.
        """
        other = self if other is None else other
        if other is self and (taken := WITHIN.get()) is not None:
            taken.append("gram")
        if not isinstance(other, Algebra):
            raise TypeError(
                f"gram: the other batch is {arguments.kind_of(other)}; expected the PerSampleGrads of another batch. Take "
                "per_sample_grads(model) after its backward pass." + ON_VERBS
            )
        if self._model != other._model or self.keys() != other.keys():
            raise ValueError(
                "gram: the other gradients are of another model, or of other parameters; expected two batches of one model. "
                "Take both by per_sample_grads(model) with the same parameters trained and the same only=." + ON_VERBS
            )
        if differing := [name for name, form in self.items() if form.shape != other[name].shape]:
            raise ValueError(
                f"gram: for {differing[0]!r} the other gradients have shape {tuple(other[differing[0]].shape)}; expected "
                f"{tuple(self[differing[0]].shape)}, as these have. A metric has changed the shape of one side: apply "
                "preconditioned(metric) to both." + ON_METRICS
            )
        if not per_parameter:
            return self._between(other, lambda name, form: form.gram(other[name], budget))
        with self.reading(), other.reading():
            products = self._each({name: form.gram(other[name], budget) for name, form in self.items()})
            return {name: other._placed(x, x.ndim - 1) for name, x in products.items()}

    def gram_of_all(self, dim: int | None = None, seed: int = 0, limit: float = LIMIT) -> Tensor:
        """⟨gₙ, g′ₘ⟩ of this process's samples with those of all processes, (N, M), M in the order of the processes.

        dim: from rows that are projected to so many coordinates, as `project` does it: N · dim numbers go to each process.
        Unless told, the products are exact: the rows of all, written out, go to each process, one parameter at a time
        limit: bytes that those may have

        All processes at once.  Raises BlockTooLarge on all where the rows of a parameter take more.
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
                    f"gram_of_all: the rows of all {count:.0f} samples take {count * size / 2**20:,.0f} MiB for the largest "
                    f"parameter, on each process; the limit is {limit / 2**20:,.0f} MiB. Project them, "
                    "gram_of_all(dim=4096), or raise limit."
                )
            shape = self.samples, int(count)

            def products(forms: Mapping[str, Form]) -> Tensor:
                return matrix.added((form.gram(Dense(everyones(form.dense()))) for form in forms.values()), shape)

            return whole_sum(self, self.cuts, products)

    def second_moment(self, w: Tensor | None = None, budget: int = BUDGET) -> dict[str, Tensor]:
        """Σₙ wₙ gₙ², elementwise, {name: shape}: with weights of 1/N the diagonal of the empirical Fisher matrix.

        w: N, ones unless told
        Raises as `weighted_sum` does.
        """
        with self.summing(lambda: None if w is None else self._by_row(w)) as (w, _):
            return self.spread.settled(matrix.second_moments(self, w, {}, budget).items())

    def reduce(self, f: Callable[[Tensor], Tensor], budget: int = BUDGET) -> dict[str, Tensor]:
        """Σₙ f(gₙ), elementwise, {name: shape}: the sum of the samples' signs, of their magnitudes, of what each has left
        after clamping.  After `group` gₙ is the sum of a group's rows.

        f: an elementwise function, ``torch.sign``, ``torch.abs``, ``lambda g: g.clamp(-1, 1)``, or ``lambda g: g > 0`` to
        count.  It gets pieces of rows, a matrix of any size, and returns as many numbers.  Some 1,024 numbers of each piece
        are given to it beside others too, and must come out the same: what a number becomes depends on it alone

        Sums of half precision are in single, also over processes.
        Raises TypeError for what is no function, ValueError for one that isn't elementwise or overwrites what it is given.
        Source: Roulet and Agarwala 2025, "Per-example gradients: a new frontier for understanding and improving
        optimizers" (arXiv:2510.00236), which puts signs and squares of optimizers inside the mean over samples.
        """
        if not callable(f):
            raise TypeError(
                f"reduce: {arguments.kind_of(f)} is no function; expected an elementwise one, torch.sign." + ON_VERBS
            )

        def here() -> dict[str, Tensor]:  # f may fail on one process alone
            with without_autocast(form.like for form in self.values()):
                return {name: form.reduce(arguments.elementwise(f, name), budget) for name, form in self.items()}

        with self.summing(here) as (sums, _):
            return self.spread.settled(sums.items(), narrow=False)

    @overload
    def project(
        self,
        dim: int,
        seed: int = 0,
        budget: int = BUDGET,
        *,
        kind: Literal["signs", "sjlt"] = "signs",
        entries: int = 1,
    ) -> Tensor: ...
    @overload
    def project(
        self,
        dim: int | None = None,
        seed: int = 0,
        budget: int = BUDGET,
        *,
        per_parameter: bool,
        rank: int | None = None,
        kind: Literal["signs", "sjlt"] = "signs",
        entries: int = 1,
    ) -> dict[str, Tensor]: ...
    def project(
        self,
        dim: int | None = None,
        seed: int = 0,
        budget: int = BUDGET,
        *,
        per_parameter: bool = False,
        rank: int | None = None,
        kind: Literal["signs", "sjlt"] = "signs",
        entries: int = 1,
    ) -> Tensor | dict[str, Tensor]:
        """J R, (N, dim), for a random map R that keeps inner products in expectation: ⟨gₙ R, gₘ R⟩ ≈ ⟨gₙ, gₘ⟩.

        per_parameter: whether to return {name: (N, dim)} instead, each parameter's own projection
        rank: with ``per_parameter``, and in the place of ``dim``: {name: (N, rank, rank)}, Pᵀ Gₙ Q with random signs P and
        Q, as `Metric.low_rank` has them; a vector has at most rank² numbers, a side with no more than ``rank`` all its own
        kind: "signs", where coordinate k of a matrix G is uₖᵀ G vₖ / √dim with random signs u and v; or "sjlt", a sparse
        map, which moves each number to ``entries`` coordinates (see `forms.SparseMap`), and takes far less time.  The
        square of a unit gradient's projected length has a standard deviation of at most √(8 / dim) with signs, for a matrix
        of rank one, and of about √(6 / dim) with a sparse map, for any
        entries: of a sparse map; ``dim`` is a multiple

        R depends on ``kind``, ``entries``, ``seed``, ``dim``, and each parameter's name and shape, and on nothing else: any
        two batches can be compared.
        Source: Park et al. 2023, "TRAK" (arXiv:2303.14186); Choe et al. 2024, "LoGra" (arXiv:2405.13954), for uᵀ G v; Hu et
        al. 2025, "GraSS" (arXiv:2505.18976), for sparse maps.

        Raises ValueError for a ``dim`` or ``rank`` below 1, for neither or both, another kind, and entries that are none or
        don't divide ``dim``.
        """
        if rank is not None:
            if dim is not None or not per_parameter or self.cuts or kind != "signs":
                raise ValueError(
                    f"project: rank={rank} doesn't go with dim={dim}, per_parameter={per_parameter}, kind={kind!r}; "
                    "expected project(rank=..., per_parameter=True), of parameters that aren't cut over processes."
                    + ON_VERBS
                )
            with self.reading():
                sides = {n: random_sides(n, form.shape, rank, seed, form.like.device) for n, form in self.items()}
                return {name: self._placed(mapped(form, sides[name]).dense()) for name, form in self.items()}
        matrix.check_map("project: dim", dim, kind, entries)
        count = dim or 0

        def projected(name: str, form: Form) -> Tensor:
            random = matrix.random_map(name, form.shape, count, seed, self.cuts.get(name), kind, entries)
            return form.project(random, budget)

        with self.reading():
            if per_parameter:
                return self._each({name: projected(name, form) for name, form in self.items()})
            return self._added(projected, count)

    def low_rank(self, rank: int, budget: int = BUDGET) -> dict[str, LowRank]:
        """The best approximation of each sample's gradient by a matrix of low rank, {name: (left, right)}: Σᵣ left[n, :, r]
        right[n, :, r]ᵀ, left (N, O, R) and right (N, I, R) for a parameter seen as a matrix O × I, I being 1 for a vector,
        and R = min(rank, O, I).

        Over T positions a gradient has rank T at most, and is exact for ``rank`` from there.  ``over(..., out="folder")``
        writes them, and `Store` takes inner products from the factors.
        Source: Li et al. 2026, "LoRIF" (arXiv:2601.21929).

        Raises ValueError for a rank below 1, and for parameters that are cut over processes.
        """
        arguments.check_count("low_rank: rank", rank, "singular values", ON_VERBS)
        if self.cuts or self.entries:
            raise ValueError(
                f"low_rank: these are {'parameters cut over processes' if self.cuts else 'rows of output entries'}; "
                "expected rows of whole parameters, one for each sample." + ON_VERBS
            )
        with self.reading():
            return {name: low_rank(form, rank, budget) for name, form in self.items()}

    def group(self, ids: Tensor, groups: int | None = None) -> Self:
        """The sums over samples with the same id: one row for each user, each document.

        ids: N integers    groups: how many rows, for ids in [0, groups); unless told there is one for each id that occurs,
        in the order of the ids
        Raises ValueError for ids of another shape, or out of range, TypeError for what are no integers.
        """
        ids, groups = arguments.numbered(ids, groups, self.samples)
        ids = self._rows_of(ids, groups)
        forms = {n: group(form, ids.to(form.like.device), groups * prod(self.entries)) for n, form in self.items()}
        return self.with_forms(forms, groups)

    def select(self, index: slice | Tensor) -> Self:
        """Some of the samples.  index: a slice, a mask of N booleans, or sample numbers (negative ones count from the end)

        Of the rows of `backprop_hess` some rows; ``batch`` stays then, so that curvature stays a sum over what it was.

        Raises IndexError for a mask of another length, or numbers out of range.
        """
        chosen = arguments.chosen_samples(index, self.samples)
        rows = self._rows_of(chosen, self.samples)
        return self.with_forms({n: form[rows.to(form.like.device)] for n, form in self.items()}, len(chosen))

    def with_forms(self, forms: Mapping[str, Form], samples: int) -> Self:
        """The same gradients as other forms, some rows of these say."""
        batches = self.batches if self.hess_type else [samples]
        kept = self.reached, self.loss_type, self._model, self.hess_type
        made = type(self)(forms, samples, *kept, batches, self.entries, self.spread)
        made._versions = [*self._versions, *made._versions]
        return made

    def _part(self, names: Iterable[str]) -> Self:
        return self.with_forms({name: self[name] for name in names}, self.samples)

    def local(self) -> Self:
        """The same rows, for sums over the samples of this process alone."""
        made = self.with_forms(self._forms, self.samples)
        made.batches, made.batch, made.spread = self.batches, self.batch, self.spread.local()
        return made
