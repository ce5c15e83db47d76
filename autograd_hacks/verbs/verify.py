"""Compares the library's rows with autograd's by randomly weighted sums, which a wrong row would change."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.above import ABOVE
from autograd_hacks.capture.hooks import hooked_copy, recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Record
from autograd_hacks.errors import (
    ON_SEGMENTS,
    ON_WRONG,
    REENTRANT,
    NothingRecorded,
    ProbeFailed,
    SamplesMixed,
    UnsupportedLayer,
    VerificationFailed,
)
from autograd_hacks.formulas.table import rule_for
from autograd_hacks.probe.batch import kept_samples
from autograd_hacks.probe.documents import Documents, documents_of
from autograd_hacks.reading.certificate import agree, rounded_by
from autograd_hacks.reading.gate import read
from autograd_hacks.reading.guards import is_shown
from autograd_hacks.reading.processes import Spread, spread_of
from autograd_hacks.support.copies import Copy
from autograd_hacks.support.display import text_table
from autograd_hacks.support.internals import tree_leaves
from autograd_hacks.support.layout import differs, rounding_of
from autograd_hacks.support.parts import part_of
from autograd_hacks.support.philox import key_of, noise
from autograd_hacks.support.ranges import checked
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import held, is_packed, tensors_of, unpacked

HEADER = ("parameter", "compared", "largest difference", "largest value")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Over = Callable[[Tensor, Tensor], Any]
"""Weights of samples at each entry of an output."""


@checked(ON_WRONG)
def verify(
    model: nn.Module,
    rows: int = 0,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    independent: bool = False,
) -> None:
    """Checks the per-sample gradients of a hooked model against autograd, on the arguments of its last forward pass.

    It runs a copy of the model, with random gradients g at the model's outputs and random weights w.  For every trainable
    parameter it compares Σₙ wₙ gradₙ with a plain backward pass from w · g, and Σₙ gradₙ with one from g.  Swapped samples,
    mixed samples or a wrong axis can't pass.

    With ``add_hooks(segments=...)`` rows belong to documents.  It then also replaces the tokens of some documents and checks
    that the outputs of the others in the same sample don't change.

    The model, what its hooks keep, ``.grad`` and the record don't change.  If processes share a batch, all must call it
    together; each checks its own rows.

    rows: how many single rows to compare as well, by one backward pass each
    args: positional arguments for the model. Needed if the arguments of the last forward no longer exist: the library
    doesn't keep them alive
    kwargs: keyword arguments for the model
    independent: also check that no sample's output depends on other samples' values along a path without a gradient, see
    `add_hooks`

    Raises VerificationFailed with a table of the parameters that differ; NothingRecorded if the model has not run with
    hooks, or its arguments no longer exist; SamplesMixed if samples mix, or no output has a batch axis; ProbeFailed if
    independence can't be checked, or something can't be copied; and what reading raises.
    """
    recorder = recorder_of(model)
    spread = spread_of(model, recorder)

    def own() -> None:
        given = (args or (), dict(kwargs or {})) if args is not None or kwargs is not None else last_step(recorder.record)
        if wrong := _with_autograd(model, recorder, given, rows, independent):
            raise VerificationFailed("wrong per-sample gradients:\n" + text_table([HEADER, *wrong]))

    with ABOVE.alone(model):
        spread.agreed(own)


def last_step(record: Record) -> Arguments:
    """The last forward's arguments.  Raises NothingRecorded if they no longer exist."""
    if record.arguments is None:
        raise NothingRecorded("verify(model) needs the arguments of a forward pass: run one, with hooks and with gradients.")
    try:
        args, kwargs = record.arguments
        return held(args), held(kwargs)
    except ReferenceError:
        raise NothingRecorded(
            "verify(model) needs the last forward's arguments, which no longer exist. Give them: verify(model, args=(x,))"
        ) from None


def ask_independent(model: nn.Module, recorder: Recorder, spread: Spread, verb: str) -> None:
    """Checks that the recorded forward's samples are independent, by a copy that repeats it, and makes later ones check it.

    It has the effect of ``add_hooks(independent=True)``.  All processes that share a batch call it.  verb: what needs it

    Raises SamplesMixed if samples are not independent, and ProbeFailed if that can't be checked.
    """
    if recorder.segments is not None or recorder.record.documents is not None:
        raise ValueError(
            f"{verb}: the model was hooked with segments, and only verify(model) can check that documents are independent. "
            "Make each document a padded sample, without segments." + ON_SEGMENTS
        )
    if not recorder.kinds.independent:
        recorder.kinds.independent = True
        with ABOVE.alone(model):
            spread.agreed(lambda: _show(model, recorder, verb))


