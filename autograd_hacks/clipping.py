"""Gradients of which no sample has more than its share."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.gradients import set_grads
from autograd_hacks.grads import per_sample_grads
from autograd_hacks.hooks import recorder_of

BUDGET = 256 * 2**20
"""Bytes to use beside the result, unless told another number: a quarter for what is computed, the rest for rows that are
read twice, whose memory is kept for the next step."""


@torch.no_grad()
def clip_grad1_norm_(
    model: nn.Module,
    max_norm: float,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    error_if_nonfinite: bool = False,
    budget: int = BUDGET,
) -> Tensor:
    """Sets ``param.grad`` to the mean (or sum, as the loss was) of the per-sample gradients, each clipped to a norm.

    A sample's gradient gₙ over all parameters becomes gₙ · min(1, max_norm / ‖gₙ‖).  One backward pass is enough, and
    nothing of size N × P is written.  Whatever was in ``.grad`` is replaced: run the backward pass of a penalty afterwards.

    max_norm: larger than 0    loss_type, scale: as in `compute_grad1`
    error_if_nonfinite: whether to raise RuntimeError for a norm that is infinite or no number; else such samples spoil the
    sum, as they would without clipping    budget: bytes to use beside the result

    Returns the norms before clipping, N.

    Raises ValueError for max_norm ≤ 0, and what `compute_grad1` raises.

    Source: Abadi et al. 2016, "Deep learning with differential privacy" (arXiv:1607.00133), algorithm 1; mirrors
    ``torch.nn.utils.clip_grad_norm_``, without the 1e-6 that it adds to the norm.
    """
    if not isinstance(max_norm, int | float) or isinstance(max_norm, bool):
        raise TypeError(f"clip_grad1_norm_ was given max_norm={max_norm!r}; expected a number")
    if not max_norm > 0:
        raise ValueError(f"clip_grad1_norm_ was given max_norm={max_norm}; expected a number larger than 0")
    memory = recorder_of(model).memory
    grads = per_sample_grads(model, loss_type, scale).written_where_it_saves(3 * budget // 4, memory)
    norms = grads.norms(budget=budget // 4)
    assert isinstance(norms, Tensor)
    if error_if_nonfinite and not norms.isfinite().all():
        raise RuntimeError(
            f"the gradients of samples {(~norms.isfinite()).nonzero()[:, 0].tolist()} have a norm that is no finite number. "
            "Leave them out of the batch, or clip with error_if_nonfinite=False."
        )
    weights = (max_norm / norms).clamp(max=1)  # 1 for a gradient of zeros
    if grads.loss_type == "mean":
        weights = weights / max(1, grads.samples)
    set_grads(model, grads.weighted_sum(weights, budget // 4), grads.reached)
    return norms
