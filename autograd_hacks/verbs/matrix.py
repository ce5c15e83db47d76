"""The forms of a whole model: when they may be read, and how verbs sum over parameters."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import contextmanager
from functools import reduce
from itertools import starmap
from math import prod
from typing import NamedTuple, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_VERBS, StaleRecord
from autograd_hacks.forms import BUDGET, Dense, Form, Outer, RandomMap, SparseMap
from autograd_hacks.forms.base import held_bytes, kinds_of, written_bytes
from autograd_hacks.forms.composite import without_factor
from autograd_hacks.forms.numerics import SMALL, accumulation_dtype, row_norms
from autograd_hacks.forms.projection import AnyMap
from autograd_hacks.reading.processes import Spread
from autograd_hacks.support.contexts import outside_inference, without_autocast
from autograd_hacks.support.display import Hinting, Shown, Table, with_unit
from autograd_hacks.support.patterns import unwrapped
from autograd_hacks.support.ranges import check_word
from autograd_hacks.support.trees import overwritten_in, versions_among
from autograd_hacks.verbs.arguments import kind_of, name_among

T = TypeVar("T")
Forms = Mapping[str, Form]
"""Forms of the same N samples, by the parameter's name."""
Verb = Callable[[str, Form], Tensor]
"""``verb(name, form)`` returns something for each of the form's samples."""
INTERNAL = {"with_forms", "reading", "summing", "wide_sum", "spread", "batches"}
"""Attributes for other modules of the library, hidden from tab completion and from the reference."""


def second_moments(forms: Forms, w: Tensor | None, about: Mapping[str, Tensor], max_bytes: int) -> dict[str, Tensor]:
    """Σₙ wₙ (gₙ - about)², elementwise, {name: shape}.  w: N, None for all 1    about: {name: shape}, else zero"""
    moments: dict[str, Tensor] = {}
    for name, form in forms.items():
        weights = form.new_sums(form.samples).abs() + 1 if w is None else w.to(form.like.device)
        moments[name] = form.second_moment(weights, about.get(name), max_bytes)
    return moments


def small_alike(forms: Forms, max_bytes: int) -> list[dict[str, list[Tensor]]]:
    """Small forms, in groups to be read at once in an eighth of a budget, because a kernel for each would take far longer.

    A group has the rows of `Dense` forms as matrices, or both factors of `Outer` forms of one position and of one shape."""
    found, left = dict[Hashable, dict[str, list[Tensor]]](), max_bytes // 8
    for name, form in forms.items():
        if type(form) is Outer and form.flat is not None:
            held, shape, numbers = [*form.flat], (form.fan_out, form.fan_in), form.samples * (form.fan_out + form.fan_in)
        elif type(form) is Dense:
            held, shape, numbers = [form.values], (-1, -1), form.values.numel()
        else:
            continue
        dtype, device, is_flat = held[0].dtype, held[0].device, type(form) is Outer or len(form.shape) == 1
        if numbers <= SMALL and dtype in (torch.float32, torch.float64) and (left := left - numbers * dtype.itemsize) >= 0:
            found.setdefault((dtype, device, shape), {})[name] = held if is_flat else [form.matrix()]
    return [*found.values()]


def norms_of(forms: Forms, samples: int, max_bytes: int) -> Tensor:
    """The norms of rows of all parameters together, N."""
    groups, parts = small_alike(forms, max_bytes), list[Tensor]()
    for group in groups:
        factors = [*zip(*group.values())]
        if len(factors) == 1:
            parts.append(torch.cat(factors[0], 1))
        else:
            stacked = (own[0] if len(own) == 1 else torch.stack(own, 1).flatten(0, 1) for own in factors)
            parts.append(reduce(torch.mul, map(row_norms, stacked)).view(samples, len(group)))
    joined = {name for group in groups for name in group}
    return joint_norms([*parts, *[form.norms(max_bytes) for name, form in forms.items() if name not in joined]], samples)


def joint_norms(parts: Sequence[Tensor], samples: int) -> Tensor:
    """The norms of rows, N, from those of their parts, N each, or from numbers that have these norms, (N, F)."""
    if not parts:
        return torch.zeros(samples, device="cpu")
    # A model's parts may differ in dtype and device.
    dtype, device = reduce(torch.promote_types, (part.dtype for part in parts)), parts[0].device
    return row_norms(torch.cat([part.to(device, dtype).view(samples, *(part.shape[1:] or (1,))) for part in parts], 1))


