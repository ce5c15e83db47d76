"""May what was recorded be read?  Each check raises what to do about it."""

from collections.abc import Iterable, Mapping

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.by_part import PartCall
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Record, Segment
from autograd_hacks.capture.uses import LayerCall, OutputGrads, Use
from autograd_hacks.capture.wrappers import gathering
from autograd_hacks.errors import (
    ON_PASSES,
    ON_SEGMENTS,
    BatchSizeError,
    NothingRecorded,
    ProbeFailed,
    SamplesMixed,
    ShardedParameters,
    StaleRecord,
    UnseenGradient,
    VerificationFailed,
    where,
)
from autograd_hacks.probe.documents import NOT_INSIDE
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import modules_of, version_of

_MICRO_BATCHES = (
    "For micro-batches run all passes within autograd_hacks.accumulate(model), or clip each, with param_grad=False: "
    "clip_grad1_norm_(model, max_norm, add=True); to read the last alone clear"
)


def check_hooked(model: nn.Module, parameters: Mapping[str, Tensor], recorder: Recorder) -> None:
    """Raises where a parameter that trains belongs to a layer without a hook, or has none itself."""
    missing = {layer for layer in modules_of(model) if layer._parameters and layer not in recorder.layers and _trains(layer)}
    unhooked = [
        where(path, layer)
        for path, layer in (model.named_modules() if missing else ())
        if layer in missing and not isinstance(layer, torch.jit.ScriptModule)
    ]
    trained = ((name, p) for name, p in parameters.items() if p.requires_grad and p.is_leaf and p.grad is not None)
    unwatched = [f"parameter {name!r}" for name, p in trained if p not in recorder.backward.watched]
    if unhooked or unwatched:
        raise NothingRecorded(
            f"these were not in the model at add_hooks, or were frozen then: {'; '.join(unhooked or unwatched)}. Call "
            "autograd_hacks.add_hooks(model) again, and repeat the step."
        )


def check_known(model: nn.Module, record: Record) -> None:
    """Raises where layers had tensors in the place of shards that aren't known to be these: a miss is not "not reached"."""
    known = set(record.names.values()) if gathering(model) else set()
    passes = (recorded for segment in record.segments for recorded in segment.passes)
    strange = [name for recorded in passes for name in recorded.calls_of if known and name not in known]
    if strange or (known and record.unseen.keys() - known):
        raise NothingRecorded(
            "fully_shard has gathered parameters that the hooks don't know: a part of the model was called by itself before "
            "the model was, or parameters were made anew since. Call autograd_hacks.add_hooks(model) again, then the model "
            "itself, and repeat the step."
        )


