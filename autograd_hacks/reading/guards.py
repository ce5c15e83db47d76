"""What must hold for the rows to be right, as far as records can tell; each check raises what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.forward import Recorder
from autograd_hacks.capture.passes import Losses, Pass, Segment
from autograd_hacks.capture.records import Received, Visit
from autograd_hacks.errors import (
    BatchSizeError,
    HigherOrderError,
    NothingRecorded,
    SamplesMixed,
    StaleRecord,
    UnseenGradient,
    where,
)
from autograd_hacks.forms import Form
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import MIXING
from autograd_hacks.rules import rule_for
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import modules_of, version_of

LOSS_TYPES = ("mean", "sum")


def check_loss_type(loss_type: str | None) -> None:
    if loss_type is not None and loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type is {loss_type!r}; expected 'mean' or 'sum', whichever the loss does over the batch, or None after "
            "autograd_hacks.backward(losses)"
        )


def check_scale(scale: float | Tensor) -> None:
    value = scale.detach() if isinstance(scale, Tensor) and scale.numel() == 1 else scale
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float | Tensor)
        or (isinstance(value, Tensor) and value.numel() != 1)
    ):
        raise TypeError(f"scale is {scale!r}; expected the number that the loss was multiplied by, GradScaler.get_scale()")
    if not 0 < float(value) < float("inf"):
        raise ValueError(f"scale is {float(value)}; expected a number above 0, which the loss was multiplied by")


def check_hooked(model: nn.Module, parameters: Mapping[str, Tensor], recorder: Recorder) -> None:
    """Raises where a parameter that trains belongs to a layer without a hook, or has none itself."""
    missing = {layer for layer in modules_of(model) if layer._parameters and layer not in recorder.layers and _trains(layer)}
    unhooked = [
        where(path, layer)
        for path, layer in (model.named_modules() if missing else ())
        if layer in missing and not isinstance(layer, torch.jit.ScriptModule)
    ]
    trained = ((name, p) for name, p in parameters.items() if p.requires_grad and p.is_leaf and p.grad is not None)
    unwatched = [f"parameter {name!r}" for name, p in trained if p not in recorder.watched]
    if unhooked or unwatched:
        raise NothingRecorded(
            f"these were not in the model at add_hooks, or were frozen then: {'; '.join(unhooked or unwatched)}. Call "
            "autograd_hacks.add_hooks(model) again, and repeat the step."
        )


def readable_segments(parameters: Mapping[str, Tensor], recorder: Recorder) -> list[Segment]:
    """The recorded rows; raises where there are none or they can't be trusted."""
    if not Switch.on():
        raise NothingRecorded("hooks are disabled. Call autograd_hacks.enable_hooks() and repeat the step.")
    check_strays(parameters, recorder)
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
                check_seen(visit, received)  # which may be what it failed for
            raise NothingRecorded(
                "the last backward pass has not run to its end, so that its rows are incomplete. Repeat the forward and "
                "the backward pass."
            )
        if recorded.losses is not None and not recorded.losses.complete:
            raise NothingRecorded("backprop_hess has not run to its end, so that its rows are incomplete. Repeat the step.")
        if recorded.blind is not None:
            slot, shape = recorded.blind
            raise SamplesMixed(
                f"samples mix: when some samples of the batch were replaced by others, output number {slot} of the model, "
                f"of shape {shape}, changed for the rest too, whichever of its axes was taken for the batch, and the loss "
                "came that way. If the batch is not on axis 0 of the model's input, say where it is: add_hooks(model, "
                "batch_dim=...)."
            )
        if recorded.ambiguous:
            raise NothingRecorded(
                "checkpointing has recomputed layers in this backward pass, and several forward passes have run since the "
                "one before, so that it can't be known which it belongs to. Run each backward pass before the next forward, "
                "or use torch.utils.checkpoint with use_reentrant=False."
            )
    return recorder.segments


def check_strays(parameters: Mapping[str, Tensor], recorder: Recorder) -> None:
    """Raises where gradient has come to a parameter by no call that the hooks have seen."""
    past = {name: p for name, p in parameters.items() if p.requires_grad and id(p) in recorder.strays}
    if not past:
        return
    refused = {reason: name for name, p in past.items() if (reason := recorder.plan.refused.get(id(p)))}
    for reason, name in refused.items():
        if reason.startswith(MIXING):
            raise SamplesMixed(f"{name} has no per-sample gradients: {reason}")
        raise UnseenGradient(f"gradient has reached {name} by a way that the library can't follow: {reason}")
    raise UnseenGradient(
        f"gradient has reached {', '.join(past)} by a way that the hooks don't see, so that the rows would be without "
        "it: a weight used outside its own layer's forward, a penalty on weights in a loss, torch.compile, scripting, "
        "functional_call. Let layers be called as modules; run a backward pass of a penalty alone within "
        "autograd_hacks.pause_hooks(); or freeze the parameter."
    )


