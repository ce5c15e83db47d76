"""What the hooks on layers note of their calls.  No mathematics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from autograd_hacks.capture.by_copies import check_alike, module_by_sample
from autograd_hacks.capture.by_operation import ByExpansion
from autograd_hacks.capture.by_part import BY_PART, check_cut, check_plan
from autograd_hacks.capture.calls import Way
from autograd_hacks.capture.derived import Entry, turning
from autograd_hacks.capture.graph import Live, anchored, attach, attach_copies, hear_at
from autograd_hacks.capture.inner_maps import InnerMaps, has_inner_maps
from autograd_hacks.capture.noting import Noting
from autograd_hacks.capture.reads import Notes, Reads, Running
from autograd_hacks.capture.replay import ByRunningAgain
from autograd_hacks.capture.values import Value
from autograd_hacks.capture.ways import BY_RULE, ByInner
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import HOOKS, UNKNOWN
from autograd_hacks.probe.tracker import Frame
from autograd_hacks.rules.attention import count_queries
from autograd_hacks.rules.table import covered, rule_for
from autograd_hacks.support.parts import has_parts, is_part, part_of
from autograd_hacks.support.switch import NO_TASK, current_task
from autograd_hacks.support.trees import map_tensors, parameter_at, plain, tensors_of, version_of
from autograd_hacks.support.untouched import autocast_dtype, cuda_devices_of, random_state


class Forward(Noting):
    """The running forward of a hooked model, call by call."""

    def begin_layer(self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer with a rule begins that has dropout or inner maps, whose parameters may be switched off, or which is to
        have calls of derivative passes.  Returns what it is to be given in the place of its arguments, or None."""
        if not self.records():
            return None
        rule = rule_for(layer)
        if rule is not None and rule.recomputes and layer.training and getattr(layer, "dropout", None):
            self._random_states[layer] = random_state(cuda_devices_of(layer))
        plan = self.record.plan if self.is_running or current_task() != NO_TASK else self.static
        if path in plan.unplaced:
            return None
        may_skip = self.param_grad.skips and (self.is_running or current_task() != NO_TASK)
        if self.samples != 0 and has_inner_maps(layer, args, kwargs):
            self._begin_maps(path, layer, args, kwargs, may_skip)
        elif may_skip:
            again = self.units.names_at(path, plan) | self.param_grad.awaited
            own = [p for p in covered(layer).values() if self.record.names.get(p) not in again]
            own = [p for p in own if self.param_grad.may_skip(p)]
            self.param_grad.switch_off(layer, own, swaps=plan.mode != HOOKS)
        if plan.mode != HOOKS and rule is not None and rule.linear_in:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if len(given) == 1 and given[0].requires_grad:
                self._entries[layer] = _, alias = (made := Entry()), made.into(given[0])
                named = {name: alias if x is given[0] else x for name, x in kwargs.items()}
                return tuple([alias if x is given[0] else x for x in args]), named
        return None

    def _begin_maps(
        self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], may_skip: bool
    ) -> None:
        """An attention layer begins, whose maps are to be noted."""
        self._locate(path, layer)
        again, named = self.units.names_at(path, self.record.plan), covered(layer).items()
        names = {local: name for local, p in named if (name := self.record.name_of(p, path, local)) not in again}
        # Where the samples are in its output, whose first axes are the query's.
        query, number = args[0] if args else kwargs["query"], self._count(path, ends=False)
        layouts = self.record.plan.layouts_of(path, number, layer, [query], self.samples)
        if layouts and layouts[0] is None:
            self.record.plan.refused |= dict.fromkeys(names.values(), UNKNOWN)
            return

        def note(running: Running, way: Way, *of_read: Any) -> Tensor:
            return self._note_read(running, ByInner(way, count, layouts[0] if layouts else None), *of_read)

        count, mode = count_queries(layer, args, kwargs), self.record.plan.mode
        notes = Notes(note, self._lose_read, self._doubt, lambda parameters: may_skip and self._is_off(parameters))
        parameters = {names[local]: p for local, p in named if local in names}
        maps = InnerMaps(path, layer, parameters, count, notes, mode)
        self.maps[layer] = maps  # first, for what an interrupt may leave
        maps.__enter__()

    def end_layer(
        self, path: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_first: bool
    ) -> Any:
        """A layer with a rule has run.  Returns what its caller is to get.  output: None where it has failed"""
        off, entry = self.param_grad.end_layer(layer), self._entries.pop(layer, None) if self._entries else None
        inside = self.leave_maps(layer)
        if inside is not None:
            self.reads.resume()
        if output is None:
            return None
        if inside is not None and inside.noted:
            self._count(path)
            return output
        noted = self._note(path, layer, args, kwargs, output, is_first, off, entry)
        if noted is None and off:  # which would leave its gradients unnoticed
            lost = partial(self.backward.note_lost, [self.record.name_of(p, path, "") for p in off])
            return map_tensors(lambda x: anchored(x, lost, off) if x.is_floating_point() else x, output)
        return output if noted is None else noted

    def _note(
        self,
        path: str,
        layer: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
        is_first: bool,
        off: Sequence[Tensor],
        entry: tuple[Entry, Tensor] | None,
    ) -> Any:
        """The output, or None where the call is not to be noted.

        off: the parameters that were switched off    entry: of the call, and what it was to be given
        """
        drew = self._random_states.pop(layer, None) if len(self._random_states) else None
        if not self._is_on():
            return None
        self._locate(path, layer)
        plan, number, rule = self.record.plan, self._count(path), rule_for(layer)
        # 1. Is there something to note: parameters whose rows no module around gives, and a graph that leads to them?
        outputs, owned = tensors_of(output), covered(layer)
        if not (rule and (off or [x for x in outputs if x.grad_fn is not None]) and torch.is_grad_enabled()):
            return None
        edges = self._edges(path, owned, self.units.names_at(path, plan))
        # 2. Without an axis of samples it is not noted; its gradients are, when they arrive unseen.
        if not edges or path in plan.unplaced or any(x.is_nested for x in outputs):
            return None
        # 3. The plan says where the samples are; of a call that it doesn't know, sizes may tell.
        layouts = plan.layouts_of(path, number, layer, [part_of(x) for x in outputs], self.samples)
        if is_cut := any(map(is_part, owned.values())):
            check_cut(path, layer, rule, owned, outputs, layouts[0] if layouts else None)
        if layouts and layouts[0] is None:
            plan.refused |= dict.fromkeys((edge.name for edge in edges.values()), UNKNOWN)
            return None
        # 4. The record, with what its rule will have to read as it was; and hooks in the graph.
        live = (args, kwargs) if plan.mode != HOOKS else None
        turns = {} if plan.mode == HOOKS else turning(rule.linear_in, edges, tensors_of((args, kwargs)), entry)
        args, kwargs = map_tensors(plain, args), map_tensors(plain, kwargs) if kwargs else {}
        call, graph = self._call(
            path,
            layer,
            args,
            kwargs,
            outputs,
            edges,
            rule.recomputes,
            state={name: (x, version_of(x)) for name, x in (*owned.items(), *layer._buffers.items()) if x is not None},
            random_state=drew,
            way=BY_PART if is_cut else BY_RULE,
            layouts=layouts,
            skipped=self._names(off),
            is_first=is_first,
            **turns,
        )
        return attach(call, graph, output, self.backward.receive, rule.recomputes, off, live)

    def begin_reads(self, model: nn.Module) -> None:
        """The forward of the plan that is known now begins, or checkpointing runs a part of it again."""
        plan, self._model = self.record.plan, model
        check_plan(self.record.parameters_of(model) if has_parts(model) else {}, plan)
        if plan.reading.names and self.samples is not None and self.records():
            named, notes = (
                self.record.parameters_of(model),
                Notes(self._note_read, self._lose_read, self._doubt, self._is_off),
            )
            self.reads.begin(Reads(plan, named, self.samples, notes))

    def begin_frame(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins in whose own code, or around which, parameters may meet the batch past rules."""
        again = current_task() != NO_TASK
        if self._is_on() and again and self.reads.reads is None:
            self._locate(path, module)
            self.begin_reads(self._model)
        if self._is_on():
            self.reads.enter(path, module, again, (args, kwargs))

    def end_frame(self, path: str, module: nn.Module, args: object, kwargs: object, output: Any, is_first: bool) -> None:
        self.reads.leave(path)

    def _is_off(self, parameters: Sequence[Tensor]) -> bool:
        off, names = self.param_grad, [self.record.names.get(p) for p in parameters]
        return off.skips and off.awaited.isdisjoint(names) and all(map(off.may_skip, parameters))

    def _note_read(
        self,
        running: Running,
        way: Way,
        operands: Sequence[Tensor],
        output: Tensor,
        parameters: Mapping[str, Tensor],
        layout: Layout | None,
        off: bool,
        entry: Entry | None = None,
        turns: Sequence[str] = (),
        live: Live = None,
    ) -> Tensor:
        """Notes an operation at which parameters meet the batch.  Returns its output.

        entry, turns: see `RecordedCall`    live: the operands in their graph
        """
        if not off and output.grad_fn is None:
            return output
        path, module, args, layouts = running.frame.path, running.module, tuple(operands), (layout,)
        edges = self._edges("", parameters)
        fields: dict[str, Any] = {"way": way, "layouts": layouts, "entry": entry, "turns": turns}
        fields["is_lost"] = self.record.plan.mode == HOOKS
        fields["skipped"] = frozenset(edge.name for edge in edges.values()) if off else frozenset()
        call, graph = self._call(path, module, args, {}, [output], edges, **fields)
        switched = list(parameters.values()) if off else []
        if isinstance(way, ByExpansion):
            return attach_copies(call, graph, output, self.backward.receive, switched)
        noted: Tensor = attach(call, graph, output, self.backward.receive, False, switched, live)
        return noted

    def _doubt(self, names: set[str]) -> None:
        plan = self.record.plan
        plan.incomplete |= bool(names)
        plan.refused |= dict.fromkeys(names, UNKNOWN)
        self.record.unseen |= dict.fromkeys(names, self.record.forwards)

    def _lose_read(self, output: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        """Has gradient that comes by an operation noticed, of which it isn't known where the samples are."""
        plan = self.record.plan
        plan.incomplete, plan.refused = True, plan.refused | dict.fromkeys(parameters, UNKNOWN)
        return hear_at(output, partial(self.backward.note_lost, [self.record.name_of(p) for p in parameters.values()]))

    def begin_unit(self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps what it takes to run a module again, where the forward's plan says so."""
        if self.records():
            self._locate(path, module)
            if (unit := self.record.plan.units.get(path)) is not None:
                self.units.open.append(ByRunningAgain.of(path, module, unit, args, kwargs))

    def _by_sample(
        self, begun: ByRunningAgain, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """What a module returns that has run for the batch, for each sample with copies of its parameters."""
        path, samples, seen = begun.path, self.samples or 0, tensors_of(output)
        number, running = self._count(path), Running(Frame(path, 0), module)
        trained = {local: p for local, p in module.named_parameters() if p.requires_grad}

        def copies(p: Tensor) -> Tensor:
            name, off, wide = self.record.name_of(p), self._is_off([p]), p.expand(samples, *p.shape)
            way = ByExpansion(Value(p.detach(), {name: p}, version=version_of(p)), Layout(), (1, *p.shape))
            return self._note_read(running, way, (), wide, {name: p}, Layout(), off)

        places = begun.unit.places_of(number, tensors_of((args, kwargs)), samples)
        layouts = begun.unit.layouts_of(number, seen, samples)
        drew = any(not torch.equal(begun.random_state[d], s) for d, s in random_state(cuda_devices_of(module)).items())
        own = {local: copies(p) for local, p in trained.items()}
        found = module_by_sample(module, (args, kwargs), own, places, layouts, samples)
        # Where it draws random numbers its samples may differ, but not what belongs to none of them.
        fixed = [not drew or at is None for at in layouts]
        check_alike(path, module, seen, found, fixed, autocast_dtype(seen[0].device))
        made = iter(found)
        return map_tensors(lambda _: next(made), output)

    def end_unit(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, is_first: bool
    ) -> Any:
        """Notes a call that `begin_unit` has kept.  Returns the output."""
        begun = self.units.end(path) if self.records() else None
        if begun is None:
            return output
        if self.record.plan.mode != HOOKS and self.samples:
            return output if self.units.open else self._by_sample(begun, module, args, kwargs, output)
        outer = self.units.names()
        own = {local: parameter_at(module, local) for local, name in begun.unit.parameters.items() if name not in outer}
        outputs = tensors_of(output)
        layouts = begun.unit.layouts_of(self._count(path), outputs, self.samples)
        if not any(x.grad_fn is not None for x in outputs):
            return output
        changed = {id(module.get_buffer(name)) for name in begun.unit.buffers}
        seen = ((name, self.record.seen(p)) for name, p in module.named_parameters())
        everything = (*seen, *module.named_buffers())
        call, graph = self._call(
            path,
            module,
            begun.args,
            begun.kwargs,
            outputs,
            self._edges(path, {local: p for local, p in own.items() if p is not None}),
            is_compared=True,
            state={name: (x, version_of(x)) for name, x in everything if id(x) not in changed},
            way=begun,
            layouts=layouts,
            is_first=is_first,
        )
        return attach(call, graph, output, self.backward.receive, is_compared=True)
