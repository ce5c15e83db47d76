"""What capture asks of the floors above it.  Each of them registers its functions here when it is imported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.kinds import Known, Told
from autograd_hacks.capture.ran import Ran
from autograd_hacks.probe.batch import Batch
from autograd_hacks.probe.tape import Tape


class Above:
    """The functions of floors above.

    read_forward(recorder, known, ran): reads a finished forward by laws
    assume(ran): reads a graph whose outputs are assumed to have the samples on axis 0
    created(recorder, use, node, hook): called when a pass that makes a graph arrives at a node
    is_shown(recorder, ran, told, samples): whether the tape shows that samples are independent, if that is asked
    show(recorder, model, copy, batch, ran, told, samples): records whether they are
    why_unshown(model, batch, axis, samples): why the analysis can't show it; "" if it can
    why_not_by_tape(tape, axes, samples, outputs): why labels of the tape don't show it; "" if they do
    check_opaque(tape): raises for operations of a tape that are opaque
    learn(model, recorder): called as a forward with gradients begins: finds the whole parameters
    together(model, recorder, read, show): reads a finished forward, and shows independence if ``read`` says that it is due.
    Other processes may have to take part, so each forward with gradients calls it
    describe(model, trained): a table of the model's parameters
    """

    read_forward: Callable[[Any, Known, Ran], None]
    assume: Callable[[Ran], None]
    created: Callable[..., None]
    is_shown: Callable[[Any, Ran, Told, int | None], bool]
    show: Callable[..., None]
    why_unshown: Callable[[nn.Module, Batch, int | None, int], str]
    why_not_by_tape: Callable[[Tape, Sequence[int | None], int, Sequence[Tensor]], str]
    check_opaque: Callable[[Tape], None]
    learn: Callable[[nn.Module, Any], None]
    together: Callable[[nn.Module, Any, Callable[[], bool], Callable[[], None]], None]
    describe: Callable[[nn.Module, bool], Any]


ABOVE = Above()
