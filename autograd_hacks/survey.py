"""A signature's first forward, call by call beside the probe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from autograd_hacks.batch import Batch, Hypothesis
from autograd_hacks.layout import Layout, differs, find_layout, for_each_sample
from autograd_hacks.plan import Layouts
from autograd_hacks.probe import Frame, Stack, Tracker
from autograd_hacks.record import Recorder, Switch
from autograd_hacks.rerun import devices_of, random_state, untouched, with_random_state
from autograd_hacks.rules.embedding import embedding
from autograd_hacks.rules.table import axes_for, covered, parts_of_composites, rule_for
from autograd_hacks.trees import is_packed, tensors_of, version_of
from autograd_hacks.visits import Replay, Visit

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_MODEL = Frame("", 0)
_PLAIN = (NoneType, bool, int, float, complex, str, bytes, Tensor, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Probed:
    """A call in the probe.

    outputs: copies    inputs: a copy of the first, for a rule that goes by it    from_batch: whether they follow from
    the samples    routed: whether their rows do    copies: whether the call changed its arguments    buffers: those that it
    changed, by name
    """

    outputs: list[Tensor]
    inputs: list[Tensor]
    from_batch: bool
    routed: bool
    copies: bool
    buffers: list[str]


@dataclass
class Seen:
    """A call in the forward that was compared with the probe.

    owned: the ids of the parameters that its rule covers    layouts: of its outputs, under each hypothesis    placed:
    under each hypothesis whether the rule can tell the samples apart    replayable: whether it can be run again    unit:
    the visit of the call as one to be run again, where it may become one    visit: that of its rule
    """

    stack: Stack
    module: nn.Module
    probed: Probed | None
    owned: set[int]
    layouts: list[Layouts]
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
        self.calls: list[Seen] = []
        self.lookups: dict[str, str] = {}  # those that are the same for all samples, and what is taken for the samples' own
        self.probed: dict[Frame, Probed] = {}
        self.tracker = Tracker((), (), lambda path, parameter: False)
        self._free: dict[
            str, set[int | None]
        ] = {}  # lookups: their sizes on axis 0, None for one that is not the same for all
        self._open = ExitStack()
        self._wanted: set[Frame] = set()  # calls that may have to be run again

    def probe(self, replacement: Arguments, original: Arguments, with_gradients: bool) -> None:
        """Runs the probe, and where lookups turn out the same for all samples, more to see whether they may be taken for the
        samples' own: copied for each; or where they have N rows already, these.

        original: the model's arguments    with_gradients: whether to run it so, for models that need gradients inside
        """
        self._with_gradients = with_gradients
        self._run(replacement, {})
        free = {path: sizes for path, sizes in self._free.items() if None not in sizes}
        samples, copies = self.hypotheses[0].samples, dict.fromkeys(free, "copies")
        if samples > 1 and {samples} in free.values():
            trial = {path: "its rows" if sizes == {samples} else "copies" for path, sizes in free.items()}
            if self._try(replacement, trial, original):
                return
        if free:
            self._try(replacement, copies, None)

    def _try(self, replacement: Arguments, trial: dict[str, str], original: Arguments | None) -> bool:
        """Runs the probe with other lookups, and goes on with what it has seen, if the model's output is the same; or given
        the original arguments, if it is for the samples that were kept, in the places that those have."""
        before, layouts = (self.tracker, self.probed), None
        outputs = self.probed[_MODEL].outputs
        try:
            if original is not None:
                self._run(original, {})
                layouts = _compare(outputs, self.probed[_MODEL].outputs, self.hypotheses[0])
            self._run(replacement, trial)
        except Exception:  # whatever the model's own code raises for a shape that it doesn't expect
            self.tracker, self.probed = before
            return False
        after, kept = self.probed[_MODEL].outputs, self.hypotheses[0].kept
        same = len(outputs) == len(after) and all(
            x.shape == y.shape and not differs(x, y).any()
            if layouts is None or (at := layouts[slot]) is None
            else x.shape == y.shape and not at.samples_first(differs(x, y), len(kept))[kept.to(x.device)].any()
            for slot, (x, y) in enumerate(zip(outputs, after))
        )
        if not same:
            self.tracker, self.probed = before
            return False
        self.lookups = trial
        return True

    def _run(self, arguments: Arguments, trial: dict[str, str]) -> None:
        args, kwargs = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, arguments, is_leaf=is_packed)
        carried = self.batch.carried(self.hypotheses)
        carrying = [leaf for leaf, at in zip(tree_leaves((args, kwargs), is_packed), carried) if at]
        by_rule = {path: {id(p) for p in covered(m).values()} for m, path in self.paths.items() if rule_for(m)}
        self.tracker = Tracker(self.model.parameters(), carrying, lambda path, p: p in by_rule.get(path, ()))
        self.probed, self._free = {}, {}
        state = random_state(devices_of(self.model))

        def begins(stack: Stack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
            self.tracker.stack = stack
            return _versions(module), [(x, version_of(x)) for x in tensors_of((args, kwargs))]

        def ended(stack: Stack, begun: Any, module: nn.Module, output: Any) -> Any:
            self.tracker.stack = stack[:-1]
            with _disable_current_modes():
                return self._note(stack[-1], begun, module, output, trial.get(stack[-1].path))

        with ExitStack() as contexts:
            for context in (Switch.paused_here(), untouched(self.model), with_random_state(state), _slow_paths()):
                contexts.enter_context(context)
            contexts.enter_context(torch.set_grad_enabled(self._with_gradients))
            contexts.enter_context(self._walking(begins, ended))
            contexts.enter_context(self.tracker)
            self.model(*args, **kwargs)

    def _note(self, frame: Frame, begun: Any, module: nn.Module, output: Any, trial: str | None) -> Any:
        """Notes a call of the probe.  Returns what its caller is to get, None for the output itself."""
        (buffers, arguments), outputs = begun, tensors_of(output)
        facts = [self.tracker.facts(x) for x in outputs]
        now = _versions(module)
        self.probed[frame] = Probed(
            outputs=[x.detach().clone() for x in outputs],
            inputs=[arguments[0][0].detach().clone()] if getattr(rule_for(module), "by_input", False) else [],
            from_batch=any(fact.from_batch for fact in facts) or not facts,
            routed=any(fact.routed for fact in facts),
            copies=any(version_of(x) != version for x, version in arguments),
            buffers=[name for name, version in buffers.items() if now.get(name) != version],
        )
        if rule_for(module) is not embedding:
            return None
        x = outputs[0]
        self._free.setdefault(frame.path, set()).add(None if self.probed[frame].from_batch else x.shape[0])
        if trial is None:
            return None
        samples, kept = self.hypotheses[0].samples, self.hypotheses[0].kept.to(x.device)
        if trial == "copies":
            x = for_each_sample(x, samples)
        else:  # other values for the samples that were not kept, of no pattern that what follows may be blind to
            noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
            x = torch.where(kept.view(-1, *[1] * (x.ndim - 1)), x, x + noise)
        self.tracker.mark(x)
        return x

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hooks all modules for the model's forward, which has begun."""
        self.recorder.survey = self
        self._wanted |= {frame for stacks in self.tracker.reads.values() for stack in stacks for frame in stack}

        def begins(stack: Stack, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Replay:
            known = self.probed.get(stack[-1])
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
        probed, outputs = self.probed.get(stack[-1]), tensors_of(output)
        has_rule = rule_for(module) is not None and module not in self._parts
        owned = {id(p) for p in covered(module).values()} if has_rule and outputs else set()
        seen = Seen(stack, module, probed, owned, [], [])
        for hypothesis in self.hypotheses:
            layouts = _compare([] if probed is None else probed.outputs, outputs, hypothesis)
            layouts = tuple(at if self._is_trusted(stack, probed, at) else None for at in layouts)
            placed = stack[-1].path in self.lookups
            if placed:
                layouts = (Layout(),)
            elif owned and probed is not None and probed.from_batch:
                axes = axes_for(module, outputs[0])
                told = tensors_of((begun.args, begun.kwargs)) if probed.inputs else outputs
                by_rule = _compare(probed.inputs or probed.outputs, told[:1], hypothesis, axes)
                if is_packed(output[0] if type(output) is tuple else output):
                    placed, layouts = True, (Layout(axes[0]),)  # the rule knows whose the rows are
                elif placed := self._is_trusted(stack, probed, by_rule[0]):
                    layouts = by_rule
            seen.layouts.append(layouts)
            seen.placed.append(placed)
        if owned and not all(seen.placed):
            self._wanted.update(stack)
        leaves = tree_leaves((begun.args, begun.kwargs), is_packed)
        seen.replayable = stack[-1] in self._wanted and all(isinstance(x, _PLAIN) or is_packed(x) for x in leaves)
        if seen.replayable:  # with no visit where checkpointing will make the call again, with gradients then
            output, seen.unit = self.recorder.visit_unit(begun, {}, output, is_first=True, layouts=seen.layouts[0])
        self.calls.append(seen)
        return output

    def _is_trusted(self, stack: Stack, probed: Probed | None, layout: Layout | None) -> bool:
        """Whether a layout that the values allow is no accident: rows that an operation has chosen by their values may be
        anyone's in the next forward."""
        if layout is None or probed is None or probed.routed:
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


def _compare(
    probed: Sequence[Tensor], outputs: Sequence[Tensor], hypothesis: Hypothesis, axes: Iterable[int] | None = None
) -> Layouts:
    if len(probed) < len(outputs):
        return (None,) * len(outputs)
    return tuple(
        find_layout(x.detach(), y, hypothesis.kept.to(x.device), range(x.ndim) if axes is None else axes)
        for x, y in zip(outputs, probed)
    )


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