def _show(model: nn.Module, recorder: Recorder, verb: str) -> None:
    """Checks independence for the recorded forward."""
    record = recorder.record
    record.mark_read()
    unshown = {use for recorded in record.passes for use in recorded.received if not is_shown(use)}
    if not unshown:
        return
    try:
        if not all(use.is_own and use.within.forward == record.forwards for use in unshown):
            raise NothingRecorded("it was not the model's last forward")
        arguments = last_step(record)
    except NothingRecorded as error:
        raise ProbeFailed(
            f"{verb} needs a check that no sample's outputs depend on other samples' values. The recorded forward can't be "
            "repeated: its arguments are gone, or another ran. Hook it by add_hooks(model, independent=True)."
        ) from error
    copy = Copy(model, arguments)
    with copy.running(), hooked_copy(copy.model, recorder, independent=True, knows=True) as own:
        args, kwargs = copy.given
        copy.model(*args, **kwargs)
        shown = own.record.last
    if shown.mixing:
        raise SamplesMixed(shown.mixing)
    for use in unshown:
        use.within.kind = shown.kind


def _with_autograd(
    model: nn.Module, recorder: Recorder, arguments: Arguments, singles: int, independent: bool
) -> list[tuple[str, ...]]:
    """Compares weighted sums of rows with backward passes through the whole model."""
    if any(is_packed(leaf) for leaf in tree_leaves(unpacked(arguments), is_packed)):
        raise TypeError("verify does not support packed sequences; give the model a padded batch" + ON_WRONG)
    if recorder.segments is not None:
        told = documents_of(recorder.segments, *arguments)
        if told.is_of_tokens:
            raise ValueError("verify can't check rows of segments='tokens'; hook the model without segments" + ON_SEGMENTS)
        _check_values(model, recorder, arguments, told)
    copy = Copy(model, arguments)
    parameters = recorder.record.asked({name: p for name, p in copy.model.named_parameters() if p.requires_grad})
    asked, independent = independent, independent or recorder.kinds.independent
    with copy.running(), hooked_copy(copy.model, recorder, independent, knows=asked) as own:
        args, kwargs = copy.given
        output = copy.model(*args, **kwargs)
        outputs, forward = tensors_of(output), own.record.last
        if forward.mixing:
            raise SamplesMixed(forward.mixing)
        if asked and not forward.kind.is_independent and not rule_for(model):  # a single layer's rule implies independence
            raise ProbeFailed(
                "verify(model, independent=True): no argument has samples that can be replaced by others of the batch. Give "
                "tensors in which samples differ."
            )
        samples, over = _samples_in(outputs, own)
        return _wrong(copy.model, own, parameters, outputs, over, samples, singles) if samples else []


def _samples_in(outputs: Sequence[Tensor], own: Recorder) -> tuple[int, dict[int, Over]]:
    """How many samples, or documents, there are, and where they are in the outputs that have some."""
    record = own.record
    places = {slot: at for slot, (_, at) in enumerate(record.returned) if at is not None and outputs[slot].requires_grad}
    if not places:
        raise SamplesMixed(
            "verify(model) found no output with a batch axis; the model's outputs have shape "
            f"{', '.join(str(tuple(x.shape)) for x in outputs)}. Verify the part of the model before the loss."
        )
    if (documents := record.documents) is not None:
        tried = torch.ones(documents.count, device="cpu")
        found = [slot for slot in places if documents.over(outputs[slot], tried) is not None]
        return documents.count, dict.fromkeys(found, documents.over)
    slot, count = next(iter(places)), own.forward.within.samples
    samples = outputs[slot].shape[places[slot].axis] if count is None else count
    return samples, {slot: at.over for slot, at in places.items()}


