"""The gate between records and rules: checks and dtype, once, before any rule; then the loss's scale, and one form for each
parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.errors import (
    BatchSizeError,
    HigherOrderError,
    NothingRecorded,
    SamplesMixed,
    StaleRecord,
    UnseenGradient,
    UnsupportedLayer,
    where,
)
from autograd_hacks.forms import Concatenation, Dense, Form, Sum
from autograd_hacks.record import Pass, Received, Recorder, Segment, Switch, Visit, version_of
from autograd_hacks.rules import Call, rule_for
from autograd_hacks.trees import map_tensors

LOSS_TYPES = ("mean", "sum")


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
            _check_sum(name, parameter, table.get(parameter), segment, loss_type, samples)
    return {
        name: _stack([table.get(parameter) for table, _ in tables], [samples for _, samples in tables], parameter)
        for name, parameter in trainable.items()
    }


def without_autocast(parameter: Tensor) -> AbstractContextManager[object]:
    """A context in which products keep the parameter's precision, wherever reading is called from."""
    return torch.autocast(parameter.device.type, enabled=False)


def check_loss_type(loss_type: str | None) -> None:
    if loss_type is not None and loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type is {loss_type!r}; expected 'mean' or 'sum', whichever the loss does over the batch, or None after "
            "autograd_hacks.backward(losses)"
        )


def check_supported(model: nn.Module, recorder: Recorder) -> None:
    """Raises where a parameter that trains belongs to a layer without a rule, or to one without a hook."""
    training = [(path, layer, names) for path, layer in model.named_modules() if (names := _trainable(layer))]
    missing = [f"{where(path, layer)} with {', '.join(names)}" for path, layer, names in training if not rule_for(layer)]
    if missing:
        raise UnsupportedLayer(
            f"no rule covers {'; '.join(missing)}. A rule is looked up by type, and a subclass that changes forward or "
            "weight needs one of its own. Either teach the library this layer with "
            "autograd_hacks.register_rule(type, rule), or freeze it with layer.requires_grad_(False)."
        )
    unhooked = [where(path, layer) for path, layer, _ in training if layer not in recorder.layers]
    if unhooked:
        raise NothingRecorded(
            f"these layers have come into the model since add_hooks: {'; '.join(unhooked)}. Call "
            "autograd_hacks.add_hooks(model) again, and repeat the step."
        )


def readable_segments(model: nn.Module, recorder: Recorder) -> list[Segment]:
    """The recorded rows; raises where there are none or they can't be trusted."""
    if not Switch.on():
        raise NothingRecorded("hooks are disabled. Call autograd_hacks.enable_hooks() and repeat the step.")
    strays = recorder.strays
    if past := [name for name, p in model.named_parameters() if strays and p.requires_grad and id(p) in strays]:
        raise UnseenGradient(
            f"gradient has reached {', '.join(past)} by a way that the hooks don't see, so that the rows would be without "
            "it: a weight used outside its own layer's forward, a penalty on weights in a loss, torch.compile, scripting, "
            "functional_call. Let layers be called as modules; run a backward pass of a penalty alone within "
            "autograd_hacks.pause_hooks(); or freeze the parameter."
        )
    if not recorder.segments:
        no_backward = (
            "no backward pass has reached a trainable parameter of a hooked layer since add_hooks. Call loss.backward() on "
            "a loss of this model's output (outside torch.no_grad and torch.func) first."
        )
        no_forward = "the model has not run since add_hooks. Run a forward and a backward pass first."
        raise NothingRecorded(recorder.why_empty or (no_backward if recorder.forwards else no_forward))
    for recorded in (p for segment in recorder.segments for p in segment.passes):
        if recorded.higher_order:
            raise HigherOrderError(
                "the backward pass ran with create_graph=True. Per-sample gradients of higher-order losses are not "
                "supported: run the backward pass without it, or call clear_backprops(model) and repeat the step."
            )
        if not recorded.finished:
            for visit, received in recorded.received.items():
                _check_seen(visit, received)  # which may be what it failed for
            raise NothingRecorded(
                "the last backward pass has not run to its end, so that its rows are incomplete. Repeat the forward and "
                "the backward pass."
            )
        if recorded.ambiguous:
            raise NothingRecorded(
                "checkpointing has recomputed layers in this backward pass, and several forward passes have run since the "
                "one before, so that it can't be known which it belongs to. Run each backward pass before the next forward, "
                "or use torch.utils.checkpoint with use_reentrant=False."
            )
    return recorder.segments


