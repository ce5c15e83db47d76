"""The classic face: per-sample gradients written out next to ``param.grad``."""

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.forms import Form
from autograd_hacks.forms.numerics import accumulation_dtype
from autograd_hacks.reading.gate import read
from autograd_hacks.reading.guards import check_sets_all
from autograd_hacks.reading.scale import check_ordinary, check_scale
from autograd_hacks.support.memory import Pool
from autograd_hacks.support.parts import joined, part_of
from autograd_hacks.support.restored import switches_kept
from autograd_hacks.support.untouched import without_autocast


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
    set_grad: whether to set ``.grad`` too, to the rows' mean or sum, for ``add_hooks(param_grad=False)``; without ``scale``

    Raises NothingRecorded, UnsupportedLayer, SamplesMixed, BatchSizeError, StaleRecord, UnseenGradient, HigherOrderError
    (see `autograd_hacks.errors`), ValueError for another loss_type; and with ``set_grad`` ValueError for a scale, and
    NotReduced where DistributedDataParallel has reduced ``.grad``.

    Source: Goodfellow 2015, "Efficient per-example gradient computations" (arXiv:1510.01799).
    """
    recorder = recorder_of(model)
    parameters = dict(model.named_parameters())
    totals: dict[str, Tensor | None] = {}
    try:
        check_ordinary(recorder.record, "grad1")
        if set_grad:
            _check_unscaled(scale)
            recorder.reduction.check_local([s.forwards for s in recorder.record.segments], "compute_grad1(set_grad=True)")
            check_sets_all(recorder.record, "compute_grad1(set_grad=True)")
        forms = read(model, parameters, recorder, loss_type, scale)
        is_mean = set_grad and recorder.record.reduction(loss_type) == "mean"
        share = 1 / max(1, next((form.samples for form in forms.values() if form), 1)) if is_mean else 1.0
        with switches_kept(), torch.no_grad(), without_autocast(parameters.values()):
            for name, parameter in parameters.items():
                rows = _set(name, parameter, name in forms, forms.get(name), recorder.pool)
                if set_grad and name in forms:
                    totals[name] = None if rows is None else _total(forms[name], rows, share)
    except BaseException:  # an earlier step's rows must not be taken for this one's, nor some of both be there
        for parameter in parameters.values():
            vars(parameter).pop("grad1", None)
        raise
    for name, total in totals.items():
        parameters[name].grad = None if total is None else joined(total, parameters[name])
    for segment in recorder.record.segments if set_grad and not recorder.param_grad.wanted else ():
        segment.replaced = True


def _check_unscaled(scale: float | Tensor) -> None:
    """Raises where ``scaler.step`` would divide by the scale twice."""
    check_scale(scale)
    if scale != 1:
        raise ValueError(
            f"compute_grad1(set_grad=True) was given scale={float(scale)}, after which .grad has no scale in it, and "
            "scaler.step() would divide by that once more. Leave scale out: rows and .grad then have the scale in them, as "
            ".grad has it after any backward pass, and scaler.step() is right."
        )


def _set(name: str, parameter: Tensor, trains: bool, form: Form | None, pool: Pool) -> Tensor | None:
    """Writes a parameter's rows, into the memory of the last step's where nobody else holds that, and returns them."""
    key, own, out = f"grad1 of {name}", vars(parameter), None
    if form is not None and form.writes_in_place:
        pool.give_back(key, own.pop("grad1", None))
        # A tensor of its own, not a view, to be used again.
        out = pool.take(key, (form.samples, *form.shape), part_of(parameter))
    own.pop("grad1", None)  # the old rows make room before the new ones come
    if not trains:
        return None
    rows = None if form is None else form.dense(out).to(parameter.dtype)
    own["grad1"] = None if rows is None else joined(rows, parameter)
    return rows


def _total(form: Form | None, rows: Tensor, share: float) -> Tensor:
    """The gradient of the whole batch's loss: by the factors, where that is less than to read the rows."""
    if form is not None and form.sums_cheaply:
        return form.weighted_sum(torch.full((form.samples,), share, device=rows.device)).to(rows.dtype)
    return (rows.sum(0, dtype=accumulation_dtype(rows.dtype)) * share).to(rows.dtype)
