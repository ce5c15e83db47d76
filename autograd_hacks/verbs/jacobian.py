"""Rows of outputs: the gradient of each entry of each sample's output."""

import weakref
from collections.abc import Iterator, Sequence
from math import prod

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.arrivals import announced, returned_in
from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Announcement
from autograd_hacks.distributed.spread import Spread
from autograd_hacks.errors import ON_OUTPUTS, BatchSizeError, NothingRecorded, SamplesMixed
from autograd_hacks.forms import Concatenation, Dense, Form
from autograd_hacks.forms.base import held_bytes, written_bytes
from autograd_hacks.reading.guards import check_unseen
from autograd_hacks.reading.outside import come_apart
from autograd_hacks.support.contexts import outside_inference
from autograd_hacks.support.display import progress
from autograd_hacks.support.graph import Graph
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.trees import version_of
from autograd_hacks.verbs.arguments import check_count, kind_of
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.per_sample import per_sample_grads

WHAT = "per_sample_jacobian"


def per_sample_jacobian(
    model: nn.Module, output: Tensor, *, retain_graph: bool = False, chunk_size: int | None = None
) -> PerSampleGrads:
    """The Jacobian of an output by the parameters: a row for each sample and each entry of its output, by so many passes.

    Verbs have the output's axes behind the samples': of logits ``norms()`` is (N, C), ``gram(other)`` (N, C, M, C), which
    is the tangent kernel; of tokens' losses ``norms()`` is (N, T), and ``weighted_sum(w)`` takes (N, T).

    output: what the hooked model returned, with the samples on whichever axis, which the rows have first; or what follows
    from that, losses of tokens say, with the samples first: two more passes show that no sample's follows from another's
    retain_graph: whether another backward pass of this forward is to follow
    chunk_size: after how many passes rows are written out that take less memory so than what they are made of, the gradients
    of each pass at layers' outputs; unless told never

    ``.grad`` and what was recorded of other passes stay as they are, also within `accumulate` and `streaming`.

    Raises TypeError for what is no tensor of real numbers, ValueError for one without entries or a chunk_size below 1;
    SamplesMixed for an output in which samples have no place, or that mixes them; BatchSizeError for one with another number
    of them; NothingRecorded for one without a graph, or of no forward of the model with hooks; and what `compute_grad1`
    raises.
    """
    recorder = recorder_of(model)
    record = recorder.record
    if chunk_size is not None:
        check_count(f"{WHAT}: chunk_size", chunk_size, "passes", ON_OUTPUTS, ", or None")
    check_output(WHAT, output, ON_OUTPUTS)
    with outside_inference(), record.set_aside(), recorder.backward.aside():
        layout, samples, version = record.outputs.get(output) or (None, None, None)
        is_returned = version == version_of(output)  # and not overwritten since
        with torch.enable_grad():
            first = _samples_first(output, layout, samples) if is_returned else _samples_first(output, Layout(), None)
        # Inputs too: reentrant checkpoints lead to nothing else.  But for them no other model's records would be left alone.
        parameters = set(record.parameters_of(model).values())
        leaves = [leaf for leaf in leaves_of(first) if not isinstance(leaf, nn.Parameter) or leaf in parameters]
        if leaves and not is_returned:
            _check_function(first)
        count = prod(first.shape[1:])
        size, chunks, reached = chunk_size or count, list[dict[str, Form]](), set[str]()
        losses = _announcement(first)
        for number, s in enumerate(progress(_each_entry(first), "Jacobian", "pass", count), 1):
            with announced(first, losses) as root:
                if leaves:
                    run_pass(WHAT, root, leaves, s, retain_graph or number < count)
            if number % size == 0 or number == count:
                losses.complete = True
                grads = _read(model, recorder, losses)
                chunks.append(dict(grads) if chunk_size is None else _smallest(grads))
                reached |= grads.reached
                losses = _announcement(first)
        forms = chunks[0]
        if len(chunks) > 1:
            forms = {name: Concatenation([chunk[name] for chunk in chunks]) for name in forms}
        samples, entries = len(first), first.shape[1:]
        of = weakref.ref(model), "Jacobian", [samples], entries, Spread({}, None, cuts=grads.cuts)
        return PerSampleGrads(forms, samples, frozenset(reached), "sum", *of)


def run_pass(what: str, root: Tensor, leaves: Sequence[Tensor], s: Tensor, retain_graph: bool = True) -> None:
    """A backward pass for its hooks alone: it leaves ``.grad`` as it is.  what: runs it, for people"""
    try:
        torch.autograd.grad(root, leaves, s, retain_graph=retain_graph, allow_unused=True)
    except RuntimeError as error:
        if "backward through the graph a second time" not in str(error):
            raise
        raise NothingRecorded(
            f"{what} was given an output whose graph was freed by an earlier backward pass. Run {what} before that, keeping "
            "the graph; or that with retain_graph=True."
        ) from None


