"""Notes the operations at which values of parameters meet the batch, as a forward runs them.  No mathematics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from autograd_hacks.capture.by_copies import by_group, by_sample
from autograd_hacks.capture.by_operation import ByExpansion, ByOperation
from autograd_hacks.capture.derived import Entry
from autograd_hacks.capture.graph import Live
from autograd_hacks.capture.values import Step, Value, tensors_in
from autograd_hacks.probe.functions import Following, aligned
from autograd_hacks.probe.labels import GROUPED
from autograd_hacks.probe.layout import Layout, only_by_sizes
from autograd_hacks.probe.plan import BY_LAYER, DERIVATIVES, EXPANDED, HOOKS, RECORDED, ROWS, VALUE, VMAPPED, Plan, Read
from autograd_hacks.probe.tracker import Frame
from autograd_hacks.rules.operations import ADDED, ELEMENTWISE, LOOKUPS, NORMS, OPERATIONS
from autograd_hacks.support.trees import plain, version_of
from autograd_hacks.support.untouched import RandomState, random_state

_signature = cache(signature)


class Running(NamedTuple):
    """A module's call that runs."""

    frame: Frame
    module: nn.Module


class Notes(NamedTuple):
    """Where what is seen goes."""

    # note(running, way, operands, output, parameters, layout, off, entry, turns, live): returns what is to be used
    note: Callable[..., Tensor]
    lose: Callable[[Tensor, Mapping[str, Tensor]], Tensor]  # where it isn't known how a read is to be taken
    doubt: Callable[[set[str]], None]  # parameters whose calls may not be those that the plan knows
    is_off: Callable[[Sequence[Tensor]], bool]  # whether parameters go without ordinary gradients


