"""Sums of rows compared while a backward pass runs, so that no gradient is kept for it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.calls import RecordedCall
from autograd_hacks.capture.records import Pass, Record, Segment
from autograd_hacks.forms import Form
from autograd_hacks.reading.certificate import adds_up, agree, received_by
from autograd_hacks.reading.gate import Gate
from autograd_hacks.reading.trial import Trial
from autograd_hacks.support.untouched import without_autocast


def settle(record: Record, current: Pass, name: str, grad: Tensor) -> bool:
    """Whether the rows of the calls that a pass has just come by add up to the gradient that it brings to a parameter.

    Where they don't, or can't be taken, the gradient is kept, and who reads is told what is wrong.

    name: the parameter's, in the record
    """
    calls = current.calls_of[name]
    # Passes of `backprop_hess` share what arrives; recurrent layers are recomputed for rows, once, when somebody reads.
    if current.is_hess or any(isinstance(call.layer, nn.RNNBase | nn.RNNCellBase) for call in calls):
        return False
    reader = current.reader = current.reader or Gate(Segment([current]), None)
    try:
        with torch.no_grad(), without_autocast([edge.parameter for edge in calls[0].edges.values()]):
            form = reader.form_so_far(name)
            # Modules are run again once, when somebody reads.
            if form is None or form.sources or not form.samples or not adds_up(name, form, [(current, grad.detach())], None):
                return False
    except Exception:  # whatever a rule raises, or the gate: so it does for who reads
        return False
    current.settled.setdefault(name, set()).update(calls)
    return True


class Sums:
    """Which parameters' rows add up to what a proof's two passes bring, and don't.

    ratio: N, what the second pass is weighted by, compared with the first
    """

    def __init__(self, trial: Trial, ratio: Tensor) -> None:
        self.trial, self.ratio = trial, ratio
        self.forms: dict[str, Form] = {}  # of the parameters, by name, to which rows lead
        self.wrong: set[str] = set()
        self.wrong_weighted: set[str] = set()  # in the second pass
        self.unsure = False  # whether a gradient was zero, or not finite
        self._gate: Gate | None = None
        self._error: Exception | None = None

    def take(self, name: str, grad: Tensor) -> None:
        """The first pass brings a gradient to a parameter."""
        recorder = self.trial.recorder
        current, known = recorder.backward.running, recorder.record.name_of(self.trial.parameters[name])
        if current is None or self._error is not None:
            return
        self._gate = self._gate or Gate(Segment([current]), "sum")
        try:
            with torch.no_grad(), without_autocast([self.trial.parameters[name]]):
                form = self._gate.form_so_far(known)
                if form is not None:
                    self.forms[name] = form
                    grad, ones = grad.to_dense(), torch.ones(form.samples, dtype=form.sum_dtype, device=form.like.device)
                    self.wrong |= set() if self._agrees(name, ones, grad) else {name}
                    self.unsure |= not bool(grad.any()) or not bool(grad.isfinite().all())
        except Exception as error:  # which is told when it is known whether samples mix
            self._error = error

    def take_weighted(self, name: str, grad: Tensor) -> None:
        """The second does."""
        form = self.forms.get(name)
        if form is not None and self._error is None:
            with torch.no_grad(), without_autocast([self.trial.parameters[name]]):
                ratio = self.ratio.to(form.like.device, form.sum_dtype)
                self.wrong_weighted |= set() if self._agrees(name, ratio, grad.to_dense()) else {name}

    def calls_of(self, name: str) -> list[RecordedCall]:
        assert self._gate is not None
        known = self.trial.recorder.record.name_of(self.trial.parameters[name])
        return self._gate.segment.passes[0].calls_of[known]

    def check(self) -> None:
        """Raises what reading raised, or numbers of samples that differ."""
        if self._error is not None:
            raise self._error
        if self._gate is not None:
            self._gate.segment.batch_size()

    def _agrees(self, name: str, w: Tensor, grad: Tensor) -> bool:
        form, calls, scale = self.forms[name], self.calls_of(name), float(w.max())
        assert self._gate is not None
        received = self._gate.segment.passes[0].received
        used = [call.precision for call in calls]
        return agree(form, w, grad, used, partial(received_by, form, [(call, received[call], scale) for call in calls]))
