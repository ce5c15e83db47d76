"""The library's answer for a model against autograd's own, by randomly weighted sums, which a wrong row would change."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Record
from autograd_hacks.distributed.shards import alone
from autograd_hacks.distributed.spread import spread_of
from autograd_hacks.errors import ON_WRONG, NothingRecorded, ProbeFailed, SamplesMixed, UnsupportedLayer, VerificationFailed
from autograd_hacks.forms import Form
from autograd_hacks.probe.batch import kept_samples
from autograd_hacks.reading.certificate import agree
from autograd_hacks.reading.gate import read
from autograd_hacks.rules.table import rule_for
from autograd_hacks.support.display import text_table
from autograd_hacks.support.internals import tree_leaves
from autograd_hacks.support.layout import Layouts, differs, rounding_of
from autograd_hacks.support.parts import cut_as, own_of, part_of
from autograd_hacks.support.trees import held, is_packed, map_tensors, opened, tensors_of
from autograd_hacks.support.untouched import untouched

HEADER = ("parameter", "compared", "largest difference", "largest value")


Rows = list[tuple[str, ...]]
"""Of the table: what was compared, and differs."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _compared(
    parameter: str, what: str, form: Form | None, w: Tensor, expected: Tensor, used: Collection[torch.dtype], grads: float
) -> Rows:
    """Σₙ wₙ gₙ with what autograd says.  used: precisions that autocast brought in    grads: see `agree`"""
    if form is None:
        is_right, difference = not bool(expected.any()), expected
    else:
        w = w.to(form.like.device, form.sum_dtype)
        is_right = agree(form, w, expected, used, lambda: grads)
        difference = expected if is_right else form.weighted_sum(w).to(expected) - expected
    return [] if is_right else [(parameter, what, f"{_largest(difference):.3g}", f"{_largest(expected):.3g}")]


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
        wrong = _with_grad(model, recorder) if spread.mesh is None else []
        wrong += _with_autograd(model, recorder, given, samples, loss, independent)
        if wrong:
            hint = (
                " (or .grad was not cleared before the step)" if any("with .grad" in what for _, what, *_ in wrong) else ""
            )
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


def _largest(x: Tensor) -> float:
    """The largest magnitude, 0 where there is nothing."""
    return float(x.abs().max()) if x.numel() else 0.0


def _with_grad(model: nn.Module, recorder: Recorder) -> Rows:
    """The recorded rows' sums with ``.grad``."""
    record = recorder.record
    passes = [recorded for segment in record.segments for recorded in segment.passes]
    if any(segment.replaced for segment in record.segments):
        return []
    if not passes or not recorder.backward.wants_grad or any(recorded.captures or recorded.is_hess for recorded in passes):
        return []
    wrong: Rows = []
    announced = next((recorded.losses for recorded in passes if recorded.losses), None)
    parameters, used = dict(model.named_parameters()), _precisions(record)
    for name, form in read(model, parameters, recorder, None if announced else "sum").items():
        grad = parameters[name].grad
        if form is not None and grad is not None:
            share = 1 / form.samples if announced and announced.loss_type == "mean" else 1.0
            w = torch.full((form.samples,), share, dtype=torch.float64, device="cpu")
            what, grads = "sum of the step's rows with .grad", _length(record)
            wrong += _compared(name, what, form, w, own_of(grad, parameters[name]).to_dense(), used, grads)
    return wrong


def _with_autograd(
    model: nn.Module,
    recorder: Recorder,
    arguments: Arguments,
    singles: int,
    loss: Callable[[Any], Tensor] | None,
    independent: bool,
) -> Rows:
    """Weighted sums of rows with backward passes through the whole model."""
    if any(is_packed(leaf) for leaf in tree_leaves(opened(arguments), is_packed)):
        raise TypeError("verify can't tell the samples of a packed sequence apart; give the model a padded batch" + ON_WRONG)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    record, wrong = recorder.record, Rows()
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
        slot = next(iter(places))
        count = recorder.forward.samples
        samples = outputs[slot].shape[places[slot].axis] if count is None else count
        if not samples:
            return wrong
        if loss is not None:
            _check_loss(loss, output, tuple([at for _, at in record.returned]), samples)
        grads = {slot: _random(outputs[slot].shape, draws).to(part_of(outputs[slot])) for slot in places}
        # Powers of two, times which all digits stay, also of what a model computes in a lower precision.
        order, signs = torch.randperm(samples, generator=draws, device="cpu"), _random((samples,), draws).sign()
        weights = {"sum of rows": torch.ones(samples, device="cpu"), "weighted sum of rows": signs * 2.0 ** (order % 9 - 4)}
        weights |= {f"row {n}": one for n, one in enumerate(torch.eye(samples, device="cpu")[: min(singles, samples)])}
        expected = {}
        with recorder.backward.silent():
            for what, w in weights.items():
                weighted = {slot: g * places[slot].over(g, w.to(g)) for slot, g in grads.items()}
                expected[what] = _pull(outputs, weighted, parameters)
        _pull(outputs, grads, parameters)
        forms = read(model, dict(model.named_parameters()), recorder, "sum")
        used = _precisions(record)
        for what, w in weights.items():
            for name, total in expected[what].items():
                form, own = forms.get(name), w
                if form is not None and what.startswith("row "):
                    n = int(what.removeprefix("row "))
                    form, own = form[n : n + 1], w[n : n + 1]
                grads_here = float(w.abs().max()) * _length(record)
                wrong += _compared(name, what, form, own, total, used, grads_here)
    return wrong


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
            others = [x if at is None else x.where(at.over(x, kept) > 0, x.roll(1, at.axis)) for x, at in here]
            again = loss(map_tensors(partial(_take, iter(others)), output))
            if differs(losses, again, rounding_of(losses))[kept.to(losses.device)].any():
                raise SamplesMixed(
                    "samples mix in the loss given to verify: when the model's outputs for some samples were replaced by "
                    "those for others, the losses of the rest changed. They have no gradients of their own then."
                )


def _take(others: Iterator[Tensor], _: Tensor) -> Tensor:
    return next(others)


def _length(record: Record) -> float:
    """How long the gradients that came to calls are, all together."""
    passes = [recorded for segment in record.segments for recorded in segment.passes]
    return sum(grads.length for recorded in passes for grads in recorded.received.values())


def _random(shape: Sequence[int], draws: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=draws, device="cpu")


def _precisions(record: Record) -> set[torch.dtype]:
    """What autocast has computed in, in the calls that are recorded."""
    calls = (call for segment in record.segments for recorded in segment.passes for call in recorded.received)
    return {call.precision for call in calls if call.precision is not None}


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