class Reads(Following[Value]):
    """Is there while the modules run in whose own code parameters meet the batch past rules."""

    def __init__(self, plan: Plan, parameters: Mapping[str, Tensor], samples: int, notes: Notes) -> None:
        wanted = {name: p for name, p in parameters.items() if name in plan.reading.names}
        own = {id(p): Value(p.detach(), {name: p}, version=version_of(p)) for name, p in wanted.items()}
        super().__init__(own)
        self.plan, self.samples, self.notes = plan, samples, notes
        self.running: list[Running] = []
        # By call how many functions of it have run; None where others have than in the traces.
        self.places: dict[Frame, int | None] = {}
        self.is_paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def meet(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = self.running[-1]
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        names = frozenset(n for x in self.known((args, kwargs)) for n in self.values[id(x)].parameters)
        read, is_in_order = self._find(running.frame, name, names)
        if read is not None and read.kind == BY_LAYER:
            return func(*args, **kwargs)
        if read is not None and read.kind == VALUE:
            state = random_state({x.device for x in self.known((args, kwargs))}) if read.draws else {}
            out = func(*args, **kwargs)
            self.make(func, args, kwargs, tensors_in(out), state)
            return out
        parameters = self._parameters(args, kwargs)
        if not parameters:  # of none that trains
            return func(*args, **kwargs)
        if read is None:
            out = func(*args, **kwargs)
            if any(x.requires_grad for x in tensors_in(out)):
                self.places[running.frame] = None
            return self._lost(out, parameters)
        off, mode = self.notes.is_off(list(parameters.values())), self.plan.mode
        grows = not read.ndim and read.kind != ROWS  # it makes an axis for the samples itself, of values and constants
        is_product = name in ELEMENTWISE and not grows and read.kind != ROWS
        if is_in_order and (read.kind == EXPANDED or ((off or mode != HOOKS) and is_product)):
            return self._expand(func, args, kwargs, read, off)
        # What is linear in the value, and in nothing else that could be differentiated by, has no part in derivatives.
        is_lookup = name in LOOKUPS or (grows and read.kind == RECORDED)
        turns = self._turns(name, args, kwargs) if mode == DERIVATIVES or not self.samples else None
        if mode == HOOKS or is_lookup or turns is not None or not self.samples:
            return self._record(name, func, args, kwargs, read, off, is_in_order, turns or ())
        return self._by_sample(name, func, args, kwargs, read, off, is_in_order)

    def _turns(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[str] | None:
        """The parameters of the one value that a function multiplies its only other tensor by; None where it does something
        else, or adds them too."""
        if name not in ADDED or len(self.others((args, kwargs))) != 1:
            return None
        place, key = ADDED[name]
        added = [x for x in (*args[place : place + 1], kwargs.get(key)) if isinstance(x, Tensor)]
        known = [x for x in self.known((args, kwargs)) if not any(x is y for y in added)]
        factor, others = (self._parameters(tuple(values), {}) for values in (known, added))
        return list(factor) if len(known) == 1 and others.keys().isdisjoint(factor) else None

    def _find(self, frame: Frame, name: str, names: frozenset[str]) -> tuple[Read | None, bool]:
        """How a call is read: as it was traced, while calls come in that order; else as all that are alike.  And which."""
        reading, at = self.plan.reading, self.places.get(frame, 0)
        known = reading.in_order(frame.path, frame.call) if at is not None else ()
        if at is not None and at < len(known) and known[at][0] == name and known[at][1].names == names:
            self.places[frame] = at + 1
            return known[at][1], True
        if (read := reading.alike(frame.path, name, names)) is not None:
            self.places[frame] = None
        return read, False

    def end(self, frame: Frame) -> None:
        """A module's call has ended.  Where it has run other functions than were traced, those before may have been others,
        too, of which nothing but their order tells."""
        known, at = self.plan.reading.in_order(frame.path, frame.call), self.places.pop(frame, 0)
        if at == 0 or at == len(known):
            return
        meetings = [(name, read) for name, read in known[:at] if read.kind not in (VALUE, BY_LAYER)]
        reading = self.plan.reading
        self.notes.doubt({n for name, r in meetings if reading.alike(frame.path, name, r.names) is None for n in r.names})

    def _lost(self, out: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Has the gradient noticed that comes by what a call has returned, of which it isn't known where the samples are."""

        def lost(x: Any) -> Any:
            return self.notes.lose(x, parameters) if isinstance(x, Tensor) and x.requires_grad else x

        return tree_map(lost, out)

    def make(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Sequence[Tensor],
        state: RandomState | None = None,
    ) -> None:
        """Knows what was made of values alone.  state: of the generators before, where it has drawn from them"""
        step: Step | None = None
        for slot, x in enumerate(made):
            if id(x) not in self.values and (x.is_floating_point() or x.is_complex()):
                step = Step.of(func, args, kwargs, self.values, state or {}) if step is None else step
                parameters = {n: p for y in self.known((args, kwargs)) for n, p in self.values[id(y)].parameters.items()}
                self.know(x, Value(x.detach(), parameters, step, slot))

    def _parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """The parameters that train, of all values that a call is given."""
        found = [self.values[id(x)] for x in self.known((args, kwargs)) if x.requires_grad]
        return {name: p for value in found for name, p in value.parameters.items() if p.requires_grad}

    def _expand(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: Read, off: bool) -> Any:
        """Calls a function that broadcasts with a copy of each value for each sample."""
        layout = read.layout
        assert layout is not None
        everything = [*self.known((args, kwargs)), *(others := self.others((args, kwargs)))]
        sizes = [aligned(x.shape, read.ndim)[layout.axis] for x in everything if x.ndim <= read.ndim]
        size, is_right = self.samples if 0 in sizes else max(sizes), len(sizes) == len(everything)
        is_right &= size % max(1, self.samples) == 0 if layout.fold else size == self.samples
        is_right &= all(len(x.shape) == rank or not rank for x, rank in zip(others, read.ranks))

        def expanded(x: Any) -> Any:
            value = self.values.get(id(x)) if isinstance(x, Tensor) else None
            if value is None or not x.requires_grad:
                return x
            shape = aligned(x.shape, read.ndim)
            if not is_right or (shape[layout.axis] != 1 and self.samples != 1):
                return self.notes.lose(x, {name: p for name, p in value.parameters.items() if p.requires_grad})
            return self._copies(x, shape, layout, size, off)

        args, kwargs = tree_map(expanded, (args, kwargs))
        return func(*args, **kwargs)

    def _copies(self, x: Tensor, shape: tuple[int, ...], layout: Layout, size: int, off: bool) -> Tensor:
        """A copy of a value for each sample.  shape: the value's, with as many axes as the copies are to have"""
        value, sizes = self.values[id(x)], list(shape)
        sizes[layout.axis] = size
        trained = {name: p for name, p in value.parameters.items() if p.requires_grad}
        way = ByExpansion(value, layout, shape)
        return self.notes.note(self.running[-1], way, (), x.reshape(shape).expand(sizes), trained, layout, off)

    def _by_sample(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], read: Read, off: bool, is_in_order: bool
    ) -> Any:
        """Calls a function for each sample, or for each row that is one's, with copies of the values."""
        others, labels = self.others((args, kwargs)), self._labels(args, read)
        size, layout = (self.samples, read.layout) if labels is None else (len(labels), Layout())
        operands = read.operands if labels is None else [Layout() if Layout().fits(x, size) else None for x in others]
        is_right = all(at is None or at.fits(x, size) for at, x in zip(operands, others)) and layout is not None
        is_right &= labels is not None or (is_in_order and all(x.ndim == r or not r for x, r in zip(others, read.ranks)))
        if labels is None and not read.ndim:  # constants of whose axes none can be told for the samples'
            is_right &= all(at is not None or self.samples not in x.shape for at, x in zip(operands, others))
        if not size:
            return self._record(name, func, args, kwargs, read, off, is_in_order, ())
        if not is_right or layout is None:
            return self._lost(func(*args, **kwargs), self._parameters(args, kwargs))
        if name in NORMS and labels is None and type(func) is FunctionType:
            given = _signature(func).bind(*args, **kwargs).arguments
            out = func(**{key: x for key, x in given.items() if key not in ("weight", "bias")})
            for key, combine in (("weight", torch.mul), ("bias", torch.add)):
                if (x := given.get(key)) is not None:
                    shape = (*x.shape, *[1] * (out.ndim - 2)) if NORMS[name] else x.shape
                    wide, is_copied = aligned(shape, out.ndim), id(x) in self.values and x.requires_grad
                    axis = out.shape[layout.axis]
                    out = combine(out, self._copies(x, wide, layout, axis, off) if is_copied else x.view(wide))
            return out
        leaves = tree_leaves((args, kwargs))
        copies, places = {}, {}
        numbers = iter(operands)
        for n, x in enumerate(leaves):
            if isinstance(x, Tensor) and id(x) not in self.values:
                if (at := next(numbers, None)) is not None:
                    places[n] = at
            elif isinstance(x, Tensor) and x.requires_grad:
                own = self._copies(x, (1, *x.shape), Layout(), self.samples, off)
                copies[n] = own if labels is None else own[labels]
        if name in GROUPED and labels is not None:
            return by_group(leaves, copies)
        return by_sample(func, args, kwargs, copies, places, layout, size)

    def _labels(self, args: tuple[Any, ...], read: Read) -> Tensor | None:
        return next((self.rows[id(x)] for x in args if id(x) in self.rows), None) if read.kind == ROWS else None

    def _record(
        self,
        name: str,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        read: Read,
        off: bool,
        is_in_order: bool,
        turns: Sequence[str],
    ) -> Any:
        """Calls a function, and notes what it was given.  turns: the parameters that have rows in derivative passes, too"""
        parameters, layout = self._parameters(args, kwargs), read.layout
        labels, entry = self._labels(args, read), Entry() if turns else None
        if entry is not None:
            into = {id(x): entry.into(x) for x in self.others((args, kwargs))}
            args, kwargs = tree_map(lambda x: into.get(id(x), x) if isinstance(x, Tensor) else x, (args, kwargs))
        given = (args, kwargs)
        if off:
            given = tree_map(lambda x: x.detach() if isinstance(x, Tensor) and id(x) in self.values else x, given)
        out = func(*given[0], **given[1])
        others = self.others((args, kwargs))
        alike = isinstance(out, Tensor) and all(x.ndim == rank or not rank for x, rank in zip(others, read.ranks))
        if alike and layout is not None and not is_in_order:  # sizes may tell
            alike = read.kind != EXPANDED and only_by_sizes(out.shape, self.samples, range(out.ndim)) == layout
        elif alike and layout is not None:
            alike = (layout.fits(out, self.samples) or not self.samples) and out.ndim == (read.ndim or out.ndim)
        elif alike:
            alike = labels is not None and len(labels) == len(out)
        if alike and layout is not None and name in ELEMENTWISE and read.ndim and self.samples > 1:
            alike = all(aligned(x.shape, out.ndim)[layout.axis] == 1 for x in self.known((args, kwargs)))
        if not alike:
            return self._lost(out, parameters)
        if off and read.kind == VMAPPED:  # it may have saved its own output, which would count as overwritten
            out = out.clone()
        needs = name in OPERATIONS or name not in ELEMENTWISE or name == "mul"

        def keep(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return self.values[id(x)] if id(x) in self.values else plain(x) if needs else None

        kept, named = tree_map(keep, (args, kwargs))
        way = ByOperation(name, func, kept, named, read, labels)
        operands = [x for x in tree_leaves((kept, named)) if isinstance(x, Tensor)]
        live: Live = (tuple(self.others((args, kwargs))) if needs else (), {}) if self.plan.mode != HOOKS else None
        return self.notes.note(self.running[-1], way, operands, out, parameters, layout, off, entry, turns, live)
