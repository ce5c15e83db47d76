"""Rows of outputs: the gradient of each entry of each sample's output."""

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.arrivals import Returned, announced, returned_in
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Announcement
from autograd_hacks.errors import ON_OUTPUTS, BatchSizeError, NothingRecorded, SamplesMixed
from autograd_hacks.reading.beyond import read_outside
from autograd_hacks.reading.guards import check_unseen
from autograd_hacks.support.contexts import outside_inference
from autograd_hacks.support.display import progress
from autograd_hacks.support.graph import Value, leaves_behind
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.ranges import checked
from autograd_hacks.verbs.arguments import kind_of
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.matrix import Of
from autograd_hacks.verbs.per_sample import per_sample_grads

WHAT = "per_sample_jacobian"


@checked(ON_OUTPUTS)
def per_sample_jacobian(model: nn.Module, output: Tensor, *, retain_graph: bool = False) -> PerSampleGrads:
    """The Jacobian of an output by the parameters: one row for each sample and each entry of its output.

    It runs one backward pass for each entry.  Verbs return the output's axes after the samples'.  For logits, ``norms()`` is
    (N, C), and ``gram(other)``, the tangent kernel, is (N, C, M, C).  For tokens' losses, ``norms()`` is (N, T), and
    ``weighted_sum(w)`` takes (N, T).  ``.grad`` and the record of other passes don't change, also within `accumulate` and
    `during_backward`.

    output: an output of the hooked model, with the samples on any axis; the rows have them on axis 0. Or a function of the
    outputs, such as tokens' losses, with the samples on axis 0
    retain_graph: keep the graph for another backward pass

    Raises TypeError if ``output`` is not a tensor of real numbers, ValueError if it has no entries; SamplesMixed if
    ``output`` has no batch axis or mixes samples; BatchSizeError if it has another number of samples; NothingRecorded if it
    has no graph, or does not come from a forward of the model with hooks; and what `compute_grad1` raises.
    """
    recorder = recorder_of(model)
    record = recorder.record
    check_output(WHAT, output, ON_OUTPUTS)
    with outside_inference(), record.set_aside(), recorder.backward.aside():
        made_by: Any = output.grad_fn  # another node, if the output was overwritten since
        mark: Any = None if made_by is None else made_by.metadata.get(Returned, {}).get(output.output_nr)
        is_returned = mark is not None and mark.recorder() is recorder
        at, samples = (mark.at, mark.samples) if is_returned else (Layout(), None)
        with torch.enable_grad():
            first = _samples_first(output, at if isinstance(at, Layout) else None, samples)
        # Inputs are leaves, too, because reentrant checkpoints reach nothing else.  Other models' parameters are left out,
        # so that those models' records stay as they are.
        parameters = set(record.as_seen(recorder.tree.parameters()).values())
        leaves = [leaf for leaf in leaves_of(first) if not isinstance(leaf, nn.Parameter) or leaf in parameters]
        if leaves and not is_returned:
            _check_function(first)
        count = prod(first.shape[1:])
        losses = Announcement(first.shape, "sum", f"the output given to {WHAT}", "Jacobian", complete=False)
        for number in progress(range(count), "Jacobian", "pass", count):
            s = torch.zeros(first.shape, dtype=first.dtype, device=first.device)  # 1 at this entry of every sample
            s.view(len(first), count)[:, number] = 1
            with announced(first, losses) as root:
                if leaves:
                    run_pass(WHAT, root, leaves, s, retain_graph or number + 1 < count)
        losses.complete = True
        grads = _read(model, recorder, losses)
        of = Of(grads.reached, "sum", weakref.ref(model), "Jacobian", [len(first)], tuple(first.shape[1:]))
        return PerSampleGrads(dict(grads), len(first), of)


def run_pass(what: str, root: Tensor, leaves: Sequence[Tensor], s: Tensor, retain_graph: bool = True) -> None:
    """A backward pass that runs hooks and doesn't change ``.grad``.  what: the function that runs it, for the message"""
    try:
        torch.autograd.grad(root, leaves, s, retain_graph=retain_graph, allow_unused=True)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise NothingRecorded(
            f"{what}: an earlier backward pass freed the graph of this output. Run that pass, or {what} before it, with "
            "retain_graph=True."
        ) from None


def leaves_of(root: Tensor) -> list[Tensor]:
    """The leaves of a graph.  Asking for their gradients, instead of calling backward, leaves ``.grad`` unchanged."""
    return [x for x in leaves_behind([] if root.grad_fn is None else [root.grad_fn]) if x.requires_grad]


def _samples_first(output: Tensor, layout: Layout | None, samples: int | None) -> Tensor:
    """An output of the model with the samples on axis 0, N ..."""
    if layout is None or layout.axis >= output.ndim or (samples is not None and not layout.fits(output, samples)):
        raise SamplesMixed(
            f"{WHAT}: the output of shape {tuple(output.shape)} has no batch axis, like a mean over the batch, or samples "
            "mix in it. Give it an output with a value for each sample, for example losses with reduction='none'."
        )
    return layout.samples_first(output, output.shape[layout.axis] if samples is None else samples)


def _check_function(first: Tensor) -> None:
    """Raises unless a function of the model's outputs has the samples on axis 0, unmixed."""
    assert first.grad_fn is not None
    for mark in returned_in([Value(first.grad_fn, first.output_nr)]).marks.values():
        if mark.samples != len(first):
            raise BatchSizeError(
                f"{WHAT} was given a tensor of shape {tuple(first.shape)} that is not an output of the model; expected the "
                f"model's {mark.samples} samples on axis 0. Move them to axis 0, or give an output of the model."
            )
    if at := read_outside(first):
        raise SamplesMixed(
            f"{WHAT}: samples mix in the given tensor of shape {tuple(first.shape)}, at {at}: it is not an output of the "
            "model, and one index of axis 0 depends on several samples. If they are on axis 1: output.transpose(0, 1)."
        )


def _read(model: nn.Module, recorder: Recorder, losses: Announcement) -> PerSampleGrads:
    """The rows of the passes that have run.  Their record is cleared."""
    mine = recorder.record
    for record in losses.heard_by:
        if record is not mine:  # a part of the model that has hooks of its own
            record.clear(f"a backward pass of another model's {WHAT} has replaced its record")
    is_own = any(call.is_own for call in mine.witnesses())
    if not is_own and mine.last.mixing:
        check_unseen(mine.as_seen(recorder.tree.parameters()), mine)
    grads = per_sample_grads(model) if is_own else None
    mine.clear()
    if grads is None or not grads.reached:
        raise NothingRecorded(
            f"{WHAT}: the output of shape {tuple(losses.shape)} does not come from a forward of this {type(model).__name__} "
            "with hooks and trainable parameters. Give the output of model(...) as a whole, after add_hooks(model)."
        )
    return grads


def check_output(what: str, output: object, page: str) -> None:
    """Raises unless ``output`` is a real tensor with entries and a graph.  page: ends the message"""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        mend = " From an object with several, give one: output.logits."
        if isinstance(output, Tensor):
            mend = " View it as real numbers: torch.view_as_real(output)." if output.is_complex() else ""
        raise TypeError(
            f"{what} was given output={kind_of(output)}; expected a floating-point tensor, an output of the model.{mend}"
            + page
        )
    if 0 in output.shape[1:]:
        raise ValueError(f"{what} was given an output of shape {tuple(output.shape)}, which has no entries" + page)
    if not output.requires_grad:
        raise NothingRecorded(
            f"{what} was given an output without a graph: it is detached, or was computed under torch.no_grad. Give it one "
            "that was computed with gradients."
        )
