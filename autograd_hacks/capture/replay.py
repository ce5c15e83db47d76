"""Runs a module's call again, for the rows of parameters that no rule gives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call, vjp, vmap

from autograd_hacks.capture.cut import Cut, no_word_of_speed
from autograd_hacks.capture.records import OutputGrads, RecordedCall
from autograd_hacks.errors import SamplesMixed, StaleRecord, where
from autograd_hacks.forms import BUDGET, Form, Replay
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import Unit
from autograd_hacks.rules.recompute import is_recomputed
from autograd_hacks.support.restored import restored
from autograd_hacks.support.stores import hooks_kept
from autograd_hacks.support.switch import Switch
from autograd_hacks.support.trees import cloned, map_tensors, parameter_at, tensors_of, version_of
from autograd_hacks.support.untouched import autocast_to, random_state, untouched, with_random_state

_REFUSALS = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError)
"""What torch and modules raise for arguments that they can't take."""

Values = dict[str, Tensor]
"""Tensors by a parameter's name in the module."""


@dataclass(frozen=True)
class ByRunningAgain:
    """The way to rows by running the module's call again."""

    modes: tuple[bool, ...]  # the training flag of each module inside, as the call began
    copies: bool  # whether the call changes its arguments
    buffers: Values  # those that the call changes, as they were before it
    generators: list[tuple[torch.Generator, Tensor]]  # the module's own, and their states as the call began
    is_doubtful: bool  # whether samples seem to mix inside, so that each must be seen to be its own

    @staticmethod
    def of(module: nn.Module, unit: Unit) -> ByRunningAgain:
        """For a call that begins."""
        modes = tuple(part.training for part in module.modules())
        buffers = {name: module.get_buffer(name).detach().clone() for name in unit.buffers}
        own = [x for part in module.modules() for x in vars(part).values() if isinstance(x, torch.Generator)]
        generators = [(generator, generator.get_state()) for generator in own]
        return ByRunningAgain(modes, unit.copies, buffers, generators, unit.is_doubtful)

    def rows(self, call: RecordedCall, grads: OutputGrads) -> int:
        return grads.first.shape[0] if grads.first.ndim else 1

    def forms(self, call: RecordedCall, grads: OutputGrads) -> Mapping[str, Form]:
        source = Rerun(call, self, grads)
        edges = {local: call.edges[local] for local in grads.reached}
        return {n: Replay(source, n, source.samples, e.parameter.shape, e.parameter.detach()) for n, e in edges.items()}


