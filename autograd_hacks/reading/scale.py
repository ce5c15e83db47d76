"""How losses were scaled: the reduction over the batch, the number of samples, and the factor on the loss."""

import torch
from torch.amp.grad_scaler import OptState

from autograd_hacks.capture.records import Announcement, Record
from autograd_hacks.capture.wrappers import has_processes
from autograd_hacks.errors import ON_SEGMENTS, BatchSizeError, NothingRecorded
from autograd_hacks.support.layout import Layout

LOSS_TYPES = ("mean", "sum")


def is_unscaled(scaler: torch.amp.GradScaler) -> bool:
    """Whether ``unscale_`` was called for some optimizer since its last step, so that ``.grad`` has lost the scale."""
    return any(state["stage"] is OptState.UNSCALED for state in scaler._per_optimizer_states.values())


def check_ordinary(record: Record, what: str) -> None:
    """Raises if the record holds passes of `backprop_hess`, or of tokens.  what: is to be read, for messages"""
    uses = (use for recorded in record.passes for use, _ in recorded.witnesses())
    check_no_tokens(any(use.documents is not None and use.documents.is_of_tokens for use in uses), what)
    if record.hess_type is not None:
        raise NothingRecorded(
            f"there is no {what}: the record holds the passes of backprop_hess, whose rows are not samples' gradients. Run "
            "loss.backward() first, on a new forward or after clear_backprops(model). Or read the recorded passes: "
            "compute_hess(model), per_sample_grads(model)."
        )


def check_no_tokens(is_of_tokens: bool, what: str) -> None:
    """Raises if rows belong to tokens, N T, and the function has only one axis for rows.  what: what is missing"""
    if is_of_tokens:
        raise ValueError(
            f"there is no {what} for rows of tokens (segments='tokens'). Use per_sample_grads(model), whose verbs have "
            "an axis for samples and one for positions; or call add_hooks(model) again, without segments." + ON_SEGMENTS
        )


def check_batch_size(losses: Announcement, why: str) -> None:
    """Clears passes whose number of samples differs from the number of losses, and raises.

    why: for messages, why there is nothing to read
    """
    for record in losses.heard_by:
        try:
            for shape, layout in record.returned if losses.hess_type else ():
                if shape == losses.shape and layout is not None and layout != Layout():
                    raise BatchSizeError(
                        f"{losses.what}, of shape {tuple(shape)}, has its samples as {layout}; expected them on axis 0. For "
                        "(T, N, C) use output.transpose(0, 1)."
                    )
            for segment in [] if has_processes() else record.segments:  # else reading raises this, so that all know
                if any(recorded.losses is losses for recorded in segment.passes):
                    segment.batch_size()
        except RuntimeError:
            record.clear(why)
            raise
