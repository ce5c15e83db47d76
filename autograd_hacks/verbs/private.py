"""A step of differentially private training; the budget is its accountant's business."""

from collections.abc import Mapping
from hashlib import sha256
from math import inf, nan
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.hooks import recorder_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.distributed.cut import over_stages
from autograd_hacks.distributed.spread import Spread, Where, spread_of
from autograd_hacks.errors import ON_CLIPPING, NothingRecorded
from autograd_hacks.reading.guards import check_sets_all
from autograd_hacks.reading.scale import check_ordinary
from autograd_hacks.support.kinds import is_number
from autograd_hacks.support.parts import cut_as
from autograd_hacks.verbs.arguments import set_grads
from autograd_hacks.verbs.clipping import BUDGET, check_adds, written_where_it_saves
from autograd_hacks.verbs.grads import PerSampleGrads
from autograd_hacks.verbs.per_sample import grads_of


@torch.no_grad()
def clip_and_noise_(
    model: nn.Module,
    max_norm: float,
    noise_multiplier: float,
    expected_batch_size: float,
    groups: Tensor | None = None,
    generator: torch.Generator | None = None,
    add: bool = False,
    loss_type: str | None = None,
    budget: int = BUDGET,
    process_group: Where = None,
) -> Tensor:
    """Sets ``param.grad`` to (Σₙ clipped gₙ + noise) / expected_batch_size, a step of differentially private training.

    A sample's gradient gₙ over all parameters becomes gₙ · min(1, max_norm / ‖gₙ‖), so that one sample more or less moves
    the sum by max_norm at most; the noise is normal with a standard deviation of noise_multiplier · max_norm, in both parts
    of complex numbers.  The divisor
    does not depend on the samples: for Poisson sampling, each of D samples with a probability q, it is q · D.  Batches may
    be empty, for which there is still a forward and backward pass to run.  A sample whose gradient or norm is not finite
    contributes nothing.  All parameters that train get noise, whether or not the loss reached them.

    max_norm, expected_batch_size: above 0; max_norm=inf without noise alone    noise_multiplier: 0 or more
    groups: N integers, whose each sample is: a user's samples are added up and clipped together, and count as one of those
    expected. All of a user's must be in this batch
    generator: that draws the noise, parameter by parameter; torch's own unless told. Where processes share a batch, the
    state on the first of them counts for all, so that noise is added once
    add: whether to add to ``.grad``, for micro-batches after ``add_hooks(param_grad=False)``: noise_multiplier is 0 for all
    but one of them    loss_type, process_group: as in `per_sample_grads`    budget: bytes to use beside the result

    Returns the norms before clipping, N, or of each group in the order of the ids, NaN where none of its samples is finite.
    They are not private.

    Raises ValueError for numbers out of range, for groups of another shape or that several processes have, and as
    `clip_grad1_norm_` does for ``add``; NothingRecorded for a pass that ``.grad`` was set from already; and what
    `compute_grad1` raises.

    Source: Abadi et al. 2016, "Deep learning with differential privacy" (arXiv:1607.00133), algorithm 1.
    """
    _check_numbers(max_norm=max_norm, noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size)
    recorder = recorder_of(model)
    spread = spread_of(model, recorder, process_group)
    has_groups = groups is not None
    rows, (grouped, processes) = spread.agreed(
        lambda: _rows(model, recorder, spread, loss_type, groups, add, budget), lambda _: [has_groups, 1], 2
    )
    _check_apart(spread, groups, grouped, processes)
    weights = (float(max_norm) / rows.kept_norms).clamp(max=1)  # that of a gradient of zeros is one
    weights = weights / float(expected_batch_size)
    set_grads(model, rows.kept.weighted_sum(weights, budget // 4), list(rows.kept), add)
    for segment in recorder.record.segments:
        segment.replaced = True
    for key, memory in rows.written.items():  # for the next step
        recorder.pool.give_back(key, memory)
    if noise_multiplier:
        deviation = float(noise_multiplier) * float(max_norm) / float(expected_batch_size)
        _add_noise(model, spread, recorder, deviation, generator)
    return rows.norms


class _Rows(NamedTuple):
    """This process's."""

    norms: Tensor  # of all
    kept: PerSampleGrads  # those that are finite
    kept_norms: Tensor
    written: Mapping[str, Tensor]  # those that were written out


def _rows(
    model: nn.Module,
    recorder: Recorder,
    spread: Spread,
    loss_type: str | None,
    groups: Tensor | None,
    add: bool,
    budget: int,
) -> _Rows:
    record = recorder.record
    check_ordinary(record, "gradient to clip")
    check_sets_all(record, "clip_and_noise_")
    if any(segment.replaced for segment in record.segments):
        raise NothingRecorded(
            "clip_and_noise_: .grad was set from the last backward pass already, and a step that takes it again spends more "
            "of the budget than its accountant knows. Run another forward and backward pass, of an empty batch too."
        )
    if add:
        check_adds(recorder)
    grads, written = written_where_it_saves(grads_of(model, recorder, spread, loss_type), 3 * budget // 4, recorder.pool)
    if groups is not None:
        grads.group(groups)  # checks them
    norms = over_stages(grads.norms(budget=budget // 4), record)
    finite = norms.isfinite()
    is_finite = bool(finite.all())
    kept, kept_norms = (grads, norms) if is_finite else (grads.select(finite), norms[finite])  # 0 · NaN is NaN
    if groups is not None:
        own = groups if is_finite else groups[finite.to(groups.device)]
        kept = kept.group(own)
        kept_norms = over_stages(kept.norms(budget=budget // 4), record)
        known = groups.unique()
        norms = kept_norms.new_full((len(known),), nan).index_put(
            (torch.isin(known, own).to(kept_norms.device),), kept_norms
        )
    return _Rows(norms, kept, kept_norms, written)


def _check_apart(spread: Spread, groups: Tensor | None, grouped: float, processes: float) -> None:
    """Raises, on all processes, where a group's samples are not all on one."""
    if grouped not in (0, processes):
        raise ValueError(
            f"clip_and_noise_ was given groups on {grouped:.0f} of {processes:.0f} processes; expected all or none"
            + ON_CLIPPING
        )
    if groups is None or spread.mesh is None:
        return
    known, counts = spread.everyones(groups.unique()).unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"clip_and_noise_: several processes have samples of groups {known[counts > 1].tolist()[:10]}, each of which "
            "would clip its own part. Send all of a group's samples to one process." + ON_CLIPPING
        )


def _add_noise(
    model: nn.Module, spread: Spread, recorder: Recorder, deviation: float, generator: torch.Generator | None
) -> None:
    """The same on all processes that share a batch, each of which takes its part; another on each stage of a pipeline."""
    stage = None if recorder.record.stage is None else recorder.record.stage()
    drawing = _of_all(spread, model, generator)
    if stage is not None:
        device = torch.device("cpu") if drawing is None else drawing.device
        seed = int(torch.randint(2**62, (), generator=drawing, device=device))
        key = sha256(repr((seed, stage.stage_index)).encode()).digest()
        drawing = torch.Generator(device).manual_seed(int.from_bytes(key[:7], "big"))
    for p in model.parameters():
        if p.requires_grad and p.grad is not None:
            kind = torch.promote_types(p.dtype, torch.float32)
            device = p.device if drawing is None else drawing.device
            # Of a complex number each part has the whole deviation, since norms are over both: torch.normal shares it out.
            shape = (*p.shape, 2) if p.is_complex() else p.shape
            noise = torch.normal(0.0, deviation, shape, generator=drawing, dtype=kind.to_real(), device=device)
            noise = torch.view_as_complex(noise) if p.is_complex() else noise
            p.grad += cut_as(noise.to(p.device, p.dtype), p)


def _of_all(spread: Spread, model: nn.Module, generator: torch.Generator | None) -> torch.Generator | None:
    """The generator; of several processes' one in the state of the first's."""
    if not spread.groups():
        return generator
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if generator is None:
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, (), device="cpu")))
    generator.set_state(spread.firsts(generator.get_state().to(device)).cpu())
    return generator


def _check_numbers(**numbers: float) -> None:
    for what, number in numbers.items():
        if not is_number(number):
            raise TypeError(f"clip_and_noise_ was given {what}={number!r}; expected a number" + ON_CLIPPING)
        least = "0 or more" if what == "noise_multiplier" else "a number larger than 0"
        if not (number > 0 or (number == 0 and what == "noise_multiplier")) or (number == inf and what != "max_norm"):
            raise ValueError(f"clip_and_noise_ was given {what}={number}; expected {least}" + ON_CLIPPING)
    if numbers["max_norm"] == inf and numbers["noise_multiplier"]:
        raise ValueError(
            f"clip_and_noise_ was given max_norm=inf and noise_multiplier={numbers['noise_multiplier']}; expected a finite "
            "max_norm, of which the noise is a multiple, or noise_multiplier=0" + ON_CLIPPING
        )
