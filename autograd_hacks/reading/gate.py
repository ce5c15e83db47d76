"""The gate between records and rules: checks and dtype, once, before any rule; then the loss's scale, and one form for each
parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.forward import Recorder
from autograd_hacks.capture.passes import Segment
from autograd_hacks.capture.records import Received, Visit
from autograd_hacks.capture.wrappers import check_unsharded
from autograd_hacks.errors import BatchSizeError, NothingRecorded, SamplesMixed, UnsupportedLayer, where
from autograd_hacks.forms import Concatenation, Form, Passes, Replay, Scaled, Sum, Zero
from autograd_hacks.probe.layout import Layout
from autograd_hacks.reading.guards import (
    batch_size,
    check_hooked,
    check_layout,
    check_loss_type,
    check_scale,
    check_seen,
    check_sum,
    common_batch_size,
    readable_segments,
    reduction,
    row_count,
)
from autograd_hacks.reading.replay import Rerun
from autograd_hacks.rules import Call, rule_for
from autograd_hacks.rules.attention import map_inside
from autograd_hacks.support.trees import map_tensors
from autograd_hacks.support.untouched import autocast_to, outside_inference


def per_parameter_forms(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    recorder: Recorder,
    loss_type: str | None,
    scale: float | Tensor = 1.0,
    lazily: bool = False,
) -> dict[str, Form | None]:
    """{name: form} over the parameters that train, in the order of ``named_parameters``; None where no loss arrived.

    parameters: the model's, by name
    loss_type: 'mean' or 'sum' over the batch; None for what `backward(losses)` announced, else 'mean'
    scale: what the loss was multiplied by    lazily: whether rows may not be written out, all at once
    """
    check_loss_type(loss_type)
    check_scale(scale)
    if recorder.stream is not None:
        raise NothingRecorded(
            "inside streaming(model) each layer's record is freed as the pass goes on. Read after that context."
        )
    check_unsharded(model)
    check_hooked(model, parameters, recorder)
    for segment in recorder.segments:
        segment.read = True  # or tried to be
    segments = readable_segments(parameters, recorder)
    trainable = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    with outside_inference():
        return _forms_of_segments(trainable, recorder, segments, loss_type, scale, lazily)


def _forms_of_segments(
    trainable: Mapping[str, Tensor],
    recorder: Recorder,
    segments: Sequence[Segment],
    loss_type: str | None,
    scale: float | Tensor,
    lazily: bool,
) -> dict[str, Form | None]:
    tables = [segment_forms(segment, loss_type) for segment in segments]
    kept = any(recorded.arrived for segment in segments for recorded in segment.passes)
    for name, parameter in trainable.items() if kept else ():
        for segment, (table, samples) in zip(segments, tables):
            with without_autocast(parameter):
                check_sum(name, parameter, table.get(parameter), segment, loss_type, samples, recorder, lazily)
    recorder.plan.checked |= kept
    recorder.plan.watched = not recorder.plan.checked
    scaled = scale if isinstance(scale, Tensor) or scale != 1 else None
    tables = tables if scaled is None else [({p: f.scaled(1 / scaled) for p, f in t.items()}, n) for t, n in tables]
    return {
        name: _stack([table.get(parameter) for table, _ in tables], [samples for _, samples in tables], parameter)
        for name, parameter in trainable.items()
    }


def set_grads(model: nn.Module, sums: Mapping[str, Tensor], reached: Collection[str]) -> None:
    """Sets ``param.grad`` of each parameter that trains; to None where the loss did not reach it.

    sums: {name: shape}    reached: the names of those that it reached
    """
    for name, parameter in model.named_parameters():
        if name in sums:
            parameter.grad = sums[name].detach().to(parameter.dtype) if name in reached else None


def without_autocast(parameter: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep the parameter's precision, wherever reading is called from."""
    return autocast_to(None, parameter.device)


def segment_forms(segment: Segment, loss_type: str | None) -> tuple[dict[Tensor, Form], int]:
    """{parameter: form} of one segment, and its number of rows: one for each sample, or for each sample of each pass of
    `backprop_hess`, pass by pass."""
    found: dict[Tensor, list[Form]] = {}
    passes: list[dict[tuple[Visit, Tensor], Form]] = []
    is_hess = segment.hess_type is not None
    for recorded in segment.passes:
        is_mean = reduction(recorded, loss_type) == "mean"
        table: dict[tuple[Visit, Tensor], Form] = {}
        for visit, received in reversed(recorded.received.items()):  # in the order of the forward
            check_seen(visit, received)
            for name, form in forms_of(visit, received).items():
                # The mean divided every sample's gradient by N.
                own = Scaled(form, form.samples) if is_mean and form.samples != 1 else form
                parameter = visit.parameters[name][0]
                if is_hess:
                    table[visit, parameter] = table[visit, parameter] + own if (visit, parameter) in table else own
                else:
                    found.setdefault(parameter, []).append(own)
        passes.append(table)
    samples = common_batch_size(segment)
    if not is_hess:
        return {parameter: Sum.of(forms) for parameter, forms in found.items()}, samples
    return _stacked_passes(passes, samples), samples * len(passes)


def _stacked_passes(passes: Sequence[dict[tuple[Visit, Tensor], Form]], samples: int) -> dict[Tensor, Form]:
    """The rows of several passes below each other; call by call, for which they share what they can, and then added up."""
    if any(table.keys() != passes[0].keys() for table in passes):  # checkpointing has made the calls anew in each
        return _stacked_parameters(passes, samples)
    found: dict[Tensor, list[Form]] = {}
    for key in passes[0]:
        found.setdefault(key[1], []).append(Passes.of([table[key] for table in passes]))
    return {parameter: Sum.of(forms) for parameter, forms in found.items()}


