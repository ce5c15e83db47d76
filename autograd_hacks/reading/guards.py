"""Checks whether a record may be read.  Each check raises an error that says what to do."""

from collections.abc import Mapping

import torch
import torch.nn as nn
from torch import Tensor
from torch.amp.grad_scaler import OptState

from autograd_hacks.capture.calls import LayerCall
from autograd_hacks.capture.log import INSIDE_PASS
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Announcement, Record, Segment
from autograd_hacks.capture.uses import OutputGrads, Use
from autograd_hacks.capture.wrappers import gathering, has_processes
from autograd_hacks.errors import (
    ON_PASSES,
    ON_SEGMENTS,
    BatchSizeError,
    NothingRecorded,
    PerSampleGradientError,
    ProbeFailed,
    SamplesMixed,
    StaleRecord,
    UnseenGradient,
    VerificationFailed,
    where,
)
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import overwritten_in

LOSS_TYPES = ("mean", "sum")
_MICRO_BATCHES = (
    "If both passes are of the same samples, add their losses up first, so that each sample has one row. For micro-batches "
    "run all passes within autograd_hacks.accumulate(model), or clip each one with param_grad=False: "
    "clip_grad1_norm_(model, max_norm, add=True). To read the last pass only, clear"
)


def check_hooked(model: nn.Module, parameters: Mapping[str, Tensor], recorder: Recorder) -> None:
    """Raises if a trainable parameter has no hook, or its layer has none."""
    missing = {
        own for own in recorder.unhooked() if [p for p in own._parameters.values() if p is not None and p.requires_grad]
    }
    layers = model.named_modules() if missing else ()
    unhooked = [where(path, own) for path, own in layers if own in missing and not isinstance(own, torch.jit.ScriptModule)]
    trained = {name: p for name, p in parameters.items() if p.requires_grad and p.is_leaf and p.grad is not None}
    watched = recorder.backward.watched.of(trained.values())
    unwatched = [f"parameter {name!r}" for name, handles in zip(trained, watched) if handles is None]
    if unhooked or unwatched:
        raise NothingRecorded(
            f"not hooked, because they were added or unfrozen after add_hooks: {'; '.join(unhooked or unwatched)}. Call "
            "autograd_hacks.add_hooks(model) again and repeat the step."
        )


def check_known(model: nn.Module, record: Record) -> None:
    """Raises if layers used whole parameters that can't be matched to shards.  They would look like unused parameters."""
    known = {*record.names.values()} if gathering(model) else None
    if known is not None and (record.unseen.keys() - known or any(recorded.names() - known for recorded in record.passes)):
        raise NothingRecorded(
            "fully_shard gathered parameters that the hooks don't know: a part of the model was called before the model "
            "itself, or parameters were replaced. Call autograd_hacks.add_hooks(model) again, then call the model itself, "
            "and repeat the step."
        )


def readable_segments(parameters: Mapping[str, Tensor], record: Record) -> list[Segment]:
    """The segments to read.  Raises if there are none, or if their rows can't be trusted."""
    if not Switch.on():
        raise NothingRecorded("hooks are disabled. Call autograd_hacks.enable_hooks() and repeat the step.")
    if record.last.failed is not None:  # then hooks may be missing, too
        raise record.last.failed
    check_unseen(parameters, record)
    if not record.segments:
        no_backward = (
            "no backward pass has reached a trainable parameter of a hooked layer since add_hooks. First call "
            "loss.backward() on a loss of this model's output (outside torch.no_grad and torch.func)."
        )
        no_forward = "the model has not run since add_hooks. Run a forward and a backward pass first."
        raise NothingRecorded(record.why_empty or (no_backward if record.forwards else no_forward))
    for recorded in record.passes:
        if recorded.mixes:
            raise SamplesMixed(
                "samples mix: the loss uses a gradient of the whole batch by parameters, which is a sum over samples. Use "
                "per_sample_grads(model) instead, or run this loss's backward pass within pause_hooks()."
            )
        if not recorded.finished:
            for call, grads in recorded.received.items():
                check_seen(call, grads)  # this may be why it failed
            raise NothingRecorded(
                "the last backward pass did not finish, so its rows are incomplete. Repeat the forward and the backward "
                "pass."
            )
        if recorded.losses is not None and not recorded.losses.complete:
            raise NothingRecorded("backprop_hess did not finish, so its rows are incomplete. Repeat the step.")
        why = record.last.mixing or record.last.untold
        if why and not record.last.refused.keys().isdisjoint(recorded.names()):
            raise _refusal(why)
        if record.comparing and record.last.mixes_at:
            raise _refusal(
                f"samples mix at {record.last.mixes_at}, and a derivative leads back through it, so that each sample's loss "
                "depends on the others' outputs."
            )
        if recorded.refused:
            raise _refusal(recorded.refused)
        if wrong := [why for name, why in record.last.facts.disproven.items() if name in recorded.names()]:
            for call, grads in recorded.received.items():
                check_seen(call, grads)  # this may be why
            raise VerificationFailed(f"wrong per-sample gradients: {'; '.join(wrong)}.")
        if recorded.replaces_unread and recorded.adds_to_left and recorded.fills_grad:
            raise NothingRecorded(
                "an earlier backward pass was not read. It is in .grad too, but its rows were discarded when the last pass "
                f"came, so the remaining rows don't cover all of .grad. {_MICRO_BATCHES} .grad between them (zero_grad), or "
                "the record (autograd_hacks.clear_backprops(model))." + ON_PASSES
            )
    return record.segments


