"""A signature's first forward, call by call beside the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from types import FunctionType, NoneType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from autograd_hacks.capture.forward import Recorder
from autograd_hacks.capture.records import Replay, Visit
from autograd_hacks.errors import ProbeFailed
from autograd_hacks.probe.batch import Batch, Hypothesis
from autograd_hacks.probe.layout import (
    Evidence,
    Layout,
    differs,
    for_each_sample,
    layouts_that_fit,
    likeliest,
    only_by_sizes,
)
from autograd_hacks.probe.plan import Layouts
from autograd_hacks.probe.tracker import Frame, Stack, Tracker
from autograd_hacks.rules.embedding import embedding
from autograd_hacks.rules.table import axes_for, covered, parts_of_composites, rule_for
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import is_packed, tensors_of, version_of
from autograd_hacks.support.untouched import (
    cuda_devices_of,
    random_state,
    untouched,
    with_other_generators,
    with_random_state,
)

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_PLAIN = (NoneType, bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, torch.Size)

_SHARED = (torch.Generator, nn.Module, torch.device, FunctionType, type)
"""Whose state a forward doesn't change, or is put back by other means."""


@dataclass(frozen=True)
class Probed:
    """A call in a probe.

    outputs: copies    inputs: a copy of the first, for a rule that may go by it    from_batch: whether the outputs follow
    from the samples    routed: whether their rows do    copies: whether the call changed its arguments    buffers: those
    that it changed, by name
    """

    outputs: list[Tensor]
    inputs: list[Tensor]
    from_batch: bool
    routed: bool
    copies: bool
    buffers: list[str]


@dataclass
class Seen:
    """A call in the forward that was compared with the probes.

    owned: the ids of the parameters that its rule covers    layouts: of its outputs, under each hypothesis    mixing: which
    of them samples mix in    placed: under each hypothesis whether the rule can tell the samples apart    replayable:
    whether it can be run again    unit: the visit of the call as one to be run again, where it may become one    visit: that
    of its rule
    """

    stack: Stack
    module: nn.Module
    probed: Probed | None
    owned: set[int]
    layouts: list[Layouts]
    mixing: list[list[bool]]
    placed: list[bool]
    replayable: bool = False
    unit: Visit | None = None
    visit: Visit | None = None


