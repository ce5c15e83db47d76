"""What the traces of a model show of the operations at which parameters meet the batch: where the samples are there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autograd_hacks.probe.functions import SIZED, Following, Key, grown, only_axis
from autograd_hacks.probe.guard import comparable
from autograd_hacks.probe.layout import Fits, Layout
from autograd_hacks.probe.tracker import Frame, Stack, Tracker
from autograd_hacks.support.untouched import random_state


@dataclass(frozen=True)
class Known:
    """A tensor that follows from parameters alone."""

    names: frozenset[str]
    grew: tuple[Key, ...] = ()  # the calls on its way that have given it an axis of N entries
    saving: object = None  # what packed the tensors that autograd saves, as it was made


@dataclass(frozen=True)
class Met:
    """A call of a function in the batch's own trace that was given something which follows from parameters."""

    stack: Stack
    names: frozenset[str] = frozenset()
    values: Sequence[tuple[torch.Size, tuple[Key, ...]]] = ()  # the shape of each value, and where it has grown
    operands: Sequence[Fits | None] = ()  # the other tensors; None where one doesn't follow from the batch
    output: Fits | None = None  # where it met the batch; else it has made something new that follows from parameters alone
    routed: bool = False  # whether the rows were chosen by their values
    rounds: bool = False
    source: str | None = None  # the module by path from whose arguments it is known whose they are
    grew_to: Layout | None = None  # where it makes an axis for the samples itself
    axes: Sequence[int | None] = ()  # where it has been given that axis, in each other tensor
    draws: bool = False  # whether random numbers are drawn
    by_layer: bool = False  # whether it is a layer's own, which has a rule


@dataclass(frozen=True)
class Follow:
    """Which parameters a trace follows through torch's functions."""

    names: frozenset[str] = frozenset()
    forced: frozenset[Key] = frozenset()  # calls without a batch that are taken for meetings, since they make an axis for it
    unruled: frozenset[str] = frozenset()  # the layers by path whose rules can't tell the samples apart
    rows: frozenset[str] = frozenset()  # the modules by path in which it is followed whose each row is


@dataclass
class Meetings:
    """What all traces have shown of these calls."""

    follow: Follow
    wanted: Mapping[str, Tensor]  # the parameters that are followed, by name
    calls: dict[Key, Met] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)  # parameters that were used where no function of torch is seen: why
    carrying: dict[str, set[str]] = field(default_factory=dict)  # by source the modules by path in which rows were followed


def _saving() -> object:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else id(hooks[0])