def check_sets_all(record: Record, what: str) -> None:
    """Raises if ``.grad`` is to be set with ``param_grad=False`` and would lack an unread pass.

    what: the function that sets it, for messages
    """
    record.mark_read()  # also if it is refused, so that the pass after the next forward is read again
    if any(p.replaces_unread and p.adds_to_left and not p.fills_grad for p in record.passes):
        raise NothingRecorded(
            f"an earlier backward pass was not read, and was discarded when the last one came. {what} would set .grad "
            f"without it. {_MICRO_BATCHES} the record between them: autograd_hacks.clear_backprops(model)." + ON_PASSES
        )


def check_unseen(parameters: Mapping[str, Tensor], record: Record) -> None:
    """Raises if a parameter got gradient through a call that the hooks have not seen."""
    named = parameters.items() if record.unseen else ()
    past = [name for name, p in named if p.requires_grad and record.name_of(p) in record.unseen] if named else ()
    if not past:
        return
    if not record.forwards:
        raise UnseenGradient(
            f"{', '.join(past)}: got gradient through a forward without hooks: it ran before add_hooks(model), or while "
            "hooks were off, or under torch.compile. Hook the model first, then run the forward and the backward pass."
        )
    for name in past:
        reason = record.last.refused.get(record.name_of(parameters[name]), "")
        if reason and reason == record.last.mixing:
            raise _refusal(reason)
        if reason:
            raise UnseenGradient(f"{name}: got gradient in a way that the library can't follow: {reason}")
    if record.last.facts.returns_parameters:
        raise UnseenGradient(
            f"{', '.join(past)}: got gradient through an output that depends on parameters only. A mean over samples "
            "doesn't show where the loss combines it with the batch. Call autograd_hacks.backward(losses) with one loss "
            "per sample, or return the output once for each sample: log_std.expand_as(mean)."
        )
    if record.why_unseen:
        raise UnseenGradient(f"{', '.join(past)}: {record.why_unseen}")
    uses = record.witnesses()
    if uses and not any(use.is_own for use in uses):
        raise UnseenGradient(
            f"{', '.join(past)}: used by a method that isn't forward. {uses[0].place} was called by itself, and the model "
            "was not, so its other parameters were not seen. Put the method into a module whose forward calls it, and hook "
            "and call that module."
        )
    raise UnseenGradient(
        f"{', '.join(past)}: got gradient that did not pass through the hooks, so the rows would be incomplete. Possible "
        "causes: a forward before add_hooks, a weight used outside its own layer's forward, a penalty on weights in the "
        "loss, torch.compile, scripting, functional_call. Call layers as modules, run the backward pass of a penalty "
        "separately within autograd_hacks.pause_hooks(), or freeze the parameter."
    )


def check_independent(recorder: Recorder) -> None:
    """Raises ProbeFailed if independence of samples was requested and not shown."""
    if not recorder.kinds.independent or recorder.is_aside:
        return
    for use in {*recorder.record.witnesses()}:
        check_shown(use)


def check_documents(recorder: Recorder) -> None:
    """Raises if rows of documents were requested and can't be assigned."""
    is_asked, record = recorder.segments is not None, recorder.record
    if is_asked or [use for use in record.witnesses() if use.within.documents is not None]:
        for use, own in (pair for recorded in record.passes for pair in recorded.received.items()):
            check_own_documents(use, own, is_asked)


