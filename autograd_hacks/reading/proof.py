"""Proves a plan by gradients: what backward passes from random gradients at the outputs bring to calls and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.calls import RecordedCall
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.errors import PerSampleGradientError, where
from autograd_hacks.probe.batch import Batch, kept_samples
from autograd_hacks.probe.layout import Layout
from autograd_hacks.reading.apart import are_apart, two_weights
from autograd_hacks.reading.arrival import Sums
from autograd_hacks.reading.trial import Grads, Key, Take, Trial, layout_in

Arrived = Mapping[str, Tensor]
"""What a backward pass has brought to inputs, by '#' and number."""


def prove(model: nn.Module, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Proves the plan of the forward that begins, and notes in it what is wrong, and which outputs mix samples.

    The model runs once, on copies of its arguments.  From gradients w ∘ G at its outputs, G random, come two backward
    passes, w being powers of two that no two of few samples share in both.  At each call's output sample n's gradient must
    be wₙ times what it is under G, and each parameter's rows, weighted, must add up to what arrives at it.  Nothing of the
    user's is touched.
    """
    plan, samples = recorder.record.plan, recorder.forward.samples
    if not samples:
        return
    batch = replace(Batch.of(args, kwargs, recorder.planner.batch_dim), shared=plan.shared)
    plan.pending, plan.unsure = False, False
    # An input that asks for gradients may be more than the model can take, and so may noise in the place of zeros.
    for asks, zeros in dict.fromkeys(((True, plan.opened), (False, plan.opened), (False, frozenset()))):
        draws = torch.Generator().manual_seed(1000 * plan.forwards + samples)
        proof = _Proof(Trial(model, recorder, plan, batch, samples, draws, asks))
        try:
            with proof.trial.aside(zeros):
                proof.run()
            return
        except PerSampleGradientError:
            return  # what can't be read: reading says so
        except RuntimeError as error:
            if "use_reentrant" in str(error):
                return
            plan.unsure = True
        except Exception:  # whatever the model's own code raises
            plan.unsure = True


