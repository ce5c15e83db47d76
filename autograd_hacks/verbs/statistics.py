"""The noise of a batch's rows.

Each function takes the forms of this process's samples and sums over the samples of all processes, which must call it
together.  ``samples`` is their number over all processes, at least 2.
"""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from autograd_hacks.distributed.spread import Spread, whole_of
from autograd_hacks.forms import scale
from autograd_hacks.forms.numerics import smallest
from autograd_hacks.verbs.matrix import Forms, second_moments, whole_parts


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


def means(forms: Forms, spread: Spread, samples: int, budget: int) -> dict[str, Tensor]:
    """The mean gradient ḡ, {name: shape}."""
    shares = {name: form.new_sums(form.samples) + 1 / samples for name, form in forms.items()}
    return spread.settled((name, form.weighted_sum(shares[name], budget)) for name, form in forms.items())


def variances(forms: Forms, about: Mapping[str, Tensor], spread: Spread, samples: int, budget: int) -> dict[str, Tensor]:
    """The variance Σₙ (gₙ - ḡ)² / (N - 1), elementwise, {name: shape}.

    about: ḡ
    """
    totals = spread.settled(second_moments(forms, None, whole_parts(about), budget).items())
    return {name: total / (samples - 1) for name, total in totals.items()}


def signal_to_noise(forms: Forms, spread: Spread, samples: int, budget: int) -> dict[str, Tensor]:
    """ḡ² / `variances`, {name: shape}."""
    about = means(forms, spread, samples, budget)
    squares = {name: mean.abs().square() for name, mean in about.items()}
    noise = variances(forms, about, spread, samples, budget)
    for name in _out_of_range(forms, {name: squares[name] + noise[name] for name in forms}):
        form = forms[name]
        size = spread.summed({name: form.norms(budget).double().sum()})[name].item()
        if not 0 < size < inf:
            continue
        dtype = form.sum_dtype.to_real()
        factor = min(1 / size, torch.finfo(dtype).max / 16)
        unit = scale(form, torch.full((form.samples,), factor, dtype=dtype, device=form.like.device))
        squares[name] = (about[name] * factor).abs().square()
        noise |= variances({name: unit}, {name: about[name] * factor}, spread, samples, budget)
    return {name: torch.where(x == 0, x, x / noise[name]) for name, x in squares.items()}


def _out_of_range(forms: Forms, sums: Mapping[str, Tensor]) -> list[str]:
    """The names whose squares overflow or underflow.  They are the same on all processes, because sums are."""
    sizes = torch.stack([whole_of(x.double().sum()).cpu() for x in sums.values()]).tolist() if sums else []
    least = [form.shape.numel() * smallest(form.sum_dtype) for form in forms.values()]
    return [name for name, size, low in zip(forms, sizes, least) if not low <= size < inf]


def noise_scales(forms: Forms, spread: Spread, samples: int, budget: int) -> dict[str, NoiseScale]:
    """Noise and signal of each parameter."""
    norms = {name: form.norms(budget) for name, form in forms.items()}
    squares = spread.summed({name: x.double().square().sum() for name, x in norms.items()})
    about = means(forms, spread, samples, budget)
    lengths = {name: whole_of(mean.abs().double().square().sum()) for name, mean in about.items()}
    noise = {name: (squares[name] - samples * lengths[name]) / (samples - 1) for name in forms}
    for name in _without_digits(forms, noise, squares, samples):
        each = variances({name: forms[name]}, {name: about[name]}, spread, samples, budget)[name]
        noise[name] = whole_of(each.double().sum())
    return {name: NoiseScale(noise[name], lengths[name] - noise[name] / samples) for name in forms}


def _without_digits(forms: Forms, noise: Mapping[str, Tensor], squares: Mapping[str, Tensor], samples: int) -> list[str]:
    """The names whose difference of sums has lost its digits.  They are the same on all processes, because sums are."""
    shares = [(noise[name] / squares[name]).cpu() for name in forms]  # NaN where all are zero
    digits = [1e4 * torch.finfo(form.sum_dtype).eps / (samples - 1) for form in forms.values()]
    return [name for name, share, least in zip(forms, torch.stack(shares).tolist(), digits) if share <= least]
