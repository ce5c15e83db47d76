"""What the last backward pass has left: a matrix for each parameter, lazily; or rows written out next to ``param.grad``."""

import weakref
from collections.abc import Iterable

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.distributed.spread import Spread, Where, spread_of
from autograd_hacks.errors import ON_SCALERS
from autograd_hacks.forms import Form, Zero
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.reading.gate import read
from autograd_hacks.reading.scale import check_ordinary, check_scale
from autograd_hacks.support.contexts import without_autocast
from autograd_hacks.support.memory import Pool
from autograd_hacks.support.parts import joined, part_of
from autograd_hacks.support.restored import switches_kept
from autograd_hacks.verbs.arguments import names_matching
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.setting import check_may_set, set_grads


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
    only: names of some parameters, or patterns: ``'8.*'``, ``['*.weight', 'head.bias']``. Verbs are then of these alone

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
    parameters = recorder.record.parameters_of(model)
    with spread.reading():
        forms = read(model, parameters, recorder, loss_type, scale)  # and checks, of all
    samples = _samples(forms.values())
    if only is not None:
        names = names_matching(only, list(model.named_parameters(remove_duplicate=False)), list(forms))
        forms = {name: forms[name] for name in names}
    reached = frozenset(name for name, form in forms.items() if form is not None)
    like = {name: part_of(parameters[name]) for name in forms}
    filled = {n: Zero(samples, like[n].shape, like[n]) if f is None else f for n, f in forms.items()}
    record, of_model = recorder.record, weakref.ref(model)
    hess_type, batches = record.hess_type, [segment.batch_size() for segment in record.segments]
    return PerSampleGrads(filled, samples, reached, record.reduction(loss_type), of_model, hess_type, batches, spread=spread)


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
    names = [name for name, p in model.named_parameters() if p.requires_grad]

    def counts(here: dict[str, Form | None]) -> list[int]:
        return [_samples(here.values()), *(here[name] is not None for name in names)]

    with spread.weights():
        forms, (samples, *reaching) = spread.agreed(
            lambda: _written(model, recorder, spread, loss_type, scale, set_grad), counts, 1 + len(names)
        )
        if not set_grad:
            return
        parameters, reached = spread.parameters, {name for name, count in zip(names, reaching) if count}
        share = 1 / max(1, samples) if recorder.record.reduction(loss_type) == "mean" else 1.0
        with switches_kept(), torch.no_grad(), without_autocast(parameters.values()), spread.reading():
            sums = ((name, _total(forms[name], parameters[name], share)) for name in names if name in reached)
            totals = spread.settled(sums)
    as_recorded = None if recorder.backward.wants_grad else recorder
    set_grads(model, {name: totals.get(name) for name in names}, reached, recorder=as_recorded)


def _samples(forms: Iterable[Form | None]) -> int:
    return next((form.samples for form in forms if form is not None), 0)


def _written(
    model: nn.Module, recorder: Recorder, spread: Spread, loss_type: str | None, scaling: float | Tensor, set_grad: bool
) -> dict[str, Form | None]:
    """Sets ``grad1``, and returns the forms that it was made of."""
    parameters, seen = spread.parameters, recorder.record.parameters_of(model)
    try:
        check_ordinary(recorder.record, "grad1")
        if set_grad:
            _check_unscaled(scaling)
            check_may_set(recorder, "compute_grad1(set_grad=True)")
        with spread.reading():
            forms = read(model, seen, recorder, loss_type, scaling)
            with switches_kept(), torch.no_grad(), without_autocast(parameters.values()):
                for name, parameter in parameters.items():
                    _set(name, parameter, seen[name], name in forms, forms.get(name), recorder.pool)
    except BaseException:  # an earlier step's rows must not be taken for this one's, nor some of both be there
        for parameter in parameters.values():
            vars(parameter).pop("grad1", None)
        raise
    return forms


def _check_unscaled(scale: float | Tensor) -> None:
    """Raises where ``scaler.step`` would divide by the scale twice."""
    check_scale(scale)
    if scale != 1:
        raise ValueError(
            f"compute_grad1(set_grad=True) was given scale={float(scale)}, after which .grad has no scale in it, and "
            "scaler.step() would divide by that once more. Leave scale out: rows and .grad then have the scale in them, as "
            ".grad has it after any backward pass, and scaler.step() is right." + ON_SCALERS
        )


def _set(name: str, parameter: Tensor, like: Tensor, trains: bool, form: Form | None, pool: Pool) -> None:
    """Writes a parameter's rows, into the memory of the last step's where nobody else holds that.  like: of their kind"""
    key, attributes, out = f"grad1 of {name}", vars(parameter), None
    if form is not None and form.writes_in_place:
        pool.give_back(key, attributes.pop("grad1", None))
        # A tensor of its own, not a view, to be used again.
        out = pool.take(key, (form.samples, *form.shape), part_of(like))
    attributes.pop("grad1", None)  # the old rows make room before the new ones come
    if trains:
        attributes["grad1"] = None if form is None else joined(form.dense(out).to(parameter.dtype), like)


def _total(form: Form | None, parameter: Tensor, share: float) -> Tensor:
    """The gradient of the whole batch's loss: by the factors, where that is less than to read the rows."""
    written = vars(parameter)["grad1"]
    rows: Tensor | None = None if written is None else part_of(written)
    if form is None or rows is None:  # other processes' samples have some
        return torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    if form.sums_cheaply:
        return form.weighted_sum(torch.full((form.samples,), share, device=rows.device)).to(rows.dtype)
    return (rows.sum(0, dtype=accumulation_dtype(rows.dtype)) * share).to(rows.dtype)