def added(terms: Iterable[Tensor], shape: tuple[int, ...]) -> Tensor:
    """The sum over parameters, which may differ in dtype and device."""
    total: Tensor | None = None
    for part in terms:
        total = part if total is None else total + part.to(total.device)
    return torch.zeros(shape, device="cpu") if total is None else total


def random_maps(what: str, dim: int, seed: int, kind: str) -> Callable[[str, Form], AnyMap]:
    """The random map of each parameter.  Raises ValueError for an unknown kind.  what: the verb, for the message"""
    check_word(what, ON_VERBS, ("signs", "sjlt"), kind=kind)
    of = SparseMap if kind == "sjlt" else RandomMap
    return lambda name, form: of(unwrapped(name), form.shape, dim, seed)


class Of(NamedTuple):
    """Where rows come from.  The first fields are those of `PerSampleGrads`."""

    reached: frozenset[str]
    loss_type: str
    model: weakref.ref[nn.Module]
    hess_type: str | None
    batches: Sequence[int]  # the micro-batches' numbers of samples
    entries: tuple[int, ...] = ()
    spread: Spread = Spread({}, None)  # the processes that have other samples


class Matrix(Hinting, Shown, Mapping[str, Form]):
    """`PerSampleGrads` without the verbs."""

    def __init__(self, forms: Mapping[str, Form], samples: int, of: Of) -> None:
        self._forms, self.samples, self._of = dict(forms), samples, of
        self.reached, self.loss_type, self._model, self.hess_type, self.batches, self.entries, self.spread = of
        self.batch = sum(self.batches)
        # The tensors that forms hold, with their version counters now.
        held = [(name, x) for name, form in forms.items() for x in form.held]
        self._versions = [(name, x, n) for (name, x), n in zip(held, versions_among(*[x for _, x in held]))]
        self._by_device = {x.device.type: x for _, x in held}

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if name not in INTERNAL]

    def __getitem__(self, name: str | nn.Parameter) -> Form:
        """A parameter's form, by any of its names or by the parameter itself.  Raises KeyError for what doesn't train."""
        form = self._forms.get(name) if isinstance(name, str) else None
        if form is not None:
            return form
        model = self._model()
        named = [] if model is None else list(model.named_parameters(remove_duplicate=False))
        return self._forms[name_among(name, named, list(self._forms))]

    def __iter__(self) -> Iterator[str]:
        return iter(self._forms)

    def __len__(self) -> int:
        return len(self._forms)

    def items(self) -> ItemsView[str, Form]:
        return self._forms.items()  # Mapping's own would look each name up, ten times in a step

    def values(self) -> ValuesView[Form]:
        return self._forms.values()

    @property
    def _row_count(self) -> int:
        """The number of rows: N for each entry."""
        return self.samples * prod(self.entries)

    def _origin(self) -> str:
        """The samples and entries of the rows, for messages."""
        each = f", {' × '.join(map(str, self.entries))} entries of an output each" if self.entries else ""
        return f"{self.samples} samples{each}"

    def _table(self) -> Table:
        rows = [("parameter", "form", "shape", "holds", "written out")]
        for name, form in self.items():
            kinds = kinds_of(form) + ("" if name in self.reached else ", not reached")
            shape, held = str((self.samples, *self.entries, *form.shape)), with_unit(held_bytes(form))
            rows.append((name, kinds, shape, held, with_unit(written_bytes(form))))
        held, written = with_unit(held_bytes(*self.values())), with_unit(sum(map(written_bytes, self.values())))
        size = sum(form.shape.numel() for form in self.values())
        title = f"{type(self).__name__} of {self._origin()} for {len(self)} parameters, {size} numbers each"
        return Table(title, [*rows, ("all", "", "", held, written)])

    def _placed(self, rows: Tensor, axis: int = 0) -> Tensor:
        """Results for each row, with the rows' axis replaced by (N, *entries)."""
        if not self.entries:
            return rows
        return rows.unflatten(axis, (*self.entries, self.samples)).movedim(axis + len(self.entries), axis)

    def _rows_of(self, samples: Tensor, count: int) -> Tensor:
        """The numbers of the rows of some samples, entry by entry.  samples: their numbers, in [0, count)"""
        return (torch.arange(prod(self.entries), device=samples.device)[:, None] * count + samples).flatten()

    def _by_row(self, w: Tensor, several: bool = False) -> Tensor:
        """Weights, (N, *entries), in the order of the rows.  several: whether they may have an axis K in front"""
        shape = (self.samples, *self.entries)
        axes = ", ".join(["N", *map(str, self.entries)]) + ("" if self.entries else ",")
        expected = f"({axes})" + (f" or (K, {axes.rstrip(',')})" if several else "")
        if not isinstance(w, Tensor) or not (
            w.is_floating_point() or (w.is_complex() and any(form.like.is_complex() for form in self.values()))
        ):
            raise TypeError(f"the weights are {kind_of(w)}; expected a floating-point tensor of shape {expected}" + ON_VERBS)
        before = w.ndim - len(shape)
        if before not in range(1 + several) or w.shape[before:] != shape:
            wrong = f"the weights have shape {tuple(w.shape)}"
            raise ValueError(f"{wrong}; expected {expected} with N = {self.samples} samples" + ON_VERBS)
        return w.movedim(before, -1).flatten(before) if self.entries else w

    # When the forms may be read, and how verbs combine them.

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context for reading.  Raises StaleRecord if something was overwritten since the gradients were taken."""
        self._check()
        with outside_inference(), self.spread.weights(), without_autocast(self._by_device.values()):
            yield

    @contextmanager
    def summing(self, here: Callable[[], T], count: float = 0) -> Iterator[tuple[T, float]]:
        """`reading` for sums over the samples of all processes.  If ``here()`` raises on one of them, all raise.

        It yields the result of ``here()`` on this process and the sum of all counts.
        """

        def checked() -> T:
            self._check()
            return here()

        with outside_inference(), self.spread.weights():
            result, (total,) = self.spread.agreed(checked, lambda _: [count], 1)
            with without_autocast(self._by_device.values()):
                yield result, total

    def _check(self) -> None:
        self.spread.check()
        if versions_among(*[x for _, x, _ in self._versions]) == [n for _, _, n in self._versions]:
            return
        for name, x, n in self._versions:
            if wrong := overwritten_in([(x, n)]):
                raise StaleRecord(
                    f"a tensor that the per-sample gradients of {name!r} need, {wrong} since they were taken. Read before "
                    "that, or give the layer a copy: x.clone()."
                )

    def _added(self, verb: Verb, *shape: int) -> Tensor:
        """A verb's results summed over parameters, (N, *shape)."""
        return self._placed(added(starmap(verb, self.items()), (self._row_count, *shape)))

    def _read(self, verb: Verb, *shape: int) -> Tensor:
        """`_added`, when the forms may be read."""
        with self.reading():
            return self._added(verb, *shape)

    def _each(self, verb: Verb) -> dict[str, Tensor]:
        """A verb's results for each parameter, {name: (N, ...)}."""
        return {name: self._placed(verb(name, form)) for name, form in self.items()}

    def _totals(self, w: Tensor, max_bytes: int, narrow: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Jᵀ w of this process's samples in the forms' accumulation dtype, or a wider one.  w: by row    narrow: in the
        forms' own dtype"""
        (forms, factor), found = without_factor(self), dict[str, Tensor]()

        def given(like: Tensor) -> Tensor:
            return w.to(like.device, torch.promote_types(w.dtype, accumulation_dtype(like.dtype))) * factor

        for group in [own for own in small_alike(forms, max_bytes) if len(own) > 1]:
            factors = [*zip(*group.values())]
            own = given(like := factors[0][0]).to(like.dtype)
            if len(factors) == 1:
                sums = (own @ torch.cat(factors[0], 1)).split([x.shape[1] for x in factors[0]], -1)
            elif w.ndim == 1 and like.shape[1] * factors[1][0].shape[1] <= SMALL:
                left, right = map(torch.stack, factors)
                sums = torch.bmm(left.mT, right * own[:, None]).unbind()
            else:
                continue
            # In memory of their own, as each becomes a gradient.
            found |= {n: total.view((*w.shape[:-1], *forms[n].shape)).clone() for n, total in zip(group, sums)}
        for name, form in forms.items():
            if name in found:
                yield name, found[name]
                continue
            total = form.weighted_sum(given(like := form.like), max_bytes)
            yield name, total.to(like.dtype) if narrow else total

    def wide_sum(self, w: Tensor, max_bytes: int = BUDGET) -> dict[str, Tensor]:
        """Jᵀ w in the forms' accumulation dtype."""
        with self.summing(lambda: self._by_row(w)) as (by_row, _):
            return self.spread.settled(self._totals(by_row, max_bytes), narrow=False)
