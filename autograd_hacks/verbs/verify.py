"""The library's answer for a model against autograd's own, by randomly weighted sums, which a wrong row would change."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Record
from autograd_hacks.distributed.shards import alone
from autograd_hacks.distributed.spread import Spread, spread_of
from autograd_hacks.errors import (
    ON_SEGMENTS,
    ON_WRONG,
    NothingRecorded,
    ProbeFailed,
    SamplesMixed,
    UnsupportedLayer,
    VerificationFailed,
)
from autograd_hacks.forms import Form
from autograd_hacks.probe.batch import kept_samples
from autograd_hacks.probe.documents import documents_of
from autograd_hacks.reading.certificate import agree, rounded_by
from autograd_hacks.reading.gate import read
from autograd_hacks.reading.guards import is_shown
from autograd_hacks.rules.table import rule_for
from autograd_hacks.support.display import text_table
from autograd_hacks.support.internals import tree_leaves
from autograd_hacks.support.layout import Layouts, differs, rounding_of
from autograd_hacks.support.parts import cut_as, own_of, part_of
from autograd_hacks.support.philox import key_of, noise
from autograd_hacks.support.trees import held, is_packed, map_tensors, tensors_of, unpacked
from autograd_hacks.support.untouched import untouched
from autograd_hacks.verbs.leaks import check_values

HEADER = ("parameter", "compared", "largest difference", "largest value")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def verify(
    model: nn.Module,
    samples: int = 0,
    args: tuple[Any, ...] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    independent: bool = False,
) -> None:
    """Checks the per-sample gradients of a hooked model against autograd, on the arguments of its last forward pass.

    It runs the model once more.  With random gradients g at the model's outputs and random weights w it compares, for every
    parameter that trains, Σₙ wₙ gradₙ with one backward pass from w · g, in which the library has no part; and Σₙ gradₙ
    with one from g.  Two swapped samples, a mixed pair or a wrong axis can't pass.  Where a step's record is there, it also
    compares the sum of its rows with ``.grad``, which must have been cleared before the step.  It also proves anew, as the
    first forwards do, that samples' gradients don't mix.  It leaves the model, ``.grad`` and the record as they were.  Where
    processes share a batch each checks its own rows, all at once, and not ``.grad``, in which the others' are too.

    samples: how many single samples to compare besides, by one backward pass each
    args, kwargs: other arguments to take, positional and by keyword; needed where those of the last forward were kept by
    nobody, as the library doesn't
    loss: of the model's output makes N losses, to be checked too: those of some samples may not change with the others'
    outputs
    Of a model with ``add_hooks(segments=...)`` rows are of documents, and it also replaces documents by others' tokens: what
    the model returns for one may not change with the others packed into the same sample.

    independent: whether it is also shown that what the model returns for a sample doesn't depend on the values of others, by
    a way without a gradient; see `add_hooks`

    Raises VerificationFailed with a table of the parameters that differ; NothingRecorded where the model has not run with
    hooks, or its arguments are gone; SamplesMixed where samples mix, or no output has a place for each; ProbeFailed where
    independence can't be shown; and whatever reading raises.
    """
    recorder = recorder_of(model)
    spread = spread_of(model, recorder)

    def own() -> None:
        given = (args or (), dict(kwargs or {})) if args is not None or kwargs is not None else last_step(recorder.record)
        of_step = _with_grad(model, recorder) if spread.mesh is None else []
        wrong = of_step + _with_autograd(model, recorder, given, samples, loss, independent)
        if wrong:
            hint = " (or .grad was not cleared before the step)" if of_step else ""
            raise VerificationFailed(f"wrong per-sample gradients{hint}:\n" + text_table([HEADER, *wrong]))

    with alone(model):
        spread.agreed(own)


def last_step(record: Record) -> Arguments:
    """The last forward's arguments.  Raises NothingRecorded where they are gone."""
    if record.arguments is None:
        raise NothingRecorded("verify(model) needs the arguments of a forward pass: run one, with hooks and with gradients.")
    try:
        args, kwargs = record.arguments
        return held(args), held(kwargs)
    except ReferenceError:
        raise NothingRecorded(
            "verify(model) needs the arguments of the last forward pass, which nobody has kept. Keep them until then, or "
            "give it some: verify(model, args=(x,))."
        ) from None


def ask_independent(model: nn.Module, recorder: Recorder, spread: Spread, verb: str) -> None:
    """Has forwards show from now on that samples are independent, as ``add_hooks(independent=True)`` does, and the one that
    is recorded now, which is run again for that.  All processes that share a batch call it.

    verb: what asks, for people

    Raises SamplesMixed where samples are not independent, and ProbeFailed where that can't be shown.
    """
    if recorder.segments is not None or recorder.record.documents is not None:
        raise ValueError(
            f"{verb}: the model was hooked with segments, and that documents' values don't reach each other is shown by "
            "verify(model) alone. Give each document as a sample of its own, padded, without segments." + ON_SEGMENTS
        )
    if not recorder.planner.independent:
        recorder.planner.independent = True
        with alone(model):
            spread.agreed(lambda: _show(model, recorder, verb))


