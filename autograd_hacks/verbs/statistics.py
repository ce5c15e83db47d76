"""What the rows of a batch say of each other: their noise, their directions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autograd_hacks.distributed.cut import whole_sum
from autograd_hacks.distributed.spread import whole_of
from autograd_hacks.errors import ON_NOISE, NothingRecorded
from autograd_hacks.forms import BUDGET, Form, scale
from autograd_hacks.forms.numerics import row_norms, smallest
from autograd_hacks.verbs.arguments import check_direction
from autograd_hacks.verbs.matvec import Curvature
from autograd_hacks.verbs.rounds import added, by_rows, joint_norms, second_moments, unit_products

if TYPE_CHECKING:
    from typing import Self  # since Python 3.11


class NoiseScale(NamedTuple):
    """How noisy a batch's mean gradient is.  Both are unbiased: over steps take the means of each, and then the ratio."""

    noise: Tensor
    """tr Σ, the variance of single samples' gradients, added up over all numbers"""
    signal: Tensor
    """‖G‖², the squared length of the gradient that they scatter about; noise may bring it below 0"""

    @property
    def scale(self) -> Tensor:
        """tr Σ / ‖G‖², a number of samples: batches much smaller are noise in the main, much larger ones gain little."""
        return self.noise / self.signal


class Statistics(Curvature):
    """Noise, signal and directions of the rows J of N samples."""

    @abstractmethod
    def norms(self, *, budget: int = BUDGET) -> Tensor:
        """The 2-norm of each row."""

    @abstractmethod
    def gram(self, other: Any = None, budget: int = BUDGET) -> Tensor:
        """J J′ᴴ."""

    @abstractmethod
    def select(self, index: slice | Tensor) -> Self:
        """Some of the samples."""

    @abstractmethod
    def with_forms(self, forms: Mapping[str, Form], samples: int) -> Self:
        """Other forms of the same gradients."""

    def variance(self, budget: int = BUDGET) -> dict[str, Tensor]:
        """The unbiased variance over the samples, elementwise, {name: shape}: Σₙ (gₙ - ḡ)² / (N - 1).

        Raises ValueError for fewer than two samples, and for rows of an output's entries.
        """
        with self._counted("variance") as samples:
            return self._variances(self, self._means(samples, budget), samples, budget)

    def snr(self, budget: int = BUDGET) -> dict[str, Tensor]:
        """The signal to noise ratio of each number's gradient, {name: shape}: ḡ² over `variance`.

        It is that of one sample: a step's has N times as much.  0 where no sample has a gradient, infinite where all have
        the same.
        Raises as `variance` does.
        Source: Liu et al. 2020, "Understanding why neural networks generalize well through GSNR" (arXiv:2001.07384).
        """
        with self._counted("snr") as samples:
            means = self._means(samples, budget)
            squares = {name: mean.abs().square() for name, mean in means.items()}
            variances = self._variances(self, means, samples, budget)
            for name in self._beyond({name: squares[name] + variances[name] for name in self}):
                norms = by_rows({name: self[name]}, self.samples, lambda _, form: form.norms(budget), budget)
                size = self.spread.summed({name: self._each_norms(norms)[name].double().sum()})[name].item()
                if not 0 < size < inf:
                    continue
                dtype = self[name].sum_dtype.to_real()
                factor = min(1 / size, torch.finfo(dtype).max / 16)
                weights = torch.full((self.samples,), factor, dtype=dtype, device=self[name].like.device)
                unit = {name: means[name] * factor}
                squares[name] = unit[name].abs().square()
                variances |= self._variances({name: scale(self[name], weights)}, unit, samples, budget)
            return {name: torch.where(x == 0, x, x / variances[name]) for name, x in squares.items()}

    def _beyond(self, sums: Mapping[str, Tensor]) -> list[str]:
        """Where squares have left the range of numbers.  The same on all processes, since sums are."""
        sizes = torch.stack([whole_of(x.double().sum()).cpu() for x in sums.values()]).tolist() if sums else []
        least = [form.shape.numel() * smallest(form.sum_dtype) for form in self.values()]
        return [name for name, size, low in zip(self, sizes, least) if not low <= size < inf]

    def noise_scale(self, per_parameter: bool = False, budget: int = BUDGET) -> NoiseScale | dict[str, NoiseScale]:
        """The gradient noise scale tr Σ / ‖G‖², `NoiseScale.scale`, with both numbers, from one batch.

        per_parameter: whether to return {name: NoiseScale} instead
        Raises as `variance` does, and NothingRecorded for rows that are no gradients of losses.
        Source: McCandlish et al. 2018, "An empirical model of large-batch training" (arXiv:1812.06162), appendix A.1 with
        batches of 1 and N samples.
        """
        if self.hess_type is not None and not self._axes.entries:
            raise NothingRecorded(
                "noise_scale: these are the rows of backprop_hess, and no gradients of losses. Run loss.backward() instead."
            )
        with self._counted("noise_scale") as samples:
            own = self._each_norms(by_rows(self, self.samples, lambda name, form: form.norms(budget), budget))
            squares = self.spread.summed({name: norms.double().square().sum() for name, norms in own.items()})
            means = self._means(samples, budget)
            lengths = {name: whole_of(mean.abs().double().square().sum()) for name, mean in means.items()}
            noise = {name: (squares[name] - samples * lengths[name]) / (samples - 1) for name in self}
            for name in self._lost(noise, squares, samples):
                about = self._own({name: means[name]})
                found = second_moments({name: self[name]}, self.samples, None, about, budget)
                noise[name] = whole_of(self.spread.settled(found.items())[name].double().sum()) / (samples - 1)
        each = {name: NoiseScale(noise[name], lengths[name] - noise[name] / samples) for name in self}
        if per_parameter:
            return each
        zero = torch.zeros((), dtype=torch.float64, device="cpu")
        return NoiseScale(*(sum((own.to(part[0].device) for own in part), zero) for part in zip(*each.values())))

    def _lost(self, noise: Mapping[str, Tensor], squares: Mapping[str, Tensor], samples: int) -> list[str]:
        """Where next to nothing is left of a difference of sums.  The same on all processes, since sums are."""
        shares = [(noise[name] / squares[name]).cpu() for name in self]  # no number where all are zero
        digits = [1e4 * torch.finfo(form.sum_dtype).eps / (samples - 1) for form in self.values()]
        return [name for name, share, least in zip(self, torch.stack(shares).tolist(), digits) if share <= least]

    def cosine(self, other: Self | Mapping[str, Tensor] | None = None, budget: int = BUDGET) -> Tensor:
        """The cosine of the angle between gradients, (N, M), or with a direction, N; 0 for a gradient of zeros.

        other: the gradients of another batch by the same model, these themselves unless told; or a direction, {name: shape}
        Raises as ``gram`` and ``dot`` do.
        """
        other = self if other is None else other
        if isinstance(other, Statistics):
            products = self.gram(other, budget)  # checks the other
            mine = self.norms(budget=budget)
            theirs = mine if other is self else other.norms(budget=budget)
            found = products / _divisors(mine).view(*mine.shape, *[1] * theirs.ndim) / _divisors(theirs)
            again = _beyond(mine, theirs)[:, None].flatten(1).any(1).nonzero()[:, 0]
            return found if not len(again) else found.index_put((again,), self._cosines(other, mine, theirs, again, budget))
        check_direction(other, {name: self.shape_of(name) for name in self})
        wide = {name: whole_of(x).to(torch.promote_types(x.dtype, torch.float32)) for name, x in other.items()}
        lengths = [row_norms(x.reshape(1, -1)).cpu() for x in wide.values()]
        length = _divisors(joint_norms(lengths, 1))
        along = self.dot({name: x / length.to(x.device) for name, x in wide.items()}, budget)
        return along / _divisors(self.norms(budget=budget))

    def _cosines(self, other: Self, mine: Tensor, theirs: Tensor, index: Tensor, budget: int) -> Tensor:
        """Those of some samples, by rows of length one, whose products stay in the range of numbers."""
        some = self.select(index)
        n, m = some._by_row(_divisors(mine[index])), other._by_row(_divisors(theirs))
        with some.reading(), other.reading():

            def products(own: Mapping[str, Form]) -> Tensor:
                each = (unit_products(form, other[name], n, m, budget) for name, form in own.items())
                return added(each, (some._axes.rows, other._axes.rows))

            return some._axes.placed(other._axes.placed(whole_sum(some, some.cuts, products), 1))

    def scaled(self, w: Tensor) -> Self:
        """The rows wₙ gₙ, lazily.  w: N.  Raises as ``second_moment`` does for other weights."""
        w = self._by_row(w)
        return self.with_forms({name: scale(form, w.to(form.like.device)) for name, form in self.items()}, self.samples)

    @contextmanager
    def _counted(self, what: str) -> Iterator[int]:
        """A context for sums over all samples; how many all processes have."""
        if self._axes.entries:
            raise ValueError(
                f"{what}: these are the gradients of {self._axes}, and over which of them is meant can't be known. Take "
                "second_moment(w) and weighted_sum(w), or dense()[name].var(0) for each entry." + ON_NOISE
            )
        with self.summing(lambda: self.samples, lambda own: [own], 1) as (_, (count,)):
            if count < 2:
                raise ValueError(
                    f"{what}: a variance over samples needs two of them; these are the gradients of {count:.0f}" + ON_NOISE
                )
            yield int(count)

    def _means(self, samples: int, budget: int) -> dict[str, Tensor]:
        ones = {name: form.new_sums(self.samples) + 1 / samples for name, form in self.items()}
        return self.spread.settled((name, form.weighted_sum(ones[name], budget)) for name, form in self.items())

    def _variances(
        self, forms: Mapping[str, Form], means: Mapping[str, Tensor], samples: int, budget: int
    ) -> dict[str, Tensor]:
        found = self.spread.settled(second_moments(forms, self.samples, None, self._own(means), budget).items())
        return {name: total / (samples - 1) for name, total in found.items()}


def _divisors(lengths: Tensor) -> Tensor:
    return lengths.masked_fill(lengths == 0, 1)


def _beyond(mine: Tensor, theirs: Tensor) -> Tensor:
    """Which of our rows have products with some of theirs that leave the range of numbers.  mine: (N, ...)"""
    known = theirs[(theirs > 0) & theirs.isfinite()].detach()
    if not len(known):
        return torch.zeros_like(mine, dtype=torch.bool)
    least, most = smallest(known.dtype), torch.finfo(known.dtype).max / 16
    return ((mine * known.min() < least) & (mine > 0)) | (mine > most / known.max().clamp(min=1))
