"""Per-sample gradient clipping."""

from collections.abc import Mapping

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import ON_CLIPPING, ON_SCALERS
from autograd_hacks.forms.base import written_bytes
from autograd_hacks.forms.composite import without_factor
from autograd_hacks.forms.numerics import clip_weights
from autograd_hacks.reading.guards import is_unscaled
from autograd_hacks.reading.processes import Where, spread_of
from autograd_hacks.support.contexts import outside_inference
from autograd_hacks.support.ranges import check
from autograd_hacks.verbs.arguments import check_kind
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.per_sample import check_may_set, drop_grads, grads_of, set_grads

CLIPPING_BUDGET = 256 * 2**20
"""The default number of bytes to use beside the result.

A quarter is for the computation.  The rest is for rows that are read twice; their memory is kept for the next step.
"""


@torch.no_grad()
def clip_grad1_norm_(
    model: nn.Module,
    max_norm: float,
    loss_type: str | None = None,
    error_if_nonfinite: bool = False,
    max_bytes: int = CLIPPING_BUDGET,
    scaler: torch.amp.GradScaler | None = None,
    add: bool = False,
    batch_size: float | None = None,
    process_group: Where = None,
) -> Tensor:
    """Sets ``param.grad`` to the mean of the per-sample gradients, each clipped to a norm.

    A sample's gradient gₙ over all parameters becomes gₙ · min(1, max_norm / ‖gₙ‖).  If the loss was a sum, ``.grad`` is the
    sum.  One backward pass is enough, and nothing of size N × P is written.  The old ``.grad`` is replaced unless ``add`` is
    set, so run the backward pass of a penalty afterwards.

    max_norm: the largest norm, above 0    loss_type: as in `compute_grad1`
    error_if_nonfinite: raise RuntimeError if a norm is NaN or infinite. Otherwise the sum becomes NaN, as without clipping
    max_bytes: bytes to use beside the result
    scaler: the GradScaler that scaled the loss. ``.grad`` keeps its scale, as after any backward pass. Call
    ``scaler.unscale_`` and ``scaler.step`` afterwards, never before. A norm that is not finite makes all of ``.grad`` NaN,
    and ``scaler.step`` skips the step
    add: add to ``.grad``, whatever it holds, for micro-batches that are clipped one by one. Needs
    ``add_hooks(param_grad=False)``
    batch_size: the divisor of the sum. By default it is N for a mean loss and 1 for a sum. Give the number of samples in
    all micro-batches of a step, or the expected number if batches are sampled at random. Adding or removing one sample
    then changes ``.grad`` by at most max_norm / batch_size
    process_group: as in `per_sample_grads`. The sum and N cover the samples of all these processes

    Returns the norms of this process's samples before clipping, N, without the scale.

    Raises ValueError for max_norm or batch_size ≤ 0, and for ``add`` if ``.grad`` already holds
    the unclipped gradient; RuntimeError after ``scaler.unscale_``; NothingRecorded if this pass was already added;
    ProcessesDisagree if another process has failed; and what `compute_grad1` raises.

    Source: Abadi et al. 2016, "Deep learning with differential privacy" (arXiv:1607.00133), algorithm 1.  It mirrors
    ``torch.nn.utils.clip_grad_norm_`` without adding 1e-6 to the norm.
    """
    recorder = recorder_of(model)
    spread = spread_of(model, recorder, process_group)
    names = [name for name, p in spread.parameters.items() if p.requires_grad]
    written: dict[str, Tensor] = {}

    def read() -> tuple[PerSampleGrads, Tensor]:
        check("clip_grad1_norm_", ON_CLIPPING, "batch_size", max_norm=max_norm, max_bytes=max_bytes, batch_size=batch_size)
        _check_scaler(scaler)
        check_may_set(recorder, "clip_grad1_norm_", add)
        grads = write_where_it_saves(grads_of(model, recorder, spread, loss_type), max_bytes, recorder, written)
        norms = grads.norms(max_bytes=max(1, max_bytes // 4))
        norms = norms if scaler is None else norms / scaler.scale(norms.new_ones(()))
        if error_if_nonfinite and not norms.isfinite().all():
            raise RuntimeError(
                f"clip_grad1_norm_: samples {(~norms.isfinite()).nonzero()[:, 0].tolist()} have a NaN or infinite norm. "
                "Leave them out of the batch, or clip with error_if_nonfinite=False." + ON_CLIPPING
            )
        return grads, norms

    def counts(here: tuple[PerSampleGrads, Tensor]) -> list[int]:
        return [here[0].samples, *[name in here[0].reached for name in names]]

    with outside_inference(), spread.weights():
        (grads, lengths), (samples, *reaching) = spread.agreed(read, counts, 1 + len(names))
        weights = clip_weights(lengths, float(max_norm))
        if scaler is not None and scaler.is_enabled():
            # Every optimizer must skip its step, whichever parameter overflowed.
            weights = weights.where(lengths.isfinite(), torch.nan)
        if batch_size is not None:
            weights = weights / float(batch_size)
        elif grads.loss_type == "mean":
            weights = weights / max(1, samples)
        if not add:
            drop_grads(spread.parameters)  # first, so that two sets of gradients never exist at once
        sums = grads.weighted_sum(weights, max(1, max_bytes // 4))
    set_grads(spread.parameters, sums, {name for name, count in zip(names, reaching) if count}, add, recorder)
    give_back(written, recorder)
    return lengths


def _check_scaler(scaler: torch.amp.GradScaler | None) -> None:
    """Raises if ``scaler.step`` would not divide by the scale."""
    check_kind("clip_grad1_norm_", ON_SCALERS, torch.amp.GradScaler | None, "a torch.amp.GradScaler", scaler=scaler)
    # The scaler doesn't say which model an optimizer belongs to, so any unscaled optimizer counts.
    if scaler is not None and scaler.is_enabled() and is_unscaled(scaler):
        raise RuntimeError(
            "clip_grad1_norm_ was called after scaler.unscale_(optimizer), so scaler.step(optimizer) would not divide its "
            "scaled gradients. Call unscale_ later, or not at all. If it was another model's, step that first." + ON_SCALERS
        )


def write_where_it_saves(
    grads: PerSampleGrads, max_bytes: int, recorder: Recorder, written: dict[str, Tensor]
) -> PerSampleGrads:
    """The same gradients, with rows written out where that makes norms and weighted sums together cheaper.

    max_bytes: see `CLIPPING_BUDGET`    written: receives the memory of these rows, for `give_back`
    """
    # Rows go into an earlier step's memory if possible: fresh memory costs more.
    forms, left, pool = dict(grads.items()), 3 * max_bytes // 4, recorder.pool
    with grads.reading():
        plain, _ = without_factor(forms)
        saved = {name: form.saving() for name, form in plain.items()}
        for name in sorted([name for name in saved if saved[name] > 0], key=lambda name: saved[name], reverse=True):
            form, key = forms[name], f"clipped rows of {name}"
            if (size := written_bytes(form)) <= left:
                written[key] = pool.take(key, (form.samples, *form.shape), form.like)
                forms[name], left = form.written(written[key]), left - size
    return grads.with_forms(forms, grads.samples) if written else grads


def give_back(written: Mapping[str, Tensor], recorder: Recorder) -> None:
    """Returns the memory of rows to the pool, for the next step."""
    for key, rows in written.items():
        recorder.pool.give_back(key, rows)