def _show(model: nn.Module, recorder: Recorder, verb: str) -> None:
    """Shows it for the recorded forward."""
    record = recorder.record
    for segment in record.segments:
        segment.read = True  # or tried to be
    unshown = {use for recorded in record.passes for use in recorded.received if not is_shown(use)}
    if not unshown:
        return
    try:
        if not all(use.is_own and use.forward == record.forwards for use in unshown):
            raise NothingRecorded("it was not the model's last forward")
        arguments = last_step(record)
    except NothingRecorded as error:
        raise ProbeFailed(
            f"{verb} gives numbers only where it was shown that no sample's outputs depend on the values of others, and the "
            "recorded forward was not asked to show that, nor can it be run again: nobody has kept its arguments, or others "
            "ran after it. Ask for it from the beginning: add_hooks(model, independent=True)."
        ) from error
    with untouched(model, arguments) as copied, recorder.aside(), recorder.proving(independent=True):
        args, kwargs = copied(arguments)
        model(*args, **kwargs)
        plan = record.plan
    if plan.mixing:
        raise SamplesMixed(plan.mixing)
    for use in unshown:
        use.plan = plan


class _Comparison:
    """Of Σₙ wₙ gₙ with what autograd says, for the passes that are recorded."""

    def __init__(self, record: Record) -> None:
        received = [own for recorded in record.passes for own in recorded.received.items()]
        self.used = {call.precision for call, _ in received}  # what autocast has computed in
        self.uses = [call for call, _ in received]
        self.length = sum(grads.length for _, grads in received)  # of all gradients that came to calls
        self.wrong: list[tuple[str, ...]] = []
        """Rows of the table."""

    def add(self, parameter: str, what: str, form: Form | None, w: Tensor, expected: Tensor, size: float = 1.0) -> None:
        """Compares them.  size: how many times longer terms of the sum are than what came to calls"""
        difference = expected
        if form is not None:
            w = w.to(form.like.device, form.sum_dtype)
            if agree(form, w, expected, self.used, lambda: size * self.length, rounded_by(self.uses, expected)):
                return
            difference = form.weighted_sum(w).to(expected) - expected
        if form is not None or expected.any():
            largest = (f"{float(x.abs().max()) if x.numel() else 0.0:.3g}" for x in (difference, expected))
            self.wrong.append((parameter, what, *largest))


def _with_grad(model: nn.Module, recorder: Recorder) -> list[tuple[str, ...]]:
    """The recorded rows' sums with ``.grad``."""
    record = recorder.record
    passes = record.passes
    if any(segment.replaced for segment in record.segments) or any(p.captures or p.is_hess for p in passes):
        return []
    if not passes or not recorder.backward.wants_grad:
        return []
    announced = next((recorded.losses for recorded in passes if recorded.losses), None)
    is_mean = announced is not None and announced.loss_type == "mean"
    parameters, comparison = dict(model.named_parameters()), _Comparison(record)
    for name, form in read(model, parameters, recorder, None if announced else "sum").items():
        grad = parameters[name].grad
        if form is not None and grad is not None:
            w = torch.full((form.samples,), 1 / form.samples if is_mean else 1.0, dtype=torch.float64, device="cpu")
            total = own_of(grad, parameters[name]).to_dense()
            comparison.add(name, "sum of the step's rows with .grad", form, w, total)
    return comparison.wrong