def _stacked_parameters(passes: Sequence[dict[tuple[Visit, Tensor], Form]], samples: int) -> dict[Tensor, Form]:
    tables: list[dict[Tensor, list[Form]]] = [{} for _ in passes]
    for table, forms in zip(tables, passes):
        for (_, parameter), form in forms.items():
            table.setdefault(parameter, []).append(form)
    found = {}
    for parameter in dict.fromkeys(parameter for table in tables for parameter in table):
        zero = [Zero(samples, parameter.shape, parameter)]
        found[parameter] = Passes.of([Sum.of(table.get(parameter, zero)) for table in tables])
    return found


def _gated(visit: Visit, received: Received, layout: Layout | None) -> Call:
    """The call as rules expect it: samples first, in the parameters' dtype, whatever autocast made of the layer's input.

    layout: where a positionwise layer's samples are; None where they are where the rule looks for them
    """
    dtype = next(parameter.dtype for parameter, _ in visit.parameters.values())

    def ready(tensor: Tensor) -> Tensor:
        if layout is not None and layout.fits(tensor, visit.samples or 0):
            tensor = layout.samples_first(tensor, visit.samples or 0)
        if tensor.dtype == dtype or not (tensor.is_floating_point() and dtype.is_floating_point):
            return tensor
        return tensor.to(dtype)

    return Call(
        path=visit.path,
        layer=visit.layer,
        args=map_tensors(ready, visit.args),
        kwargs=map_tensors(ready, visit.kwargs) if visit.kwargs else {},
        grads=tuple(grad if grad is None else ready(grad) for grad in received.grads),
        training=visit.training,
        state=visit.state,
        random_state=visit.random_state,
        outputs=tuple(visit.results),
        precision=visit.precision,
    )


def forms_of(visit: Visit, received: Received) -> Mapping[str, Form]:
    """{name: form} for the parameters of a call that the pass reached, a row for each sample."""
    samples = batch_size(visit, received)
    if visit.replay is not None:
        layouts = visit.layouts or (Layout(),) * visit.outputs
        source = Rerun(visit, received, samples, layouts)
        owned = {name: visit.parameters[name][0] for name in received.reached}
        return {name: Replay(source, name, samples, p.shape, p.detach()) for name, p in owned.items()}
    if visit.inside is not None:
        return _forms_inside(visit, received)
    if visit.samples is None:
        return _apply_rule(visit, received, None, samples)
    layout = visit.layouts[0]
    assert layout is not None  # a call whose samples have no place is no visit by a rule
    if hasattr(rule_for(visit.layer), "features"):
        check_layout(visit, layout, next(grad.shape for grad in received.grads if grad is not None))
        return _apply_rule(visit, received, layout if layout.axis or layout.fold else None, samples)
    rows = row_count(visit, received)
    forms = _apply_rule(visit, received, None, rows)
    if not layout.fold:
        return forms
    device = next(grad.device for grad in received.grads if grad is not None)
    return {name: form.group(layout.rows(rows, samples, device), samples) for name, form in forms.items()}


def _forms_inside(visit: Visit, received: Received) -> Mapping[str, Form]:
    """{name: form} for a map inside a layer."""
    layout, inside = visit.layouts[0], visit.inside
    assert layout is not None
    assert inside is not None
    call = _gated(visit, received, layout)
    shapes = {name: p.shape for name, (p, _) in visit.parameters.items()}
    rows = {name: rows for name, rows in inside.rows.items() if name in received.reached}
    return map_inside(call.args[0].flatten(1, -2), call.grad.flatten(1, -2), inside.weight, rows, shapes)


def _apply_rule(visit: Visit, received: Received, layout: Layout | None, rows: int) -> Mapping[str, Form]:
    """What the layer's rule says, checked against what forms must be.  rows: how many they must have"""
    rule = rule_for(visit.layer)
    if rule is None:
        raise UnsupportedLayer(f"{where(visit.path, visit.layer)} has lost its rule since the forward pass; repeat the step")
    try:
        with without_autocast(next(iter(visit.parameters.values()))[0]):
            forms = rule(visit.layer, _gated(visit, received, layout))
    except (BatchSizeError, SamplesMixed) as error:
        raise type(error)(f"{where(visit.path, visit.layer)} {error}") from None
    if not isinstance(forms, Mapping) or not all(isinstance(form, Form) for form in forms.values()):
        raise TypeError(
            f"the rule of {where(visit.path, visit.layer)} returned {forms!r}; expected {{name: form}}, see "
            "autograd_hacks.forms"
        )
    found = {}
    for name in received.reached:
        if name not in forms:
            raise UnsupportedLayer(
                f"the rule of {where(visit.path, visit.layer)} returned forms for {', '.join(forms) or 'nothing'}, but "
                f"{name!r} trains too. Register a rule that covers it (autograd_hacks.register_rule), or freeze it: "
                "requires_grad_(False)."
            )
        form, shape = forms[name], visit.parameters[name][0].shape
        if form.samples != rows or tuple(form.shape) != shape:
            raise BatchSizeError(
                f"the rule of {where(visit.path, visit.layer)} returned per-sample gradients of shape "
                f"{(form.samples, *form.shape)} for {name!r}; expected {(rows, *shape)}: samples first, then the "
                "parameter's shape."
            )
        found[name] = form
    return found


def _stack(forms: Sequence[Form | None], sizes: Sequence[int], parameter: Tensor) -> Form | None:
    """The rows of all segments; zeros for a segment that did not reach the parameter."""
    if len(forms) == 1 or all(form is None for form in forms):
        return forms[0]
    return Concatenation(
        [Zero(size, parameter.shape, parameter) if form is None else form for form, size in zip(forms, sizes)]
    )
