"""Setting ``.grad`` from the rows of the last passes: what must hold before, and what is left behind."""

from collections.abc import Collection, Mapping

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import ON_PASSES, ON_PROCESSES, NothingRecorded
from autograd_hacks.reading.guards import check_sets_all
from autograd_hacks.reading.scale import check_ordinary
from autograd_hacks.verbs.grads import PerSampleGrads


def check_may_set(recorder: Recorder, what: str, add: bool = False, once: bool = False) -> None:
    """Raises where ``.grad`` would not be what the rows of the record make.  what: sets it, for people

    add: whether it is to be added to    once: whether rows may be taken once alone, since that spends a budget
    """
    record = recorder.record
    check_ordinary(record, "gradient to clip")
    check_sets_all(record, what)
    if once and any(segment.replaced for segment in record.segments):
        raise NothingRecorded(
            f"{what}: there was no backward pass since the last step, and to take its rows again spends more of the budget "
            "than its accountant knows. Run another forward and backward pass, of an empty batch too."
        )
    if add and (recorder.backward.wants_grad or any(p.fills_grad for segment in record.segments for p in segment.passes)):
        raise ValueError(
            f"{what} was given add=True, but the backward pass has added its unclipped gradient to .grad already. "
            "Hook the model by add_hooks(model, param_grad=False), after which backward() leaves .grad as it was, also "
            "where layers are called by themselves; or run all micro-batches within accumulate(model) and clip once."
            + ON_PASSES
        )
    if add and any(segment.replaced for segment in record.segments):
        raise NothingRecorded(
            f"{what}(add=True): the last backward pass was put into .grad already, and would be added once more. Run "
            "another forward and backward pass before; within accumulate(model), which keeps all passes, clip once, at its "
            "end." + ON_PASSES
        )


def check_alone(grads: PerSampleGrads, what: str, instead: str) -> None:
    """Raises NotImplementedError where processes share the batch, or a layer.  instead: what to do then"""
    if grads.spread.mesh is not None or grads.spread.cuts:
        raise NotImplementedError(
            f"{what}: the model shares its batches, or its layers, with other processes, and this would add up "
            f"those of one process alone. {instead}" + ON_PROCESSES
        )


def set_grads(
    model: nn.Module,
    sums: Mapping[str, Tensor | None],
    reached: Collection[str],
    add: bool = False,
    recorder: Recorder | None = None,
) -> None:
    """Sets ``param.grad`` of each parameter that trains; to None where the loss did not reach it.  What is a part of more
    memory, a flat buffer of gradients say, is written in place, and zeros where the loss did not reach.

    sums: {name: shape}, in memory of their own    reached: the names of those that it reached
    add: whether to add to what is there    recorder: whose passes ``.grad`` is then known to be set from
    """
    for name, parameter in model.named_parameters():
        total, before = sums.get(name), parameter.grad
        if name in reached and total is not None:
            now = total.detach().to(parameter.dtype)
            if before is not None and _is_part(before) and (now.shape, now.device) == (before.shape, before.device):
                with torch.no_grad():
                    before.copy_(now.add_(before) if add else now)
            else:
                parameter.grad = now if before is None or not add else now.add_(before)
        elif name in sums and not add and before is not None and _is_part(before):
            before.zero_()
        elif name in sums and not add:
            parameter.grad = None
    if recorder is not None:
        mark_set(recorder)


def mark_set(recorder: Recorder) -> None:
    """Notes that ``.grad`` was set from the rows of the passes that are recorded."""
    for segment in recorder.record.segments:
        segment.replaced = True


def _is_part(grad: Tensor) -> bool:
    """Whether a gradient is a view of memory that has more in it, and that may be written: not that of a graph."""
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad or grad.is_inference():
        return False
    base = grad._base
    is_flat = base is not None and base.ndim == 1 < grad.ndim
    return is_flat or grad.untyped_storage().nbytes() > grad.nbytes
