"""The gate between records and rules: may they be read, then one call after the other, the loss's scale, one form for each
parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Pass, RecordedCall, Segment
from autograd_hacks.capture.wrappers import check_unsharded
from autograd_hacks.errors import NothingRecorded
from autograd_hacks.forms import Concatenation, Form, Passes, Zero, add, scale
from autograd_hacks.probe.plan import SumCheck
from autograd_hacks.reading.certificate import check_sum, comparable
from autograd_hacks.reading.guards import check_hooked, check_seen, readable_segments
from autograd_hacks.reading.scale import check_loss_type, check_scale
from autograd_hacks.support.untouched import outside_inference, without_autocast


def read(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    recorder: Recorder,
    loss_type: str | None,
    scaling: float | Tensor = 1.0,
    lazily: bool = False,
) -> Iterator[tuple[str, Form | None]]:
    """(name, form) over the parameters that train, in the order of ``named_parameters``; None where no loss arrived.

    parameters: the model's, by name
    loss_type: 'mean' or 'sum' over the batch; None for what `backward(losses)` announced, else 'mean'
    scaling: what the loss was multiplied by    lazily: whether rows may not be written out, all at once
    """
    record = recorder.record
    check_loss_type(loss_type)
    check_scale(scaling)
    if record.on_arrival is not None:
        raise NothingRecorded(
            "inside streaming(model) each layer's record is freed as the pass goes on. Read after that context."
        )
    for segment in record.segments:
        segment.read = True  # or tried to be
    check_unsharded(model)
    check_hooked(model, parameters, recorder)
    segments = readable_segments(parameters, record)
    with outside_inference():
        gates = [Gate(segment, loss_type) for segment in segments]
        for gate in gates:
            gate.read_all()
    if record.plan.sum_check is SumCheck.MISSED:
        record.plan.sum_check = SumCheck.PENDING  # somebody reads: the next pass's are kept, also where this one's fail
    kept = any(recorded.arrived for segment in segments for recorded in segment.passes)
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            continue
        with outside_inference(), without_autocast(parameter):
            forms = [gate.form(record.name_of(parameter)) for gate in gates]
            for gate, form in zip(gates, forms):
                if kept and form is not None:
                    arrived = comparable(gate.segment, record.name_of(parameter))
                    check_sum(name, form, arrived, record, loss_type, lazily)
        yield name, _stack([None if form is None else scale(form, 1 / scaling) for form in forms], gates, parameter)
    if kept:
        record.plan.sum_check = SumCheck.DONE


class Gate:
    """The passes of one segment, parameter by parameter."""

    def __init__(self, segment: Segment, loss_type: str | None) -> None:
        self.segment, self.loss_type = segment, loss_type
        self.samples = 0  # how many rows there are of a pass
        self._forms: dict[tuple[int, RecordedCall], dict[str, Form]] = {}  # of calls, while some of them are to be asked for

    def read_all(self) -> None:
        """Asks every call for its forms, in the order of the forward, and compares their numbers of samples."""
        for number, recorded in enumerate(self.segment.passes):
            for call in reversed(recorded.received):
                self.of_call(number, recorded, call)
        self.samples = self.segment.batch_size()

    def of_call(self, number: int, recorded: Pass, call: RecordedCall) -> dict[str, Form]:
        """{name in the layer: form} of a call that are still to be asked for."""
        if (number, call) not in self._forms:
            grads = recorded.received[call]
            check_seen(call, grads)
            self._forms[number, call] = dict(call.forms(grads))
        return self._forms[number, call]

    def form(self, name: str) -> Form | None:
        """J of a parameter; None where no call leads to it.  Of `backprop_hess` a row for each sample of each pass, pass by
        pass."""
        tables = [self._terms(number, recorded, name) for number, recorded in enumerate(self.segment.passes)]
        if not any(tables):
            return None
        if self.segment.hess_type is None:
            return add([form for table in tables for form in table.values()])
        if all(table.keys() == tables[0].keys() for table in tables):  # call by call, for which passes share what they can
            return add([Passes.of([table[key] for table in tables]) for key in tables[0]])
        # Checkpointing has made the calls anew in each pass.
        like = next(form for table in tables for form in table.values())
        zero = Zero(self.samples, like.shape, like.like)
        return Passes.of([add(list(table.values()) or [zero]) for table in tables])

    def _terms(self, number: int, recorded: Pass, name: str) -> dict[RecordedCall, Form]:
        """A pass's forms for a parameter, by call."""
        found: dict[RecordedCall, Form] = {}
        is_mean = recorded.reduction(self.loss_type) == "mean"
        for call in reversed(recorded.calls_of.get(name, ())):  # in the order of the forward
            forms = self.of_call(number, recorded, call)
            for local in [local for local in forms if call.edges[local].name == name]:
                form = forms.pop(local)
                own = scale(form, form.samples) if is_mean else form  # the mean divided every sample's gradient by N
                found[call] = add([found[call], own]) if call in found else own
        return found

    def done(self) -> list[RecordedCall]:
        """The calls all of whose forms were asked for, which it forgets."""
        done = [key for key, forms in self._forms.items() if not forms]
        for key in done:
            del self._forms[key]
        return [call for _, call in done]


def _stack(forms: Sequence[Form | None], gates: Sequence[Gate], parameter: Tensor) -> Form | None:
    """The rows of all segments; zeros for a segment that did not reach the parameter."""
    if len(forms) == 1 or all(form is None for form in forms):
        return forms[0]
    sizes = [gate.samples * (len(gate.segment.passes) if gate.segment.hess_type else 1) for gate in gates]
    filled = (Zero(size, parameter.shape, parameter) if form is None else form for form, size in zip(forms, sizes))
    return Concatenation(list(filled))
