"""The gate between records and rules: checks and dtype, once, before any rule; then the loss's scale, and one form for each
parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.checks import (
    batch_size,
    check_loss_type,
    check_seen,
    check_sum,
    check_supported,
    common_batch_size,
    readable_segments,
    reduction,
)
from autograd_hacks.errors import BatchSizeError, SamplesMixed, UnsupportedLayer, where
from autograd_hacks.forms import Concatenation, Dense, Form, Sum
from autograd_hacks.record import Received, Recorder, Segment, Visit
from autograd_hacks.rules import Call, rule_for
from autograd_hacks.trees import map_tensors


def per_parameter_forms(model: nn.Module, recorder: Recorder, loss_type: str | None) -> dict[str, Form | None]:
    """{name: form} over the parameters that train, in the order of ``named_parameters``; None where no loss arrived.

    loss_type: 'mean' or 'sum' over the batch; None for what `backward(losses)` announced, else 'mean'
    """
    check_loss_type(loss_type)
    check_supported(model, recorder)
    segments = readable_segments(model, recorder)
    tables = [segment_forms(segment, loss_type) for segment in segments]
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, parameter in trainable.items():
        for segment, (table, samples) in zip(segments, tables):
            check_sum(name, parameter, table.get(parameter), segment, loss_type, samples)
    return {
        name: _stack([table.get(parameter) for table, _ in tables], [samples for _, samples in tables], parameter)
        for name, parameter in trainable.items()
    }


def without_autocast(parameter: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep the parameter's precision, wherever reading is called from."""
    return torch.autocast(parameter.device.type, enabled=False)


def segment_forms(segment: Segment, loss_type: str | None) -> tuple[dict[Tensor, Form], int]:
    """{parameter: form} of one segment, and its number of samples."""
    found: dict[Tensor, list[Form]] = {}
    for recorded in segment.passes:
        is_mean = reduction(recorded, loss_type) == "mean"
        for visit, received in reversed(recorded.received.items()):  # in the order of the forward
            check_seen(visit, received)
            for name, form in _apply_rule(visit, received).items():
                # The mean divided every sample's gradient by N.
                own = form.scaled(form.samples) if is_mean and form.samples != 1 else form
                found.setdefault(visit.parameters[name][0], []).append(own)
    samples = common_batch_size(segment)
    return {parameter: Sum.of(forms) for parameter, forms in found.items()}, samples


def _gated(visit: Visit, received: Received) -> Call:
    """The call as rules expect it: in the parameters' dtype, whatever autocast made of the layer's input."""
    dtype = next(parameter.dtype for parameter, _ in visit.parameters.values())

    def promote(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and dtype.is_floating_point else tensor

    return Call(
        path=visit.path,
        layer=visit.layer,
        args=map_tensors(promote, visit.args),
        kwargs=map_tensors(promote, visit.kwargs) if visit.kwargs else {},
        grads=tuple(grad if grad is None else promote(grad) for grad in received.grads),
        training=visit.training,
        state=visit.state,
        random_state=visit.random_state,
        outputs=tuple(visit.results),
        precision=visit.precision,
    )


def _apply_rule(visit: Visit, received: Received) -> Mapping[str, Form]:
    """{name: form} for the layer's parameters that the pass reached, checked against what a form must be."""
    place, rule = where(visit.path, visit.layer), rule_for(visit.layer)
    if rule is None:
        return {}  # what trains here has been refused by check_supported; what doesn't is not wanted
    try:
        with without_autocast(next(iter(visit.parameters.values()))[0]):
            forms = rule(visit.layer, _gated(visit, received))
    except (BatchSizeError, SamplesMixed) as error:
        raise type(error)(f"{place} {error}") from None
    if not isinstance(forms, Mapping) or not all(isinstance(form, Form) for form in forms.values()):
        raise TypeError(f"the rule of {place} returned {forms!r}; expected {{name: form}}, see autograd_hacks.forms")
    for name in received.reached:
        if name not in forms:
            raise UnsupportedLayer(
                f"the rule of {place} returned forms for {', '.join(forms) or 'nothing'}, but {name!r} trains too. Register "
                "a rule that covers it (autograd_hacks.register_rule), or freeze it: requires_grad_(False)."
            )
        expected = (batch_size(visit, received), *visit.parameters[name][0].shape)
        if (forms[name].samples, *forms[name].shape) != expected:
            raise BatchSizeError(
                f"the rule of {place} returned per-sample gradients of shape {(forms[name].samples, *forms[name].shape)} "
                f"for {name!r}; expected {expected}: samples first, then the parameter's shape."
            )
    return {name: forms[name] for name in received.reached}


def _stack(forms: Sequence[Form | None], sizes: Sequence[int], parameter: Tensor) -> Form | None:
    """The rows of all segments; zeros for a segment that did not reach the parameter."""
    if all(form is None for form in forms):
        return None
    zeros = [Dense(parameter.new_zeros(()).expand(size, *parameter.shape)) for size in sizes]
    parts = [zero if form is None else form for form, zero in zip(forms, zeros)]
    return parts[0] if len(parts) == 1 else Concatenation(parts)
