"""Checks that a model's outputs for a sample don't depend on the values of other samples.

An analysis of the model's graph shows it.  If that is not possible, the model is run again with other samples replaced.  If
the model computes a loss itself, the rows are compared too."""

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.off_graph import Ran
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.wrappers import gathering
from autograd_hacks.distributed.shards import alone
from autograd_hacks.errors import PerSampleGradientError, ProbeFailed
from autograd_hacks.probe.batch import Batch, kept_samples
from autograd_hacks.probe.plan import MIXING, Plan
from autograd_hacks.probe.routes import has_choosing
from autograd_hacks.reading.gate import read
from autograd_hacks.support.layout import Layout, candidates, differs, rounding_of
from autograd_hacks.support.philox import key_of, noise
from autograd_hacks.support.restored import kept as kept_as_is
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import tensors_of
from autograd_hacks.support.untouched import Aside


class _Seen(NamedTuple):
    """The results of one run."""

    outputs: list[Tensor]
    buffers: dict[str, Tensor]
    rows: dict[str, Tensor]  # by parameter, its rows along a random direction, N, if they were read


def show_independent(recorder: Recorder, aside: Aside, batch: Batch, ran: Ran, plan: Plan, samples: int) -> None:
    """Records in a plan whether outputs, and changed buffers, are independent of other samples.

    Raises ProbeFailed if the model can't be run again.
    """
    if samples < 2 or plan.mixing:
        plan.is_independent = not plan.mixing
        return
    makes_loss = any(at is None and x.numel() == 1 and x.grad_fn is not None for x, at in zip(ran.outputs, plan.outputs))
    # The arguments as they were when the forward began: it may have overwritten them, and hooks may have replaced them.
    batch = replace(batch, leaves=[aside.reach.copy_of(leaf, "its arguments") for leaf in batch.leaves])
    if not makes_loss and _is_analysed(recorder, aside, batch, plan, samples):
        plan.is_independent, plan.replaced = True, max(plan.replaced, samples)
        return
    runs, arguments = _Runs(recorder, plan, aside, samples, makes_loss), batch.arguments()
    was_shown, draws = samples <= plan.replaced, torch.Generator().manual_seed(samples)  # at another point of training
    # Rows take a backward pass.  They are compared in two runs of the first proof.
    with_rows = 0 if was_shown else 2
    reference = runs.run(arguments, with_rows=makes_loss or with_rows > 0)
    # Rows that are moved by values pass through kernels together with other rows, which may change their rounding.
    has_changed, rounds = False, has_choosing(ran.graph, samples)
    every = kept_samples(samples, draws)
    if was_shown:
        half = torch.randperm(samples, generator=draws.manual_seed(plan.forwards), device="cpu") < samples // 2
        every = [half, ~half]
    for turn, kept in enumerate(every, 1):
        replaced = batch.replaced(plan.axis, kept, turn, plan.counted_at is not None)
        if replaced is None:
            continue
        has_changed = True
        seen = runs.run(replaced, with_rows=makes_loss or turn <= with_rows)
        what, slots = runs.differing(reference, seen, kept, rounds)
        if what and not rounds and not runs.differing(reference, seen, kept, rounds=True)[0]:
            again = runs.run(arguments, with_rows=False)  # it gives the same bits, unless kernels add in any order
            rounds = bool(runs.differing(reference, again, torch.ones_like(kept), rounds)[0])
            what = "" if rounds else what
        if what:
            plan.mixing = (
                f"{MIXING}: {what} changed for samples that were kept while others were replaced. There is no gradient "
                "between them, but private training needs samples that don't depend on each other."
            )
            plan.mixed_outputs, plan.is_independent = slots, False
            return
    # If all samples are equal, replacing them shows nothing.
    plan.is_independent, plan.unsure = plan.is_independent or has_changed, plan.unsure or not has_changed
    plan.replaced = max(plan.replaced, samples if has_changed else 0)


def _is_analysed(recorder: Recorder, aside: Aside, batch: Batch, plan: Plan, samples: int) -> bool:
    """Whether the analysis shows it.  With several processes it is not used, because they must decide together."""
    if plan.counted_at is not None or (dist.is_available() and dist.is_initialized()):
        return False
    if batch.has_lists(samples):  # their numbers are constants in a trace
        return False
    if plan.is_independent and not plan.why_unshown and samples <= plan.replaced and plan.forwards == 2:
        return True  # it holds for all values; whether the model's code branches is checked later
    with aside.run() as copied, Switch.paused_here():
        own = replace(batch, leaves=[copied(leaf) for leaf in batch.leaves])
        plan.why_unshown = recorder.why_unshown(aside.module, own, plan.axis, samples)
    return not plan.why_unshown


