"""How the losses were scaled: the reduction over the batch, the number of samples, what the loss was multiplied by."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from autograd_hacks.capture.records import Announcement, Record
from autograd_hacks.errors import ON_REDUCTION, ON_SEGMENTS, BatchSizeError, NothingRecorded, SamplesMixed
from autograd_hacks.support.kinds import is_number
from autograd_hacks.support.layout import Layout

LOSS_TYPES = ("mean", "sum")


def check_loss_type(loss_type: str | None) -> None:
    if loss_type is not None and loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type is {loss_type!r}; expected 'mean' or 'sum', whichever the loss does over the batch, or None after "
            "autograd_hacks.backward(losses)" + ON_REDUCTION
        )


def check_scale(scale: float | Tensor) -> None:
    value = scale.detach() if isinstance(scale, Tensor) and scale.numel() == 1 else scale
    if value.numel() != 1 if isinstance(value, Tensor) else not is_number(value):
        raise TypeError(
            f"scale is {scale!r}; expected the number that the loss was multiplied by, GradScaler.get_scale()" + ON_REDUCTION
        )
    if not 0 < float(value) < float("inf"):
        raise ValueError(
            f"scale is {float(value)}; expected a number above 0, which the loss was multiplied by" + ON_REDUCTION
        )


def check_ordinary(record: Record, what: str) -> None:
    """Raises where the record holds the passes of `backprop_hess`, or of tokens.  what: is to be read, for people"""
    uses = (use for segment in record.segments for recorded in segment.passes for use in recorded.received)
    check_no_tokens(any(use.documents is not None and use.documents.is_of_tokens for use in uses), what)
    if record.hess_type is not None:
        raise NothingRecorded(
            f"the record holds the passes of backprop_hess, whose rows are no samples' gradients, so that there is no "
            f"{what}. Run loss.backward() first, on a new forward or after clear_backprops(model); or read these by "
            "compute_hess(model) or per_sample_grads(model)."
        )


def check_no_tokens(is_of_tokens: bool, what: str) -> None:
    """Raises where rows are of tokens, N T, and what reads them has one axis for rows."""
    if is_of_tokens:
        raise ValueError(
            f"rows of tokens (segments='tokens') have no {what}: read them by per_sample_grads(model), whose verbs have an "
            "axis of samples and one of positions; or call add_hooks(model) again, without segments." + ON_SEGMENTS
        )


@contextmanager
def telling_of_lists(record: Record) -> Iterator[None]:
    """A context in which an error about samples says that the model was given a list, where it was."""
    try:
        yield
    except (BatchSizeError, SamplesMixed) as error:
        args, kwargs = record.arguments or ((), {})
        if not any(isinstance(x, list) and x for x in (*args, *kwargs.values())):
            raise
        raise type(error)(
            f"{error} The model was given a list of tensors: if each is a sample, give it one tensor of all, padded, with a "
            "mask (torch.nn.utils.rnn.pad_sequence), or a packed sequence (pack_sequence); samples must stand on an axis."
        ) from None


def check_batch_size(losses: Announcement, why: str) -> None:
    """Clears the records of passes that have come through another number of samples than there are losses, and raises.

    why: there is nothing to read then, for people
    """
    for record in losses.heard_by:
        try:
            for shape, layout in record.returned if losses.hess_type else ():
                if shape == losses.shape and layout is not None and layout != Layout():
                    raise BatchSizeError(
                        f"{losses.what}, of shape {tuple(shape)}, has its samples as {layout}, not on axis 0. Bring them "
                        "there: output.transpose(0, 1) for (T, N, C)."
                    )
            for segment in record.segments:
                if any(recorded.losses is losses for recorded in segment.passes):
                    with telling_of_lists(record):
                        segment.batch_size()
        except RuntimeError:
            record.clear(why)
            raise