class Watch(Following[Known]):
    """Watches the batch's own trace.

    by_rule: whether a rule covers the parameter of a name where the module at a path reads it
    """

    def __init__(self, found: Meetings, tracker: Tracker, samples: int, by_rule: Callable[[str, str], bool]) -> None:
        super().__init__({id(p): Known(frozenset([name])) for name, p in found.wanted.items()})
        self.found, self.tracker, self.samples, self.by_rule = found, tracker, samples, by_rule
        self.savings: dict[Frame, object] = {}
        self.sources: dict[int, str] = {}  # by the id of a tensor with labels
        self.is_seeing = False
        tracker.unseen = self.note_unseen

    def note_unseen(self, name: str) -> None:
        """Hears of a parameter that has met the batch."""
        if not self.is_seeing:  # in an operation that no function of torch was seen to run
            self._lose([name], "it is used inside compiled code, or in an autograd.Function")

    def _lose(self, names: Collection[str], why: str) -> None:
        for name in names:
            self.found.lost.setdefault(name, why)

    def begin(self, frame: Frame, inputs: Sequence[Tensor]) -> None:
        """Hears of a call that begins."""
        self.savings[frame] = _saving()
        for x in inputs if frame.path in self.found.follow.rows else ():
            # Rows that were chosen by their values may be anyone's in the next forward, but for samples beside other axes.
            is_own = not self.tracker.facts(x).routed or (x.ndim > 2 and len(x) == self.samples)
            if is_own and x.ndim and len(x) and len(x) % self.samples == 0 and id(x) not in self.rows:
                samples = torch.arange(self.samples, device=x.device)
                self.sources[id(x)] = frame.path
                super().label(x, samples.repeat_interleave(len(x) // self.samples))

    def _carry(self, func: Any, args: tuple[Any, ...], out: Any) -> None:
        origin = next((self.sources[id(x)] for x in args if id(x) in self.rows and id(x) in self.sources), None)
        super()._carry(func, args, out)
        labelled = [x for x in tree_leaves(out) if isinstance(x, Tensor) and id(x) in self.rows]
        if origin is not None and labelled:
            self.sources |= dict.fromkeys(map(id, labelled), origin)
            self.found.carrying.setdefault(origin, set()).add(self.tracker.stack[-1].path if self.tracker.stack else "")

    def make(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[Tensor], grew: tuple[Key, ...] = ()
    ) -> None:
        """grew: the calls on the way that have given it an axis of N entries, beside those of the values"""
        values = [self.values[id(x)] for x in self.known((args, kwargs))]
        names, before = frozenset().union(*(value.names for value in values)), [k for value in values for k in value.grew]
        for x in made:
            if id(x) not in self.values:
                self.know(x, Known(names, tuple(dict.fromkeys([*before, *grew])), _saving()))

    def meet(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        held, others = self.known((args, kwargs)), self.others((args, kwargs))
        values = [self.values[id(x)] for x in held]
        names = frozenset().union(*(value.names for value in values))
        facts = [self.tracker.facts(x) for x in others]
        follows = [fact.from_batch and name not in SIZED for fact in facts]
        frame = self.tracker.stack[-1] if self.tracker.stack else Frame("", 0)
        picks = name == "getitem" and args[0] is held[0] and all(x.numel() == 1 for x in others)
        meets = any(follows) and not picks
        key = self.count(frame, name)
        is_ruled = all(self.by_rule(frame.path, n) for n in names)
        if meets and is_ruled:
            self.found.calls[key] = Met(self.tracker.stack, names, by_layer=True)
            return func(*args, **kwargs)
        kept, state = [self.tracker.keep(x) for x in others] if meets else [], random_state({x.device for x in held})
        out = self.run(func, args, kwargs)
        draws = any(not torch.equal(state[name], now) for name, now in random_state({x.device for x in held}).items())
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
        if self._is_lost(name, meets, out, outs, names, values):
            return out
        if not any(x.requires_grad for x in outs):
            return out
        self._lose([n for fact in facts for n in fact.sources], "what was made of it is used past torch's functions")
        shapes = [(x.shape, value.grew) for x, value in zip(held, values)]
        if meets:
            fits = [Fits(x, self.samples) if own else None for x, own in zip(kept, follows)]
            routed, rounds = any(fact.routed for fact in facts), self.tracker.facts(outs[0]).rounds
            seen = Fits(self.tracker.keep(outs[0]), self.samples)
            source = next((self.sources.get(id(x)) for x in others if id(x) in self.rows), None)
            self.found.calls[key] = Met(
                self.tracker.stack, names, shapes, fits, seen, routed, rounds, draws=draws, source=source
            )
            return out
        grew_to = grown(name, held[0], others, outs[0], self.samples) if len(outs) == 1 else None
        is_own = key in self.found.follow.forced and grew_to is not None
        if is_own and is_ruled:
            self.found.calls[key] = Met(self.tracker.stack, names, by_layer=True)
        else:
            axes = [only_axis(x, self.samples) for x in others]
            self.found.calls[key] = Met(self.tracker.stack, names, shapes, grew_to=grew_to, axes=axes, draws=draws)
        if is_own:
            copy = outs[0].clone()
            self.tracker.mark(copy)
            return copy
        self.make(func, args, kwargs, outs, () if grew_to is None else (key,))
        return out

    def _is_lost(
        self, name: str, meets: bool, out: Any, outs: list[Tensor], names: frozenset[str], values: list[Known]
    ) -> bool:
        """Whether what a call does can't be followed, or needn't."""
        writes = name == "setitem" or name.endswith("_")
        if writes and not meets and torch.is_grad_enabled():
            self._lose(names, f"it is written into a tensor ({name})")
        elif meets and not torch.is_grad_enabled():
            self._lose(names, "it is used under no_grad, as in an autograd.Function")
        elif writes and meets and not outs:
            self._lose(names, f"it is written into a tensor ({name})")
        elif meets and not isinstance(out, Tensor):
            self._lose(names, f"{name} returns several tensors")
        elif meets and any(saving != _saving() for saving in self._savings(values)):
            self._lose(names, "checkpointing runs a part of the module that reads it")
        else:
            return False
        return True

    def _savings(self, values: list[Known]) -> list[object]:
        frame = self.tracker.stack[-1] if self.tracker.stack else Frame("", 0)
        derived = [value.saving for value in values if value.saving is not None]
        return [self.savings.get(frame, _saving()), *derived]

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.is_seeing = True
        try:
            return func(*args, **kwargs)
        finally:
            self.is_seeing = False


class Repeat(Following[None]):
    """Watches another trace, with samples replaced.

    frame: tells the call that runs    show: is shown what is known of a tensor of the batch's own trace, and what it is here
    """

    def __init__(self, found: Meetings, frame: Callable[[], Frame], show: Callable[[Fits, Tensor], None]) -> None:
        super().__init__(dict.fromkeys(map(id, found.wanted.values())))
        self.found, self.frame, self.show = found, frame, show

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Sequence[Tensor]) -> None:
        for x in made:
            self.know(x, None)

    def meet(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        others, key = self.others((args, kwargs)), self.count(self.frame(), name)
        met = self.found.calls.get(key)
        writes = met is not None and met.output is not None and name.endswith("_")
        before = [x.detach().clone() for x in others] if writes else others
        out = func(*args, **kwargs)
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())]
        if met is None or met.by_layer or not outs:
            return out
        if met.output is None:
            self.make(func, args, kwargs, [] if key in self.found.follow.forced else outs)
            return out
        if len(before) == len(met.operands):
            for fits, x in zip(met.operands, before):
                if fits is not None:
                    self.show(fits, comparable(x))
            self.show(met.output, comparable(outs[0]))
        return out
