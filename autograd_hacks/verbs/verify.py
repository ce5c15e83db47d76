"""The library's answer for a model against autograd's own, by randomly weighted sums, which a wrong row would change."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Record
from autograd_hacks.errors import NothingRecorded, SamplesMixed, UnsupportedLayer, VerificationFailed
from autograd_hacks.reading.certificate import is_rounding
from autograd_hacks.reading.gate import read
from autograd_hacks.support.display import text_table
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import cloned, detached, held, is_packed, map_tensors, opened, tensors_of
from autograd_hacks.support.untouched import RandomState, cuda_devices_of, random_state, untouched, with_random_state

HEADER = ("parameter", "compared", "largest difference", "largest value")


@dataclass(frozen=True)
class _Comparison:
    parameter: str
    what: str
    found: Tensor
    expected: Tensor
    used: Collection[torch.dtype]  # precisions that autocast brought in

    @property
    def difference(self) -> Tensor:
        return _largest(self.found - self.expected)

    @property
    def value(self) -> Tensor:
        return _largest(self.expected)


def verify(
    model: nn.Module, samples: int = 0, args: tuple[Any, ...] | None = None, kwargs: Mapping[str, Any] | None = None
) -> None:
    """Checks the per-sample gradients of a hooked model against autograd, on the arguments of its last forward pass.

    With random gradients g at the model's outputs and random weights w it compares, for every parameter that trains, Σₙ
    wₙ gradₙ with one backward pass from w · g, in which the library has no part; and Σₙ gradₙ with one from g.  Two
    swapped samples, a mixed pair or a wrong axis can't pass.  Where a step's record is there, it also compares the sum
    of its rows with ``.grad``, which must have been cleared before the step.  It runs the model twice, and leaves it,
    ``.grad`` and the record as they were.

    samples: how many single samples to compare besides, by one backward pass each
    args, kwargs: other arguments to take, positional and by keyword; needed where those of the last forward were kept by
    nobody, as the library doesn't

    Raises VerificationFailed with a table of the parameters that differ; NothingRecorded where the model has not run with
    hooks, or its arguments are gone; SamplesMixed where no output has a place for each sample; and whatever reading raises.
    """
    recorder = recorder_of(model)
    state = random_state(cuda_devices_of(model))
    if args is None and kwargs is None:
        args, kwargs, state = _last_step(recorder.record)
    args, kwargs = args or (), dict(kwargs or {})
    comparisons = _with_grad(model, recorder) + _with_autograd(model, recorder, args, kwargs, state, samples)
    largest = max((c.value for c in comparisons), default=torch.zeros((), device="cpu"))
    wrong = [c for c in comparisons if not is_rounding(c.difference, c.value, lambda: largest, (c.found.dtype, *c.used))]
    if wrong:
        rows = [(c.parameter, c.what, f"{c.difference:.3g}", f"{c.value:.3g}") for c in wrong]
        hint = " (or .grad was not cleared before the step)" if any("with .grad" in c.what for c in wrong) else ""
        raise VerificationFailed(f"wrong per-sample gradients{hint}:\n" + text_table([HEADER, *rows]))


def _last_step(record: Record) -> tuple[tuple[Any, ...], dict[str, Any], RandomState]:
    """The last forward's arguments, and the state that its random numbers came from."""
    if record.arguments is None:
        raise NothingRecorded("verify(model) needs the arguments of a forward pass: run one, with hooks and with gradients.")
    try:
        args, kwargs, state = record.arguments
        return held(args), held(kwargs), state
    except ReferenceError:
        raise NothingRecorded(
            "verify(model) needs the arguments of the last forward pass, which nobody has kept. Keep them until then, or "
            "give it some: verify(model, args=(x,))."
        ) from None


def _largest(x: Tensor) -> Tensor:
    """The largest magnitude, 0 where there is nothing."""
    return x.abs().max() if x.numel() else x.new_zeros(()).abs()


def _with_grad(model: nn.Module, recorder: Recorder) -> list[_Comparison]:
    """The recorded rows' sums with ``.grad``."""
    record = recorder.record
    passes = [recorded for segment in record.segments for recorded in segment.passes]
    if any(segment.replaced for segment in record.segments):
        return []
    if not passes or not recorder.param_grad.wanted or any(recorded.captures or recorded.is_hess for recorded in passes):
        return []
    comparisons = []
    announced = next((recorded.losses for recorded in passes if recorded.losses), None)
    parameters, used = dict(model.named_parameters()), _precisions(record)
    for name, form in read(model, parameters, recorder, None if announced else "sum").items():
        grad = parameters[name].grad
        if form is not None and grad is not None:
            share = 1 / form.samples if announced and announced.loss_type == "mean" else 1.0
            total = form.weighted_sum(torch.full((form.samples,), share, dtype=grad.dtype, device=grad.device))
            comparisons.append(_Comparison(name, "sum of the step's rows with .grad", total, grad.to_dense(), used))
    return comparisons


