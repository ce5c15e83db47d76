"""Curvature added up over batches: whole blocks, their diagonals, or Kronecker factors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks import PerSampleGrads
from autograd_hacks.curvature.kronecker import KFAC, Matricised, factors_of, is_empty, lay_of, parts_of
from autograd_hacks.errors import ON_CURVATURE, BlockTooLarge, NothingRecorded, UnsupportedLayer, where
from autograd_hacks.extending import accumulation_dtype, grads_of, recorder_of, spread_of
from autograd_hacks.support.display import Shown, Table, percent, with_unit
from autograd_hacks.support.patterns import names_matching
from autograd_hacks.support.ranges import check_word

ATTRIBUTES = {"full": "hess", "diag": "hess_diag", "kfac": "kfac", "ekfac": "kfac"}
"""The attribute that parameters get, by kind; 'ekfac' also sets ``ekfac``."""
MAX_BYTES = 2**30
"""The default number of bytes that a block may take."""


@dataclass(frozen=True, repr=False)
class Coverage(Shown):
    """The result of `compute_hess` and `compute_hess_over`: a line for each trainable parameter.  It prints as a table, in a
    terminal and in a notebook, below the share of their numbers that have the curvature."""

    kind: str  # the requested one
    kinds: Mapping[str, str]  # {parameter: what it has}
    skipped: Mapping[str, str]  # {parameter: why it has none}
    sizes: Mapping[str, int]  # {parameter: how many numbers}
    frozen: int = 0  # how many numbers are frozen

    @property
    def covered(self) -> list[str]:
        """The parameters that have it, for example for ``per_sample_grads(model, only=...)``."""
        return list(self.kinds)

    @property
    def share(self) -> float:
        """The share of the trainable numbers that have it, in [0, 1]."""
        return sum(self.sizes[name] for name in self.kinds) / max(1, sum(self.sizes.values()))

    def _table(self) -> Table:
        count, tensors = f"{sum(self.sizes.values()):,}", f"{len(self.kinds)} of {len(self.sizes)} tensors"
        title = f"{self.kind}: {tensors}; attributed: {percent(self.share)} of {count} parameters"
        title += f" that train; {self.frozen:,} are frozen" if self.frozen else ""
        rows = [("parameter", "numbers", self.kind)]
        for name, size in self.sizes.items():
            rows.append((name, f"{size:,}", self.kinds.get(name) or f"none: {self.skipped[name]}"))
        return Table(title, rows, is_whole=True)


@dataclass(eq=False)
class Sums:
    """Sums over batches.  At the end it sets the means on the parameters, and before that nothing."""

    model: nn.Module
    asked: str  # the requested kind
    parameters: str | Collection[str] | None
    max_bytes: float
    skip: bool

    def __post_init__(self) -> None:
        check_word("compute_hess", ON_CURVATURE, ATTRIBUTES, kind=self.asked)
        self.kind, recorder = "kfac" if self.asked == "ekfac" else self.asked, recorder_of(self.model)
        every, self.left_out = recorder.record.as_seen(recorder.tree.parameters()), recorder.record.left_out
        self.names = [name for name, p in every.items() if p.requires_grad]
        if self.parameters is not None:
            self.names = self._matching(self.parameters)
        # By parameter: its sums, how it is made of matrices, and why it has none.
        self.sums, self.lays, self.skipped = dict[str, list[Tensor]](), dict[str, Matricised](), dict[str, str]()
        self.batch, self.spread = 0, spread_of(self.model, recorder)
        for parameter in self.model.parameters():  # an earlier curvature must not be mistaken for this one
            vars(parameter).pop(ATTRIBUTES[self.asked], None)
            vars(parameter).pop(self.asked, None)

    def _matching(self, patterns: str | Collection[str]) -> list[str]:
        """The trainable parameters that are meant.  Raises ValueError for parameters without hooks."""
        trained, what = [name for name, p in self.model.named_parameters() if p.requires_grad], "compute_hess: parameters"
        every = [patterns] if isinstance(patterns, str) else list(patterns)
        for pattern in every:
            meant = names_matching([pattern], self.model, trained, what, ON_CURVATURE)
            if self.left_out.issuperset(meant):
                raise ValueError(f"{what}: {pattern!r} was left out by add_hooks(only=...); hook it, too" + ON_CURVATURE)
        meant = names_matching(every, self.model, trained, what, ON_CURVATURE)
        return [name for name in self.names if name in meant]

    @torch.no_grad()
    def end(self, last: Callable[[], None] = lambda: None) -> None:
        """last: what there is to add"""
        with self.spread.weights():
            _, (batch,) = self.spread.agreed(last, lambda _: [self.batch], 1)
        everyones = self.spread.from_all(({name: self.lays.get(name) for name in self.sums}, {*self.skipped}))
        refused = set[str]().union(*(skipped for _, skipped in everyones))
        elsewhere = [name for name in self.names if name in refused and name not in self.skipped]
        self._refuse(dict.fromkeys(elsewhere, "it has none on another process"))
        lays = {name: {own[name] for own, _ in everyones if name in own} for name in self.names if name not in refused}
        self._refuse({n: "it is read in other ways on another process" for n, own in lays.items() if len(own) > 1})
        reached = [name for name, own in lays.items() if own and name not in self.skipped]
        self.lays |= {name: lay for name in reached for lay in lays[name] if lay is not None}
        sums = {f"{k} {name}": x for name in reached for k, x in enumerate(self.sums.get(name) or self._zeros(name))}
        total = self.spread.summed(sums)
        for name in self.names:
            value: Any = None
            if name in reached and self.kind == "kfac":
                lay, positions = self.lays[name], total[f"2 {name}"].clamp(min=1)
                a, b = (total[f"{k} {name}"] for k in range(2))
                positions = a.sum()[None].clamp(min=torch.finfo(a.dtype).tiny) if lay.is_by_rows else positions
                a.div_(positions.view(-1, *[1] * (a.ndim - 1)) if lay.blocks > 1 else positions[0])
                value = KFAC.of(a, b.div_(max(1, batch)), lay.is_turned)
            elif name in reached:
                value = total[f"0 {name}"].div_(max(1, batch))
            vars(self.model.get_parameter(name))[ATTRIBUTES[self.kind]] = value

    def coverage(self) -> Coverage:
        """The final result of every parameter."""
        had, skipped = dict[str, str](), dict[str, str]()
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        for name, p in trained.items():
            if name not in self.names:
                is_out = name in self.left_out
                skipped[name] = f"it {'was left out by add_hooks(only=...)' if is_out else 'is not among parameters='}"
            elif vars(p).get(self.asked if self.kind == "kfac" else ATTRIBUTES[self.kind]) is None:
                skipped[name] = self.skipped.get(name, "the loss did not reach it")
            elif self.kind == "kfac" and p.ndim > 1:
                had[name] = str(self.lays[name])
            else:
                size = f"{p.numel():,} × {p.numel():,}" if p.ndim else "1"
                had[name] = "its diagonal" if self.kind == "diag" else f"its block, {size}"
        frozen = sum(p.numel() for p in self.model.parameters() if not p.requires_grad)
        return Coverage(self.asked, had, skipped, {name: p.numel() for name, p in trained.items()}, frozen)

    def _zeros(self, name: str) -> list[Tensor]:
        """The sums of a parameter that only other processes' samples have reached."""
        p = self.model.get_parameter(name)
        zeros = torch.zeros((), dtype=accumulation_dtype(p.dtype), device=p.device)
        if self.kind != "kfac":
            return [zeros.new_zeros(p.shape if self.kind == "diag" else (*p.shape, *p.shape))]
        counts = torch.zeros(self.lays[name].blocks, dtype=torch.int64, device=p.device)
        return [*(zeros.new_zeros(shape) for shape in self.lays[name].factors), counts]

    @torch.no_grad()
    def add(self) -> None:
        """The passes of `backprop_hess` that are in the record."""
        grads = grads_of(self.model, recorder_of(self.model), self.spread)
        if grads.hess_type is None:
            raise NothingRecorded(
                "the record holds an ordinary backward pass. Run backprop_hess(output); or take products with the empirical "
                "Fisher matrix, curvature.matvec(per_sample_grads(model), v)."
            )
        reached = [name for name in self.names if name in grads.reached]
        with grads.reading():
            for name in self._checked(grads, reached):
                now = self._sums_of(name, grads)
                self.sums[name] = [x.add_(y) for x, y in zip(self.sums[name], now)] if name in self.sums else now
        self.batch += grads.batch

    def _sums_of(self, name: str, grads: PerSampleGrads) -> list[Tensor]:
        form = grads[name]
        if self.kind == "diag":
            return [form.second_moment(form.new_sums(form.samples) + 1)]
        if self.kind == "full":
            return [form.weighted_sum(form.matrix().mT).view((*form.shape, *form.shape))]
        return [*factors_of(form, self.lays[name], grads.batches)]

    def _lay(self, name: str, grads: PerSampleGrads) -> Matricised | str | None:
        """How a parameter is made of matrices, or why it has no factors; None if none of these samples read it."""
        found = [lay_of(part) for part in parts_of(grads[name], grads.batches) if not is_empty(part)]
        found += [self.lays[name]] if name in self.sums else []
        by_rows = [lay for lay in found if lay.is_by_rows]
        if by_rows and (name not in self.sums or self.lays[name].is_by_rows):
            return by_rows[0]  # any parameter can be: positions look like a table in a batch of one sample
        return found[0] if len(set(found)) == 1 else "it is read in other ways in some batches" if found else None

    def _checked(self, grads: PerSampleGrads, reached: Sequence[str]) -> list[str]:
        """The parameters for which these passes are summed.  Raises if one has no curvature, or too large a block."""
        if any(grads[name].like.is_complex() for name in reached):
            raise TypeError("compute_hess: parameters are complex; curvature exists for real parameters only" + ON_CURVATURE)
        if self.kind == "diag":
            return [*reached]
        if self.kind == "full":
            sizes = {name: {f"of {name}": grads[name].shape.numel() ** 2} for name in reached}
        else:
            found = {name: self._lay(name, grads) for name in reached if name not in self.skipped}
            self._refuse({name: why for name, why in found.items() if isinstance(why, str)})
            lays = {name: lay for name, lay in found.items() if isinstance(lay, Matricised)}
            self.lays |= lays
            sizes = {n: {f"{ab} of {n}": prod(size) for ab, size in zip("AB", lay.factors)} for n, lay in lays.items()}
        return self._small(grads, sizes)

    def _refuse(self, reasons: Mapping[str, str]) -> None:
        """Leaves parameters out, or raises for them."""
        if self.skip:
            for name, why in reasons.items():
                self.sums.pop(name, None)
                self.skipped[name] = why
        elif reasons:
            listing = "; ".join(f"{name} of {_place(self.model, name)}: {why}" for name, why in reasons.items())
            raise UnsupportedLayer(
                f"these parameters have no Kronecker factors: {listing}. Leave them out with skip=True, which names them in "
                f"a table; or name the others, parameters=[...] with kind={self.asked!r}; or take kind='diag' or 'full'."
            )

    def _small(self, grads: PerSampleGrads, sizes: Mapping[str, Mapping[str, int]]) -> list[str]:
        """The parameters whose tensors are small enough.  sizes: {name: {a tensor, in words: its numbers}}"""
        for name, own in sizes.items():
            what, size = max(own.items(), key=lambda pair: pair[1])
            if (held := size * grads[name].sum_dtype.itemsize) > self.max_bytes:
                wide = f"the block {what} would take {with_unit(held)}, and max_bytes is {with_unit(int(self.max_bytes))}"
                if not self.skip:
                    raise BlockTooLarge(
                        f"{wide}. Raise it, or leave such parameters out by skip=True; or take compute_hess(model, "
                        "kind='diag') or 'kfac', or products, curvature.matvec(grads, v)."
                    )
                self._refuse({name: wide})
        return [name for name in sizes if name not in self.skipped]


def _place(model: nn.Module, name: str) -> str:
    """The layer that has a parameter, in words."""
    parameter = model.get_parameter(name)
    owners = (where(path, m) for path, m in model.named_modules() if any(p is parameter for p in m._parameters.values()))
    return next(owners)
