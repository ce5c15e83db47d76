"""What per-sample gradients say, without writing them out: algebra on J for the whole model."""

from __future__ import annotations

import weakref
from collections.abc import ItemsView, Iterator, Mapping, Sequence, ValuesView
from math import prod
from typing import Literal, overload

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.distributed.spread import Spread
from autograd_hacks.errors import ON_VERBS
from autograd_hacks.forms import BUDGET, Form, group
from autograd_hacks.support.display import Hinting, Shown, Table, table_of
from autograd_hacks.support.trees import version_of
from autograd_hacks.verbs.arguments import Axes, check_dim, check_direction, check_ids, kind_of, name_among
from autograd_hacks.verbs.rounds import by_rows, second_moments
from autograd_hacks.verbs.statistics import Statistics


class PerSampleGrads(Hinting, Shown, Statistics):
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

    Each verb takes ``budget``, the bytes that it may use beside its result (and, for modules that are run again, beside
    what their own forward and backward pass need).  Each raises StaleRecord where something that the gradients are made of
    was overwritten since: an activation, or for modules that are run again a weight.  So read before ``optimizer.step()``.
    """

    def __init__(
        self,
        forms: Mapping[str, Form],
        samples: int,
        reached: frozenset[str],
        loss_type: str,
        model: weakref.ref[nn.Module],
        hess_type: str | None,
        batches: Sequence[int],
        entries: Sequence[int] = (),
        spread: Spread | None = None,
    ) -> None:
        self.spread = Spread({}, None) if spread is None else spread
        self._forms, self.samples, self.reached, self.loss_type = dict(forms), samples, reached, loss_type
        self.hess_type, self.batches, self.batch = hess_type, batches, sum(batches)
        self._model, self._axes, self.cuts = model, Axes(samples, tuple(entries)), self.spread.cuts
        self._versions = [
            (name, x, version_of(x)) for name, form in forms.items() for leaf in form.leaves() for x in leaf.held
        ]

    def __getitem__(self, name: str | nn.Parameter) -> Form:
        """A parameter's form.  name: its name, or another one of a shared parameter's, or the parameter itself

        Raises KeyError for what is none of a parameter that trains.
        """
        found = self._forms.get(name) if isinstance(name, str) else None
        return self._forms[self._name_of(name)] if found is None else found

    def _name_of(self, key: object) -> str:
        model = self._model()
        named = [] if model is None else list(model.named_parameters(remove_duplicate=False))
        return name_among(key, named, list(self._forms))

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    def items(self) -> ItemsView[str, Form]:
        return self._forms.items()  # Mapping's own would look each name up, ten times in a step

    def values(self) -> ValuesView[Form]:
        return self._forms.values()

    def _table(self) -> Table:
        size = sum(form.shape.numel() for form in self.values())
        title = f"PerSampleGrads of {self._axes} for {len(self)} parameters, {size} numbers each"
        shapes = {name: (self.samples, *self.entries, *form.shape) for name, form in self.items()}
        return table_of(title, self._forms, shapes, {name: ", not reached" for name in self if name not in self.reached})

    __repr__ = Shown.__str__

    def dense(self) -> dict[str, Tensor]:
        """J written out, ``{name: (N, *shape)}``."""
        with self.reading():
            return self._joined({name: self._axes.placed(form.dense()) for name, form in self.items()})

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
            norms = by_rows(self, self._axes.rows, lambda name, form: form.norms(budget), budget)
            return self._each_norms(norms) if per_parameter else self._joint_norms(norms)

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
        check_direction(v, {name: self.shape_of(name) for name in self})
        v = self._own(v)
        with self.reading():

            def along(name: str, form: Form) -> Tensor:
                return form.dot(v[name].to(form.like.device).conj().resolve_conj(), budget)

            return (
                self._each(by_rows(self, self._axes.rows, along, budget)) if per_parameter else self._summed(along, budget)
            )

    def weighted_sum(self, w: Tensor, budget: int = BUDGET) -> dict[str, Tensor]:
        """Jᵀ w: Σₙ wₙ gₙ, {name: shape}.

        w: N; or (K, N) for K sums at once, ``{name: (K, *shape)}``
        Raises ValueError for weights of another shape, TypeError for what is no floating-point tensor.
        """
        with self.summing(lambda: self._by_row(w, several=True)) as (w, _):
            # Weights in what a form adds up in, or better.
            kinds = {n: (form.like.device, form.sum_dtype) for n, form in self.items()}
            own = {kind: w.to(kind[0], torch.promote_types(w.dtype, kind[1])) for kind in {*kinds.values()}}
            sums = ((n, form.weighted_sum(own[kinds[n]], budget).to(form.like.dtype)) for n, form in self.items())
            return self.spread.settled(sums)

    @overload
    def gram(self, other: PerSampleGrads | None = None, budget: int = BUDGET) -> Tensor: ...
    @overload
    def gram(
        self, other: PerSampleGrads | None = None, budget: int = BUDGET, *, per_parameter: bool
    ) -> dict[str, Tensor]: ...
    def gram(
        self, other: PerSampleGrads | None = None, budget: int = BUDGET, *, per_parameter: bool = False
    ) -> Tensor | dict[str, Tensor]:
        """J J′ᴴ: ⟨gₙ, g′ₘ⟩ for each pair of samples, (N, M).  Of `per_sample_jacobian` the empirical tangent kernel.

        other: the gradients of another batch by the same model; these themselves unless told
        per_parameter: whether to return {name: (N, M)} instead
        Raises ValueError for the gradients of another model.
        """
        other = self if other is None else other
        if not isinstance(other, PerSampleGrads):
            raise TypeError(
                f"gram was given {type(other).__name__}; expected the PerSampleGrads of another batch" + ON_VERBS
            )
        if self._model != other._model or self.keys() != other.keys():
            raise ValueError(
                "gram was given the gradients of another model, or of other parameters: inner products are taken between "
                "two batches of one model. Take both from per_sample_grads of the same model, with the same parameters "
                "trained." + ON_VERBS
            )
        with self.reading(), other.reading():
            if per_parameter:
                products = self._each({name: form.gram(other[name], budget) for name, form in self.items()})
                return {name: other._axes.placed(own, own.ndim - 1) for name, own in products.items()}
            found = self._products(other, (self._axes.rows, other._axes.rows), budget)
            return self._axes.placed(other._axes.placed(found, 1))

    def second_moment(self, w: Tensor | None = None, budget: int = BUDGET) -> dict[str, Tensor]:
        """Σₙ wₙ gₙ², elementwise, {name: shape}: with weights of 1/N the diagonal of the empirical Fisher matrix.

        w: N, ones unless told
        Raises as `weighted_sum` does.
        """
        with self.summing(lambda: None if w is None else self._by_row(w)) as (w, _):
            return self.spread.settled(second_moments(self, self._axes.rows, w, {}, budget).items())

    def project(self, dim: int, seed: int = 0, budget: int = BUDGET) -> Tensor:
        """J R, (N, dim), for a random map R that keeps inner products in expectation: ⟨gₙ R, gₘ R⟩ ≈ ⟨gₙ, gₘ⟩.

        R depends on ``seed``, ``dim``, and each parameter's name and shape, and on nothing else: any two batches can be
        compared.  The square of a unit gradient's projected length spreads by √(8 / dim) at most for a matrix of rank one.
        Source: Park et al. 2023, "TRAK" (arXiv:2303.14186); Choe et al. 2024, "LoGra" (arXiv:2405.13954), for uᵀ G v.

        Raises ValueError for a ``dim`` below 1.
        """
        check_dim("project was given dim", dim)
        with self.reading():
            return self._summed(lambda name, form: form.project(self._map(name, dim, seed), budget), budget, dim)

    def group(self, ids: Tensor, groups: int | None = None) -> PerSampleGrads:
        """The sums over samples with the same id: one row for each user, each document.

        ids: N integers    groups: how many rows, for ids in [0, groups); unless told there is one for each id that occurs,
        in the order of the ids
        Raises ValueError for ids of another shape, or out of range, TypeError for what are no integers.
        """
        check_ids(ids, groups, self.samples)
        if groups is None:
            known, ids = ids.unique(return_inverse=True)
            groups = len(known)
        ids = self._axes.of_samples(ids, groups)
        forms = {n: group(form, ids.to(form.like.device), groups * prod(self.entries)) for n, form in self.items()}
        return self.with_forms(forms, groups)

    def select(self, index: slice | Tensor) -> PerSampleGrads:
        """Some of the samples.  index: a slice, a mask of N booleans, or sample numbers (negative ones count from the end)

        Of the rows of `backprop_hess` some rows; ``batch`` stays then, so that curvature stays a sum over what it was.

        Raises IndexError for a mask of another length, or numbers out of range.
        """
        if not isinstance(index, slice | Tensor) or (isinstance(index, Tensor) and index.ndim != 1):
            raise TypeError(
                f"select was given {kind_of(index)}; expected a slice, a mask of N booleans, or a vector of numbers"
                + ON_VERBS
            )
        if isinstance(index, slice):
            index = torch.tensor(range(self.samples)[index], dtype=torch.long, device="cpu")
        chosen = torch.arange(self.samples, device="cpu")[index.cpu()]
        rows = self._axes.of_samples(chosen, self.samples)
        return self.with_forms({n: form[rows.to(form.like.device)] for n, form in self.items()}, len(chosen))

    def with_forms(self, forms: Mapping[str, Form], samples: int) -> PerSampleGrads:
        """The same gradients as other forms, some rows of these say."""
        batches = self.batches if self.hess_type else [samples]
        kept = self.reached, self.loss_type, self._model, self.hess_type
        made = PerSampleGrads(forms, samples, *kept, batches, self.entries, self.spread)
        made._versions = [*self._versions, *made._versions]
        return made

    def local(self) -> PerSampleGrads:
        """The same rows, for sums over the samples of this process alone."""
        made = self.with_forms(self._forms, self.samples)
        made.batches, made.batch, made.spread = self.batches, self.batch, self.spread.local()
        return made

    def __reduce_ex__(self, protocol: object) -> str:
        raise TypeError("a PerSampleGrads refers to what its model has seen, and can't be copied or pickled; take dense()")

    @property
    def entries(self) -> tuple[int, ...]:
        return self._axes.entries

    def _by_row(self, w: Tensor, several: bool = False) -> Tensor:
        return self._axes.by_row(w, several, any(form.like.is_complex() for form in self.values()))