def _wrong(
    model: nn.Module,
    own: Recorder,
    parameters: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
    over: Mapping[int, Over],
    samples: int,
    singles: int,
) -> list[tuple[str, ...]]:
    """The rows of the table: where Σₙ wₙ gₙ is something else than a backward pass from w · g."""
    draws = torch.Generator().manual_seed(0)  # a separate generator, so that the user's random numbers don't change
    every, ones = slice(samples), torch.ones(samples, device="cpu")
    grads = {slot: noise(x.shape, key_of(slot), x.device, x.dtype) for slot in over for x in [outputs[slot]]}
    grads = {slot: g * over[slot](g, ones.to(g)) for slot, g in grads.items()}  # zero at padding
    # Multiplying by powers of two keeps all digits, also of numbers in a lower precision.
    order = torch.randperm(samples, generator=draws, device="cpu")
    signs = 2.0 * torch.randint(2, (samples,), generator=draws, device="cpu") - 1
    weights = [("sum of rows", every, ones), ("weighted sum of rows", every, signs * 2.0 ** (order % 9 - 4))]
    rows = torch.eye(min(singles, samples), samples, device="cpu")
    weights += [(f"row {n}", slice(n, n + 1), w) for n, w in enumerate(rows)]
    with own.backward.silent():
        expected = [_pull(outputs, {n: g * over[n](g, w.to(g)) for n, g in grads.items()}, parameters) for *_, w in weights]
    _pull(outputs, grads, parameters)
    forms = read(model, dict(model.named_parameters()), own, "sum")
    received, wrong = [pair for recorded in own.record.passes for pair in recorded.received.items()], []
    used, uses = {call.precision for call, _ in received}, [call for call, _ in received]  # used: autocast's dtypes
    length = sum(grads.length for _, grads in received)
    for (what, some, w), totals in zip(weights, expected):
        for name, total in totals.items():
            form, difference = forms.get(name), total
            if form is not None:
                form = form if some == every else form[some]
                by, size = w[some].to(form.like.device, form.sum_dtype), partial(mul, float(w.abs().max()), length)
                if agree(form, by, total, used, size, rounded_by(uses, total)):
                    continue
                difference = form.weighted_sum(by).to(total) - total
            if form is not None or total.any():
                largest = (f"{float(x.abs().max()) if x.numel() else 0.0:.3g}" for x in (difference, total))
                wrong.append((name, what, *largest))
    return wrong


def _check_values(model: nn.Module, recorder: Recorder, arguments: Arguments, documents: Documents) -> None:
    """Replaces the tokens of some documents and compares the outputs of the others.  Each pair of documents is tried.

    Raises SamplesMixed if those outputs change, ProbeFailed if no argument has tokens that can be replaced.
    """
    assert recorder.segments is not None  # documents exist only with segments

    def run(given: Arguments) -> list[Tensor]:
        copy = Copy(model, given)
        with copy.running(), Switch.paused_here(), torch.no_grad():
            args, kwargs = copy.given
            return [x.detach() for x in tensors_of(copy.model(*args, **kwargs))]

    outputs, draws = run(arguments), torch.Generator().manual_seed(0)
    for kept in kept_samples(documents.count, draws) if documents.count > 1 else ():
        others = documents.replaced(recorder.segments, *arguments, kept)
        if others is None:
            raise ProbeFailed(
                "verify could not check that documents are independent: no other argument has values for each position, "
                "(B, T, ...), that can be replaced. Use other tokens."
            )
        for slot, (x, y) in enumerate(zip(outputs, run(others))):
            weights = documents.over(x, kept)
            if weights is not None and bool((differs(x, y, rounding_of(x)) & (weights > 0)).any()):
                raise SamplesMixed(
                    f"documents mix: when the tokens of some were replaced, the model's output {slot}, of shape "
                    f"{tuple(x.shape)}, changed at the positions of others. Mask attention, and all else, by document."
                )


def _pull(outputs: Sequence[Tensor], grads: Mapping[int, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One backward pass from some of the outputs."""
    try:
        roots, leaves = [outputs[slot] for slot in grads], list(parameters.values())
        found = torch.autograd.grad(roots, leaves, list(grads.values()), retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise UnsupportedLayer(f"verify {REENTRANT}") from error
    return {
        name: torch.zeros_like(part_of(p)) if grad is None else part_of(grad.detach()).to_dense()
        for (name, p), grad in zip(parameters.items(), found)
    }
