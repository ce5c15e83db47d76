"""A trace: one forward of a model that leaves nothing behind but what each call returned, and where that comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from autograd_hacks.probe.batch import Batch
from autograd_hacks.probe.copies import PLAIN, Arguments, copies
from autograd_hacks.probe.guard import Kept, WriteGuard
from autograd_hacks.probe.layout import Fits, samples_of_rows
from autograd_hacks.probe.meetings import Follow, Meetings, Repeat, Watch
from autograd_hacks.probe.plan import DERIVATIVES, HOOKS
from autograd_hacks.probe.tracker import Frame, Stack, Tracker
from autograd_hacks.rules.table import covered, parts_of_composites, rule_for
from autograd_hacks.support.parts import cut_as, part_of
from autograd_hacks.support.restored import restored
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import is_packed, opened, tensors_of, version_of
from autograd_hacks.support.untouched import (
    cuda_devices_of,
    random_state,
    untouched,
    with_random_state,
)

See = Callable[[Frame, list[Tensor], list[Tensor]], None]
"""``see(frame, inputs, outputs)`` is shown a call that has ended."""

Show = Callable[[Fits, Tensor], None]
"""``show(fits, x)`` is shown what a tensor of the batch's own trace is in another."""


Noise = Mapping[str, Tensor]
"""Values by the name of a parameter, which has them in a trace."""


@dataclass(frozen=True)
class Traced:
    """A call of a module in a trace."""

    stack: Stack  # the calls around it, and itself
    module: nn.Module
    outputs: list[Tensor]  # as they were then
    inputs: list[Tensor]  # the first, for a rule that may go by it
    rows_of_packed: Tensor | None  # where the first output is a packed sequence, the sample of each row
    from_batch: bool  # whether the outputs follow from the samples
    routed: bool  # whether their rows do
    rounds: bool  # whether something before was routed, so that their rounding may follow from other samples
    changes_arguments: bool
    buffers: list[str]  # those that the call changed, by name
    has_plain_arguments: bool  # so that it can be run again


@dataclass(frozen=True)
class Trace:
    """What one forward has shown."""

    tracker: Tracker
    meetings: Meetings
    calls: dict[Frame, Traced] = field(default_factory=dict)  # in the order in which they ended

    def output_size(self) -> int:
        """How many entries axis 0 of the model's output has."""
        return next((len(x) for x in self.calls[Frame("", 0)].outputs if x.ndim), 1)