def _with_autograd(
    model: nn.Module,
    recorder: Recorder,
    arguments: Arguments,
    singles: int,
    loss: Callable[[Any], Tensor] | None,
    independent: bool,
) -> list[tuple[str, ...]]:
    """Weighted sums of rows with backward passes through the whole model."""
    if any(is_packed(leaf) for leaf in tree_leaves(unpacked(arguments), is_packed)):
        raise TypeError("verify can't tell the samples of a packed sequence apart; give the model a padded batch" + ON_WRONG)
    record = recorder.record
    if recorder.segments is not None:
        told = documents_of(recorder.segments, *arguments)
        if told.is_of_tokens:
            raise ValueError(
                "verify(model) compares rows with the derivatives of what the model returns, and segments='tokens' has "
                "parts of these. Verify with add_hooks(model), without segments." + ON_SEGMENTS
            )
        check_values(model, recorder, arguments, told)
    parameters = record.asked({name: p for name, p in model.named_parameters() if p.requires_grad})
    draws = torch.Generator().manual_seed(0)  # its own, so that the user's goes on as it would have
    with untouched(model, arguments) as copied, recorder.aside(), recorder.proving(independent):
        args, kwargs = copied(arguments)
        output = model(*args, **kwargs)
        outputs, plan = tensors_of(output), record.plan
        if plan.mixing:
            raise SamplesMixed(plan.mixing)
        if independent and not plan.is_independent and not rule_for(model):  # a layer alone has a rule that knows
            raise ProbeFailed(
                "verify(model, independent=True) could not show that samples are independent: no argument has samples that "
                "could be replaced by others of the batch. Give it a batch of tensors in which samples differ."
            )
        places = {slot: at for slot, (_, at) in enumerate(record.returned) if at is not None and outputs[slot].requires_grad}
        if not places:
            raise SamplesMixed(
                "verify(model) found no output of the model in which each sample has its place, but tensors of shape "
                f"{', '.join(str(tuple(x.shape)) for x in outputs)}. Verify the part of the model in front of the loss."
            )
        slot, count = next(iter(places)), recorder.forward.samples
        samples = outputs[slot].shape[places[slot].axis] if count is None else count
        documents = record.documents
        weights_of: dict[int, Callable[[Tensor, Tensor], Any]] = {slot: at.over for slot, at in places.items()}
        if documents is not None:
            ones = torch.ones(documents.count, device="cpu")
            places = {slot: at for slot, at in places.items() if documents.over(outputs[slot], ones) is not None}
            weights_of, samples = dict.fromkeys(places, documents.over), documents.count
        if not samples:
            return []
        if loss is not None:
            _check_loss(loss, output, tuple([at for _, at in record.returned]), samples)
        parts = {slot: part_of(outputs[slot]) for slot in places}
        grads = {slot: noise(outputs[slot].shape, key_of(slot), own.device, own.dtype) for slot, own in parts.items()}
        if documents is not None:  # nothing for padding
            grads = {slot: g * weights_of[slot](g, torch.ones(samples, device="cpu").to(g)) for slot, g in grads.items()}
        # Powers of two, times which all digits stay, also of what a model computes in a lower precision.
        order = torch.randperm(samples, generator=draws, device="cpu")
        signs = 2.0 * torch.randint(2, (samples,), generator=draws, device="cpu") - 1
        every, ones = slice(samples), torch.ones(samples, device="cpu")
        weights = [("sum of rows", every, ones), ("weighted sum of rows", every, signs * 2.0 ** (order % 9 - 4))]
        rows = torch.eye(min(singles, samples), samples, device="cpu")
        weights += [(f"row {n}", slice(n, n + 1), w) for n, w in enumerate(rows)]
        expected = []
        with recorder.backward.silent():
            for _, _, w in weights:
                weighted = {slot: g * weights_of[slot](g, w.to(g)) for slot, g in grads.items()}
                expected.append(_pull(outputs, weighted, parameters))
        _pull(outputs, grads, parameters)
        forms, comparison = read(model, dict(model.named_parameters()), recorder, "sum"), _Comparison(record)
        for (what, some, w), totals in zip(weights, expected):
            for name, total in totals.items():
                form = forms.get(name)
                form = form if form is None or some == every else form[some]
                comparison.add(name, what, form, w[some], total, float(w.abs().max()))
    return comparison.wrong


def _check_loss(loss: Callable[[Any], Tensor], output: Any, layouts: Layouts, samples: int) -> None:
    """Raises SamplesMixed where the losses of some samples change with the outputs of others."""
    draws, places = torch.Generator().manual_seed(0), iter(layouts)
    here = [(x.detach(), next(places, None)) for x in tensors_of(output)]
    with torch.no_grad():
        losses = loss(map_tensors(Tensor.detach, output))
        if not isinstance(losses, Tensor) or losses.shape != (samples,):
            raise ValueError(
                f"the loss given to verify returned {tuple(losses.shape) if isinstance(losses, Tensor) else type(losses)}; "
                f"expected {samples} losses, one for each sample (reduction='none')" + ON_WRONG
            )
        for kept in kept_samples(samples, draws):
            others = iter([x if at is None else x.where(at.over(x, kept) > 0, x.roll(1, at.axis)) for x, at in here])
            again = loss(map_tensors(partial(next, others), output))  # each tensor is the default that next never takes
            if differs(losses, again, rounding_of(losses))[kept.to(losses.device)].any():
                raise SamplesMixed(
                    "samples mix in the loss given to verify: when the model's outputs for some samples were replaced by "
                    "those for others, the losses of the rest changed. They have no gradients of their own then."
                )


def _pull(outputs: Sequence[Tensor], grads: Mapping[int, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One backward pass from some of the outputs."""
    try:
        roots, leaves = [outputs[slot] for slot in grads], list(parameters.values())
        given = [cut_as(g, root) for g, root in zip(grads.values(), roots)]
        found = torch.autograd.grad(roots, leaves, given, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise UnsupportedLayer(
            "verify takes gradients by torch.autograd.grad, which reentrant checkpointing doesn't allow. Verify the model "
            "without checkpointing, or with use_reentrant=False."
        ) from error
    return {
        name: torch.zeros_like(part_of(p)) if grad is None else own_of(grad.detach(), p).to_dense()
        for (name, p), grad in zip(parameters.items(), found)
    }
