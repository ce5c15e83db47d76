"""Sums of rows compared while a backward pass runs, so that no gradient is kept for it."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.records import Pass, Record, Segment
from autograd_hacks.capture.uses import LayerCall
from autograd_hacks.reading.certificate import adds_up
from autograd_hacks.reading.gate import Gate
from autograd_hacks.support.contexts import without_autocast


def settle(record: Record, current: Pass, name: str, grad: Tensor) -> bool:
    """Whether the rows of the calls that a pass has just come by add up to the gradient that it brings to a parameter.

    Where they don't, or can't be taken, the gradient is kept, and who reads is told what is wrong.

    name: the parameter's, in the record
    """
    calls = current.calls_of[name]
    # Passes of `backprop_hess` share what arrives; recurrent layers are recomputed for rows, once, when somebody reads.
    if current.is_hess or any(
        isinstance(call, LayerCall) and isinstance(call.layer, nn.RNNBase | nn.RNNCellBase) for call in calls
    ):
        return False
    reader = current.reader = current.reader or Gate(Segment([current]), None)
    try:
        with torch.no_grad(), without_autocast([edge.parameter for edge in calls[0].edges.values()]):
            form = reader.form_so_far(name)
            if form is None or not form.samples or not adds_up(name, form, [(current, grad.detach())], None):
                return False
    except Exception:  # whatever a rule raises, or the gate: so it does for who reads
        return False
    current.settled.setdefault(name, set()).update(calls)
    return True