class Rerun:
    """One call of a module and the gradients that a pass brought to its outputs, N samples of them.

    Three ways lead to the rows.  Each sample alone as a batch of one, all at the same time by vmap; or where vmap can't
    run the module, one after the other; or N backward passes through one forward of the whole batch, each from one
    sample's part of the gradients: where the call has drawn random numbers, which belong to the batch as a whole, and
    where the arguments can't be cut into samples.  The outputs must be those of the call, whichever way.
    """

    def __init__(self, call: RecordedCall, way: ByRunningAgain, grads: OutputGrads) -> None:
        self.call, self.way, self.samples = call, way, call.batch_size(grads)
        layouts = call.layouts or (Layout(),) * call.slots
        self.reached = [slot for slot, grad in enumerate(grads.at) if grad is not None]
        self.grads = [grad for grad in grads.at if grad is not None]
        self.layouts = [layout for slot in self.reached if (layout := layouts[slot]) is not None]
        if len(self.layouts) < len(self.reached):
            slot, grad = next((slot, g) for slot, g in zip(self.reached, self.grads) if layouts[slot] is None)
            raise SamplesMixed(
                f"{self._place()} must be run again for {', '.join(call.edges)}, but the loss came by its output "
                f"number {slot}, of shape {tuple(grad.shape)}, in which samples have no places of their own. If that is the "
                "batch's loss, compute it outside the model, from the other outputs."
            )
        self._rows: Values = {}  # of some samples, by the parameter's name
        self._at: list[int] | None = None  # which samples; None: all of them
        self._sums: tuple[Tensor, Values] | None = None  # weights, and what is left of the sums with them
        self._drew = False

    @property
    def row_size(self) -> int:
        return sum(p.numel() for p in self._parameters().values())

    def prepare(self, index: Tensor | None = None) -> None:
        at = None if index is None else index.tolist()
        if self._rows and self._at == at:
            return
        self._rows, self._at = {}, at
        count = self.samples if index is None else len(index)
        self._check_unchanged()
        if self.grads[0].is_meta:
            self._rows = {name: p.new_empty(count, *p.shape) for name, p in self._parameters().items()}
            return
        with hooks_kept(self.call.layer):  # also while gradients run back
            rows = self._by_sample(index)
            if rows is None and count and self.way.is_doubtful and not self._drew:
                raise SamplesMixed(
                    f"samples mix in {self._place()}, or seem to: run by themselves the samples come out different. So "
                    f"{', '.join(self.call.edges)} have no per-sample gradients that can be known. If it is a sample's "
                    "place in the batch that decides, h[: n // 2] to one head and the rest to another, give both heads "
                    "all samples, and choose from what they return: torch.where(mask, a(h), b(h))."
                )
            self._rows = rows or self._by_masks(index)

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
            self._check_unchanged()
            with hooks_kept(self.call.layer):
                parameters, outputs = self._whole_batch()
                weighted = [g * layout.over(g, w.to(g.dtype)) for g, layout in zip(self.grads, self.layouts)]
                self._sums = w, dict(zip(parameters, _grad(outputs, list(parameters.values()), weighted)))
        return self._sums[1].pop(name)

    def _by_sample(self, index: Tensor | None) -> Values | None:
        """Rows of some samples by themselves, or None where that isn't what has happened in the batch."""
        count = self.samples if index is None else len(index)
        if not count:
            return None
        cut, drew = Cut(self.call, self.layouts[0], self.samples), list[bool]()
        grads = [_of(at.samples_first(g, self.samples), index) for g, at in zip(self.grads, self.layouts)]

        def one(parameters: Values, sample: list[Any], grads: list[Tensor]) -> tuple[list[Tensor], Values]:
            args, kwargs = cut.batch_of_one(sample)
            outputs, pull = vjp(lambda own: self._run(own, args, kwargs, drew), parameters)  # type: ignore[misc]  # no aux
            (rows,) = pull([at.batch_of_one(g) for g, at in zip(grads, self.layouts)])
            return outputs, rows

        def alone(n: int) -> tuple[list[Tensor], list[Tensor]]:
            """The same, without torch.func, which can't run some operations on packed sequences."""
            args, kwargs = cut.batch_of_one([s[n] for s in samples])
            own = {name: p.requires_grad_() for name, p in detached_parameters().items()}
            with torch.enable_grad():
                outputs = self._run(own, args, kwargs, drew)
            if not any(x.requires_grad for x in outputs):  # the sample has gone another way
                return outputs, [torch.zeros_like(p) for p in own.values()]
            found = _grad(outputs, list(own.values()), [at.batch_of_one(g[n]) for g, at in zip(grads, self.layouts)])
            return [x.detach() for x in outputs], found

        def detached_parameters() -> Values:
            return {name: p.detach() for name, p in self._parameters().items()}

        samples = [_of(part, index) for part in cut.parts]
        try:
            if cut.is_packed:
                raise TypeError("vmap takes no packed sequences")
            with no_word_of_speed():
                outputs, rows = vmap(one, in_dims=(None, 0, 0), chunk_size=self._chunk())(
                    detached_parameters(), samples, grads
                )
        except _REFUSALS:
            # What vmap can't run, by torch's own page on its limits: control flow on values, sizes that depend on values,
            # in-place changes of unbatched tensors, operations without a batching rule.  A loop can.
            try:
                each = [alone(n) for n in range(count)]
                outputs = [torch.stack(parts) for parts in zip(*(outputs for outputs, _ in each))]
            except _REFUSALS:
                return None  # the arguments were cut where a module can't take that, a mask over the batch say
            rows = {name: torch.stack(own) for name, own in zip(self._parameters(), zip(*(own for _, own in each)))}
        self._drew = any(drew)
        if self._drew:
            return None
        for slot, out, at in zip(self.reached, outputs, self.layouts):
            real = _of(at.samples_first(self.call.outputs[slot], self.samples), index)
            whole = torch.stack([at.batch_of_one(x) for x in real]) if len(real) else real
            if out.shape != whole.shape or not is_recomputed(whole, out, self.call.precision):
                return None
        return rows

    def _chunk(self) -> int | None:
        """How many samples to run at a time; None for all."""
        row = sum(p.numel() * p.element_size() for p in self._parameters().values())
        at_a_time = max(1, 4 * BUDGET // max(1, row))  # beside the result, which all of them are written into
        return at_a_time if at_a_time < self.samples else None

    def _by_masks(self, index: Tensor | None) -> Values:
        """Rows of some samples by one forward and a backward pass for each."""
        parameters, outputs = self._whole_batch()
        rows: list[list[Tensor]] = []
        order = torch.arange(self.samples, device=self.grads[0].device)
        for n in range(self.samples) if index is None else index.tolist():
            only = [g * at.over(g, (order == n).to(g.dtype)) for g, at in zip(self.grads, self.layouts)]
            rows.append(_grad(outputs, list(parameters.values()), only))
        return {
            name: torch.stack(own) if rows else p.new_zeros(0, *p.shape)
            for (name, p), own in zip(parameters.items(), zip(*rows) if rows else [()] * len(parameters))
        }

    def _whole_batch(self) -> tuple[Values, list[Tensor]]:
        """The call as it was.  Raises StaleRecord where it comes out different."""
        parameters = {name: p.detach().requires_grad_() for name, p in self._parameters().items()}
        with torch.enable_grad():
            outputs = self._run(parameters, self.call.args, self.call.kwargs, [])
        for slot, out in zip(self.reached, outputs):
            seen = self.call.outputs[slot]
            if out.shape != seen.shape or not is_recomputed(seen, out, self.call.precision):
                raise StaleRecord(
                    f"{self._place()} was run again for the rows of {', '.join(parameters)}, and its output number {slot} "
                    "came out different. Something that it depends on has changed since: weights (read per-sample gradients "
                    "before the update), a state of its own that is no buffer, or random numbers that don't come from torch."
                )
        return parameters, outputs

    def _run(self, parameters: Values, args: tuple[Any, ...], kwargs: Mapping[str, Any], drew: list[bool]) -> list[Tensor]:
        """The outputs that the loss reached.  drew: gets whether random numbers were drawn"""
        module, state = self.call.layer, self.call.random_state or {}
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
            autocast_to(self.call.precision, self.grads[0].device),
            with_random_state(state),
        ):
            for generator, before in self.way.generators:
                generator.set_state(before)
            # `untouched` puts all back.  What is compared is what the module itself returned.
            module._forward_hooks.clear()
            for part, mode in zip(module.modules(), self.way.modes):
                part.training = mode
            if self.way.copies:
                args, kwargs = (map_tensors(cloned, tree) for tree in (args, kwargs))
            outputs = tensors_of(functional_call(module, slots, args, dict(kwargs), tie_weights=False))
            now = random_state([torch.device(name) for name in state])
            own = [(generator.get_state(), before) for generator, before in self.way.generators]
            drew.append(any(not torch.equal(*pair) for pair in (*own, *((now[name], state[name]) for name in now))))
        return [outputs[slot] for slot in self.reached]

    def _check_unchanged(self) -> None:
        now = dict((*self.call.layer.named_parameters(), *self.call.layer.named_buffers()))
        for name, (tensor, version) in self.call.state.items():
            if now.get(name) is not tensor or version_of(tensor) != version:
                raise StaleRecord(
                    f"{name!r} of {self._place()} has changed since the forward pass, and the module must be run again for "
                    f"the rows of {', '.join(self.call.edges)}. Read them before optimizer.step(), and before another "
                    "forward in training mode."
                )

    def _parameters(self) -> Values:
        return {local: edge.parameter for local, edge in self.call.edges.items()}

    def _place(self) -> str:
        return where(self.call.path, self.call.layer)


def _of(tensor: Any, index: Tensor | None) -> Any:
    """Some entries of axis 0."""
    if isinstance(tensor, list):
        return tensor if index is None else [tensor[n] for n in index.tolist()]
    return tensor if index is None else tensor[index]


def _grad(outputs: Sequence[Tensor], parameters: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    pairs = [(out, g) for out, g in zip(outputs, grads) if out.requires_grad]
    if not pairs:
        raise StaleRecord("a module that was run again has returned nothing that leads to its parameters, as it did before")
    outs, gs = zip(*pairs)
    found = torch.autograd.grad(outs, parameters, gs, retain_graph=True, allow_unused=True, materialize_grads=True)
    return [g.detach() for g in found]


@contextmanager
def _no_word_of_speed() -> Iterator[None]:
    """A context in which vmap doesn't warn of operations that it runs sample by sample."""
    functorch: Any = torch._C._functorch  # torch has no types for these
    with restored(partial(functorch._set_vmap_fallback_warning_enabled, True)):
        functorch._set_vmap_fallback_warning_enabled(False)
        yield