class Survey:
    """Of one forward: `probe` runs before it, `begin` as it begins, `close` when it has ended.

    hypotheses: where the samples may be in the model's arguments, the likeliest first
    """

    def __init__(self, model: nn.Module, recorder: Recorder, batch: Batch, hypotheses: Sequence[Hypothesis]) -> None:
        self.model, self.recorder, self.batch, self.hypotheses = model, recorder, batch, hypotheses
        self._parts = parts_of_composites(model)
        self.paths = {module: path for path, module in model.named_modules() if _takes_hooks(path, module)}
        self._modules = {path: module for module, path in self.paths.items()}
        self.calls: list[Seen] = []
        self.lookups: set[str] = set()  # those that are the same for all samples, and are copied for each
        self.probed: list[dict[Frame, Probed]] = []
        self.tracker = Tracker((), (), lambda path, parameter: False)
        self._free: dict[str, bool] = {}  # lookups: whether every call of them is the same for all samples
        self._open = ExitStack()
        self._wanted: set[Frame] = set()  # calls that may have to be run again

    def probe(self, replacements: Sequence[Arguments], with_gradients: bool) -> None:
        """Runs the probes, and where lookups turn out the same for all samples once more, to see whether they may be copied
        for each.

        with_gradients: whether to run them so, for models that need gradients inside
        """
        self._with_gradients = with_gradients
        self.probed = [self._run(arguments, number, set()) for number, arguments in enumerate(replacements)]
        free = {path for path, is_free in self._free.items() if is_free}
        if free:
            self._try(replacements[-1], free)

    def output_size(self) -> int:
        """How many entries axis 0 of the model's output has."""
        outputs = self.probed[-1][Frame("", 0)].outputs
        return next((len(x) for x in outputs if x.ndim), 1)

    def fails_on(self, arguments: Arguments) -> bool:
        """Whether the model can't run its own arguments."""
        try:
            self._run(arguments, 0, set())
        except Exception:  # whatever the model's own code raises
            return True
        return False

    def _try(self, arguments: Arguments, lookups: set[str]) -> None:
        """Runs the last probe with copied lookups, and goes on with that, if every other call returned the same."""
        tracker = self.tracker
        try:
            probed = self._run(arguments, len(self.probed) - 1, lookups)
        except Exception:  # whatever the model's own code raises for a shape that it doesn't expect
            self.tracker = tracker
            return
        before = self.probed[-1]
        same = before.keys() == probed.keys() and all(
            x.shape == y.shape and not differs(x, y).any()
            for frame in before
            if frame.path not in lookups
            for x, y in zip(before[frame].outputs, probed[frame].outputs)
        )
        if same:
            self.probed[-1], self.lookups = probed, lookups
        else:
            self.tracker = tracker

    def _run(self, arguments: Arguments, number: int, lookups: set[str]) -> dict[Frame, Probed]:
        args, kwargs = _copies(arguments)
        carried = self.batch.carried(self.hypotheses, number)
        carrying = [leaf for leaf, at in zip(tree_leaves((args, kwargs), is_packed), carried) if at]
        by_rule = {path: {id(p) for p in covered(m).values()} for m, path in self.paths.items() if rule_for(m)}
        probed: dict[Frame, Probed] = {}
        self._free = {}
        state = random_state(cuda_devices_of(self.model))

        def begins(stack: Stack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            self.tracker.stack = stack
            return _versions(module), [(x, version_of(x)) for x in tensors_of((args, kwargs))]

        def ended(stack: Stack, begun: Any, module: nn.Module, output: Any) -> Any:
            self.tracker.stack = stack[:-1]
            with _disable_current_modes():
                probed[stack[-1]] = self._note(begun, module, output)
                return self._look_up(stack[-1].path, module, output, probed[stack[-1]], lookups)

        with ExitStack() as contexts:
            alone = untouched(self.model, and_parameters=True), with_other_generators(), with_random_state(state)
            for context in (Switch.paused_here(), *alone, _slow_paths()):
                contexts.enter_context(context)
            # Here, where parameters are copies.
            self.tracker = Tracker(self.model.parameters(), carrying, lambda path, p: p in by_rule.get(path, ()))
            contexts.enter_context(torch.set_grad_enabled(self._with_gradients))
            contexts.enter_context(self._walking(begins, ended))
            contexts.enter_context(self.tracker)
            self.model(*args, **kwargs)
        return probed

    def _note(self, begun: Any, module: nn.Module, output: Any) -> Probed:
        (buffers, arguments), outputs = begun, tensors_of(output)
        facts = [self.tracker.facts(x) for x in outputs]
        now, rule = _versions(module), rule_for(module)
        goes_by_input = rule is not None and (rule.by_input or rule.features is not None)
        return Probed(
            outputs=[x.detach().clone() for x in outputs],
            inputs=[arguments[0][0].detach().clone()] if goes_by_input and arguments else [],
            from_batch=any(fact.from_batch for fact in facts) or not facts,
            routed=any(fact.routed for fact in facts),
            copies=any(version_of(x) != version for x, version in arguments),
            buffers=[name for name, version in buffers.items() if now.get(name) != version],
        )

    def _look_up(self, path: str, module: nn.Module, output: Any, probed: Probed, lookups: set[str]) -> Any:
        """What the caller of a lookup is to get; None for the output itself."""
        if (rule := rule_for(module)) is None or rule.formula is not embedding:
            return None
        self._free[path] = self._free.get(path, True) and not probed.from_batch
        if path not in lookups:
            return None
        copies = for_each_sample(output, self.hypotheses[0].samples)
        self.tracker.mark(copies)
        return copies

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hooks all modules for the model's forward, which has begun."""
        self.recorder.survey = self
        self._wanted |= {frame for stacks in self.tracker.reads.values() for stack in stacks for frame in stack}

        def begins(stack: Stack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replay:
            known = self.probed[-1].get(stack[-1])
            copies, buffers = (False, []) if known is None else (known.copies, known.buffers)
            return Replay.of(stack[-1].path, module, args, kwargs, copies, buffers)

        before = self._open.enter_context(self._walking(begins, self._ended))
        before(self.model, args, kwargs)

    def close(self) -> None:
        self._open.close()
        self.recorder.survey = None

    def visited(self, visit: Visit) -> None:
        """Hears of a visit by a rule, whose call has just ended."""
        self.calls[-1].visit = visit

    def _ended(self, stack: Stack, begun: Replay, module: nn.Module, output: Any) -> Any:
        probed, outputs = self.probed[-1].get(stack[-1]), tensors_of(output)
        has_rule = rule_for(module) is not None and module not in self._parts
        owned = {id(p) for p in covered(module).values()} if has_rule and outputs else set()
        seen = Seen(stack, module, probed, owned, [], [], [])
        for number in range(len(self.hypotheses)):
            found = [self._place(stack, number, slot, x) for slot, x in enumerate(outputs)]
            layouts, placed = tuple(layout for layout, _ in found), False
            if owned and stack[-1].path in self.lookups:
                layouts, placed = (Layout(),), True
            elif owned and probed is not None and probed.from_batch:
                axes = axes_for(module, outputs[0])
                if is_packed(output[0] if type(output) is tuple else output):
                    layouts, placed = (Layout(axes[0]),), True  # the rule knows whose the rows are
                else:
                    own = self._place_by_rule(stack, number, outputs[0], tensors_of((begun.args, begun.kwargs)), axes)
                    layouts, placed = (own,) if own else layouts, own is not None
            seen.layouts.append(layouts)
            seen.mixing.append([mixes for _, mixes in found])
            seen.placed.append(placed)
        if owned and not all(seen.placed):
            self._wanted.update(stack)
        leaves = tree_leaves((begun.args, begun.kwargs), is_packed)
        seen.replayable = stack[-1] in self._wanted and all(isinstance(x, _PLAIN) or is_packed(x) for x in leaves)
        if seen.replayable:  # with no visit where checkpointing will make the call again, with gradients then
            output, seen.unit = self.recorder.visit_unit(begun, {}, output, is_first=True, layouts=seen.layouts[0])
        self.calls.append(seen)
        return output

    def _place(self, stack: Stack, number: int, slot: int, real: Tensor) -> tuple[Layout | None, bool]:
        """Where the samples are in a call's output under a hypothesis, and whether it shows that they mix."""
        hypothesis = self.hypotheses[number]
        evidence = self._evidence(stack[-1], number, lambda probed: probed.outputs[slot : slot + 1])
        if not evidence:
            return None, False
        fitting, has_changed = layouts_that_fit(real.detach(), evidence, range(real.ndim))
        if not has_changed and (hypothesis.samples == 1 or self.recorder.plan.assumed):
            fitting = fitting[:1]  # there is nothing to know it by
        if not has_changed and len(stack) == 1 and hypothesis.axis is not None:
            return likeliest(real.shape, hypothesis.samples, [hypothesis.axis]), False
        trusted = [layout for layout in fitting if self._is_trusted(stack, real, layout)]
        by_size = only_by_sizes(real.shape, hypothesis.samples, range(real.ndim))
        same_shape = all(other.shape == real.shape for other, _ in evidence)
        mixes = not fitting and same_shape and not self._is_routed(stack[-1]) and real.is_floating_point() and real.ndim > 0
        if len(trusted) > 1:
            return (by_size if by_size in trusted else None), mixes
        return (trusted[0] if trusted else None), mixes

    def _place_by_rule(
        self, stack: Stack, number: int, output: Tensor, arguments: list[Tensor], axes: Sequence[int]
    ) -> Layout | None:
        """Where a layer's rule finds the samples in its output; None where it can't tell them apart."""
        samples, rule = self.hypotheses[number].samples, rule_for(self._modules[stack[-1].path])
        by_input = self._evidence(stack[-1], number, lambda probed: probed.inputs)
        fitting: list[Layout] | None = None
        if rule is None or not rule.by_input:
            evidence = self._evidence(stack[-1], number, lambda probed: probed.outputs[:1])
            fitting, _ = layouts_that_fit(output.detach(), evidence, axes) if evidence else ([], True)
        if by_input and (fitting is None or len(fitting) > 1):
            # Too little has changed in the output, of zero weights say; its input may tell.
            told, _ = layouts_that_fit(arguments[0].detach(), by_input, axes)
            fitting = told if fitting is None else [layout for layout in fitting if layout in told]
        trusted = [layout for layout in fitting or () if self._is_trusted(stack, output, layout)]
        if len(trusted) > 1 and (samples == 1 or self.recorder.plan.assumed):
            trusted = trusted[:1]  # there is nothing to know it by
        if len(trusted) > 1:
            by_size = only_by_sizes(output.shape, samples, axes)
            return by_size if by_size in trusted else None
        return trusted[0] if trusted else None

    def _evidence(self, frame: Frame, number: int, part: Callable[[Probed], list[Tensor]]) -> Evidence:
        """A tensor of a call in each probe with the samples kept there; nothing where some probe lacks it."""
        kept, found = self.hypotheses[number].kept, []
        for run, probed in enumerate(self.probed):
            tensors = part(probed[frame]) if frame in probed else []
            if not tensors:
                return []
            found.append((tensors[0], kept[min(run, len(kept) - 1)]))
        return found

    def _is_routed(self, frame: Frame) -> bool:
        return any(frame not in probed or probed[frame].routed for probed in self.probed)

    def _is_trusted(self, stack: Stack, real: Tensor, layout: Layout) -> bool:
        """Whether a layout that the values allow is no accident: rows that an operation has chosen by their values may be
        anyone's in the next forward.  Not so the samples that have kept an axis of their own beside others."""
        if self._is_routed(stack[-1]) and (layout.fold or real.ndim < 3):
            return False
        return not layout.fold or not any(frame in self.tracker.counting for frame in stack[:-1])

    @contextmanager
    def _walking(self, begins: Callable[..., Any], ended: Callable[..., Any]) -> Iterator[Callable[..., None]]:
        """Hooks that tell of each call; first in line, to see what a module itself was given and returned."""
        counts: dict[str, int] = {}
        frames: list[tuple[Frame, Any]] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            path = self.paths[module]
            counts[path] = counts.get(path, -1) + 1
            stack = (*(frame for frame, _ in frames), Frame(path, counts[path]))
            frames.append((stack[-1], begins(stack, module, args, kwargs)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            while frames[-1][0].path != self.paths[module]:
                frames.pop()  # a call that has ended with an exception
            stack = tuple(frame for frame, _ in frames)
            return ended(stack, frames.pop()[1], module, output)

        with ExitStack() as handles:
            for module in self.paths:
                handles.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                hook = module.register_forward_hook(SurveyHook(after), with_kwargs=True, prepend=True)
                handles.callback(hook.remove)
            yield before


class SurveyHook:
    """A forward hook of the library's own, there for one forward."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook

    def __call__(self, *call: Any) -> Any:
        return self._hook(*call)


def _copies(arguments: Arguments) -> Arguments:
    """Arguments that a forward may change without the user's own being changed."""

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.detach().clone()
        if isinstance(leaf, _PLAIN) or is_packed(leaf) or isinstance(leaf, _SHARED):
            return leaf
        try:
            return deepcopy(leaf)
        except Exception as error:  # whatever the user's own class raises
            raise ProbeFailed(
                f"the model was given an object of type {type(leaf).__name__}, which the probe, one more forward, can't "
                f"copy ({type(error).__name__}: {error}) and might change. Give the model tensors; or do without the "
                "probe: add_hooks(model, probe=False), which takes axis 0 of every layer's input for the batch."
            ) from error

    copies: Arguments = tree_map(copy, arguments, is_leaf=is_packed)
    return copies


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Each buffer's identity and version, by name."""
    return {name: (id(buffer), version_of(buffer)) for name, buffer in module.named_buffers()}


def _takes_hooks(path: str, module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule) and "_orig_mod" not in path.split(".")


@contextmanager
def _slow_paths() -> Iterator[None]:
    """A context without what torch does otherwise where no gradients are wanted: fused layers whose children aren't called;
    and without autocast's memory of weights, which would keep theirs from having gradients later."""
    fast, cached = torch.backends.mha.get_fastpath_enabled(), torch.is_autocast_cache_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_autocast_cache_enabled(cached)