def readable_segments(parameters: Mapping[str, Tensor], record: Record) -> list[Segment]:
    """The recorded rows; raises where there are none or they can't be trusted."""
    if not Switch.on():
        raise NothingRecorded("hooks are disabled. Call autograd_hacks.enable_hooks() and repeat the step.")
    if record.stage is not None and any(p.captures for segment in record.segments for p in segment.passes):
        raise UnseenGradient(
            "a zero-bubble schedule of torch.distributed.pipelining has split the backward pass of a stage into one to its "
            "inputs and others to its weights, which come to layers more than once, so that rows can't be told from these. "
            "Use a schedule with whole backward passes: ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B."
        )
    check_unseen(parameters, record)
    if not record.segments:
        no_backward = (
            "no backward pass has reached a trainable parameter of a hooked layer since add_hooks. Call loss.backward() on "
            "a loss of this model's output (outside torch.no_grad and torch.func) first."
        )
        no_forward = "the model has not run since add_hooks. Run a forward and a backward pass first."
        raise NothingRecorded(record.why_empty or (no_backward if record.forwards else no_forward))
    for recorded in (p for segment in record.segments for p in segment.passes):
        if recorded.mixes:
            raise SamplesMixed(
                "samples mix: the loss is made of a gradient of the whole batch by parameters, a sum over its samples. Make "
                "it of per-sample gradients, per_sample_grads(model); or run its backward pass within pause_hooks()."
            )
        if not recorded.finished:
            for call, grads in recorded.received.items():
                check_seen(call, grads)  # which may be what it failed for
            raise NothingRecorded(
                "the last backward pass has not run to its end, so that its rows are incomplete. Repeat the forward and "
                "the backward pass."
            )
        check_parts(record, recorded.received)
        if recorded.losses is not None and not recorded.losses.complete:
            raise NothingRecorded("backprop_hess has not run to its end, so that its rows are incomplete. Repeat the step.")
        if recorded.mixed_output or not record.plan.refused.keys().isdisjoint(recorded.calls_of):
            raise SamplesMixed(record.plan.mixing or record.plan.untold)
        if recorded.side_door:
            raise UnseenGradient(
                f"the loss reads {recorded.side_door}, which the model keeps beside what it returns, so that it isn't known "
                "whose samples' it is. Return it from forward, with the rest."
            )
        wrong = [reason for name, reason in record.plan.disproven.items() if name in recorded.calls_of]
        if wrong:
            for call, grads in recorded.received.items():
                check_seen(call, grads)  # which may be why
            raise VerificationFailed(f"wrong per-sample gradients: {'; '.join(wrong)}.")
        if recorded.replaces_unread and recorded.adds_to_left and recorded.fills_grad:
            raise NothingRecorded(
                "an earlier backward pass, which nobody has read, is in .grad too, and its rows were thrown away when the "
                f"last one came: those of the last are not all of .grad. {_MICRO_BATCHES} .grad between them (zero_grad), "
                "or the record (autograd_hacks.clear_backprops(model))." + ON_PASSES
            )
        if recorded.ambiguous:
            raise NothingRecorded(
                "checkpointing has recomputed layers in this backward pass, and several forward passes have run since the "
                "one before, so that it can't be known which it belongs to. Run each backward pass before the next forward, "
                "or use torch.utils.checkpoint with use_reentrant=False."
            )
    return record.segments


def check_sets_all(record: Record, what: str) -> None:
    """Raises where ``.grad`` is to be set, with ``param_grad=False``, and would be without a pass that nobody has read.

    what: sets it, for people
    """
    passes = (recorded for segment in record.segments for recorded in segment.passes)
    if any(p.replaces_unread and p.adds_to_left and not p.fills_grad for p in passes):
        raise NothingRecorded(
            f"an earlier backward pass, which nobody has read, was thrown away when the last one came, and .grad as {what} "
            f"sets it would be without it. {_MICRO_BATCHES} the record between them: autograd_hacks.clear_backprops(model)."
            + ON_PASSES
        )


def check_unseen(parameters: Mapping[str, Tensor], record: Record) -> None:
    """Raises where gradient has come to a parameter by no call that the hooks have seen."""
    named = parameters.items() if record.unseen else ()
    past = [name for name, p in named if p.requires_grad and record.name_of(p) in record.unseen]
    if not past:
        return
    record.plan.pending = True  # the next forward of its kind may show the way
    if not record.forwards:
        raise UnseenGradient(
            f"gradient has reached {', '.join(past)} through a forward that ran before add_hooks(model), or while hooks "
            "were off, or under torch.compile: none has run with hooks. Hook the model first, then run the forward and the "
            "backward pass."
        )
    for name in past:
        reason = record.plan.refused.get(record.name_of(parameters[name]), "")
        if reason and reason == record.plan.mixing:
            raise SamplesMixed(reason)
        if reason:
            raise UnseenGradient(f"gradient has reached {name} by a way that the library can't follow: {reason}")
    if record.plan.returns_parameters:
        raise UnseenGradient(
            f"gradient has reached {', '.join(past)} by what the model returns of parameters alone, and where the loss "
            "reads it beside the batch can't be seen from a mean over samples. Give the losses to "
            "autograd_hacks.backward(losses), or return it for each sample: log_std.expand_as(mean)."
        )
    if record.transformed:
        raise UnseenGradient(
            f"gradient has reached {', '.join(past)} through a forward inside torch.func (grad, vmap, jacrev, jvp), whose "
            "tensors end with the transform, so that the rows would be without it. Take derivatives by torch.autograd.grad("
            "create_graph=True), rows of outputs by per_sample_jacobian."
        )
    raise UnseenGradient(
        f"gradient has reached {', '.join(past)} by a way that the hooks don't see, so that the rows would be without "
        "it: a forward pass from before add_hooks, a weight used outside its own layer's forward, a penalty on weights in a "
        "loss, torch.compile, scripting, functional_call. Let layers be called as modules; run a backward pass of a penalty "
        "alone within autograd_hacks.pause_hooks(); or freeze the parameter."
    )