class Tracer:
    """Traces a model: with gradients, as the forward runs that follows, for it may do something else without them."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.model, self.mode = model, mode
        self.paths = {module: path for path, module in model.named_modules() if _takes_hooks(path, module)}
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.owned = {path: {self.names[p] for p in covered(m).values()} for m, path in self.paths.items() if rule_for(m)}
        trained = {name for p, name in self.names.items() if p.requires_grad}
        self.trained, ruled = frozenset(trained), {name for names in self.owned.values() for name in names}
        past = [path for m, path in self.paths.items() if path in self.owned and not _goes_by_rule(m, mode)]
        # Parameters that no rule covers are followed from the beginning, and those of layers that don't go by theirs.
        names = {name for path in past for name in self.owned[path]} & trained | (self.trained - ruled)
        self.first = Follow(frozenset(names), unruled=frozenset(past))
        self.parts = {self.paths[part] for part in parts_of_composites(model) if part in self.paths}
        self._state = random_state(cuda_devices_of(model))
        self._kept: Kept = {}
        self._differentiates: bool | None = None  # whether the forward runs backward passes; None until one was traced

    def trace(
        self,
        arguments: Arguments,
        batch: Batch,
        axis: int | None,
        samples: int,
        follow: Follow,
        noise: Noise | None = None,
    ) -> Trace:
        """Runs the model on copies of arguments, and follows all values.

        batch, axis, samples: where samples are in arguments of this tree    follow: see there
        """
        args, kwargs = copies(arguments)
        leaves = tree_leaves(opened((args, kwargs)), is_packed)
        having = [leaf for leaf, at in zip(leaves, batch.carried(axis, samples)) if at is not None]
        carrying = [leaf.data if is_packed(leaf) else leaf for leaf in having]

        def by_rule(path: str, name: str) -> bool:
            return path not in follow.unruled and name in self.owned.get(path, ())

        with self._with(noise):
            parameters = {name: p for p, name in self.names.items()}
            tracker = Tracker(parameters, carrying, by_rule, self._kept)
            found = Trace(tracker, Meetings(follow, {name: parameters[name] for name in follow.names}))
            watch = Watch(found.meetings, tracker, samples, by_rule)
            if any(map(is_packed, leaves)):  # how many rows each sample has is the batch's own
                tracker.counting.add(Frame("", 0))

            def begins(stack: Stack, module: nn.Module, args: Any, kwargs: Any) -> Any:
                tracker.stack = stack
                watch.begin(stack[-1], tensors_of((args, kwargs)))
                plain = all(isinstance(x, PLAIN) or is_packed(x) for x in tree_leaves(opened((args, kwargs)), is_packed))
                return _versions(module), [(x, version_of(x)) for x in tensors_of((args, kwargs))], plain

            def ended(stack: Stack, begun: Any, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                tracker.stack = stack[:-1]
                found.calls[stack[-1]] = self._note(stack, begun, module, output, tracker, follow)

            self._run((args, kwargs), tracker, watch, begins, ended)
        self._differentiates = bool(self._differentiates)
        return found

    def show(self, arguments: Arguments, whole: Trace, see: See, show: Show, noise: Noise | None = None) -> None:
        """Runs the model on copies of arguments, and shows each call to a callable, and what is at `Meetings` to another;
        faster than `trace`.

        whole: the batch's own
        """
        running: list[Stack] = [(Frame("", 0),)]

        def begins(stack: Stack, module: nn.Module, args: Any, kwargs: Any) -> list[Tensor]:
            running.append(stack)
            seen = self._seen_inputs(stack[-1].path, module, whole.meetings.follow)
            return [part_of(x) for x in tensors_of((args, kwargs))] if seen != 0 else []

        def ended(stack: Stack, begun: Any, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            running.append(stack[:-1] or stack)
            see(stack[-1], begun, [part_of(x) for x in tensors_of(output)])

        with self._with(noise):
            guard = WriteGuard({name: p for p, name in self.names.items()}, self._kept)
            repeat = Repeat(whole.meetings, lambda: running[-1][-1], show)
            self._run(copies(arguments), guard, repeat, begins, ended)

    def _run(
        self,
        arguments: Arguments,
        guard: WriteGuard,
        mode: Watch | Repeat,
        begins: Callable[..., Any],
        ended: Callable[..., None],
    ) -> None:
        args, kwargs = arguments
        with (
            Switch.paused_here(),
            untouched(self.model),
            with_random_state(self._state),
            torch.enable_grad(),
            # Checkpointing around the model counts what is saved; a tensor itself would keep the node alive that made it.
            torch.autograd.graph.saved_tensors_hooks(self._save, self._saved),
            self._walking(mode, begins, ended),
            guard.protecting(),
            mode if mode.values else nullcontext(),
        ):
            # Else frozen layers take fused ways, in which their children aren't called; `untouched` switches back.
            torch.backends.mha.set_fastpath_enabled(False)
            self.model(*args, **kwargs)

    def _save(self, x: Tensor) -> Tensor | None:
        """What a trace keeps of a tensor for a backward pass: nothing, unless the model runs one inside its forward."""
        return x.detach() if self._differentiates is not False else None

    def _saved(self, x: Tensor | None) -> Tensor:
        self._differentiates = True
        if x is None:
            raise RuntimeError("the model differentiates in its forward, and did not when all samples were its own")
        return x

    @contextmanager
    def _with(self, noise: Noise | None) -> Iterator[None]:
        """A context in which some parameters have other values."""
        others = {p: noise[name] for p, name in self.names.items() if noise and name in noise}
        kept = {p: part_of(p).data for p in others}

        def undo() -> None:
            for p, data in kept.items():
                part_of(p).data = data

        with restored(undo):
            for p, other in others.items():
                part_of(p).data = part_of(cut_as(other, p))
            yield

    def _note(self, stack: Stack, begun: Any, module: nn.Module, output: Any, tracker: Tracker, follow: Follow) -> Traced:
        (buffers, arguments, plain), outputs = begun, [part_of(x) for x in tensors_of(output)]
        facts = [tracker.facts(x) for x in outputs]
        now, first = _versions(module), output[0] if type(output) is tuple and output else output
        return Traced(
            stack=stack,
            module=module,
            outputs=[tracker.keep(x) for x in outputs],
            inputs=[tracker.keep(x) for x, _ in arguments[: self._seen_inputs(stack[-1].path, module, follow)]],
            rows_of_packed=samples_of_rows(first) if is_packed(first) else None,
            from_batch=any(fact.from_batch for fact in facts) or not facts,
            routed=any(fact.routed for fact in facts),
            rounds=any(fact.rounds for fact in facts),
            changes_arguments=any(version_of(x) != version for x, version in arguments),
            buffers=[name for name, version in buffers.items() if now.get(name) != version],
            has_plain_arguments=plain and all(x.layout == torch.strided for x in outputs),
        )

    def _seen_inputs(self, path: str, module: nn.Module, follow: Follow) -> int | None:
        """How many of a call's first inputs are compared; None for all."""
        return None if path in follow.rows or self.mode != HOOKS else int(_goes_by_input(module))

    @contextmanager
    def _walking(self, mode: Watch | Repeat, begins: Callable[..., Any], ended: Callable[..., Any]) -> Iterator[None]:
        """Hooks that note each call; first in line, to see what a module itself was given and returned.

        begins: gets the calls that run, the module and its arguments    ended: gets what that said too, and the output
        """
        counts: dict[str, int] = {}
        frames: list[tuple[Frame, Any]] = []

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            path = self.paths[module]
            counts[path] = counts.get(path, -1) + 1
            stack = (*(frame for frame, _ in frames), Frame(path, counts[path]))
            with mode.aside():
                frames.append((stack[-1], begins(stack, module, args, kwargs)))

        def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            path = self.paths[module]
            while frames[-1][0].path != path:
                frames.pop()  # a call that has ended with an exception
            stack = tuple(frame for frame, _ in frames)
            begun = frames.pop()[1]
            with _disable_current_modes(), mode.aside():
                ended(stack, begun, module, args, kwargs, output)

        for module in self.paths:  # `untouched` takes them off
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            module.register_forward_hook(after, with_kwargs=True, prepend=True)
        yield


def _versions(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Each buffer's identity and version, by name."""
    return {name: (id(buffer), version_of(buffer)) for name, buffer in module.named_buffers()}


def _goes_by_rule(layer: nn.Module, mode: str) -> bool:
    """Whether a layer's rule gives the rows of its parameters in a mode."""
    rule = rule_for(layer)
    return rule is not None and (mode == HOOKS or (mode == DERIVATIVES and rule.linear_in is not None))


def _goes_by_input(module: nn.Module) -> bool:
    """Whether the samples' place in a layer's output may follow from its input."""
    rule = rule_for(module)
    return rule is not None and (rule.by_input or rule.features is not None)


def _takes_hooks(path: str, module: nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)
