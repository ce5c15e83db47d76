"""Proves a plan by gradients: what backward passes from random gradients at the outputs bring to calls and parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.records import Pass, RecordedCall, Segment
from autograd_hacks.capture.ways import ByCopies, ByMap
from autograd_hacks.errors import PerSampleGradientError, where
from autograd_hacks.probe.batch import Batch, kept_samples
from autograd_hacks.probe.guard import Guard
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import Plan
from autograd_hacks.probe.trace import Arguments, copies
from autograd_hacks.reading.certificate import agree
from autograd_hacks.reading.gate import Gate
from autograd_hacks.support.trees import Key, is_packed, kept_by, modules_of, outputs_of, tensors_of
from autograd_hacks.support.untouched import (
    cuda_devices_of,
    random_state,
    untouched,
    with_other_generators,
    with_random_state,
)

ROUNDING = 32
"""By how many units of the least digit a sample's gradient may differ, of its own length."""

NOISE = 0.02

Grads = dict[tuple[str, int, int], tuple[RecordedCall, Tensor]]
"""By a call's path, its number there, and the output's: the call, and a gradient at its output."""


def prove(model: nn.Module, recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Proves the plan of the forward that begins, and notes in it what is wrong, and which outputs mix samples.

    The model runs once, on copies of its arguments.  From gradients w ∘ G at its outputs, G random, come two backward
    passes, w being powers of two that no two of few samples share in both: times a power of two all digits stay.  At each
    call's output sample n's gradient must be wₙ times what it is under G, and each parameter's rows, weighted, must add up
    to what arrives at it.  Nothing of the user's is touched: see `untouched`.
    """
    plan, samples = recorder.record.plan, recorder.forward.samples
    if samples is None:
        return
    batch = replace(Batch.of(args, kwargs, recorder.planner.batch_dim), shared=plan.shared)
    proof = _Proof(model, recorder, plan, samples, batch, 1000 * plan.forwards + samples)
    plan.pending, plan.unsure = False, False
    # An input that asks for gradients may be more than the model can take, and so may noise in the place of zeros.
    for asks, opened in dict.fromkeys(((True, plan.opened), (False, plan.opened), (False, frozenset()))):
        proof = _Proof(model, recorder, plan, samples, batch, 1000 * plan.forwards + samples)
        try:
            with _aside(model, recorder), proof.restoring(opened):
                proof.run(asks)
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
    def __init__(self, model: nn.Module, recorder: Recorder, plan: Plan, samples: int, batch: Batch, seed: int) -> None:
        self.model, self.recorder, self.plan, self.samples, self.batch = model, recorder, plan, samples, batch
        self.draws = torch.Generator().manual_seed(seed)
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.outputs: list[Tensor] = []  # and what modules keep, for a loss to read later
        self.plain = 0  # how many of them are in no object
        self.layouts: list[Layout | None] = []  # of these
        self.kept: dict[int, Key] = {}  # which of them are kept
        self.inputs: dict[int, Tensor] = {}  # by the argument's number the leaf that it was made from
        self.guard = Guard(dict(model.named_parameters()), {})

    @contextmanager
    def restoring(self, opened: Collection[str]) -> Iterator[None]:
        """A context after which parameters have the numbers that they had.

        opened: those, by name, that are zero and hide what is behind them: noise stands in their place
        """
        for name in opened:
            p = self.parameters[name]
            p.data = (NOISE * torch.randn(p.shape, generator=self.draws)).to(p)  # which `untouched` takes back
        try:
            yield
        finally:
            self.guard.restore()

    def run(self, asks: bool) -> None:
        self._forward(tree_unflatten(self.batch.leaves, self.batch.spec), asks)
        marked = {*self.plan.mixed_outputs, *(slot for slot, key in self.kept.items() if key in self.plan.mixed_kept)}
        trained = [slot for slot, x in enumerate(self.outputs) if x.requires_grad and slot not in marked]
        places = {s: at for s in trained if (at := self.layouts[s]) is not None and at.fits(self.outputs[s], self.samples)}
        plain = {slot: at for slot, at in places.items() if slot < self.plain}
        self.plan.disproven |= self._prove_places(plain)
        # A loss may come by what objects and modules hold, past the outputs of a module around that is run again.
        hidden = {slot: at for slot, at in places.items() if slot >= self.plain and slot not in self.kept}
        for group in (hidden, *({slot: places[slot]} for slot in self.kept if slot in places)):
            for slot in group if self._prove_places(group) else ():
                self._mark(slot)
        for slot in trained:
            if slot not in places and self.samples > 1 and self.outputs[slot].numel() == 1:
                self._prove_scalar(slot, asks)

    def _forward(self, arguments: Arguments, asks: bool) -> None:
        """Runs the model.  asks: whether its inputs with samples are to ask for gradients"""
        args, kwargs = copies(arguments)
        leaves, spec = tree_flatten((args, kwargs), is_leaf=is_packed)
        self.inputs = {}
        for number, at in enumerate(self.batch.replaceable(self.plan.axis, self.samples)):
            if at is not None and asks and leaves[number].is_floating_point():
                self.inputs[number] = leaves[number].detach().requires_grad_()
                leaves[number] = self.inputs[number].clone()  # no leaf, which couldn't be written to
        args, kwargs = tree_unflatten(leaves, spec)
        with self.guard:
            output = self.model(*args, **kwargs)
        self.outputs, self.plain = outputs_of(output), len(tensors_of(output))
        kept = kept_by(self.model) if self.plan.kept else {}
        self.kept = {len(self.outputs) + n: key for n, key in enumerate(key for key in kept if key in self.plan.kept)}
        self.layouts = [*self.plan.layouts_of_model(self.model, self.outputs), *map(self.plan.kept.get, self.kept.values())]
        self.outputs += [kept[key] for key in self.kept.values()]

    def _mark(self, slot: int) -> None:
        """Notes that samples mix in an output, or in what a module keeps."""
        if slot in self.kept:
            self.plan.mixed_kept.add(self.kept[slot])
        else:
            self.plan.mixed_outputs = [*self.plan.mixed_outputs, slot]

    def _prove_places(self, places: Mapping[int, Layout]) -> dict[str, str]:
        """Marks which of some outputs mix samples.  Returns why rows are wrong, by parameter."""
        if not places:
            return {}
        before = len(self._recorded())
        at_random = {slot: self._random(self.outputs[slot]) for slot in places}
        first, second = self._weights(self.outputs[next(iter(places))])
        carried = self.batch.replaceable(self.plan.axis, self.samples)
        arrived = self._pull(places, at_random, first)
        recorded = self._recorded()[before:]
        if not recorded:
            return {}
        known = _numbered((call, grads.at) for call, grads in recorded[0].received.items())
        suspicious = False

        def compare(key: tuple[str, int, int], call: RecordedCall, grad: Tensor) -> None:
            nonlocal suspicious
            if key in known and (layout := _layout(call, key[2], self.samples)) is not None:
                suspicious |= self._differs(layout, known[key][1], grad, first, second)

        with self._listening(compare):
            again = self._pull(places, at_random, second)
        for number in self.inputs:
            axis = carried[number]
            pair = arrived.get(f"#{number}"), again.get(f"#{number}")
            if axis is not None and pair[0] is not None and pair[1] is not None:
                suspicious |= self._differs(Layout(axis % pair[0].ndim), pair[0], pair[1], first, second)
        if suspicious:
            mixed = [slot for slot in places if self._mixes(slot, places[slot], at_random[slot])]
            for slot in mixed:
                self._mark(slot)
            if mixed:
                return {}
            again = {}  # where a hook inside the model changes gradients, clamps them say, weights mean nothing
        wrong = self._wrong_rows(Segment([recorded[0]]), first, second, arrived, again)
        if min(places) >= self.plain:  # past what is run again, whose rows are without it then
            found = {name: self.recorder.record.name_of(p) for name, p in self.parameters.items() if name in arrived}
            lost = [n for n, known in found.items() if known not in recorded[0].calls_of and bool(arrived[n].any())]
            wrong |= dict.fromkeys(lost, "no call that is recorded leads there")
        return wrong

    def _recorded(self) -> list[Pass]:
        return [p for segment in self.recorder.record.segments for p in segment.passes]

    def _wrong_rows(
        self, segment: Segment, first: Tensor, second: Tensor, arrived: Mapping[str, Tensor], again: Mapping[str, Tensor]
    ) -> dict[str, str]:
        """Compares sums of rows with what has arrived: of all, and weighted.  Returns where they differ."""
        gate, record, wrong = Gate(segment, "sum"), self.recorder.record, {}
        gate.read_all()
        open_ends = self.samples < 3
        for name, p in self.parameters.items():
            known = record.name_of(p)
            form = gate.form(known)
            if form is None or name not in arrived:
                open_ends |= known not in self.plan.refused
                continue
            calls = {call: segment.passes[0].received[call] for call in segment.passes[0].calls_of[known]}
            used, ratio = [call.precision for call in calls], (second / first).to(form.like.device)
            length = sum(grads.length for grads in calls.values())
            is_right = all(
                agree(form, w.to(form.sum_dtype), total, used, partial(float.__mul__, length, float(w.max())))
                for w, totals in ((torch.ones_like(ratio), arrived), (ratio, again))
                if (total := totals.get(name)) is not None
            )
            if not is_right:
                layers = ", ".join(dict.fromkeys(where(call.path, call.layer) for call in calls))
                wrong[known] = (
                    f"randomly weighted, the rows of {name} don't add up to the gradient that arrives at it: its rule is "
                    f"wrong ({layers}), or a way that the hooks don't see leads there"
                )
            open_ends |= not bool(arrived[name].any()) or not bool(arrived[name].isfinite().all())
        self.plan.unsure |= open_ends
        return wrong

    def _prove_scalar(self, slot: int, asks: bool) -> None:
        """A loss that the model has made itself.  When samples are replaced, the gradients of those that are kept may change
        by one factor, a denominator's."""
        known = self._gradients_of(slot)
        for kept in kept_samples(self.samples, self.draws)[:6]:
            other = self.batch.replaced(self.plan.axis, kept, 0)
            if other is None:
                continue
            self._forward(other, asks)
            found = self._gradients_of(slot)
            pairs: list[tuple[Tensor, Tensor, float]] = []
            for key, (call, grad) in known.items():
                layout = _layout(call, key[2], self.samples)
                if key in found and layout is not None and found[key][1].shape == grad.shape:
                    two = [layout.samples_first(g, self.samples)[kept.to(g.device)] for g in (grad, found[key][1])]
                    mine, theirs = (g.flatten(1).double() for g in two)
                    pairs.append((mine, theirs, torch.finfo(grad.dtype).eps))
            total = sum(float((mine * mine).sum()) for mine, _, _ in pairs)
            factor = sum(float((mine * theirs).sum()) for mine, theirs, _ in pairs) / total if total else 1.0
            for mine, theirs, eps in pairs:
                rest = (theirs - factor * mine).norm(dim=1)
                if (rest > min(1e4 * eps, 0.1) * factor * mine.norm(dim=1) + 1e-30).any():
                    self._mark(slot)
                    return
            self.plan.scaled |= abs(factor - 1) > 1e-3

    def _gradients_of(self, slot: int) -> Grads:
        found: Grads = {}

        def note(key: tuple[str, int, int], call: RecordedCall, grad: Tensor) -> None:
            found[key] = call, grad.detach()

        with self._listening(note):
            torch.autograd.grad(self.outputs[slot], list(self.parameters.values()), retain_graph=True, allow_unused=True)
        return found

    def _mixes(self, slot: int, at: Layout, at_random: Tensor) -> bool:
        """Whether the gradients of kept samples change with those given for others at one output: what mixing is, also
        where a backward pass isn't linear."""
        ones = torch.ones(self.samples, device=at_random.device)
        known: Grads = {}
        kept = ones.bool()
        bad = False

        def note(key: tuple[str, int, int], call: RecordedCall, grad: Tensor) -> None:
            known[key] = call, grad.detach().clone()

        def compare(key: tuple[str, int, int], call: RecordedCall, grad: Tensor) -> None:
            nonlocal bad
            if key in known and (layout := _layout(call, key[2], self.samples)) is not None:
                bad |= self._differs(layout, known[key][1], grad, ones, ones, kept)

        carried = self.batch.replaceable(self.plan.axis, self.samples)
        with self._listening(note):
            inputs = self._pull({slot: at}, {slot: at_random}, ones)
        for half in kept_samples(self.samples, self.draws):
            kept = half.to(at_random.device)
            with self._listening(compare):
                others = self._pull({slot: at}, {slot: at_random}, torch.where(kept, ones, -37.0 * ones))
            for number in self.inputs:
                x, y, axis = inputs.get(f"#{number}"), others.get(f"#{number}"), carried[number]
                if x is not None and y is not None and axis is not None:
                    bad |= self._differs(Layout(axis % x.ndim), x, y, ones, ones, kept)
        return bad

    def _differs(
        self, layout: Layout, x: Tensor, y: Tensor, first: Tensor, second: Tensor, kept: Tensor | None = None
    ) -> bool:
        """Whether gradients under two weightings are more than those apart, for some sample."""
        if not x.isfinite().all() or not y.isfinite().all():
            self.plan.unsure = True
            return False
        eps, tiny = torch.finfo(x.dtype).eps, torch.finfo(x.dtype).tiny
        mine, theirs = (
            layout.samples_first(g, self.samples).flatten(1).to(torch.promote_types(g.dtype, torch.float32))
            / w.to(g.device)[:, None]
            for g, w in ((x, first), (y, second))
        )
        apart = (mine - theirs).norm(dim=1) > ROUNDING * eps * mine.norm(dim=1) + tiny * mine.shape[1]
        return bool((apart if kept is None else apart[kept]).any())

    def _weights(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Two weights for each sample, powers of two; no two of sixteen samples have the same ratio.  N each"""
        ratios = torch.randperm(max(16, self.samples), generator=self.draws)[: self.samples] % 16 - 8
        first, second = (ratios + 1).div(2, rounding_mode="floor"), -ratios.div(2, rounding_mode="floor")
        return tuple(torch.pow(2.0, power).to(like.device) for power in (first, second))  # type: ignore[return-value]

    def _random(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape, generator=self.draws).to(x)

    def _pull(self, places: Mapping[int, Layout], at_random: Mapping[int, Tensor], w: Tensor) -> dict[str, Tensor]:
        """One backward pass from w ∘ G: what arrives at parameters, by name, and at inputs, by '#' and number."""
        names = [*self.parameters, *(f"#{number}" for number in self.inputs)]
        ends = [*self.parameters.values(), *self.inputs.values()]
        grads = [at_random[slot] * at.over(at_random[slot], w.to(at_random[slot])) for slot, at in places.items()]
        found = torch.autograd.grad(
            [self.outputs[slot] for slot in places], ends, grads, retain_graph=True, allow_unused=True
        )
        return {name: grad.detach().to_dense() for name, grad in zip(names, found) if grad is not None}

    @contextmanager
    def _listening(self, note: Any) -> Iterator[None]:
        """A context in which gradients at calls go to a callable, and into no record."""
        counts: dict[tuple[str, int], dict[int, int]] = {}

        def hear(call: RecordedCall, slot: int, grad: Tensor | None) -> None:
            if grad is not None:
                seen = counts.setdefault((call.path, slot), {})
                number = seen.setdefault(id(call), len(seen))
                note((call.path, number, slot), call, grad)

        self.recorder.backward.listener = hear
        try:
            yield
        finally:
            self.recorder.backward.listener = None


def _numbered(received: Any) -> Grads:
    """Gradients by path, number and output.  The number: in the order in which the pass comes to the calls"""
    counts: dict[tuple[str, int], int] = {}
    found: Grads = {}
    for call, at in received:
        for slot, grad in enumerate(at):
            if grad is not None:
                number = counts[call.path, slot] = counts.get((call.path, slot), -1) + 1
                found[call.path, number, slot] = call, grad
    return found


def _layout(call: RecordedCall, slot: int, samples: int) -> Layout | None:
    """Where samples are in a gradient at one of a call's outputs; None where that isn't known."""
    if isinstance(call.way, ByMap | ByCopies):
        at = call.way.at if isinstance(call.way, ByMap) else Layout(1)
        return at if call.way.count == samples else None
    return call.layouts[slot] if call.samples is not None and slot < len(call.layouts) else None


@contextmanager
def _aside(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """A context in which the model may run, forwards and backwards, without anything of the user's being touched."""
    with ExitStack() as contexts:
        contexts.enter_context(recorder.proving())
        contexts.enter_context(with_other_generators())
        contexts.enter_context(with_random_state(random_state(cuda_devices_of(model))))
        contexts.enter_context(untouched(model))
        contexts.enter_context(torch.enable_grad())
        contexts.enter_context(_without_backward_hooks(model, recorder))
        # Autocast's memory of weights would lead the forward's gradients through the proof's graph.
        contexts.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:  # checkpointing around the model counts
            contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x))
        yield


@contextmanager
def _without_backward_hooks(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """A context in which backward passes run no hooks of the user's."""
    own = recorder.backward.own_hooks()
    hooks = [h for module in modules_of(model) for h in (module._backward_hooks, module._backward_pre_hooks)]
    hooks += [p._backward_hooks for p in model.parameters() if p._backward_hooks is not None]
    kept = [(at, dict(at)) for at in hooks]
    try:
        for at in hooks:
            for key in [key for key in at if key not in own]:
                del at[key]
        yield
    finally:
        for at, before in kept:
            at.clear()
            at.update(before)
