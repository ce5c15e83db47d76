"""Shows a comparison what a model does when samples of its batch are replaced by others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from autograd_hacks.errors import ProbeFailed
from autograd_hacks.probe.batch import Batch, kept_samples
from autograd_hacks.probe.compare import Comparison, Gather
from autograd_hacks.probe.copies import Arguments
from autograd_hacks.probe.decide import Decision
from autograd_hacks.probe.locate import ReadDecision
from autograd_hacks.probe.meetings import Follow
from autograd_hacks.probe.trace import Noise, Trace, Tracer
from autograd_hacks.support.parts import part_of

_ROUNDS = 6
"""How often a model is traced anew, at the most, for meetings that the traces before have shown."""

NOISE = (0.02, 1e-4)
"""How large the noise is that stands in the place of zeros; the next one is tried where the model can't run with one."""


class Proposal:
    """Traces of one model on one batch, with the samples on one axis of its arguments; see `plan_for` for the fields."""

    def __init__(
        self,
        tracer: Tracer,
        arguments: Arguments,
        batch: Batch,
        axis: int | None,
        samples: int,
        seed: int,
        gather: Gather,
    ) -> None:
        self.gather = gather
        self.tracer, self.arguments, self.batch, self.axis, self.samples = tracer, arguments, batch, axis, samples
        self.draws = torch.Generator().manual_seed(seed)
        self.stays = False  # whether vectors of integers are left as they are
        self.halves = kept_samples(samples, self.draws)

    def trace(self, follow: Follow, noise: Noise | None = None) -> Trace:
        """The batch's own trace."""
        return self.tracer.trace(self.arguments, self.batch, self.axis, self.samples, follow, noise)

    def decision(self, whole: Trace, opened: Collection[str], told_by: int | None) -> Decision:
        """What the traces say, of as many as it takes to know which parameters meet the batch past rules, and where."""
        follow = whole.meetings.follow
        for _ in range(_ROUNDS):
            unknown = self.tracer.trained & whole.tracker.reads.keys() - follow.names
            if unknown:
                follow = replace(follow, names=follow.names | unknown)
                whole = self.trace(follow)
            comparison = self.compared(whole)
            decision = Decision(comparison, [], told_by)
            if not decision.read.conflicts and (noisy := self.with_noise(opened, follow)):
                decision = Decision(comparison, noisy, told_by)
            further = decision.follow(follow)
            if further == follow:
                break
            follow = further
            whole = self.trace(follow)
        return decision

    def compared(self, whole: Trace) -> Comparison:
        """A comparison of the batch's own trace with all halves; or with one, where that tells that others are needed."""
        found = Comparison(self.tracer, whole, self.samples, self.axis)
        order = self._order()
        try:
            self._show(found, order[:1])
            found.agree(self.gather)
            if whole.meetings.calls and ReadDecision(found, []).conflicts:
                return found
            self._show(found, order[1:])
            found.agree(self.gather)
            retry = found.sizes_differ
        except Exception as error:  # whatever the model's own code raises
            if not self._has_orders():
                raise ProbeFailed(
                    f"a forward with some samples of the batch in the place of others has failed ({type(error).__name__}: "
                    f"{error}). The library runs some before the first of each kind, to find out where the samples are and "
                    "whether they mix. If the model's input has no batch on axis 0, say where: add_hooks(model, "
                    "batch_dim=...); to do without, and take axis 0 of every layer's input for the batch: "
                    "add_hooks(model, probe=False)."
                ) from error
            retry = True
        if retry and self._has_orders():  # lengths, say, that must be in order
            self.stays = True
            return self.compared(whole)
        if found.depends_on_rounding:
            self.tracer.show(self.arguments, whole, found.see_again, lambda fits, x: None)
            found.agree(self.gather)
        return found

    def with_noise(self, opened: Collection[str], follow: Follow) -> list[Comparison]:
        """A comparison of traces with noise in the place of some parameters, by name; none where there are none, or the
        model can't run with it."""
        for scale in NOISE if opened else ():
            like = {name: p for p, name in self.tracer.names.items() if name in opened}
            drawn = {name: scale * torch.randn(p.shape, generator=self.draws, device="cpu") for name, p in like.items()}
            noise = {name: x.to(part_of(like[name])) for name, x in drawn.items()}
            try:
                whole = self.trace(follow, noise)
                found = Comparison(self.tracer, whole, self.samples, self.axis)
                self._show(found, self._order()[:2], noise)
                found.agree(self.gather)
            except Exception:  # whatever the model's own code raises, for numbers that it doesn't expect
                continue
            if all(self.gather(found.is_finite)):
                return [found]
        return []

    def _order(self) -> list[int]:
        order: list[int] = torch.randperm(len(self.halves), generator=self.draws, device="cpu").tolist()
        return order

    def _show(self, comparison: Comparison, order: Sequence[int], noise: Noise | None = None) -> None:
        """Shows it some of the halves, by their numbers."""
        for kept, turn in [(self.halves[n], n) for n in order]:
            other = self.batch.replaced(self.axis, kept, turn // (len(self.halves) // 2 or 1), self.stays)
            if other is not None:
                comparison.kept = kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]
                self.tracer.show(other, comparison.whole, comparison.see, comparison.see_meeting, noise)
                comparison.traces += 1

    def _has_orders(self) -> bool:
        return not self.stays and self.batch.has_orders(self.axis, self.samples)