def check_own_documents(use: Use, own: OutputGrads, is_asked: bool) -> None:
    """Raises if rows of documents were requested, but a use's forward has no documents, or its documents mix."""
    if use.within.documents is None and is_asked:
        raise BatchSizeError(
            f"{use.place}: ran by itself, or before add_hooks(segments=...), so its documents are unknown. Call the hooked "
            "model itself, with the argument that separates documents." + ON_SEGMENTS
        )
    leaks = {} if use.within.documents is None else use.within.documents.leaks
    found = [why for local in own.reached if (why := leaks.get(use.edges[local].name))] if leaks else []
    if found:
        raise SamplesMixed(found[0])


def is_shown(use: Use) -> bool:
    """Whether samples were shown to be independent in a use's forward."""
    # A layer by itself, whose graph isn't read, mixes nothing that its rule doesn't know.
    is_alone = isinstance(use, LayerCall) and not use.path and use.within.facts.calls is None
    return is_alone or use.within.samples == 0 or use.within.kind.is_independent


def check_shown(use: Use) -> None:
    """Raises if samples were not shown to be independent in a use's forward."""
    if use.within.failed is not None:
        raise use.within.failed
    if is_shown(use):
        return
    if use.within.mixing:
        raise _refusal(use.within.mixing)
    raise ProbeFailed(
        f"{use.place}: samples were not shown to be independent in its forward. Either the forward began before "
        "add_hooks(independent=True), or a part of the model was called by itself, as a reentrant checkpoint does in the "
        "backward pass, or no argument had samples to replace. Call add_hooks(model, independent=True) first, then call the "
        "model itself with a batch of tensors in which samples differ; and checkpoints with use_reentrant=False."
    )


def _refusal(why: str, place: str = "") -> PerSampleGradientError:
    return UnseenGradient(place + why) if why == INSIDE_PASS else SamplesMixed(why)


def check_seen(use: Use, grads: OutputGrads) -> None:
    """Raises if a use has no rows, or if the tensors that the hooks saw are not the ones that the layer used."""
    if use.why_refused:
        raise _refusal(use.why_refused, f"{use.place}: ")
    if not use.is_first:
        raise UnseenGradient(
            f"{use.place}: another forward hook runs before the library's and may have changed the output. Register it "
            "without prepend=True, or call remove_hooks and add_hooks after registering it."
        )
    wrong, kind = overwritten_in(use.versions), "input"
    if not wrong:
        wrong, kind = overwritten_in(zip(grads.at, grads.versions)), "gradient at the output"
    if wrong:
        raise StaleRecord(
            f"{use.place}: its {kind}, {wrong} after the layer read it. Read the per-sample gradients before that, or "
            "give the layer a copy: x.clone()."
        )


def is_unscaled(scaler: torch.amp.GradScaler) -> bool:
    """Whether ``unscale_`` was called for some optimizer since its last step, so that ``.grad`` has lost the scale."""
    return any(state["stage"] is OptState.UNSCALED for state in scaler._per_optimizer_states.values())


def check_ordinary(record: Record, what: str) -> None:
    """Raises if the record holds passes of `backprop_hess`, or of tokens.  what: is to be read, for messages"""
    found = [own.within.documents for own in record.witnesses()]
    check_no_tokens(bool([own for own in found if own is not None and own.is_of_tokens]), what)
    if record.hess_type is not None:
        raise NothingRecorded(
            f"there is no {what}: the record holds the passes of backprop_hess, whose rows are not samples' gradients. Run "
            "loss.backward() first, on a new forward or after clear_backprops(model). Or read the recorded passes: "
            "compute_hess(model), per_sample_grads(model)."
        )


def check_no_tokens(is_of_tokens: bool, what: str) -> None:
    """Raises if rows belong to tokens, N T, and the function has only one axis for rows.  what: what is missing"""
    if is_of_tokens:
        raise ValueError(
            f"there is no {what} for rows of tokens (segments='tokens'). Use per_sample_grads(model), whose verbs have "
            "an axis for samples and one for positions; or call add_hooks(model) again, without segments." + ON_SEGMENTS
        )


def check_batch_size(losses: Announcement, why: str) -> None:
    """Clears passes whose number of samples differs from the number of losses, and raises.  why: see `Record.clear`"""
    for record in losses.heard_by:
        try:
            for shape, layout in record.returned if losses.hess_type else ():
                if shape == losses.shape and layout is not None and layout != Layout():
                    raise BatchSizeError(
                        f"{losses.what}, of shape {tuple(shape)}, has its samples as {layout}; expected them on axis 0. For "
                        "(T, N, C) use output.transpose(0, 1)."
                    )
            for segment in [] if has_processes() else record.segments:  # else reading raises this, so that all know
                if any(recorded.losses is losses for recorded in segment.passes):
                    segment.batch_size()
        except RuntimeError:
            record.clear(why)
            raise
