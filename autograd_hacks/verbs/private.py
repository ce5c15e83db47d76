"""What private steps ask for: that no sample's outputs depend on the values of others."""

from __future__ import annotations

import torch.nn as nn

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.distributed.shards import alone
from autograd_hacks.distributed.spread import Spread
from autograd_hacks.errors import NothingRecorded, ProbeFailed, SamplesMixed
from autograd_hacks.reading.guards import is_shown
from autograd_hacks.support.untouched import untouched
from autograd_hacks.verbs.verify import last_step


def ask_independent(model: nn.Module, recorder: Recorder, spread: Spread, verb: str) -> None:
    """Has forwards show from now on that samples are independent, as ``add_hooks(independent=True)`` does, and the one that
    is recorded now, which is run again for that.  All processes that share a batch call it.

    verb: what asks, for people

    Raises SamplesMixed where samples are not independent, and ProbeFailed where that can't be shown.
    """
    if not recorder.planner.independent:
        recorder.planner.independent = True
        with alone(model):
            spread.agreed(lambda: _show(model, recorder, verb))


def _show(model: nn.Module, recorder: Recorder, verb: str) -> None:
    """Shows it for the recorded forward."""
    record = recorder.record
    for segment in record.segments:
        segment.read = True  # or tried to be
    passes = (recorded for segment in record.segments for recorded in segment.passes)
    unshown = {use for recorded in passes for use in recorded.received if not is_shown(use)}
    if not unshown:
        return
    try:
        if not all(use.is_own and use.forward == record.forwards for use in unshown):
            raise NothingRecorded("it was not the model's last forward")
        arguments = last_step(record)
    except NothingRecorded as error:
        raise ProbeFailed(
            f"{verb} gives numbers only where it was shown that no sample's outputs depend on the values of others, and the "
            "recorded forward was not asked to show that, nor can it be run again: nobody has kept its arguments, or others "
            "ran after it. Ask for it from the beginning: add_hooks(model, independent=True)."
        ) from error
    with untouched(model, arguments) as copied, recorder.aside(), recorder.proving(independent=True):
        args, kwargs = copied(arguments)
        model(*args, **kwargs)
        plan = record.plan
    if plan.mixing:
        raise SamplesMixed(plan.mixing)
    for use in unshown:
        use.plan = plan
