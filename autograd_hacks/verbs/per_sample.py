"""The last backward pass's per-sample gradients: as lazy matrices, as ``param.grad1``, and as a new ``.grad``."""

import weakref
from collections.abc import Collection, Iterable, Mapping

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import (
    ON_HOOKS,
    ON_PASSES,
    ON_PROCESSES,
    ON_REDUCTION,
    ON_SCALERS,
    ON_SEGMENTS,
    NothingRecorded,
)
from autograd_hacks.forms import Form, Zero
from autograd_hacks.forms.composite import scaled_at_once
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.reading.gate import read
from autograd_hacks.reading.guards import check_ordinary, check_sets_all
from autograd_hacks.reading.processes import Spread, Where, spread_of
from autograd_hacks.support import memory
from autograd_hacks.support.contexts import outside_inference, without_autocast
from autograd_hacks.support.patterns import names_matching
from autograd_hacks.support.ranges import check, checked
from autograd_hacks.support.restored import switches_kept
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.matrix import Of


@checked(ON_REDUCTION)
def per_sample_grads(
    model: nn.Module,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    process_group: Where = None,
    only: str | Iterable[str] | None = None,
) -> PerSampleGrads:
    """The per-sample gradients of the last backward pass, lazily.  Nothing of size N × P is written until you ask for it.

    loss_type, scale: as in `compute_grad1`
    process_group: the processes that share the batch, a ``torch.distributed.ProcessGroup`` or ``DeviceMesh``. None, the
    default, means those of DistributedDataParallel or ``fully_shard``; False means this process only
    only: names of parameters to read, or of modules, or patterns: ``'head'``, ``['h.8.*', '*.bias']``. 'norms' means all
    biases and the parameters of norm layers. Verbs then cover these parameters only

    Raises what `compute_grad1` raises, and ValueError for a process group together with ``fully_shard``, and for a pattern
    that matches no trainable parameter.
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
    """The result of `per_sample_grads`.  spread: the processes that share the batch"""
    record = recorder.record
    parameters = record.as_seen(spread.parameters)
    with spread.reading():
        forms = read(model, parameters, recorder, loss_type, scale)  # reads and checks all parameters
    samples = _samples(forms)
    names = [*forms] if only is None else names_matching(only, model, [*forms])
    reached = frozenset([name for name in names if forms[name] is not None])
    filled = {name: forms[name] or Zero(samples, parameters[name].shape, parameters[name]) for name in names}
    hess_type, entries = record.hess_type, tuple[int, ...]()
    batches = [segment.batch_size() for segment in record.segments]
    documents = (use.within.documents for use in record.witnesses())
    if tokens := next((d for d in documents if d is not None and d.is_of_tokens), None):
        if len(record.segments) > 1:
            count = len(record.segments)
            raise NothingRecorded(f"rows of tokens need one batch, not {count}; read after each of them" + ON_SEGMENTS)
        samples, *axes = tokens.ids.shape
        batches, entries = [samples], tuple(axes)
    of = Of(reached, record.reduction(loss_type), weakref.ref(model), hess_type, batches, entries, spread)
    return PerSampleGrads(filled, samples, of)


def compute_grad1(
    model: nn.Module, loss_type: str | None = None, scale: float | Tensor = 1.0, set_grad: bool = False
) -> None:
    """Sets ``param.grad1``, the per-sample gradients ``(N, *param.shape)``, on every trainable parameter.

    Row n is the gradient of sample n's loss ℓₙ in the last backward pass.  The batch loss is the mean or the sum of
    ℓ₁ … ℓ_N, with the batch's own denominators held fixed.  So ``grad1.mean(0) == grad`` for 'mean' and ``grad1.sum(0) ==
    grad`` for 'sum', if ``grad`` was cleared before the backward pass.  ``grad1`` is detached and has the parameter's dtype
    and device.  It is None if the loss did not reach the parameter.  A frozen parameter has no ``grad1``.

    loss_type: 'mean' or 'sum', how the loss was reduced over the batch. By default the one given to `backward`, or 'mean'
    scale: the factor of a scaled loss, ``GradScaler.get_scale()``; the rows are divided by it
    set_grad: also set ``.grad`` to the mean or sum of the rows, for ``add_hooks(param_grad=False)``. It covers the samples
    of all processes that share the batch by DistributedDataParallel or ``fully_shard``. Leave ``scale`` out then

    Raises NothingRecorded, UnsupportedLayer, SamplesMixed, BatchSizeError, StaleRecord, UnseenGradient, HigherOrderError
    (see `autograd_hacks.errors`), and ValueError for an unknown loss_type.  With ``set_grad`` it also raises ValueError for
    a scale, and ProcessesDisagree if another process has failed.

    Source: Goodfellow 2015, "Efficient per-example gradient computations" (arXiv:1510.01799).
    """
    recorder = recorder_of(model)
    spread = spread_of(model, recorder, None if set_grad else False)
    parameters, seen = recorder.record.asked(spread.parameters), recorder.record.as_seen(spread.parameters)
    names = [name for name, p in parameters.items() if p.requires_grad]

    def counts(here: dict[str, Form | None]) -> list[int]:
        return [_samples(here), *[here[name] is not None for name in names]]

    def write() -> dict[str, Form | None]:
        """Sets ``grad1`` and returns its forms."""
        check("compute_grad1", ON_REDUCTION, scale=scale)
        try:
            check_ordinary(recorder.record, "grad1")
            if set_grad and scale != 1:
                raise ValueError(
                    f"compute_grad1: scale={float(scale)} doesn't go with set_grad=True, because scaler.step() would divide "
                    ".grad by the scale again. Leave scale out; rows and .grad then contain it." + ON_SCALERS
                )
            if set_grad:
                check_may_set(recorder, "compute_grad1(set_grad=True)")
            with spread.reading(), outside_inference(), without_autocast(parameters.values()):
                forms = read(model, seen, recorder, loss_type, scale)
                with torch.no_grad():
                    done = scaled_at_once(forms, memory.SMALL)
                    for name, parameter in parameters.items():
                        write_rows(name, parameter, seen[name], forms.get(name), recorder.pool, done.get(name))
        except BaseException:  # leave no rows of an earlier step, and no mixture of two steps
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
    set_grads(parameters, {name: totals.get(name) for name in names}, set(reached), recorder=as_recorded)


def _samples(forms: Mapping[str, Form | None]) -> int:
    return next((form.samples for form in forms.values() if form is not None), 0)


def write_rows(
    name: str, parameter: Tensor, like: Tensor, form: Form | None, pool: memory.Pool, done: Tensor | None = None
) -> None:
    """Sets ``grad1``, in the memory of the last step's rows if nothing else refers to that.

    like: the parameter, or the whole of it    done: the rows, if they are written"""
    attributes, out = parameter.__dict__, None
    if form is not None and done is None and form.samples * form.shape.numel() * like.itemsize >= memory.SMALL:
        pool.give_back(key := f"grad1 of {name}", attributes.pop("grad1", None))
        out = pool.take(key, (form.samples, *form.shape), like)  # not a view, so that the pool can reuse the memory
    else:
        attributes.pop("grad1", None)  # free the old rows before writing new ones
    rows = done if form is None or done is not None else form.dense(out)
    if rows is not None and done is None and (rows._base is not None or not rows.is_contiguous()):
        rows = rows.clone(memory_format=torch.contiguous_format)
    if parameter.requires_grad:
        attributes["grad1"] = rows if rows is None or rows.dtype == parameter.dtype else rows.to(parameter.dtype)


def drop_rows(parameters: Iterable[Tensor]) -> None:
    """Deletes ``grad1``."""
    for parameter in parameters:
        vars(parameter).pop("grad1", None)


def _total(form: Form | None, parameter: Tensor, share: float) -> Tensor:
    """The gradient of the whole batch's loss, from the form's factors if that is cheaper than reading the rows."""
    if form is None:  # only other processes' samples reached the parameter
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    rows = vars(parameter)["grad1"]
    if not form.saving():  # rows that nobody writes for their sum: products of one position, tables
        return form.weighted_sum(form.new_sums(form.samples).real + share).to(rows.dtype)
    return (rows.sum(0, dtype=accumulation_dtype(rows.dtype)) * share).to(rows.dtype)


# Setting ``.grad``.


def check_may_set(recorder: Recorder, what: str, add: bool = False, once: bool = False) -> None:
    """Raises if ``.grad`` can't be set from the rows of the record.

    what: the function that sets it, for the message    add: whether it adds to ``.grad``    once: whether rows may be used
    only once, because each use spends privacy budget
    """
    record = recorder.record
    if record.left_out:
        raise ValueError(
            f"{what}: {len(record.left_out)} parameters have no rows, {min(record.left_out)!r} among them, because the "
            "model was hooked with only=..., but .grad of all is set. Call add_hooks(model) again without only." + ON_HOOKS
        )
    check_ordinary(record, "gradient to clip")
    check_sets_all(record, what)
    was_used = any(segment.replaced for segment in record.segments)
    if once and was_used:
        raise NothingRecorded(
            f"{what}: there was no backward pass since the last step. Using its rows again would spend privacy budget that "
            "the accountant doesn't count. Run another forward and backward pass, also for an empty batch."
        )
    if add and (recorder.backward.wants_grad or any(p.fills_grad for p in record.passes)):
        raise ValueError(
            f"{what}: add=True, but .grad already holds the unclipped gradient of the backward pass. Hook the model by "
            "add_hooks(model, param_grad=False); or clip once for all passes within accumulate(model)." + ON_PASSES
        )
    if add and was_used:
        raise NothingRecorded(
            f"{what}: add=True would add the last backward pass to .grad a second time. Run another forward and backward "
            "pass first. Within accumulate(model), which keeps all passes, clip once at its end." + ON_PASSES
        )


def check_alone(grads: PerSampleGrads, what: str, instead: str) -> None:
    """Raises NotImplementedError if processes share the batch.  what, instead: what needs all samples, and what to do"""
    if grads.spread.mesh is not None:
        raise NotImplementedError(
            f"{what}: the sum would cover one process, but others share the batch. {instead}" + ON_PROCESSES
        )


def set_grads(
    parameters: Mapping[str, Tensor],
    sums: Mapping[str, Tensor | None],
    reached: Collection[str],
    add: bool = False,
    recorder: Recorder | None = None,
) -> None:
    """Sets ``param.grad`` of each trainable parameter; to None if the loss did not reach it.

    A ``.grad`` that is a view of larger memory, such as a flat buffer of gradients, is written in place, with zeros if the
    loss did not reach the parameter.

    parameters: the model's, by name    sums: {name: shape}, in memory of their own
    reached: the names of the parameters that the loss reached    add: add to the old ``.grad``
    recorder: its passes are marked as used for ``.grad``
    """
    for name, parameter in parameters.items():
        total, before = sums.get(name), parameter.grad
        held = before if before is not None and _is_part(before) else None
        if total is not None and name in reached:
            now = total.detach() if total.requires_grad else total
            now = now if now.dtype == parameter.dtype else now.to(parameter.dtype)
            now = now if before is None or not add else now.add_(before)
            if held is not None and (now.shape, now.device) == (held.shape, held.device):
                held.copy_(now)
            else:
                parameter.grad = now
        elif name in sums and not add:
            parameter.grad = None if held is None else held.zero_()
    if recorder is not None:
        mark_set(recorder)


def drop_grads(parameters: Mapping[str, Tensor]) -> None:
    """Frees the gradients that `set_grads` would replace."""
    for parameter in parameters.values():
        if parameter.requires_grad and parameter.grad is not None and not _is_part(parameter.grad):
            parameter.grad = None


def mark_set(recorder: Recorder) -> None:
    """Notes that ``.grad`` was set from the recorded passes."""
    for segment in recorder.record.segments:
        segment.replaced = True


def _is_part(grad: Tensor) -> bool:
    """Whether a gradient is a view of larger memory and may be written in place, which a tensor of a graph may not."""
    if type(grad) is not Tensor or grad.layout is not torch.strided or grad.requires_grad:
        return False
    base = grad._base
    is_flat = base is not None and base.ndim == 1 < grad.ndim
    return (is_flat or grad.untyped_storage().nbytes() > grad.nbytes) and not grad.is_inference()
