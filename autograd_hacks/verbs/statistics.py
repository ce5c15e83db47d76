"""The noise of a batch's rows, over the samples of all processes: variances, and the noise scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from autograd_hacks.errors import ON_NOISE, NothingRecorded
from autograd_hacks.forms import BUDGET, scale
from autograd_hacks.forms.numerics import smallest
from autograd_hacks.support.parts import whole_of
from autograd_hacks.support.ranges import checked
from autograd_hacks.verbs.algebra import Algebra
from autograd_hacks.verbs.matrix import Forms, added, second_moments


class NoiseScale(NamedTuple):
    """The noise and signal of a batch's gradient.

    Both estimates are unbiased.  Over several steps average each of them first, and then take the ratio.
    """

    noise: Tensor
    """tr Σ: the variance of a single sample's gradient, summed over all its numbers."""
    signal: Tensor
    """‖G‖²: the squared length of the mean gradient.  The estimate can be negative."""

    @property
    def scale(self) -> Tensor:
        """tr Σ / ‖G‖², a number of samples.  Much smaller batches are mostly noise; much larger ones gain little.

        It is infinite where the estimated signal is not above 0.
        """
        return torch.where(self.signal <= 0, torch.inf, self.noise / self.signal)


class Statistics(Algebra):
    """`PerSampleGrads` without metrics and curvature."""

    @checked(ON_NOISE)
    def variance(self, budget: int = BUDGET) -> dict[str, Tensor]:
        """The unbiased variance over the samples, Σₙ (gₙ - ḡ)² / (N - 1), elementwise, {name: shape}.

        Raises ValueError for fewer than two samples, and for rows of `per_sample_jacobian`.
        """
        with self._counted("variance") as samples:
            return self._variances(self, self._means(samples, budget), samples, budget)

    @checked(ON_NOISE)
    def snr(self, budget: int = BUDGET) -> dict[str, Tensor]:
        """The gradient signal-to-noise ratio, ḡ² / `variance`, elementwise, {name: shape}.

        It is the ratio for one sample; the mean of N samples has N times as much.  It is 0 where all samples have gradient
        zero, and infinite where all have the same gradient.

        Raises as `variance` does.
        Source: Liu et al. 2020, "Understanding why neural networks generalize well through GSNR" (arXiv:2001.07384).
        """
        with self._counted("snr") as samples:
            about = self._means(samples, budget)
            squares = {name: mean.abs().square() for name, mean in about.items()}
            noise = self._variances(self, about, samples, budget)
            sizes = [whole_of((squares[name] + noise[name]).double().sum()).cpu() for name in self]
            for (name, form), total in zip(self.items(), torch.stack(sizes).tolist() if sizes else []):
                if form.shape.numel() * smallest(form.sum_dtype) <= total < inf:
                    continue  # squares neither overflow nor underflow, on any process, because sums are the same
                size = self.spread.summed({name: form.norms(budget).double().sum()})[name].item()
                if not 0 < size < inf:
                    continue
                dtype = form.sum_dtype.to_real()
                factor = min(1 / size, torch.finfo(dtype).max / 16)
                unit = scale(form, torch.full((form.samples,), factor, dtype=dtype, device=form.like.device))
                squares[name] = (about[name] * factor).abs().square()
                noise |= self._variances({name: unit}, {name: about[name] * factor}, samples, budget)
            return {name: torch.where(x == 0, x, x / noise[name]) for name, x in squares.items()}

    @overload
    def noise_scale(self, per_parameter: Literal[False] = False, budget: int = BUDGET) -> NoiseScale: ...
    @overload
    def noise_scale(self, per_parameter: Literal[True], budget: int = BUDGET) -> dict[str, NoiseScale]: ...
    @checked(ON_NOISE)
    def noise_scale(self, per_parameter: bool = False, budget: int = BUDGET) -> NoiseScale | dict[str, NoiseScale]:
        """The gradient noise scale tr Σ / ‖G‖² of one batch: `NoiseScale.scale`, with its two terms.

        per_parameter: return {name: NoiseScale} instead    budget: bytes to use beside the result

        Raises as `variance` does, and NothingRecorded for the rows of `backprop_hess`.
        Source: McCandlish et al. 2018, "An empirical model of large-batch training" (arXiv:1812.06162), appendix A.1 with
        batches of 1 and N samples.
        """
        if self.hess_type is not None and not self.entries:
            raise NothingRecorded("noise_scale: these rows, of backprop_hess or a Jacobian, are not gradients of losses.")
        with self._counted("noise_scale") as samples:
            norms = {name: form.norms(budget) for name, form in self.items()}
            squares = self.spread.summed({name: x.double().square().sum() for name, x in norms.items()})
            about = self._means(samples, budget)
            lengths = {name: whole_of(mean.abs().double().square().sum()) for name, mean in about.items()}
            noise = {name: (squares[name] - samples * lengths[name]) / (samples - 1) for name in self}
            shares = [(noise[name] / squares[name]).cpu() for name in self]  # NaN where all are zero
            digits = [1e4 * torch.finfo(form.sum_dtype).eps / (samples - 1) for form in self.values()]
            for name, share, least in zip(self, torch.stack(shares).tolist(), digits):
                if not share <= least:
                    continue  # the difference of sums has digits left, on any process, because sums are the same
                own = self._variances({name: self[name]}, {name: about[name]}, samples, budget)[name]
                noise[name] = whole_of(own.double().sum())
        each = {name: NoiseScale(noise[name], lengths[name] - noise[name] / samples) for name in self}
        if per_parameter:
            return each
        return NoiseScale(*(added(parts, ()) for parts in zip(*each.values())))

    @contextmanager
    def _counted(self, what: str) -> Iterator[int]:
        """A context for statistics over samples.  It yields the number of samples of all processes."""
        if self.entries:
            raise ValueError(
                f"{what}: these are the gradients of {self._origin()}, so the variance over samples is ambiguous. Take "
                "second_moment(w) and weighted_sum(w), or dense()[name].var(0) for each entry." + ON_NOISE
            )
        with self.summing(lambda: None, self.samples) as (_, count):
            if count < 2:
                raise ValueError(f"{what}: a variance needs two samples or more, but there are {count:.0f}" + ON_NOISE)
            yield int(count)

    def _means(self, samples: int, budget: int) -> dict[str, Tensor]:
        """The mean gradient ḡ, {name: shape}."""
        shares = {name: form.new_sums(form.samples) + 1 / samples for name, form in self.items()}
        return self.spread.settled((name, form.weighted_sum(shares[name], budget)) for name, form in self.items())

    def _variances(self, forms: Forms, about: Mapping[str, Tensor], samples: int, budget: int) -> dict[str, Tensor]:
        """The variances of some forms about their means, {name: shape}."""
        whole = {name: whole_of(x) for name, x in about.items()}
        totals = self.spread.settled(second_moments(forms, None, whole, budget).items())
        return {name: total / (samples - 1) for name, total in totals.items()}