class _Proof:
    def __init__(self, trial: Trial) -> None:
        self.trial, self.plan, self.samples = trial, trial.plan, trial.samples
        self.gather = trial.recorder.planner.gather  # what processes find that have parts of the model's tensors

    def run(self) -> None:
        trial = self.trial
        trial.run()
        layouts = self.plan.layouts_of_model(trial.model, trial.outputs)
        trained = [slot for slot, x in enumerate(trial.outputs) if x.requires_grad and slot not in self.plan.mixed_outputs]
        places = {s: at for s in trained if (at := layouts[s]) is not None and at.fits(trial.outputs[s], self.samples)}
        scalars = [s for s in trained if s not in places and self.samples > 1 and trial.outputs[s].numel() == 1]
        if places:
            self._prove_places(places, free=not scalars)
        for slot in scalars:
            self._prove_scalar(slot)

    def _prove_places(self, places: Mapping[int, Layout], free: bool) -> None:
        """Proves that gradients stay apart, from outputs in which samples have places; then the rows.

        free: whether nothing else needs the graph
        """
        trial, given = self.trial, self.trial.at_random(places)
        first, second = two_weights(self.samples, trial.draws)
        sums = Sums(trial, second / first)
        arrived = trial.pull(places, given, first, take=sums.take)
        known = trial.recorded()
        if not known:
            return
        is_apart = self._compared(places, given, known, arrived, first, second, None, free, sums.take_weighted)
        if not is_apart:
            if free:
                trial.run()
            mixed = [slot for slot, at in places.items() if self._mixes(slot, at, given[slot])]
            if not mixed and self._mixes_by_values(places, given):
                mixed = list(places)
            self.plan.mixed_outputs = [*self.plan.mixed_outputs, *mixed]
            if mixed:
                return
            sums.wrong_weighted.clear()  # a hook inside the model may change gradients, clamp them say
        self._prove_rows(sums)

    def _compared(
        self,
        places: Mapping[int, Layout],
        given: Mapping[int, Tensor],
        known: Grads,
        arrived: Arrived,
        first: Tensor,
        second: Tensor,
        kept: Tensor | None,
        free: bool = False,
        take: Take | None = None,
    ) -> bool:
        """Whether samples stay apart in one more backward pass, from second ∘ G; see `are_apart`.

        known, arrived: what the one from first ∘ G has brought    free, take: see `Trial.pull`
        """
        verdicts: list[bool | None] = []

        def compare(key: Key, call: RecordedCall, grad: Tensor) -> None:
            if key in known and (layout := layout_in(call, key[2], self.samples)) is not None:
                verdicts.append(are_apart(layout, known[key][1], grad, first, second, kept))

        with self.trial.listening(compare):
            again = self.trial.pull(places, given, second, free, take)
        for name, layout in self.trial.input_layouts().items():
            if name in arrived and name in again:
                verdicts.append(are_apart(layout, arrived[name], again[name], first, second, kept))
        said = self.gather((None in verdicts, False in verdicts))
        self.plan.unsure |= any(unsure for unsure, _ in said)
        return not any(mixes for _, mixes in said)

    def _mixes(self, slot: int, at: Layout, given: Tensor) -> bool:
        """Whether the gradients of kept samples change with those given for others at one output: what mixing is, also
        where a backward pass isn't linear."""
        known: Grads = {}
        places, ones = {slot: at}, torch.ones(self.samples, device="cpu")
        with self.trial.listening(lambda key, call, grad: known.update({key: (call, grad.detach().clone())})):
            arrived = self.trial.pull(places, {slot: given}, ones)
        for kept in kept_samples(self.samples, self.trial.draws):
            others = {slot: given * at.over(given, torch.where(kept, 1.0, -37.0).to(given))}
            if not self._compared(places, others, known, arrived, ones, ones, kept):
                return True
        return False

    def _mixes_by_values(self, places: Mapping[int, Layout], given: Mapping[int, Tensor]) -> bool:
        """Whether the gradients of kept samples change when the others are replaced, since a backward pass adds something
        of its own, a load balancing loss say."""
        known: Grads = {}
        trial, ones = self.trial, torch.ones(self.samples, device="cpu")
        with trial.listening(lambda key, call, grad: known.update({key: (call, grad.detach().clone())})):
            arrived = trial.pull(places, given, ones)
        for turn, kept in enumerate(kept_samples(self.samples, trial.draws)):
            other = trial.batch.replaced(self.plan.axis, kept, turn)
            if other is not None:
                trial.run(other)
                if not self._compared(places, given, known, arrived, ones, ones, kept):
                    return True
        return False

    def _prove_rows(self, sums: Sums) -> None:
        """Notes which rows don't add up to what has arrived."""
        record = self.trial.recorder.record
        sums.check()
        unsure = self.samples < 3 or sums.unsure
        for name, p in self.trial.parameters.items():
            known = record.name_of(p)
            if name not in sums.forms:
                unsure |= known not in self.plan.refused
            elif name in sums.wrong | sums.wrong_weighted:
                layers = ", ".join(dict.fromkeys(where(call.path, call.layer) for call in sums.calls_of(name)))
                self.plan.disproven[known] = (
                    f"randomly weighted, the rows of {name} don't add up to the gradient that arrives at it: its rule is "
                    f"wrong ({layers}), or a way that the hooks don't see leads there"
                )
        for was_unsure, disproven in self.gather((unsure, self.plan.disproven)):
            self.plan.unsure |= was_unsure
            self.plan.disproven |= disproven

    def _prove_scalar(self, slot: int) -> None:
        """A loss that the model has made itself.  When samples are replaced, the gradients of those that are kept may change
        by one factor, a denominator's."""
        trial = self.trial
        trial.run()
        known = trial.gradients_of(slot)
        for turn, kept in enumerate(kept_samples(self.samples, trial.draws)[:6]):
            other = trial.batch.replaced(self.plan.axis, kept, turn)
            if other is None:
                continue
            trial.run(other)
            found = trial.gradients_of(slot)
            pairs: list[tuple[Tensor, Tensor, float]] = []
            for key, (call, grad) in known.items():
                layout = layout_in(call, key[2], self.samples)
                if key in found and layout is not None and found[key][1].shape == grad.shape:
                    two = [layout.samples_first(g, self.samples)[kept.to(g.device)] for g in (grad, found[key][1])]
                    mine, theirs = (g.flatten(1).double() for g in two)
                    pairs.append((mine, theirs, torch.finfo(grad.dtype).eps))
            total = sum(float((mine * mine).sum()) for mine, _, _ in pairs)
            factor = sum(float((mine * theirs).sum()) for mine, theirs, _ in pairs) / total if total else 1.0
            rests = [((theirs - factor * mine).norm(dim=1), mine.norm(dim=1), eps) for mine, theirs, eps in pairs]
            if any(self.gather(any(_exceeds(rest, factor * length, eps) for rest, length, eps in rests))):
                self.plan.mixed_outputs = [*self.plan.mixed_outputs, slot]
                return
            self.plan.scaled |= abs(factor - 1) > 1e-3


def _exceeds(rest: Tensor, length: Tensor, eps: float) -> bool:
    return bool((rest > min(1e4 * eps, 0.1) * length + 1e-30).any())