def check_layout(visit: Visit, layout: Layout, shape: torch.Size) -> None:
    """Raises where a call's output has other sizes than its samples would give it."""
    size = shape[layout.axis] if layout.axis < len(shape) else None
    if size is None or (size % (visit.samples or 1) if layout.fold else size != visit.samples):
        raise BatchSizeError(
            f"the numbers of samples disagree: the model was given {visit.samples}, but {where(visit.path, visit.layer)} "
            f"returned a tensor of shape {tuple(shape)}, in which they were to be found as {layout}. Rows can't be matched."
        )


def check_seen(visit: Visit, received: Received) -> None:
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


def check_sum(
    name: str,
    parameter: Tensor,
    form: Form | None,
    segment: Segment,
    loss_type: str | None,
    samples: int,
    recorder: Recorder,
    lazily: bool,
) -> None:
    """Raises where the rows don't add up to the gradient that arrived, where that was kept.

    lazily: whether the rows of replays may not all be written out; they are compared in the plan's first step alone then
    """
    # Those of one `backprop_hess` have added up what arrived.
    passes = list({id(p.arrived): p for p in segment.passes if id(parameter) in p.reached}.values())
    if (
        form is None
        or not samples
        or not parameter.numel()
        or not passes
        or not all(parameter in recorded.arrived for recorded in passes)
    ):
        return
    sources = form.sources
    if sources and lazily and recorder.plan.checked:
        return
    for source in sources:
        if not lazily:
            source.prepare()  # the rows, which are wanted anyway; else the sum would run the module once more
    scales = [samples if reduction(recorded, loss_type) == "mean" else 1 for recorded in passes]
    expected = sum(recorded.arrived[parameter].to_dense() * scale for recorded, scale in zip(passes, scales))
    assert isinstance(expected, Tensor)
    # Under autocast the gradient that arrived was computed in its precision.
    used = [visit.precision for p in passes for visit in p.received if visit.precision is not None]

    def largest() -> Tensor:
        return max(_largest(recorded) * scale for recorded, scale in zip(passes, scales))

    def adds_up() -> bool:
        with torch.no_grad():
            ones = expected.new_ones(samples)
            total = Form.weighted_sum(form, ones) if sources else form.weighted_sum(ones)  # of rows, and by no other way
            # A gradient that is zero but for rounding, as a bias's before a normalisation, has no digits to compare.
            total = total.to(expected.dtype)
            return is_rounding((total - expected).abs().max(), expected.abs().max(), largest, (expected.dtype, *used))

    if adds_up():
        return
    for source in sources:
        source.doubt()
    if sources and adds_up():
        for unit in recorder.plan.units.values():
            unit.doubted |= any(parameter is p for p in unit.parameters.values())
        return
    if recorder.comparing:
        raise HigherOrderError(
            f"the rows of {name} don't add up to its gradient: a backward pass with create_graph=True has made a graph that "
            "leads to it past the hooks. Per-sample gradients of such losses, a gradient penalty say, are not supported: "
            "run the penalty's backward pass by itself, within autograd_hacks.pause_hooks()."
        )
    raise UnseenGradient(
        f"the rows of {name} don't add up to the gradient that arrived at it: some of that came by a way that the hooks "
        "don't see, a penalty on the weight in the loss, say, or a use of the weight past its own layer; or its layer's "
        "rule is wrong. A penalty belongs to no sample: run its backward pass by itself, within "
        "autograd_hacks.pause_hooks()."
    )


def is_rounding(difference: Tensor, value: Tensor, largest: Callable[[], Tensor], dtypes: Sequence[torch.dtype]) -> bool:
    """Whether the difference between two ways to one gradient is no more than rounding makes it.

    difference, value, largest: magnitudes, the largest of the difference, of the gradient, and of all gradients around it
    dtypes: in which it was computed
    """
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if not value.isfinite():
        return True  # there is nothing to compare
    return bool(difference <= max(1e-3, 8 * eps) * value) or bool(difference <= max(1e3 * eps, 1e-10) * largest())


def _largest(recorded: Pass) -> Tensor:
    """The largest magnitude among the gradients that a pass brought to outputs and to parameters."""
    if recorded.largest is None:
        received = [grad for received in recorded.received.values() for grad in received.grads if grad is not None]
        grads = [*received, *(grad.to_dense() for grad in recorded.arrived.values())]
        recorded.largest = torch.stack([grad.abs().max().cpu().double() for grad in grads if grad.numel()]).max()
    return recorded.largest