class _Runs:
    """Runs a model and restores everything afterwards."""

    def __init__(self, recorder: Recorder, plan: Plan, aside: Aside, samples: int, makes_loss: bool) -> None:
        self.recorder, self.plan, self.aside, self.samples = recorder, plan, aside, samples
        self.makes_loss = makes_loss

    def run(self, arguments: tuple[tuple[Any, ...], dict[str, Any]], with_rows: bool) -> _Seen:
        model, rows = self.aside.module, dict[str, Tensor]()
        # Processes that hold shards are handled already; see `distributed/agreement.py`.
        with nullcontext() if gathering(model) else alone(model), self.aside.run() as copied:
            args, kwargs = copied(arguments)
            try:
                if with_rows:
                    outputs, rows = self._with_rows(model, args, kwargs)
                else:
                    with torch.enable_grad(), Switch.paused_here():  # the forward may take derivatives itself
                        outputs = tensors_of(model(*args, **kwargs))
            except PerSampleGradientError:
                raise
            except Exception as error:  # the model may raise anything for other samples
                raise ProbeFailed(
                    "independence of samples: the check runs the model again with other samples replaced, and the model "
                    f"raised {type(error).__name__}: {error}. To skip the check, use independent=False."
                ) from error
            buffers = {name: x.detach().clone() for name, x in model.named_buffers()}
            return _Seen([x.detach().clone() for x in outputs], buffers, rows)

    def _with_rows(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        recorder, found = self.recorder, dict[str, Tensor]()
        # Other routes may need a new proof.  It uses a copy of the plan, and starts no further runs.
        with recorder.aside(copy.deepcopy(self.plan)), kept_as_is(recorder.planner, "independent", "probes"):
            recorder.planner.independent, recorder.planner.probes = False, True
            outputs = tensors_of(model(*args, **kwargs))
            losses = [x for x in outputs if x.numel() == 1 and x.grad_fn is not None and x.is_floating_point()]
            if not self.makes_loss:
                losses = [_along(x, slot) for slot, x in enumerate(outputs) if x.grad_fn is not None and not x.is_nested]
            if not losses:
                return outputs, {}
            torch.autograd.backward(losses)
            for name, form in read(model, dict(model.named_parameters()), recorder, "sum").items():
                if form is not None and form.samples == self.samples:
                    like = form.like
                    found[name] = form.dot(noise(form.shape, key_of(name), like.device, like.dtype)).detach()
        return outputs, found

    def differing(self, first: _Seen, other: _Seen, kept: Tensor, rounds: bool) -> tuple[str, tuple[int, ...]]:
        """The difference found for the kept samples, as text for messages, and the outputs that show it; "" if there is
        none.

        rounds: whether to ignore differences that rounding explains
        """
        every = tuple(range(len(first.outputs)))
        if len(first.outputs) != len(other.outputs):
            return "how many tensors the model returns", every
        for slot, (x, y) in enumerate(zip(first.outputs, other.outputs)):
            if x.shape != y.shape:
                return f"the shape of the model's output number {slot}", (slot,)
            at = self.plan.outputs[slot] if slot < len(self.plan.outputs) else None
            at = at or self._by_size(x)
            if at is not None and _changes(x, y, at, kept, rounds):
                return f"the model's output number {slot} (shape {tuple(x.shape)})", (slot,)
        for name, x in first.buffers.items():
            left = other.buffers.get(name)
            if left is None or x.shape != left.shape or _changes(x, left, self._by_size(x), kept, rounds):
                return f"what the forward leaves in the buffer {name}", every
        return _differing_rows(first.rows, other.rows, kept), every

    def _by_size(self, x: Tensor) -> Layout | None:
        return next(iter(candidates(x.shape, self.samples, range(x.ndim))), None)


def _along(x: Tensor, seed: int) -> Tensor:
    """An output along a random direction.  For some samples no entry depends on other samples' entries."""
    return (x * noise(x.shape, key_of(seed), x.device, x.dtype)).sum().real


def _changes(x: Tensor, y: Tensor, at: Layout | None, kept: Tensor, rounds: bool) -> bool:
    if torch.equal(x, y):
        return False
    difference = differs(x, y, rounding_of(x) if rounds else None)
    if at is not None:
        difference = at.samples_first(difference, len(kept))[kept.to(x.device)]
    return bool(difference.any())


def _differing_rows(first: Mapping[str, Tensor], other: Mapping[str, Tensor], kept: Tensor) -> str:
    """The parameter whose rows changed by more than one factor that is common to all (the batch's denominator)."""
    names = [name for name in first if name in other]
    if not names:
        return ""
    pairs = [(first[name][kept.to(first[name].device)], other[name][kept.to(first[name].device)]) for name in names]
    x, y = (torch.cat([pair[n].flatten().double() for pair in pairs]) for n in (0, 1))
    factor = (x @ y) / (x @ x).clamp(min=torch.finfo(x.dtype).tiny)
    eps = max(torch.finfo(pair[0].dtype).eps for pair in pairs)
    for name, (own, again) in zip(names, pairs):
        if (own * factor - again).norm() > 1e3 * eps * again.norm() + 1e-30:
            return f"the rows of {name}"
    return ""