def leaves_of(root: Tensor) -> list[Tensor]:
    """The tensors that a graph ends at.  To ask for their gradients, and to throw these away, leaves ``.grad`` alone."""
    ends = [] if root.grad_fn is None else Graph([root.grad_fn]).leaves
    return [end.variable for end in ends if end.variable.requires_grad]


def _samples_first(output: Tensor, layout: Layout | None, samples: int | None) -> Tensor:
    """N ..., of an output of the model."""
    if layout is None or layout.axis >= output.ndim or (samples is not None and not layout.fits(output, samples)):
        raise SamplesMixed(
            f"in the output of shape {tuple(output.shape)} given to {WHAT} samples have no place: it belongs to all, as a "
            "mean over the batch does, or they mix in it. Give it something for each sample, losses by reduction='none' say."
        )
    return layout.samples_first(output, output.shape[layout.axis] if samples is None else samples)


def _check_function(first: Tensor) -> None:
    """Raises unless a tensor that follows from what the model returned has the samples on axis 0."""
    returned = returned_in(first)
    for _, mark in returned:
        if mark.samples != len(first):
            raise BatchSizeError(
                f"{WHAT} was given a tensor of shape {tuple(first.shape)} that the model has not returned, and takes axis "
                f"0 for the samples, but the model was given {mark.samples}. Bring them there; or give what it returned."
            )
    if len(first) and returned and not all(come_apart(first, returned)):
        raise SamplesMixed(
            f"samples mix in the tensor of shape {tuple(first.shape)} given to {WHAT}, which the model has not returned: "
            "what it has for one sample on axis 0 leads to another's. If samples are on another axis, bring them to axis 0, "
            "output.transpose(0, 1) say; losses of samples must not compare them."
        )


def _announcement(first: Tensor) -> Announcement:
    return Announcement(first.shape, "sum", f"the output given to {WHAT}", "Jacobian", complete=False)


def _each_entry(first: Tensor) -> Iterator[Tensor]:
    """1 at one entry of every sample's, and 0 elsewhere, entry by entry.  first: N ..."""
    count = prod(first.shape[1:])
    for entry in range(count):
        s = torch.zeros(first.shape, dtype=first.dtype, device=first.device)
        s.view(len(first), count)[:, entry] = 1
        yield s


def _read(model: nn.Module, recorder: Recorder, losses: Announcement) -> PerSampleGrads:
    """The rows of the passes that have run, which are recorded no longer."""
    mine = recorder.record
    for record in losses.heard_by:
        if record is not mine:  # of a part of the model that is hooked by itself
            record.clear(f"{WHAT} of another model has come through, whose rows are read by it")
    is_own = any(call.is_own for recorded in mine.passes for call in recorded.received)
    if not is_own and mine.plan.mixing:
        check_unseen(mine.parameters_of(model), mine)
    grads = per_sample_grads(model) if is_own else None
    mine.clear()
    if grads is None or not grads.reached:
        raise NothingRecorded(
            f"the output of shape {tuple(losses.shape)} given to {WHAT} comes of no forward of this {type(model).__name__} "
            "with hooks and parameters that train. Give it what the model returned, called as a whole after "
            "add_hooks(model), with hooks enabled."
        )
    return grads


@torch.no_grad()
def _smallest(grads: PerSampleGrads) -> dict[str, Form]:
    """The forms, written out where that takes less memory than what they are made of."""
    large = {name for name, form in grads.items() if held_bytes(form) > written_bytes(form)}
    with grads.reading():
        return {name: Dense(form.dense()) if name in large else form for name, form in grads.items()}


def check_output(what: str, output: object, page: str) -> None:
    """Raises for what is no output of a model with entries and a graph.  what: was given it    page: explains it"""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        is_complex = isinstance(output, Tensor) and output.is_complex()
        real = " View a complex output as real numbers: torch.view_as_real(output)." if is_complex else ""
        part = "" if isinstance(output, Tensor) else " Of an object that holds several, give one: output.logits, say."
        raise TypeError(
            f"{what} was given {'' if isinstance(output, Tensor) else 'a '}{kind_of(output)}; expected an output of the "
            f"model, a floating-point tensor.{real}{part}" + page
        )
    if 0 in output.shape[1:]:
        raise ValueError(f"{what} was given an output of shape {tuple(output.shape)}, without entries" + page)
    if not output.requires_grad:
        raise NothingRecorded(
            f"{what} was given an output without a graph, detached or made under torch.no_grad. Give it what the model "
            "returned, with gradients enabled and before anything has freed its graph."
        )