def _with_autograd(
    model: nn.Module, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], state: RandomState, singles: int
) -> list[_Comparison]:
    """Weighted sums of rows with backward passes through the whole model."""
    if any(is_packed(leaf) for leaf in tree_leaves(opened((args, kwargs)), is_packed)):
        raise TypeError("verify can't tell the samples of a packed sequence apart; give the model a padded batch")
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: dict[tuple[str, str], Tensor] = {}
    record = recorder.record
    with record.set_aside(), recorder.param_grad.aside(), torch.enable_grad(), untouched(model):
        outputs = _run(model, args, kwargs, state)
        layouts = record.plan.layouts_of_model(model, outputs)
        places = {slot: at for slot, at in enumerate(layouts) if at is not None and outputs[slot].requires_grad}
        if not places:
            raise SamplesMixed(
                "verify(model) found no output of the model in which each sample has its place, but tensors of shape "
                f"{', '.join(str(tuple(x.shape)) for x in outputs)}. Verify the part of the model in front of the loss."
            )
        draws = torch.Generator().manual_seed(0)  # its own, so that the user's goes on as it would have
        grads = {slot: _random(outputs[slot].shape, draws).to(outputs[slot]) for slot in places}
        sums = _pull(outputs, grads, parameters)
        forms = read(model, dict(model.named_parameters()), recorder, "sum")
        used = _precisions(record)
        samples = next((form.samples for form in forms.values() if form is not None), 0)
        weights = {"weighted sum of rows": _random((samples,), draws)}
        weights |= {f"row {n}": one for n, one in enumerate(torch.eye(samples, device="cpu")[: min(singles, samples)])}
        comparisons = []
        for name, form in forms.items():
            if form is not None:
                total = form.weighted_sum(sums[name].new_ones(samples)).detach()
                comparisons.append(_Comparison(name, "sum of rows", total, sums[name], used))
                for number, (what, w) in enumerate(weights.items()):
                    own = form[number - 1 : number].dense()[0] if number else form.weighted_sum(w.to(sums[name]))
                    found[name, what] = own.detach()
    with record.set_aside(), Switch.paused_here(), torch.enable_grad(), untouched(model):
        outputs = _run(model, args, kwargs, state)
        for what, w in weights.items():
            weighted = {slot: g * places[slot].over(g, w.to(g)) for slot, g in grads.items()}
            for name, expected in _pull(outputs, weighted, parameters).items():
                own = found.get((name, what), torch.zeros_like(expected))
                comparisons.append(_Comparison(name, what, own, expected, used))
    return comparisons


def _random(shape: Sequence[int], draws: torch.Generator) -> Tensor:
    return torch.randn(*shape, generator=draws, device="cpu")


def _precisions(record: Record) -> set[torch.dtype]:
    """What autocast has computed in, in the calls that are recorded."""
    calls = (call for segment in record.segments for recorded in segment.passes for call in recorded.received)
    return {call.precision for call in calls if call.precision is not None}


def _run(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], state: dict[str, Tensor]) -> list[Tensor]:
    args, kwargs = (map_tensors(lambda x: cloned(detached(x)), tree) for tree in (args, kwargs))
    with with_random_state(state):
        return tensors_of(model(*args, **kwargs))


def _pull(outputs: Sequence[Tensor], grads: Mapping[int, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One backward pass from some of the outputs."""
    try:
        roots, given, leaves = [outputs[slot] for slot in grads], list(grads.values()), list(parameters.values())
        found = torch.autograd.grad(roots, leaves, given, retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        if "use_reentrant" not in str(error):
            raise
        raise UnsupportedLayer(
            "verify takes gradients by torch.autograd.grad, which reentrant checkpointing doesn't allow. Verify the model "
            "without checkpointing, or with use_reentrant=False."
        ) from error
    return {
        name: torch.zeros_like(p) if grad is None else grad.detach().to_dense()
        for (name, p), grad in zip(parameters.items(), found)
    }
