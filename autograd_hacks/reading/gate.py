"""Makes one form for each parameter from a record: checks that it may be read, asks each call for its forms, and applies
the loss's scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.calls import LayerCall
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Segment
from autograd_hacks.capture.uses import OutputGrads, Use
from autograd_hacks.capture.wrappers import check_unsharded
from autograd_hacks.errors import ON_REDUCTION, NothingRecorded
from autograd_hacks.forms import Concatenation, Form, Zero, add, scale
from autograd_hacks.reading.certificate import Certificate, Told, note_compared
from autograd_hacks.reading.guards import (
    LOSS_TYPES,
    check_documents,
    check_hooked,
    check_independent,
    check_known,
    check_seen,
    readable_segments,
)
from autograd_hacks.support.contexts import outside_inference, without_autocast
from autograd_hacks.support.ranges import check_word


def read(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    recorder: Recorder,
    loss_type: str | None,
    scaling: float | Tensor = 1.0,
) -> dict[str, Form | None]:
    """{name: form} for the trainable parameters that aren't left out, in the order of ``named_parameters``.

    A form is None if no loss arrived.

    loss_type: 'mean' or 'sum' over the batch; None for what `backward(losses)` announced, else 'mean'
    scaling: the factor by which the loss was multiplied
    """
    record = recorder.record
    parameters = record.asked(parameters)
    check_word("reading", ON_REDUCTION, (*LOSS_TYPES, None), loss_type=loss_type)
    if record.on_arrival is not None:
        raise NothingRecorded(
            "inside during_backward, each layer's record is freed during the pass. Read after that context."
        )
    record.mark_read()
    check_unsharded(model)
    check_hooked(model, parameters, recorder)
    check_known(model, record)
    check_independent(recorder)
    check_documents(recorder)
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    is_scaled, forms = isinstance(scaling, Tensor) or scaling != 1, dict[str, Form | None]()
    with outside_inference(), without_autocast(parameters.values()):
        gates = [Gate(segment, loss_type) for segment in readable_segments(parameters, record)]
        names = {n: own or record.name_of(trainable[n]) for n, own in zip(trainable, record.names.of(trainable.values()))}
        for gate in gates:
            gate.read_all()
        if compared := [gate for gate in gates if [own for own in gate.segment.passes if own.along]]:
            certificate = Certificate(record)
            with torch.no_grad():
                for gate, (name, known) in product(compared, names.items()):
                    gate.certify(certificate, name, known)
                certificate.check()
        every = [gate.forms(names.values()) for gate in gates]
        if len(gates) > 1:
            every = [[_stack(own, gates, p) for *own, p in zip(*every, trainable.values())]]
        for name, form in zip(names, every[0]):
            forms[name] = scale(form, 1 / scaling) if is_scaled and form is not None else form
    return forms


class Gate:
    """Reads the passes of one segment, parameter by parameter."""

    def __init__(self, segment: Segment, loss_type: str | None) -> None:
        self.segment, self.samples = segment, 0  # how many rows a pass has
        self._adds_up = segment.hess_type is None  # else each pass has rows of its own
        self._is_mean = [recorded.reduction(loss_type) == "mean" for recorded in segment.passes]
        # One table for each pass, {parameter: {call: form}}, of the calls asked so far.
        self._terms: list[dict[str, dict[Use, Form]]] = [{} for _ in segment.passes]
        self._asked: set[Use] = set()
        self._read: list[dict[str, list[Told]]] = [{} for _ in segment.passes]  # the same, until it is compared

    def read_all(self) -> None:
        """Asks every call for its forms, in the order of the forward, and checks that their numbers of samples agree."""
        for number, recorded in enumerate(self.segment.passes):
            for use, grads in reversed(recorded.received.items()):
                self._ask(number, use, grads)
        told = [call.within.documents for recorded in self.segment.passes for call in recorded.told_by]
        self.samples = next((d.count for d in told if d is not None), self.segment.batch_size())

    def _ask(self, number: int, call: Use, grads: OutputGrads) -> None:
        recorded, read, is_mean = self.segment.passes[number], self._read[number], self._is_mean[number]
        # At once, where rows aren't compared with what arrived, use by use.
        is_compared = bool(recorded.along) and not (recorded.along.keys() | recorded.untold).isdisjoint(call.known.names)
        forms = call.forms_at_once(grads) if isinstance(call, LayerCall) and not is_compared else None
        if is_told := forms is None:
            check_seen(call, grads)
            forms = call.forms(grads)
        terms, documents = self._terms[number], call.within.documents
        # The pass may not lead to all of them.
        for name, form in [(n, forms[own]) for own, n in zip(call.known.locals, call.known.names) if own in forms]:
            found = terms.setdefault(name, {})
            # A mean loss was divided by N.
            own = scale(form, form.samples if documents is None else documents.losses) if is_mean else form
            found[call] = add([found[call], own]) if call in found else own
            if is_told:
                read.setdefault(name, []).append((call, grads, form))

    def certify(self, certificate: Certificate, name: str, known: str) -> None:
        """Takes what was read of a parameter since the last call into a certificate.  name, known: see `Certificate.add`"""
        for recorded, read in zip(self.segment.passes, self._read):
            told = read.pop(known, ())
            if told and known in recorded.along:
                certificate.add(name, known, recorded, told)
            elif told and known in recorded.untold:
                note_compared(known, told)

    def forms(self, names: Iterable[str]) -> list[Form | None]:
        """J of each parameter; None where no call leads to it.

        After `backprop_hess`: a row for each sample of each pass, pass by pass."""
        if not self._adds_up:
            return [self._concatenated(name) for name in names]
        found = [[form for terms in self._terms for form in terms.pop(name, _NONE).values()] for name in names]
        return [add(own) if own[1:] else own[0] if own else None for own in found]

    def _concatenated(self, name: str) -> Form | None:
        tables = [terms.pop(name, _NONE) for terms in self._terms]
        if not any(tables):
            return None
        if all(table.keys() == tables[0].keys() for table in tables):  # call by call, so that passes share what they can
            return add([Concatenation.of([table[key] for table in tables]) for key in tables[0]])
        # Checkpointing has made new calls in each pass.
        like = next(form for table in tables for form in table.values())
        zero = Zero(self.samples, like.shape, like.like)
        return Concatenation.of([add(list(table.values()) or [zero]) for table in tables])

    def form_at_once(self, name: str) -> tuple[Form | None, list[Use]]:
        """The rows that the only, running pass has given a parameter since the last call; and the uses needed no more."""
        for call in reversed(self.segment.passes[0].calls_of.get(name, ())):  # in the order of the forward
            if call not in self._asked:
                self._asked.add(call)
                self._ask(0, call, self.segment.passes[0].received[call])
        (form,), needed = self.forms([name]), {call for found in self._terms[0].values() for call in found}
        done = [call for call in self._asked if call not in needed]
        self._asked.difference_update(done)
        return form, done


_NONE: dict[Use, Form] = {}


def _stack(forms: Sequence[Form | None], gates: Sequence[Gate], parameter: Tensor) -> Form | None:
    """The rows of all segments.  A segment that did not reach the parameter has zeros."""
    if all(form is None for form in forms):
        return None
    sizes = [gate.samples * (len(gate.segment.passes) if gate.segment.hess_type else 1) for gate in gates]
    return Concatenation([form or Zero(size, parameter.shape, parameter) for form, size in zip(forms, sizes)])
