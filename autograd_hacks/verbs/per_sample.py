"""What the last backward pass has left: a matrix for each parameter, lazily; rows written out next to ``param.grad``; and
``.grad`` as these rows make it."""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Record, Segment
from autograd_hacks.capture.uses import NodeUse, Use
from autograd_hacks.distributed.spread import Spread, Where, spread_of
from autograd_hacks.errors import (
    ON_HOOKS,
    ON_PASSES,
    ON_PROCESSES,
    ON_SCALERS,
    ON_SEGMENTS,
    BatchSizeError,
    NothingRecorded,
    UnsupportedLayer,
)
from autograd_hacks.forms import Form, Zero
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.probe.documents import tokens_of
from autograd_hacks.reading.gate import read
from autograd_hacks.reading.guards import check_sets_all
from autograd_hacks.reading.scale import check_ordinary, check_scale
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.layout import Layout
from autograd_hacks.support.memory import Pool
from autograd_hacks.support.parts import joined, part_of
from autograd_hacks.support.restored import switches_kept
from autograd_hacks.support.trees import parameters_of
from autograd_hacks.verbs.arguments import names_matching
from autograd_hacks.verbs.grads import PerSampleGrads


def per_sample_grads(
    model: nn.Module,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    process_group: Where = None,
    only: str | Iterable[str] | None = None,
) -> PerSampleGrads:
    """The per-sample gradients of the last backward pass, lazily: nothing of size N × P until it is asked for.

    loss_type, scale: as in `compute_grad1`    process_group: the processes that have the other samples of the batch, a
    ``torch.distributed.ProcessGroup`` or ``DeviceMesh``; None for those of DistributedDataParallel or ``fully_shard``, False
    for this process alone
    only: names of some parameters, or patterns: ``'8.*'``, ``['*.weight', 'head.bias']``; 'norms' for those of norm layers
    and all biases. Verbs are then of these alone

    Raises what `compute_grad1` raises, and ValueError for a group beside ``fully_shard``, and for a pattern that matches no
    parameter that trains.
    """
    recorder = recorder_of(model)
    spread = spread_of(model, recorder, process_group)
    return grads_of(model, recorder, spread, loss_type, scale, only)


def grads_of(
    model: nn.Module,
    recorder: Recorder,
    spread: Spread,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    only: str | Iterable[str] | None = None,
) -> PerSampleGrads:
    """What `per_sample_grads` returns.  spread: the processes that have samples"""
    record = recorder.record
    parameters = record.parameters_of(model)
    with spread.reading():
        forms = read(model, parameters, recorder, loss_type, scale)  # and checks, of all
    samples = _samples(forms.values())
    names = list(forms)
    if only is not None:
        names = names_matching(only, model, names)
    reached = frozenset(name for name in names if forms[name] is not None)
    like = {name: part_of(parameters[name]) for name in names}
    filled = {name: forms[name] or Zero(samples, like[name].shape, like[name]) for name in names}
    of = weakref.ref(model), record.hess_type, [segment.batch_size() for segment in record.segments]
    entries: tuple[int, ...] = ()
    if tokens := next((d for d in map(attrgetter("documents"), _uses(record)) if d is not None and d.is_of_tokens), None):
        if len(record.segments) > 1:
            raise NothingRecorded(
                f"rows of tokens are of one batch, and {len(record.segments)} were accumulated. Read each by itself, or "
                "call add_hooks(model) again, without segments." + ON_SEGMENTS
            )
        samples, *entries_of = tokens.ids.shape
        entries, of = tuple(entries_of), (*of[:2], [samples])
    made = PerSampleGrads(filled, samples, reached, record.reduction(loss_type), *of, entries, spread)
    made._by_token = partial(
        _read_tokens, weakref.ref(recorder), [*map(weakref.ref, record.segments)], spread, loss_type, scale, names
    )
    return made


def _uses(record: Record) -> Iterator[Use]:
    """All uses that passes came by."""
    return (use for segment in record.segments for recorded in segment.passes for use in recorded.received)


def _read_tokens(
    of: weakref.ref[Recorder],
    segments: Sequence[weakref.ref[Segment]],
    spread: Spread,
    loss_type: str | None,
    scale: float | Tensor,
    names: Sequence[str],
    model: nn.Module,
) -> PerSampleGrads:
    """The rows of positions, from the record that rows were read from."""
    recorder = of()
    known = [own() for own in segments]  # freed with the record
    if recorder is None or len(known) != 1 or recorder.record.segments != known:
        raise NothingRecorded(
            "tokens: the record of the backward pass was freed, or is of several batches; expected that of the last batch "
            "alone. Call tokens() before the next forward pass, or hook the model by add_hooks(model, segments='tokens')."
        )
    uses = list(dict.fromkeys(_uses(recorder.record)))
    if all(use.documents is not None and use.documents.is_of_tokens for use in uses):
        return grads_of(model, recorder, spread, loss_type, scale, names)
    shape = next((x for x, at in recorder.record.returned if at == Layout() and len(x) > 1), None)
    if shape is None:
        raise BatchSizeError(
            "tokens: the model has no output of shape (N, T, ...), so positions are not known; expected samples on axis 0, "
            "positions on axis 1. Say where the positions are before the forward: add_hooks(model, segments=...)."
            + ON_SEGMENTS
        )
    documents = tokens_of(shape[0], shape[1])
    for use in uses:
        if isinstance(use, NodeUse):
            raise UnsupportedLayer(
                f"tokens: {use.place}, was read for whole samples during the backward pass. Ask for positions before the "
                "forward, add_hooks(model, segments='tokens'), or leave the parameter out, add_hooks(model, only=...)."
                + ON_SEGMENTS
            )
    before = [use.documents for use in uses]
    try:
        for use in uses:
            use.documents = documents
        return grads_of(model, recorder, spread, loss_type, scale, names)
    finally:
        for use, own in zip(uses, before):
            use.documents = own


