"""The noise of a batch's rows, over the samples of all processes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from autograd_hacks.errors import ON_NOISE, NothingRecorded
from autograd_hacks.support.parts import whole_of
from autograd_hacks.verbs.matrix import Matrix, second_moments


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


def noise_scales(grads: Matrix, max_bytes: int) -> dict[str, NoiseScale]:
    """`NoiseScale` by the parameter's name.  max_bytes: bytes to use beside the result

    Raises as ``grads.noise_scale()`` does.
    """
    if grads.entries:
        raise ValueError(
            f"noise_scale: these are the gradients of {grads._origin()}, so the variance over samples is ambiguous. Take "
            "second_moment(w) and weighted_sum(w), or dense()[name].var(0) for each entry." + ON_NOISE
        )
    if grads.hess_type is not None:
        raise NothingRecorded("noise_scale: these rows, of backprop_hess or a Jacobian, are not gradients of losses.")
    with grads.summing(lambda: None, grads.samples) as (_, count):
        if count < 2:
            raise ValueError(f"noise_scale: a variance needs two samples or more, but there are {count:.0f}" + ON_NOISE)
        norms = {name: form.norms(max_bytes) for name, form in grads.items()}
        squares = grads.spread.summed({name: x.double().square().sum() for name, x in norms.items()})
        shares = {name: form.new_sums(form.samples) + 1 / count for name, form in grads.items()}
        about = grads.spread.settled((name, form.weighted_sum(shares[name], max_bytes)) for name, form in grads.items())
        lengths = {name: whole_of(mean.abs().double().square().sum()) for name, mean in about.items()}
        noise = {name: (squares[name] - count * lengths[name]) / (count - 1) for name in grads}
        found = [(noise[name] / squares[name]).cpu() for name in grads]  # NaN where all are zero
        digits = [1e4 * torch.finfo(form.sum_dtype).eps / (count - 1) for form in grads.values()]
        for name, share, least in zip(grads, torch.stack(found).tolist() if found else (), digits):
            if share <= least:  # on all processes: the difference of sums has no digits left
                of = second_moments({name: grads[name]}, None, {name: whole_of(about[name])}, max_bytes)
                noise[name] = whole_of(grads.spread.settled(of.items())[name].double().sum()) / (count - 1)
    return {name: NoiseScale(noise[name], lengths[name] - noise[name] / count) for name in grads}
