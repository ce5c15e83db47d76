"""TorchJD: its weightings of the rows' inner products, and the weighted sum, with no Jacobian written out."""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import ON_TORCHJD, needed
from autograd_hacks.verbs.grads import PerSampleGrads
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
) -> Tensor:
    """Sets ``.grad`` to TorchJD's aggregation of the last backward pass's per-sample gradients, and returns the weights, N.

    aggregator: one that weights rows by their Gramian (``UPGrad``, ``MGDA``, ``CAGrad``, ``DualProj``, ...) or by their
    number (``Mean``, ``Sum``); or a weighting of Gramians, ``UPGradWeighting``
    grads: other rows of this model than the samples', of tasks or classes say: ``per_sample_grads(model).group(labels)``
    loss_type: as in `compute_grad1`

    Parameters that the loss didn't reach have ``.grad`` None.  The result is ``aggregator(J)`` for the rows J written out.

    Raises TypeError for an aggregator that needs the rows themselves, ``ConFIG`` say, ValueError for loss_type beside grads,
    and what `per_sample_grads` raises; NotImplementedError where several processes share the batch.

    Source: Quinton and Rey 2024, "Jacobian descent for multi-objective optimization" (arXiv:2406.16232), section 6.
    """
    if grads is not None and loss_type is not None:
        raise ValueError(
            f"jacobian_descent was given loss_type={loss_type!r} and rows, which know theirs; leave it out" + ON_TORCHJD
        )
    weighting = _weighting_of(aggregator)
    grads = per_sample_grads(model, loss_type) if grads is None else grads
    check_alone(grads, "jacobian_descent", "Take gram_of_all(), and weighted_sum of this process's weights.")
    weights: Tensor = weighting(grads.gram())
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
