"""Backward from a vector of per-sample losses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.capture.arrivals import announced
from autograd_hacks.capture.records import Announcement
from autograd_hacks.errors import ON_REDUCTION
from autograd_hacks.reading.outside import check_losses, read_losses
from autograd_hacks.reading.scale import check_batch_size, check_loss_type


def backward(losses: Tensor, loss_type: str = "mean", retain_graph: bool | None = None) -> None:
    """Runs the backward pass of ``losses.mean()``, or of ``losses.sum()``, and notes which of the two it was.

    `compute_grad1` then needs no ``loss_type``, and masks, weights or ignored targets in the loss need no thought: row n
    is the gradient of ``losses[n]``.

    losses: N, one loss for each sample    loss_type: 'mean' or 'sum', what ``param.grad`` is to be the gradient of
    retain_graph: as in ``torch.Tensor.backward``

    Parameters that the model returns, ``log_std`` say, may be read in the losses.

    After a forward in which the model was proven (the first few of a kind, and ever more rarely) the losses are, too.

    Raises SamplesMixed where one sample's loss follows from another's outputs, ValueError for losses that are no vector,
    TypeError for what is no tensor, and BatchSizeError where the number of
    losses is not the number of samples that the hooked layers saw; the record is empty then, and ``param.grad`` filled.
    """
    backward_to(losses, None, loss_type, retain_graph)


def backward_to(
    losses: Tensor, inputs: Sequence[Tensor] | None, loss_type: str = "mean", retain_graph: bool | None = None
) -> None:
    """The same, as far as some parameters.  inputs: these; None for all"""
    if not isinstance(losses, Tensor):
        raise TypeError(
            f"backward was given {type(losses).__name__}; expected a tensor of N losses, one for each sample" + ON_REDUCTION
        )
    if losses.ndim != 1:
        raise ValueError(
            f"backward was given losses of shape {tuple(losses.shape)}; expected a vector of N losses, one for each sample. "
            "Compute them with reduction='none', and sum over any further axes: losses.flatten(1).sum(1)." + ON_REDUCTION
        )
    check_loss_type(loss_type)
    announcement = Announcement(losses.shape, loss_type, "the vector given to backward(losses)")
    check_losses(losses)
    read_losses(losses)
    share = 1 / max(1, len(losses)) if loss_type == "mean" else 1.0
    with announced(losses, announcement) as root:
        root.backward(torch.full_like(losses, share), retain_graph, inputs=inputs)
    check_batch_size(announcement, "the losses given to backward did not match the batch; repeat the step")