def common_batch_size(segment: Segment) -> int:
    """The number of samples that all calls and loss vectors share.  Raises BatchSizeError with all of them otherwise."""
    found = [size for _, size in _sizes(segment)]
    if len(set(found)) > 1:
        sizes: dict[str, int] = {}
        for visit, size in _sizes(segment):
            told_by = f"{where(visit.path, visit.layer)}, input {_shapes(visit)}" if isinstance(visit, Visit) else visit.what
            sizes.setdefault(told_by, size)
        listing = "; ".join(f"{place}: {size}" for place, size in sizes.items())
        raise BatchSizeError(
            f"the numbers of samples disagree, so that rows can't be matched: {listing}. Expected one number for all: let "
            "axis 0 be the batch in every layer's input, and give losses one entry for each sample."
        )
    return found[0]


def _sizes(segment: Segment) -> Iterator[tuple[Visit | Losses, int]]:
    """How many samples there are by each call, and by each vector of losses."""
    for recorded in segment.passes:
        if recorded.losses:
            yield recorded.losses, recorded.losses.samples
        for visit, received in reversed(recorded.received.items()):
            if visit.replay is not None or rule_for(visit.layer):
                yield visit, batch_size(visit, received)


def check_batch_size(losses: Losses, why: str) -> None:
    """Clears the records of passes that have come through another number of samples than there are losses, and raises.

    why: there is nothing to read then, for people
    """
    for recorder in losses.recorders:
        try:
            for shape, layout in recorder.returned if losses.hess_type else ():
                if shape == losses.shape and layout is not None and layout != Layout():
                    raise BatchSizeError(
                        f"{losses.what}, of shape {tuple(shape)}, has its samples as {layout}, not on axis 0. Bring them "
                        "there: output.transpose(0, 1) for (T, N, C)."
                    )
            for segment in recorder.segments:
                if any(recorded.losses is losses for recorded in segment.passes):
                    common_batch_size(segment)
        except RuntimeError:
            recorder.clear(why)
            raise


def reduction(recorded: Pass, loss_type: str | None) -> str:
    """How the pass's loss was made of the samples' losses: 'mean' or 'sum'."""
    if recorded.losses is None:
        return loss_type or "mean"
    if loss_type not in (None, recorded.losses.loss_type):
        raise ValueError(
            f"loss_type is {loss_type!r}, but by {recorded.losses.what} it was {recorded.losses.loss_type!r}. Leave "
            "loss_type out: the scale is known."
        )
    return recorded.losses.loss_type


def common_reduction(recorder: Recorder, loss_type: str | None) -> str:
    """How all passes' losses were reduced.  Raises ValueError where they differ."""
    found = {reduction(recorded, loss_type) for segment in recorder.segments for recorded in segment.passes}
    if len(found) > 1:
        raise ValueError("some of the accumulated losses were means and some were sums; reduce all in one way")
    return found.pop()


def check_ordinary(recorder: Recorder, what: str) -> None:
    """Raises where the record holds the passes of `backprop_hess`.  what: is to be read, for people"""
    if common_hess_type(recorder) is not None:
        raise NothingRecorded(
            f"the record holds the passes of backprop_hess, whose rows are no samples' gradients, so that there is no "
            f"{what}. Run loss.backward() first, on a new forward or after clear_backprops(model); or read these by "
            "compute_hess(model) or per_sample_grads(model)."
        )


def common_hess_type(recorder: Recorder) -> str | None:
    """What `backprop_hess` was told, where it has run all recorded passes; None where ordinary backward passes are recorded.
    Raises NothingRecorded for both, or different ones."""
    found = {segment.hess_type for segment in recorder.segments}
    if len(found) > 1:
        raise NothingRecorded(
            f"the accumulated passes are of different kinds, {', '.join(sorted(map(str, found)))} (None for an ordinary "
            "backward pass), whose rows mean different things. Accumulate them apart."
        )
    return next(iter(found), None)


def batch_size(visit: Visit, received: Received) -> int:
    """How many samples a call saw: as many as the model was given, or else as many as it has rows."""
    return row_count(visit, received) if visit.samples is None else visit.samples


def row_count(visit: Visit, received: Received) -> int:
    """The size of axis 0 of a call's outputs, or what the layer's rule counts where it knows better."""
    count = None if visit.replay is not None else getattr(rule_for(visit.layer), "samples", None)
    if count is not None:
        return int(count(visit.layer, visit.args, visit.kwargs))
    return next(grad.shape[0] if grad.ndim else 1 for grad in received.grads if grad is not None)


def _shapes(visit: Visit) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor, _ in visit.versions)


def _trains(layer: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in layer._parameters.values())
