"""Runs a module's call again, for the rows of parameters that neither a rule nor an operation gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call

from autograd_hacks.capture.calls import OutputGrads, RecordedCall
from autograd_hacks.errors import SamplesMixed, StaleRecord, where
from autograd_hacks.forms import Form, Replay
from autograd_hacks.probe.batch import Batch, kept_samples
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import Plan, Unit
from autograd_hacks.rules.recompute import is_recomputed
from autograd_hacks.support.stores import hooks_kept
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import cloned, like_its_kind, map_tensors, parameter_at, tensors_of, version_of
from autograd_hacks.support.untouched import (
    RandomState,
    autocast_to,
    cuda_devices_of,
    random_state,
    untouched,
    with_random_state,
)

Values = dict[str, Tensor]
"""Tensors by a parameter's name in the module."""


@dataclass(frozen=True)
class ByRunningAgain:
    """The way to rows by running the module's call again, and what that takes, as the call begins."""

    path: str
    unit: Unit
    args: tuple[Any, ...]  # copies, where the call changes its arguments
    kwargs: dict[str, Any]
    random_state: RandomState
    modes: tuple[bool, ...]  # the training flag of each module inside
    buffers: Values  # those that the call changes
    generators: list[tuple[torch.Generator, Tensor]]  # the module's own, and their states

    @staticmethod
    def of(path: str, module: nn.Module, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ByRunningAgain:
        def keep(x: Tensor) -> Tensor:  # outside the graph, and a module may ask for gradients of its input as before
            return like_its_kind(x, x.detach().clone() if unit.copies else x.detach()).requires_grad_(x.requires_grad)

        own = [x for part in module.modules() for x in vars(part).values() if isinstance(x, torch.Generator)]
        return ByRunningAgain(
            path=path,
            unit=unit,
            args=map_tensors(keep, args),
            kwargs=map_tensors(keep, kwargs),
            random_state=random_state(cuda_devices_of(module)),
            modes=tuple(part.training for part in module.modules()),
            buffers={name: module.get_buffer(name).detach().clone() for name in unit.buffers},
            generators=[(generator, generator.get_state()) for generator in own],
        )

    def rows(self, call: RecordedCall, grads: OutputGrads) -> int:
        return grads.first.shape[0] if grads.first.ndim else 1

    def with_input(self, call: RecordedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall:
        return call

    def forms(self, call: RecordedCall, grads: OutputGrads) -> Mapping[str, Form]:
        source = Rerun(call, self, grads)
        edges = {local: call.edges[local] for local in grads.reached}
        return {n: Replay(source, n, source.samples, e.parameter.shape, e.parameter.detach()) for n, e in edges.items()}


class OpenUnits:
    """The calls of a forward that have begun, one inside the other."""

    def __init__(self) -> None:
        self.open: list[ByRunningAgain] = []  # the outermost first

    def end(self, path: str) -> ByRunningAgain | None:
        """The innermost call, if it is of the module at a path: it has ended."""
        return self.open.pop() if self.open and self.open[-1].path == path else None

    def around(self, path: str) -> bool:
        """Whether a module at a path is called inside an open call, and that is not what a call has left that failed."""
        return any(path.startswith(f"{begun.path}.") for begun in self.open)

    def names(self) -> set[str]:
        """The parameters whose rows an open call gives."""
        return {name for begun in self.open for name in begun.unit.parameters.values()}

    def names_at(self, path: str, plan: Plan) -> set[str]:
        """The parameters whose rows the module at a path gives, or one around it, run again."""
        own = plan.units[path].parameters.values() if path in plan.units else ()
        return {*self.names(), *own} if self.open or own else set()


class Rerun:
    """One call of a module and the gradients that a pass brought to its outputs, N samples of them: one forward of the whole
    batch, whose outputs must be those of the call, and a backward pass from each sample's part of the gradients."""

    def __init__(self, call: RecordedCall, way: ByRunningAgain, grads: OutputGrads) -> None:
        self.call, self.way, self.samples = call, way, call.batch_size(grads)
        self.place, self.names = where(call.path, call.layer), ", ".join(call.edges)
        layouts = call.layouts or (Layout(),) * call.slots
        self.reached: list[tuple[int, Tensor, Layout]] = []  # outputs by number, the gradients there, and samples in these
        for slot, (grad, layout) in enumerate(zip(grads.at, layouts)):
            if grad is not None and (layout is None or not layout.fits(grad, self.samples)):
                raise SamplesMixed(
                    f"{self.place} must be run again for {self.names}, but the loss came by its output number {slot}, of "
                    f"shape {tuple(grad.shape)}, in which samples have no places of their own. If that is the batch's loss, "
                    "compute it outside the model, from the other outputs."
                )
            if grad is not None and layout is not None:
                self.reached.append((slot, grad, layout))
        self._rows: Values = {}  # of some samples, by the parameter's name
        self._at: list[int] | None = None  # which samples; None: all of them
        self._sums: tuple[Tensor, Values] | None = None  # weights, and what is left of the sums with them
        self._is_apart = call.samples is not None  # whether it is known that samples don't mix, as the probe has seen

    @property
    def row_size(self) -> int:
        return sum(edge.parameter.numel() for edge in self.call.edges.values())

    def prepare(self, index: Tensor | None = None) -> None:
        at = None if index is None else index.tolist()
        if not self._rows or self._at != at:
            self._rows, one = {}, torch.eye(self.samples, device=self.reached[0][1].device)
            self._rows, self._at = self._sums_with(one if index is None else one[index]), at

    def forget(self) -> None:
        self._rows, self._sums = {}, None

    def rows(self, name: str, index: Tensor | None, keep: bool) -> Tensor:
        if name not in self._rows:
            self._rows = {}
        self.prepare(index)
        return self._rows[name] if keep else self._rows.pop(name)  # so that no second copy lives longer than it must

    def weighted_sum(self, name: str, w: Tensor) -> Tensor:
        if name in self._rows and self._at is None:
            return torch.tensordot(w.to(self._rows[name].dtype), self._rows[name], 1)
        if self._sums is None or name not in self._sums[1] or not torch.equal(self._sums[0], w):
            self._sums = w, self._sums_with(w[None])
        return self._sums[1].pop(name)[0]

    def _sums_with(self, weights: Tensor) -> Values:
        """Weighted sums of rows.  weights: K N.  Returns ``(K, *shape)`` for each parameter."""
        self._check_unchanged()
        own = {local: edge.parameter.detach().requires_grad_() for local, edge in self.call.edges.items()}
        found = {name: p.new_zeros(len(weights), *p.shape) for name, p in own.items()}
        if self.reached[0][1].is_meta:
            return found
        with hooks_kept(self.call.layer):  # also while gradients run back
            if not self._is_apart:
                self._check_apart(own)
            outputs = self._run(own, self.call.args, self.call.kwargs)
            for (slot, _, _), out in zip(self.reached, outputs):
                if not self._is_as_it_was(self.call.outputs[slot], out):
                    raise StaleRecord(
                        f"{self.place} was run again for the rows of {self.names}, and its output number {slot} came out "
                        "different. Something that it depends on has changed since: weights (read per-sample gradients "
                        "before the update), a state of its own that is no buffer, or random numbers that don't come from "
                        "torch."
                    )
            roots = [(out, g, at) for out, (_, g, at) in zip(outputs, self.reached) if out.requires_grad]
            if not roots:
                raise StaleRecord(f"{self.place} was run again and returned nothing that leads to {self.names}, as it did")
            for k, w in enumerate(weights):
                given = [g * at.over(g, w.to(g.dtype)) for _, g, at in roots]
                ends = [out for out, _, _ in roots], list(own.values())
                with Switch.paused_here():  # checkpointing inside runs modules once more
                    rows = torch.autograd.grad(*ends, given, retain_graph=True, allow_unused=True)
                for total, row in zip(found.values(), rows):
                    if row is not None:
                        total[k] = row.to_dense()
        return found

    def _check_apart(self, own: Values) -> None:
        """Raises SamplesMixed where samples come out different with others replaced, in a call that no probe has seen, whose
        samples are on axis 0.  own: the parameters"""
        batch, draws = Batch.of(self.call.args, dict(self.call.kwargs), 0), torch.Generator().manual_seed(self.samples)
        self._is_apart = any(at is not None for at in batch.carried(0, self.samples)) or self.samples < 2
        why = "have they no axis 0 in its arguments?"
        for turn, kept in enumerate(kept_samples(self.samples, draws) if self.samples > 1 else ()):
            if self._is_apart and (other := batch.replaced(0, kept, turn)) is not None:
                why = "some came out different when others were replaced."
                try:
                    outputs = self._run(own, *other)
                    for (slot, _, at), out in zip(self.reached, outputs):
                        seen, new = (at.samples_first(x, self.samples)[kept] for x in (self.call.outputs[slot], out))
                        self._is_apart &= self._is_as_it_was(seen, new)
                except Exception as error:  # whatever the module's own code raises
                    self._is_apart, why = False, f"it failed when some were replaced by others: {error}"
        if not self._is_apart:
            raise SamplesMixed(
                f"samples mix in {self.place}, or seem to, which was run again for {self.names}: {why} It was called by "
                "itself, or without a probe, so that axis 0 is the batch. Call the whole model, with a probe."
            )

    def _is_as_it_was(self, seen: Tensor, out: Tensor) -> bool:
        return seen.shape == out.shape and is_recomputed(seen, out, self.call.precision)

    def _run(self, parameters: Values, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The outputs that the loss reached."""
        module = self.call.layer
        # What every slot of every module is to hold.  torch's own care for the names of one parameter, tie_weights, leaves a
        # module that has two names with the tensors of the call.
        values = {id(p): p.detach() for p in module.parameters()}
        values |= {id(parameter_at(module, name)): value for name, value in parameters.items()}
        values |= {id(module.get_buffer(name)): buffer.clone() for name, buffer in self.way.buffers.items()}
        slots = {
            f"{path}.{name}" if path else name: values[id(x)]
            for path, part in module.named_modules()
            for name, x in (*part._parameters.items(), *part._buffers.items())
            if id(x) in values
        }
        with (
            Switch.paused_here(),
            untouched(module),
            autocast_to(self.call.precision, self.reached[0][1].device),
            with_random_state(self.way.random_state),
            torch.enable_grad(),
        ):
            for generator, before in self.way.generators:
                generator.set_state(before)
            # `untouched` puts all back.  What is compared is what the module itself returned.
            module._forward_hooks.clear()
            for part, mode in zip(module.modules(), self.way.modes):
                part.training = mode
            if self.way.unit.copies:
                args, kwargs = (map_tensors(cloned, tree) for tree in (args, kwargs))
            outputs = tensors_of(functional_call(module, slots, args, dict(kwargs), tie_weights=False))
        return [outputs[slot] for slot, _, _ in self.reached]

    def _check_unchanged(self) -> None:
        now = dict((*self.call.layer.named_parameters(), *self.call.layer.named_buffers()))
        for name, (tensor, version) in self.call.state.items():
            if now.get(name) is not tensor or version_of(tensor) != version:
                raise StaleRecord(
                    f"{name!r} of {self.place} has changed since the forward pass, and the module must be run again for the "
                    f"rows of {self.names}. Read them before optimizer.step(), and before another forward in training mode."
                )