def compute_grad1(
    model: nn.Module, loss_type: str | None = None, scale: float | Tensor = 1.0, set_grad: bool = False
) -> None:
    """Sets ``param.grad1``, of shape ``(N, *param.shape)``, on every parameter that trains, from the last backward pass.

    Row n is the gradient of sample n's loss ℓₙ, where the batch loss was the mean or the sum of ℓ₁ … ℓ_N with the batch's
    own denominators held fixed.  So ``grad1.mean(0) == grad`` for 'mean' and ``grad1.sum(0) == grad`` for 'sum', after one
    backward pass into a cleared ``grad``.  It is detached, of the parameter's dtype and device; None where the loss did not
    reach the parameter; and not there where the parameter is frozen.

    loss_type: 'mean' or 'sum', how the loss was reduced over the batch; None for what `backward` was told, else 'mean'
    scale: what the loss was multiplied by, to be divided out: ``GradScaler.get_scale()``
    set_grad: whether to set ``.grad`` too, to the rows' mean or sum, for ``add_hooks(param_grad=False)``; without ``scale``;
    over the samples of all processes that DistributedDataParallel or ``fully_shard`` has spread the batch over

    Raises NothingRecorded, UnsupportedLayer, SamplesMixed, BatchSizeError, StaleRecord, UnseenGradient, HigherOrderError
    (see `autograd_hacks.errors`), ValueError for another loss_type; and with ``set_grad`` ValueError for a scale, and
    ProcessesDisagree where another process has failed.

    Source: Goodfellow 2015, "Efficient per-example gradient computations" (arXiv:1510.01799).
    """
    recorder = recorder_of(model)
    spread = spread_of(model, recorder, None if set_grad else False)
    parameters, seen = recorder.record.asked(dict(spread.parameters)), recorder.record.parameters_of(model)
    names = [name for name, p in parameters.items() if p.requires_grad]

    def counts(here: dict[str, Form | None]) -> list[int]:
        return [_samples(here.values()), *(here[name] is not None for name in names)]

    def write() -> dict[str, Form | None]:
        """Sets ``grad1``, and returns the forms that it was made of."""
        try:
            check_ordinary(recorder.record, "grad1")
            if set_grad:
                _check_unscaled(scale)
                check_may_set(recorder, "compute_grad1(set_grad=True)")
            with spread.reading():
                forms = read(model, seen, recorder, loss_type, scale)
                with switches_kept(), torch.no_grad(), without_autocast(parameters.values()):
                    for name, parameter in parameters.items():
                        write_rows(name, parameter, seen[name], name in forms, forms.get(name), recorder.pool)
        except BaseException:  # an earlier step's rows must not be taken for this one's, nor some of both be there
            drop_rows(parameters.values())
            raise
        return forms

    with spread.weights():
        forms, (samples, *reaching) = spread.agreed(write, counts, 1 + len(names))
        if not set_grad:
            return
        reached = [name for name, count in zip(names, reaching) if count]
        share = 1 / max(1, samples) if recorder.record.reduction(loss_type) == "mean" else 1.0
        with switches_kept(), torch.no_grad(), without_autocast(parameters.values()), spread.reading():
            totals = spread.settled((name, _total(forms[name], parameters[name], share)) for name in reached)
    as_recorded = None if recorder.backward.wants_grad else recorder
    set_grads(model, {name: totals.get(name) for name in names}, set(reached), recorder=as_recorded)


def _samples(forms: Iterable[Form | None]) -> int:
    return next((form.samples for form in forms if form is not None), 0)


def _check_unscaled(scale: float | Tensor) -> None:
    """Raises where ``scaler.step`` would divide by the scale twice."""
    check_scale(scale)
    if scale != 1:
        raise ValueError(
            f"compute_grad1: scale={float(scale)} doesn't go with set_grad=True: scaler.step() would divide .grad by "
            "the scale a second time. Leave scale out: rows and .grad then contain the scale, and scaler.step() divides "
            ".grad by it." + ON_SCALERS
        )


