"""TorchJD: aggregation of per-sample gradients by their Gramian, without writing out a Jacobian."""

from math import prod
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks import PerSampleGrads, per_sample_grads, per_sample_jacobian
from autograd_hacks.errors import ON_TORCHJD, needed
from autograd_hacks.extending import check_alone, check_kind, recorder_of, set_grads, spread_of

with needed("torchjd"):
    from torchjd import aggregation as jd
    from torchjd.aggregation import Aggregator, WeightedAggregator, Weighting

BY_NUMBER = jd.ConstantWeighting, jd.MeanWeighting, jd.RandomWeighting, jd.SumWeighting
"""Weightings that depend only on the number of rows."""


@torch.no_grad()
def jacobian_descent(
    model: nn.Module,
    aggregator: Aggregator | Weighting[Any],
    grads: PerSampleGrads | None = None,
    loss_type: str | None = None,
    *,
    losses: Tensor | None = None,
    task_means: bool = False,
) -> Tensor:
    """Sets ``.grad`` to TorchJD's aggregation of the last backward pass's per-sample gradients.  Returns the weights, N.

    The result is ``aggregator(J)`` for the rows J, without writing J out.  With ``losses`` of N samples in K tasks it
    aggregates one row for each sample and task and returns (N, K) weights.  ``.grad`` is None for parameters that the loss
    didn't reach.

    model: the hooked model
    aggregator: an aggregator that weights rows by their Gramian (``UPGrad``, ``MGDA``, ``CAGrad``, ``DualProj``, ...) or by
    their number (``Mean``, ``Sum``); or a weighting of Gramians: ``UPGradWeighting``
    grads: rows to aggregate instead of the samples', for example of classes: ``per_sample_grads(model).group(labels)``
    loss_type: as in `compute_grad1`
    losses: (N, K) or (N,), each sample's loss in each task, computed from the hooked model's outputs. Give them instead of
    running a backward pass; K passes run here, by `per_sample_jacobian`. TorchJD sees the rows sample by sample
    task_means: aggregate the K gradients of the tasks' mean losses instead of N K rows, as for ``losses.mean(0)``. Returns K
    weights

    Raises TypeError for an aggregator that needs the rows themselves, such as ``ConFIG``, and for a list of losses;
    ValueError if more than one of ``grads``, ``losses`` and ``loss_type`` is given, and for losses with other axes;
    NotImplementedError if several processes share the batch; and what `per_sample_grads` and `per_sample_jacobian` raise.

    Source: Quinton and Rey 2024, "Jacobian descent for multi-objective optimization" (arXiv:2406.16232), section 6.
    """
    named = {"losses": losses, "grads": grads, f"loss_type={loss_type!r}": loss_type}
    if len(given := [name for name, x in named.items() if x is not None]) > 1:
        raise ValueError(f"jacobian_descent was given {' and '.join(given)}; expected only one of them" + ON_TORCHJD)
    expected = "one tensor (N, K) for N samples and K tasks: torch.stack(losses, dim=1)"
    check_kind("jacobian_descent", ON_TORCHJD, Tensor | None, expected, losses=losses)
    if task_means if losses is None else losses.ndim not in (1, 2):
        raise ValueError(
            f"jacobian_descent was given losses of shape {losses if losses is None else tuple(losses.shape)}; expected "
            "(N, K) for N samples and K tasks, or (N,). Reduce losses of tokens or pixels first: losses.mean(-1)."
            + ON_TORCHJD
        )
    weighting = _weighting_of(aggregator)
    if losses is not None:
        grads = per_sample_jacobian(model, losses)
        if task_means:
            share = torch.full_like(losses, 1 / len(losses))
            grads = grads.scaled(share).group(torch.zeros(len(losses), dtype=torch.long, device=losses.device))
        grads.spread = spread_of(model, recorder_of(model))  # rows of a Jacobian belong to this process only
    grads = per_sample_grads(model, loss_type) if grads is None else grads
    check_alone(grads, "jacobian_descent", "Take gram_of_all(), and weighted_sum of this process's weights.")
    products, each = grads.gram(), (grads.samples, *grads.entries)
    weights: Tensor = weighting(products.reshape(prod(each), prod(each))).view(each)
    set_grads(dict(model.named_parameters()), grads.weighted_sum(weights), grads.reached)
    return weights[0] if task_means else weights


def _weighting_of(aggregator: object) -> Weighting[Any]:
    if isinstance(aggregator, jd.GramianWeightedAggregator):
        return aggregator.gramian_weighting
    weighting = aggregator.weighting if isinstance(aggregator, WeightedAggregator) else aggregator
    needs_rows = isinstance(aggregator, WeightedAggregator) and not isinstance(weighting, BY_NUMBER)
    if isinstance(weighting, Weighting) and not needs_rows:
        return weighting
    raise TypeError(
        f"jacobian_descent was given {type(aggregator).__name__}; expected one of TorchJD's aggregators by Gramian, such as "
        "UPGrad(), or its weighting. For others take the rows: per_sample_grads(model).dense()." + ON_TORCHJD
    )