def segment_forms(segment: Segment, loss_type: str | None) -> tuple[dict[Tensor, Form], int]:
    """{parameter: form} of one segment, and its number of samples."""
    found: dict[Tensor, list[Form]] = {}
    for recorded in segment.passes:
        is_mean = _reduction(recorded, loss_type) == "mean"
        for visit, received in reversed(recorded.received.items()):  # in the order of the forward
            _check_seen(visit, received)
            for name, form in _apply_rule(visit, received).items():
                # The mean divided every sample's gradient by N.
                own = form.scaled(form.samples) if is_mean and form.samples != 1 else form
                found.setdefault(visit.parameters[name][0], []).append(own)
    samples = common_batch_size(segment)
    return {parameter: Sum.of(forms) for parameter, forms in found.items()}, samples


def common_batch_size(segment: Segment) -> int:
    """The number of samples that all calls and loss vectors share.  Raises BatchSizeError with all of them otherwise."""
    sizes = {}
    for recorded in segment.passes:
        if recorded.losses:
            sizes["the vector given to backward(losses)"] = recorded.losses.samples
        for visit, received in reversed(recorded.received.items()):
            if rule_for(visit.layer):
                sizes.setdefault(f"{where(visit.path, visit.layer)}, input {_shapes(visit)}", _batch_size(visit, received))
    if len(set(sizes.values())) > 1:
        listing = "; ".join(f"{place}: {size}" for place, size in sizes.items())
        raise BatchSizeError(
            f"the numbers of samples disagree, so that rows can't be matched: {listing}. Expected one number for all: let "
            "axis 0 be the batch in every layer's input, and give losses one entry for each sample."
        )
    return next(iter(sizes.values()))


def _reduction(recorded: Pass, loss_type: str | None) -> str:
    """How the pass's loss was made of the samples' losses: 'mean' or 'sum'."""
    if recorded.losses is None:
        return loss_type or "mean"
    if loss_type not in (None, recorded.losses.loss_type):
        raise ValueError(
            f"loss_type is {loss_type!r}, but backward(losses) ran with loss_type={recorded.losses.loss_type!r}. "
            "Leave loss_type out: the scale is known."
        )
    return recorded.losses.loss_type


def _check_seen(visit: Visit, received: Received) -> None:
    """Raises where what the hooks saw is not what the layer worked with."""
    if not visit.is_first:
        raise UnseenGradient(
            f"a forward hook stands before the library's on {where(visit.path, visit.layer)} and may have changed its "
            "output. Register it without prepend=True, or add the library's hooks anew, after it: remove_hooks, add_hooks."
        )
    for kind, watched in (("input", visit.versions), ("gradient at the output", received.versions)):
        for tensor, version in watched:
            if version_of(tensor) != version:
                raise StaleRecord(
                    f"the {kind} of {where(visit.path, visit.layer)}, of shape {tuple(tensor.shape)}, was overwritten in "
                    f"place after the layer read it (version {version_of(tensor)}; expected {version}). Read the per-sample "
                    "gradients before that, or give the layer a copy: x.clone()."
                )


def _check_sum(
    name: str, parameter: Tensor, form: Form | None, segment: Segment, loss_type: str | None, samples: int
) -> None:
    """Raises where the rows don't add up to the gradient that arrived, while that is watched (see `Recorder.comparing`)."""
    arrived = [
        (recorded.arrived[parameter], samples if _reduction(recorded, loss_type) == "mean" else 1)
        for recorded in segment.passes
        if parameter in recorded.arrived
    ]
    if form is None or not arrived or not samples:
        return
    expected = torch.stack([grad.to_dense() * scale for grad, scale in arrived]).sum(0)
    with torch.no_grad():
        furthest = (form.weighted_sum(expected.new_ones(samples)) - expected).abs().max()
    # A gradient that is zero but for rounding, as a bias's before a normalisation, has no digits to compare.
    largest = max(grad.abs().max() * scale for p in segment.passes for grad in p.arrived.values() for _, scale in arrived)
    if furthest > 1e-3 * expected.abs().max() and furthest > 100 * torch.finfo(expected.dtype).eps * largest:
        raise HigherOrderError(
            f"the rows of {name} don't add up to its gradient: a backward pass with create_graph=True has made a graph that "
            "leads to it past the hooks. Per-sample gradients of such losses, a gradient penalty say, are not supported: "
            "run the penalty's backward pass by itself, within autograd_hacks.pause_hooks()."
        )


def _batch_size(visit: Visit, received: Received) -> int:
    """How many samples a call saw: on axis 0 of its outputs, unless the layer's rule knows better."""
    count = getattr(rule_for(visit.layer), "samples", None)
    if count is not None:
        return int(count(visit.layer, visit.args, visit.kwargs))
    return next(grad.shape[0] if grad.ndim else 1 for grad in received.grads if grad is not None)


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
        expected = (_batch_size(visit, received), *visit.parameters[name][0].shape)
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


def _shapes(visit: Visit) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor, _ in visit.versions)


def _trainable(layer: nn.Module) -> list[str]:
    return [name for name, p in layer._parameters.items() if p is not None and p.requires_grad]
