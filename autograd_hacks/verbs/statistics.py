"""What the rows of a batch say of each other: their noise, their directions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from autograd_hacks.distributed.spread import whole_of
from autograd_hacks.errors import ON_VERBS, NothingRecorded
from autograd_hacks.forms import BUDGET, Form, scale
from autograd_hacks.verbs.matvec import Curvature
from autograd_hacks.verbs.rounds import by_rows, second_moments

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
    def norms(self) -> Tensor:
        """The 2-norm of each row."""

    @abstractmethod
    def gram(self, other: Any = None) -> Tensor:
        """J J′ᵀ."""

    @abstractmethod
    def with_forms(self, forms: Mapping[str, Form], samples: int) -> Self:
        """Other forms of the same gradients."""

    def variance(self, budget: int = BUDGET) -> dict[str, Tensor]:
        """The unbiased variance over the samples, elementwise, {name: shape}: Σₙ (gₙ - ḡ)² / (N - 1).

        Raises ValueError for fewer than two samples, and for rows of an output's entries.
        """
        return self._mean_and_variance("variance", budget)[1]

    def snr(self, budget: int = BUDGET) -> dict[str, Tensor]:
        """The signal to noise ratio of each number's gradient, {name: shape}: ḡ² over `variance`.

        It is that of one sample: a step's has N times as much.  0 where no sample has a gradient, infinite where all have
        the same.
        Raises as `variance` does.
        Source: Liu et al. 2020, "Understanding why neural networks generalize well through GSNR" (arXiv:2001.07384).
        """
        means, variances = self._mean_and_variance("snr", budget)
        squares = {name: mean.abs().square() for name, mean in means.items()}
        return {name: torch.where(x == 0, x, x / variances[name]) for name, x in squares.items()}

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
        mine, other = self.norms(), self if other is None else other
        if isinstance(other, Statistics):
            theirs, products = other.norms(), self.gram(other)
        else:
            products = self.dot(other)
            parts = [whole_of(x).to(products.device, products.dtype).norm() for x in other.values()]
            theirs = torch.stack(parts).norm()
        mine = mine.view(*mine.shape, *[1] * theirs.ndim)
        return products / mine.masked_fill(mine == 0, 1) / theirs.masked_fill(theirs == 0, 1)

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
                "second_moment(w) and weighted_sum(w), or dense()[name].var(0) for each entry." + ON_VERBS
            )
        with self.summing(lambda: self.samples, lambda own: [own], 1) as (_, (count,)):
            if count < 2:
                raise ValueError(
                    f"{what}: a variance over samples needs two of them; these are the gradients of {count:.0f}" + ON_VERBS
                )
            yield int(count)

    def _means(self, samples: int, budget: int) -> dict[str, Tensor]:
        ones = {name: form.new_sums(self.samples) + 1 / samples for name, form in self.items()}
        return self.spread.settled((name, form.weighted_sum(ones[name], budget)) for name, form in self.items())

    def _mean_and_variance(self, what: str, budget: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        with self._counted(what) as samples:
            means = self._means(samples, budget)
            own = self._own(means)
            found = self.spread.settled(second_moments(self, self.samples, None, own, budget).items())
            return means, {name: total / (samples - 1) for name, total in found.items()}
