"""TorchJD: its weightings of the rows' inner products, and the weighted sum, with no Jacobian written out."""

from math import prod
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.distributed.spread import spread_of
from autograd_hacks.errors import ON_TORCHJD, needed
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.jacobian import per_sample_jacobian
from autograd_hacks.verbs.per_sample import check_alone, per_sample_grads, set_grads

with needed("torchjd"):
    from torchjd.aggregation import (
        Aggregator,
        ConstantWeighting,
        GramianWeightedAggregator,
        MeanWeighting,
        RandomWeighting,
        SumWeighting,
        WeightedAggregator,
        Weighting,
    )

BY_NUMBER = ConstantWeighting, MeanWeighting, RandomWeighting, SumWeighting
"""Weightings that ask how many rows there are, and nothing else."""


@torch.no_grad()
def jacobian_descent(
    model: nn.Module,
    aggregator: Aggregator | Weighting[Any],
    grads: PerSampleGrads | None = None,
    loss_type: str | None = None,
    *,
    losses: Tensor | None = None,
) -> Tensor:
    """Sets ``.grad`` to TorchJD's aggregation of the last backward pass's per-sample gradients, and returns the weights, N.

    With ``losses``, of N samples by K tasks, it aggregates a row for each sample and task, and returns (N, K) weights.

    aggregator: one that weights rows by their Gramian (``UPGrad``, ``MGDA``, ``CAGrad``, ``DualProj``, ...) or by their
    number (``Mean``, ``Sum``); or a weighting of Gramians, ``UPGradWeighting``
    grads: other rows of this model than the samples', of tasks or classes say: ``per_sample_grads(model).group(labels)``
    loss_type: as in `compute_grad1`
    losses: (N, K), each sample's loss in each task, or (N,), that follow from what the hooked model returned; instead of a
    backward pass, for which K are run here: `per_sample_jacobian`.  In TorchJD's order rows are sample by sample

    Parameters that the loss didn't reach have ``.grad`` None.  The result is ``aggregator(J)`` for the rows J written out.

    Raises TypeError for an aggregator that needs the rows themselves, ``ConFIG`` say, and for a list of losses; ValueError
    for loss_type or losses beside grads, or loss_type beside losses, and for losses of other axes; what `per_sample_grads`
    and `per_sample_jacobian` raise; NotImplementedError where several processes share the batch.

    Source: Quinton and Rey 2024, "Jacobian descent for multi-objective optimization" (arXiv:2406.16232), section 6.
    """
    if grads is not None and loss_type is not None:
        raise ValueError(
            f"jacobian_descent was given loss_type={loss_type!r} and rows, which know theirs; leave it out" + ON_TORCHJD
        )
    if losses is not None and (grads is not None or loss_type is not None):
        raise ValueError(
            "jacobian_descent was given losses, whose rows it takes itself, beside "
            + ("grads" if grads is not None else f"loss_type={loss_type!r}")
            + "; expected one of them"
            + ON_TORCHJD
        )
    if losses is not None and not isinstance(losses, Tensor):
        raise TypeError(
            f"jacobian_descent was given losses of type {type(losses).__name__}; expected one tensor (N, K): "
            "torch.stack(losses, dim=1), of K tensors with the losses of N samples each" + ON_TORCHJD
        )
    if losses is not None and losses.ndim not in (1, 2):
        raise ValueError(
            f"jacobian_descent was given losses of shape {tuple(losses.shape)}; expected (N, K), one for each of N samples "
            "and K tasks, or (N,). Bring a token's or a pixel's losses to one: losses.mean(-1)." + ON_TORCHJD
        )
    weighting = _weighting_of(aggregator)
    if losses is not None:
        grads = per_sample_jacobian(model, losses)
        grads.spread = spread_of(model, recorder_of(model))  # rows of a Jacobian know no other processes
    grads = per_sample_grads(model, loss_type) if grads is None else grads
    check_alone(grads, "jacobian_descent", "Take gram_of_all(), and weighted_sum of this process's weights.")
    products, each = grads.gram(), (grads.samples, *grads.entries)
    weights: Tensor = weighting(products.reshape(prod(each), prod(each))).view(each)
    set_grads(model, grads.weighted_sum(weights), grads.reached)
    return weights


def _weighting_of(aggregator: object) -> Weighting[Any]:
    if isinstance(aggregator, GramianWeightedAggregator):
        return aggregator.gramian_weighting
    weighting = aggregator.weighting if isinstance(aggregator, WeightedAggregator) else aggregator
    needs_rows = isinstance(aggregator, WeightedAggregator) and not isinstance(weighting, BY_NUMBER)
    if isinstance(weighting, Weighting) and not needs_rows:
        return weighting
    raise TypeError(
        f"jacobian_descent was given {type(aggregator).__name__}; expected one of TorchJD's aggregators that weight rows by "
        "their Gramian, UPGrad() say, or such a weighting. Others need the rows themselves: per_sample_grads(model).dense()."
        + ON_TORCHJD
    )
