"""Collects the rows of several backward passes.  No mathematics."""

from __future__ import annotations

import torch.nn as nn

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.records import Record
from autograd_hacks.errors import ON_PASSES


def accumulate(model: nn.Module) -> Accumulation:
    """Returns a context that appends the rows of several forward and backward passes, for micro-batches::

        with autograd_hacks.accumulate(model):
            for x, y in micro_batches:
                loss_fn(model(x), y).backward()
        autograd_hacks.compute_grad1(model)

    With ``loss_type='mean'`` each loss is assumed to be the mean over its own micro-batch.  A row is then the gradient of
    its sample's loss, for any size of micro-batch.  If an exception leaves the context, the rows are discarded.

    If the passes are not in one block, for example in a trainer's callbacks, call ``accumulate(model).start()`` before them
    and ``accumulate(model).stop()`` after them.  Then read the rows.

    Raises NothingRecorded if the model has no hooks.  ``start`` raises RuntimeError if the model is accumulating already.
    """
    recorder_of(model)
    return Accumulation(model)


class Accumulation:
    """The result of `accumulate`: a context, which can also be started and stopped explicitly, any number of times."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._record: Record | None = None

    def start(self) -> None:
        """Starts to append rows.  Discards what was recorded before.

        Raises RuntimeError if the model is accumulating already, and NothingRecorded if it has no hooks.
        """
        record = recorder_of(self._model).record
        if record.accumulating:
            raise RuntimeError(
                "accumulate: this model is accumulating already. Leave the other context first, or call "
                "autograd_hacks.accumulate(model).stop()." + ON_PASSES
            )
        record.clear()
        record.accumulating, self._record = True, record

    def stop(self) -> None:
        """Stops, whichever object started it.  The rows stay readable until the next backward pass.

        Raises RuntimeError if the model is not accumulating, and NothingRecorded if it has no hooks.
        """
        record = recorder_of(self._model).record
        if not record.accumulating:
            raise RuntimeError(
                "accumulate: this model is not accumulating, so there is nothing to stop. Call start() first." + ON_PASSES
            )
        record.accumulating = False

    def __enter__(self) -> Accumulation:
        self.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._record is None:
            return
        self._record.accumulating = False
        if error is not None:
            self._record.clear(
                f"accumulate(model): {type(error).__name__} left the context, so the rows were discarded. Run the passes "
                "again"
            )


ABOVE.accumulate = accumulate