def check_independent(recorder: Recorder) -> None:
    """Raises where it was to be shown that samples are independent, and was not: ProbeFailed."""
    if not recorder.planner.independent or recorder.is_aside:
        return
    passes = (recorded for segment in recorder.record.segments for recorded in segment.passes)
    for use in {use for recorded in passes for use in recorded.received}:
        check_shown(use)


def check_documents(recorder: Recorder) -> None:
    """Raises where rows were to be of documents, and are not known to be."""
    for recorded in (recorded for segment in recorder.record.segments for recorded in segment.passes):
        for use, own in recorded.received.items():
            check_own_documents(use, own, recorder.segments is not None)


def check_own_documents(use: Use, own: OutputGrads, is_asked: bool) -> None:
    """Raises where a use's forward was told of no documents though rows were to be theirs, and where these mix."""
    if use.documents is None and is_asked and use.recomputed_in is not None:
        raise SamplesMixed(NOT_INSIDE)
    if use.documents is None and is_asked:
        raise BatchSizeError(
            f"{use.place} ran by itself, or before add_hooks(segments=...), where nothing tells its documents. Call the "
            "hooked model itself, with the argument that does." + ON_SEGMENTS
        )
    leaks = {} if use.documents is None else use.documents.leaks
    found = [why for local in own.reached if (why := leaks.get(use.edges[local].name))] if leaks else []
    if found:
        raise SamplesMixed(found[0])


def is_shown(use: Use) -> bool:
    """Whether samples were shown to be independent in a use's forward."""
    is_model = isinstance(use, LayerCall) and not use.path  # a layer alone, which mixes nothing that its rule doesn't know
    return is_model or use.samples == 0 or (use.plan is not None and use.plan.is_independent)


def check_shown(use: Use) -> None:
    """Raises where it was not shown that samples are independent in a use's forward."""
    if is_shown(use):
        return
    if use.plan is not None and use.plan.mixing:
        raise SamplesMixed(use.plan.mixing)
    raise ProbeFailed(
        f"whether samples are independent was not shown for the forward in which {use.place} ran: it began before that was "
        "asked for, a part of the model was called by itself, or no argument had samples that could be replaced by others "
        "of the batch. Ask for it from the beginning, add_hooks(model, independent=True), and give the model itself a "
        "batch of tensors in which samples differ."
    )


def check_parts(record: Record, uses: Iterable[Use]) -> None:
    """Raises where processes hold parts of layers through which a loss was differentiated."""
    if record.comparing and any(isinstance(use, PartCall) for use in uses):
        raise ShardedParameters(
            "a backward pass with create_graph=True has come to layers of which processes hold parts, and losses with "
            "derivatives in them have no per-sample gradients in tensor parallel: the derivatives that torch computes of "
            "such graphs aren't those of one process. Leave these layers whole."
        )


def check_seen(use: Use, grads: OutputGrads) -> None:
    """Raises where what the hooks saw is not what the layer worked with."""
    if not use.is_first:
        raise UnseenGradient(
            f"a forward hook stands before the library's on {use.place} and may have changed its "
            "output. Register it without prepend=True, or add the library's hooks anew, after it: remove_hooks, add_hooks."
        )
    for kind, watched in (("input", use.versions), ("gradient at the output", zip(grads.at, grads.versions))):
        for tensor, version in watched:
            if tensor is not None and version_of(tensor) != version:
                raise StaleRecord(
                    f"the {kind} of {use.place}, of shape {tuple(tensor.shape)}, was overwritten in "
                    f"place after the layer read it (version {version_of(tensor)}; expected {version}). Read the per-sample "
                    "gradients before that, or give the layer a copy: x.clone()."
                )


def _trains(layer: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in layer._parameters.values())