def write_rows(name: str, parameter: Tensor, like: Tensor, trains: bool, form: Form | None, pool: Pool) -> None:
    """Writes a parameter's rows, into the memory of the last step's where nobody else holds that.  like: of their kind"""
    key, attributes, out = f"grad1 of {name}", vars(parameter), None
    if form is not None and form.writes_in_place:
        pool.give_back(key, attributes.pop("grad1", None))
        # A tensor of its own, not a view, to be used again.
        out = pool.take(key, (form.samples, *form.shape), part_of(like))
    attributes.pop("grad1", None)  # the old rows make room before the new ones come
    if trains:
        attributes["grad1"] = None if form is None else joined(form.dense(out).to(parameter.dtype), like)


def drop_rows(parameters: Iterable[Tensor]) -> None:
    """Takes off ``grad1``."""
    for parameter in parameters:
        vars(parameter).pop("grad1", None)


def _total(form: Form | None, parameter: Tensor, share: float) -> Tensor:
    """The gradient of the whole batch's loss: by the factors, where that is less than to read the rows."""
    if form is None:  # other processes' samples have some
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    rows = part_of(vars(parameter)["grad1"])
    if form.sums_cheaply:
        return form.weighted_sum(torch.full((form.samples,), share, device=rows.device)).to(rows.dtype)
    return (rows.sum(0, dtype=accumulation_dtype(rows.dtype)) * share).to(rows.dtype)


# Setting ``.grad``.


def check_may_set(recorder: Recorder, what: str, add: bool = False, once: bool = False) -> None:
    """Raises where ``.grad`` would not be what the rows of the record make.  what: sets it, for people

    add: whether it is to be added to    once: whether rows may be taken once alone, since that spends a budget
    """
    record = recorder.record
    if record.left_out:
        raise ValueError(
            f"{what}: there are no rows of {len(record.left_out)} parameters, {min(record.left_out)!r} among them, because "
            "the model was hooked with only=...; expected rows of all, since .grad of all is set. Call add_hooks(model) "
            "again, without only." + ON_HOOKS
        )
    check_ordinary(record, "gradient to clip")
    check_sets_all(record, what)
    if once and any(segment.replaced for segment in record.segments):
        raise NothingRecorded(
            f"{what}: there was no backward pass since the last step. To use its rows again would spend privacy budget that "
            "the accountant doesn't count. Run another forward and backward pass, for an empty batch too."
        )
    if add and (recorder.backward.wants_grad or any(p.fills_grad for p in record.passes)):
        raise ValueError(
            f"{what}: add=True finds the unclipped gradient in .grad already, from the backward pass. Hook the model by "
            "add_hooks(model, param_grad=False), with which backward() leaves .grad alone; or run all micro-batches within "
            "accumulate(model) and clip once." + ON_PASSES
        )
    if add and any(segment.replaced for segment in record.segments):
        raise NothingRecorded(
            f"{what}: add=True would add the last backward pass to .grad a second time. Run another forward and backward "
            "pass first. Within accumulate(model), which keeps all passes, clip once, at its end." + ON_PASSES
        )


def check_alone(grads: PerSampleGrads, what: str, instead: str) -> None:
    """Raises NotImplementedError where processes share the batch, or a layer.  instead: what to do then"""
    if grads.spread.mesh is not None or grads.spread.cuts:
        raise NotImplementedError(
            f"{what}: the model shares its batches, or its layers, with other processes, and this sum would be of one "
            f"process alone. {instead}" + ON_PROCESSES
        )


def set_grads(
    model: nn.Module,
    sums: Mapping[str, Tensor | None],
    reached: Collection[str],
    add: bool = False,
    recorder: Recorder | None = None,
) -> None:
    """Sets ``param.grad`` of each parameter that trains; to None where the loss did not reach it.  What is a part of more
    memory, a flat buffer of gradients say, is written in place, and zeros where the loss did not reach.

    sums: {name: shape}, in memory of their own    reached: the names of those that it reached
    add: whether to add to what is there    recorder: whose passes ``.grad`` is then known to be set from
    """
    for name, parameter in parameters_of(model).items():
        total, before = sums.get(name), parameter.grad
        held = before if before is not None and _is_part(before) else None
        if total is not None and name in reached:
            now = total.detach().to(parameter.dtype)
            now = now if before is None or not add else now.add_(before)
            if held is not None and (now.shape, now.device) == (held.shape, held.device):
                held.copy_(now)
            else:
                parameter.grad = now
        elif name in sums and not add:
            parameter.grad = None if held is None else held.zero_()
    if recorder is not None:
        mark_set(recorder)


def drop_grads(model: nn.Module) -> None:
    """Frees the gradients that `set_grads` would put others in the place of."""
    for parameter in parameters_of(model).values():
        if parameter.requires_grad and parameter.grad is not None and not _is_part(parameter.grad):
            parameter.grad = None


def mark_set(recorder: Recorder) -> None:
    """Notes that ``.grad`` was set from the rows of the passes that are recorded."""
    for segment in recorder.record.segments:
        segment.replaced = True


def _is_part(grad: Tensor) -> bool:
    """Whether a gradient is a view of memory that has more in it, and that may be written: not that of a graph."""
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad or grad.is_inference():
        return False
    base = grad._base
    is_flat = base is not None and base.ndim == 1 < grad.ndim
    return is_flat or grad.untyped_storage().nbytes() > grad.nbytes
