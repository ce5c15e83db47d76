"""Per-sample gradient clipping."""

from math import inf

import torch
import torch.nn as nn
from torch import Tensor
from torch.amp.grad_scaler import OptState

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.distributed.cut import over_stages
from autograd_hacks.distributed.spread import Spread, Where, spread_of
from autograd_hacks.errors import ON_CLIPPING, ON_PASSES, ON_SCALERS, NothingRecorded
from autograd_hacks.reading.guards import check_sets_all
from autograd_hacks.reading.scale import check_ordinary, check_scale
from autograd_hacks.support.kinds import is_number
from autograd_hacks.support.memory import Pool
from autograd_hacks.verbs.arguments import kind_of, set_grads
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.per_sample import grads_of

BUDGET = 256 * 2**20
"""Bytes to use beside the result, unless told another number: a quarter for what is computed, the rest for rows that are
read twice, whose memory is kept for the next step."""


@torch.no_grad()
def clip_grad1_norm_(
    model: nn.Module,
    max_norm: float,
    loss_type: str | None = None,
    scale: float | Tensor = 1.0,
    error_if_nonfinite: bool = False,
    budget: int = BUDGET,
    scaler: torch.amp.GradScaler | None = None,
    add: bool = False,
    batch_size: float | None = None,
    process_group: Where = None,
    norms: Tensor | None = None,
) -> Tensor:
    """Sets ``param.grad`` to the mean (or sum, as the loss was) of the per-sample gradients, each clipped to a norm.

    A sample's gradient gₙ over all parameters becomes gₙ · min(1, max_norm / ‖gₙ‖).  One backward pass is enough, and
    nothing of size N × P is written.  Whatever was in ``.grad`` is replaced, unless told to add: run the backward pass of a
    penalty afterwards.

    max_norm: larger than 0    loss_type: as in `compute_grad1`    scale: 1, since ``scaler`` takes its place
    error_if_nonfinite: whether to raise RuntimeError for a norm that is infinite or no number; else such samples spoil the
    sum, as they would without clipping    budget: bytes to use beside the result
    scaler: what has scaled the loss. Its scale is in ``.grad`` as after any backward pass, so that ``scaler.step`` is right
    after it, and ``scaler.unscale_``, but not before; a norm that is not finite makes all of ``.grad`` NaN, and
    ``scaler.step`` skips the step
    add: whether to add to ``.grad``, for micro-batches that are clipped one by one, after ``add_hooks(param_grad=False)``
    batch_size: what the sum of the clipped gradients is divided by, in place of their number for a mean and of 1 for a sum:
    the number of samples in all micro-batches of a step, or the one expected where samples are drawn at random. A sample
    more or less then changes ``.grad`` by max_norm / batch_size at most
    process_group: as in `per_sample_grads`. The sum is over the samples of all these processes, and so is their number
    norms: N, to clip by in the place of those of this model: of all parts of a larger one, say. A stage of a pipeline
    (``torch.distributed.pipelining``) clips by the norms over all stages, each of which calls this; where processes have
    several stages each, these have to be given

    Returns the norms before clipping of this process's samples, N, without the scale.

    Raises ValueError for max_norm or batch_size ≤ 0, for another scale, and for ``add`` where ``.grad`` holds the pass's own
    gradient; RuntimeError after ``scaler.unscale_``; NothingRecorded for a pass that was added already; ProcessesDisagree
    where another process has failed; and what `compute_grad1` raises.

    Source: Abadi et al. 2016, "Deep learning with differential privacy" (arXiv:1607.00133), algorithm 1; mirrors
    ``torch.nn.utils.clip_grad_norm_``, without the 1e-6 that it adds to the norm.
    """
    recorder = recorder_of(model)
    spread = spread_of(model, recorder, process_group)
    names = [name for name, p in model.named_parameters() if p.requires_grad]

    def own() -> tuple[PerSampleGrads, dict[str, Tensor], Tensor]:
        _check_numbers(max_norm, batch_size)
        _check_scale(scale, scaler)
        return _own(model, recorder, spread, loss_type, error_if_nonfinite, budget, scaler, add, norms)

    def counts(found: tuple[PerSampleGrads, dict[str, Tensor], Tensor]) -> list[int]:
        return [found[0].samples, *(name in found[0].reached for name in names)]

    with spread.weights():
        (grads, written, lengths), (samples, *reaching) = spread.agreed(own, counts, 1 + len(names))
        weights = (float(max_norm) / lengths).clamp(max=1)  # 1 for a gradient of zeros
        if (
            scaler is not None and scaler.is_enabled()
        ):  # each optimizer's step is to be skipped, whichever parameter overflowed
            weights = weights.where(lengths.isfinite(), torch.nan)
        if batch_size is not None:
            weights = weights / float(batch_size)
        elif grads.loss_type == "mean":
            weights = weights / max(1, samples)
        sums = grads.weighted_sum(weights, budget // 4)
    set_grads(model, sums, {name for name, count in zip(names, reaching) if count}, add)
    for segment in recorder.record.segments:
        segment.replaced = True
    for key, rows in written.items():  # for the next step
        recorder.pool.give_back(key, rows)
    return lengths


def _check_numbers(max_norm: float, batch_size: float | None) -> None:
    for what, number in {"max_norm": max_norm, "batch_size": 1 if batch_size is None else batch_size}.items():
        if not is_number(number):
            raise TypeError(f"clip_grad1_norm_ was given {what}={number!r}; expected a number" + ON_CLIPPING)
        if not number > 0 or (what == "batch_size" and number == inf):
            raise ValueError(f"clip_grad1_norm_ was given {what}={number}; expected a number larger than 0" + ON_CLIPPING)


def _own(
    model: nn.Module,
    recorder: Recorder,
    spread: Spread,
    loss_type: str | None,
    error_if_nonfinite: bool,
    budget: int,
    scaler: torch.amp.GradScaler | None,
    add: bool,
    norms: Tensor | None,
) -> tuple[PerSampleGrads, dict[str, Tensor], Tensor]:
    """This process's rows, those that were written out, and their norms without the scale."""
    check_ordinary(recorder.record, "gradient to clip")
    check_sets_all(recorder.record, "clip_grad1_norm_")
    if add:
        check_adds(recorder)
    own = grads_of(model, recorder, spread, loss_type)
    grads, written = written_where_it_saves(own, 3 * budget // 4, recorder.pool)
    if norms is None:
        of_model = grads.norms(budget=budget // 4)
        assert isinstance(of_model, Tensor)
        norms = over_stages(of_model, recorder.record)
    elif not isinstance(norms, Tensor) or norms.shape != (grads.samples,):
        raise ValueError(
            f"clip_grad1_norm_ was given norms={kind_of(norms)}; expected {grads.samples}, one for each sample" + ON_CLIPPING
        )
    norms = norms if scaler is None else norms / scaler.scale(norms.new_ones(()))
    if error_if_nonfinite and not norms.isfinite().all():
        raise RuntimeError(
            f"the gradients of samples {(~norms.isfinite()).nonzero()[:, 0].tolist()} have a norm that is no finite number. "
            "Leave them out of the batch, or clip with error_if_nonfinite=False." + ON_CLIPPING
        )
    return grads, written, norms


def check_adds(recorder: Recorder) -> None:
    """Raises where ``.grad`` holds some of what is to be added."""
    segments = recorder.record.segments
    if recorder.param_grad.wanted or any(recorded.fills_grad for segment in segments for recorded in segment.passes):
        raise ValueError(
            "clip_grad1_norm_ was given add=True, but the backward pass has added its unclipped gradient to .grad already. "
            "Hook the model by add_hooks(model, param_grad=False), after which backward() leaves .grad as it was, also "
            "where layers are called by themselves; or run all micro-batches within accumulate(model) and clip once."
            + ON_PASSES
        )
    if any(segment.replaced for segment in segments):
        raise NothingRecorded(
            "clip_grad1_norm_(add=True): the last backward pass was put into .grad already, and would be added "
            "once more. Run another forward and backward pass before; within accumulate(model), which keeps all passes, "
            "clip once, at its end." + ON_PASSES
        )


def _check_scale(scale: float | Tensor, scaler: torch.amp.GradScaler | None) -> None:
    """Raises where ``scaler.step`` would divide by the scale twice, or not at all."""
    check_scale(scale)
    if scale != 1:
        raise ValueError(
            f"clip_grad1_norm_ was given scale={float(scale)}; expected the GradScaler itself, scaler=scaler: .grad then "
            "has the scale in it, and scaler.step() divides by that. For a loss that you have multiplied yourself clip to "
            "max_norm * scale, and divide by the scale afterwards: p.grad /= scale." + ON_SCALERS
        )
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"clip_grad1_norm_ was given scaler={scaler!r}; expected a torch.amp.GradScaler" + ON_SCALERS)
    # Whose optimizers they are is not known: the scaler keeps nothing of them but numbers.
    states = scaler._per_optimizer_states.values() if scaler is not None and scaler.is_enabled() else ()
    if any(state["stage"] is OptState.UNSCALED for state in states):
        raise RuntimeError(
            "clip_grad1_norm_ was given a scaler after its unscale_(optimizer), so that scaler.step(optimizer) would not "
            "divide by the scale, which .grad will have in it again. Call unscale_ after clip_grad1_norm_, or not at all. "
            "If it was for another model's optimizer, step that one first, or clip before its unscale_." + ON_SCALERS
        )


def written_where_it_saves(grads: PerSampleGrads, budget: int, pool: Pool) -> tuple[PerSampleGrads, dict[str, Tensor]]:
    """The same, with some rows written out: those of which norms and weighted sums both are best taken so; and these.

    pool: of memory to write into: fresh memory costs more
    """
    found, left, written = dict(grads), budget, dict[str, Tensor]()
    with grads.reading():
        saved = {name: form.saving(fresh=form.like.is_cpu and not pool.reuse) for name, form in grads.items()}
        for name in sorted(grads, key=lambda name: saved[name], reverse=True):
            form = grads[name]
            size = form.samples * form.shape.numel() * form.like.element_size()
            if saved[name] > 0 and size <= left:
                key = f"clipped rows of {name}"
                written[key] = pool.take(key, (form.samples, *form.shape), form.like)
                found[name], left = form.written(written[key]), left - size
    return grads.with_forms(found, grads.samples) if written else grads, written
