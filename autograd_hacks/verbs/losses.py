"""Backward from a vector of per-sample losses."""

from collections.abc import Sequence

import torch
from torch import Tensor

from autograd_hacks.capture.arrivals import announced
from autograd_hacks.capture.records import Announcement
from autograd_hacks.capture.wrappers import has_processes
from autograd_hacks.errors import A_LOSS_EACH, ON_REDUCTION, NothingRecorded, SamplesMixed
from autograd_hacks.reading.beyond import read_outside
from autograd_hacks.reading.guards import LOSS_TYPES, check_batch_size
from autograd_hacks.support.ranges import check_word
from autograd_hacks.verbs.arguments import check_kind


def backward(
    losses: Tensor,
    loss_type: str = "mean",
    retain_graph: bool | None = None,
    inputs: Sequence[Tensor] | None = None,
) -> None:
    """Runs the backward pass of ``losses.mean()`` or ``losses.sum()``, and records which one.

    Row n is then the gradient of ``losses[n]``, whatever masks, weights or ignored targets the loss has, and `compute_grad1`
    needs no ``loss_type``.  The losses may use parameters that the model returns, such as ``log_std``.

    losses: N losses, one for each sample
    loss_type: 'mean' or 'sum', the reduction whose gradient ``param.grad`` gets
    retain_graph, inputs: as in ``torch.Tensor.backward``

    Raises TypeError if ``losses`` is not a tensor, ValueError if it is not a vector of real numbers; NothingRecorded if it
    has no graph; SamplesMixed if a sample's loss depends on another sample's outputs; BatchSizeError if there are more or
    fewer losses than the hooked layers had samples. After a BatchSizeError the record is empty and ``param.grad`` is filled.
    Where processes share batches, the last two are raised when rows are read, so that all processes know.
    """
    check_kind("backward", ON_REDUCTION, Tensor, "a tensor of N losses, one for each sample", losses=losses)
    if losses.ndim != 1:
        raise ValueError(f"backward was given losses of shape {tuple(losses.shape)}; expected {A_LOSS_EACH}" + ON_REDUCTION)
    if losses.is_complex():
        raise ValueError(f"backward was given losses of {losses.dtype}; expected real numbers, as torch does" + ON_REDUCTION)
    check_word("backward", ON_REDUCTION, LOSS_TYPES, loss_type=loss_type)
    if not losses.requires_grad:
        raise NothingRecorded(
            "backward was given losses without a graph: they are detached, or computed under torch.no_grad, or from rows of "
            "a pass without create_graph=True. For these run torch.autograd.grad(loss, parameters, create_graph=True) first."
        )
    announcement = Announcement(losses.shape, loss_type, "the vector given to backward(losses)")
    if at := read_outside(losses):
        announcement.refused = (
            "samples mix in the losses given to backward, as in a contrastive loss or one with statistics of the batch, so "
            f"there are no per-sample gradients. Samples mix at {at}."
        )
        if not has_processes():  # else others wait for this one's gradients, and would get those of its next pass
            raise SamplesMixed(announcement.refused)
    share = 1 / max(1, len(losses)) if loss_type == "mean" else 1.0
    with announced(losses, announcement) as root:
        root.backward(torch.full_like(losses, share), retain_graph, inputs=inputs)
    check_batch_size(announcement, "the losses given to backward did not match the batch; repeat the step")
