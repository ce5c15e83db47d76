"""A forward of the model for a proof: with hooks, on copies of its arguments, and nothing of it is left."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from autograd_hacks.capture.backward import Backward
from autograd_hacks.capture.calls import RecordedCall
from autograd_hacks.capture.doors import doors_of
from autograd_hacks.capture.recorder import Recorder
from autograd_hacks.capture.ways import ByInner
from autograd_hacks.probe.batch import Batch
from autograd_hacks.probe.copies import Arguments, copies
from autograd_hacks.probe.guard import WriteGuard
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import Plan
from autograd_hacks.probe.propose import NOISE
from autograd_hacks.support.parts import cut_as, is_part, own_of, part_of, settled
from autograd_hacks.support.restored import restored
from autograd_hacks.support.trees import is_packed, modules_of, opened, tensors_of
from autograd_hacks.support.untouched import (
    RandomState,
    cuda_devices_of,
    random_state,
    untouched,
    with_other_generators,
    with_random_state,
)

Key = tuple[str, int, int]
"""A call's path, its number there in the order in which a backward pass comes to them, and the output's number."""

Grads = dict[Key, tuple[RecordedCall, Tensor]]
"""The gradients at calls' outputs."""

Note = Callable[[Key, RecordedCall, Tensor], None]

Take = Callable[[str, Tensor], None]
"""``take(name, grad)`` gets the gradient that arrives at a parameter."""


class Trial:
    """Forwards of a model, and backward passes from them.

    batch: its arguments    samples: N    asks: whether its inputs with samples are to ask for gradients
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Recorder,
        plan: Plan,
        batch: Batch,
        samples: int,
        draws: torch.Generator,
        asks: bool,
    ) -> None:
        self.model, self.recorder, self.plan, self.batch, self.samples = model, recorder, plan, batch, samples
        self.draws, self.asks = draws, asks
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.outputs: list[Tensor] = []
        self.inputs: dict[int, Tensor] = {}  # by the argument's number the leaf that it was made from
        self._state: RandomState = {}
        self._guard = WriteGuard(dict(model.named_parameters()), {})

    @contextmanager
    def aside(self, zeros: Collection[str]) -> Iterator[None]:
        """A context in which the model may run, forwards and backwards, without anything of the user's being touched.

        zeros: parameters by name that hide what is behind them: noise stands in their place
        """
        self._state = random_state(cuda_devices_of(self.model))
        with (
            self.recorder.proving(),
            with_random_state(self._state),
            untouched(self.model),
            torch.enable_grad(),
            _without_backward_hooks(self.model, self.recorder),
            _counting_nothing(),
            restored(self._guard.restore),
        ):
            for name in zeros:
                p = self.parameters[name]
                noise = torch.randn(p.shape, generator=self.draws, device="cpu")
                part_of(p).data = part_of(cut_as((NOISE[0] * noise).to(part_of(p)), p))  # which `untouched` takes back
            yield

    def run(self, arguments: Arguments | None = None) -> None:
        """Runs the model, on other arguments than its own if there are some."""
        if arguments is None:
            arguments = tree_unflatten(self.batch.leaves, self.batch.spec)
        args, kwargs = copies(arguments)
        leaves, spec = tree_flatten(opened((args, kwargs)), is_leaf=is_packed)
        self.inputs, made = {}, dict[int, Tensor]()
        for number, at in enumerate(self.batch.replaceable(self.plan.axis, self.samples)):
            leaf = leaves[number]
            is_plain = type(leaf) is Tensor and leaf.layout == torch.strided and leaf.is_floating_point()
            if id(leaf) in made:
                leaves[number] = made[id(leaf)]
            elif at is not None and self.asks and is_plain:
                self.inputs[number] = leaf.detach().requires_grad_()
                made[id(leaf)] = leaves[number] = self.inputs[number].clone()  # no leaf, which couldn't be written to
        args, kwargs = tree_unflatten(leaves, spec)
        # Each from the same random numbers, by which a model may go another way.
        with self._guard, with_random_state(self._state), with_other_generators():
            output = self.model(*args, **kwargs)
        self.outputs, self.plan.has_doors = tensors_of(output), bool(doors_of(self.model, output))

    def input_layouts(self) -> dict[str, Layout]:
        """Where the samples are in the inputs that ask for gradients, by what `pull` calls them."""
        axes = self.batch.replaceable(self.plan.axis, self.samples)
        return {f"#{n}": Layout(at % x.ndim) for n, x in self.inputs.items() if (at := axes[n]) is not None}

    def at_random(self, slots: Iterable[int]) -> dict[int, Tensor]:
        """G: a random gradient for each of some outputs."""
        outputs = {slot: self.outputs[slot] for slot in slots}
        draw = {slot: torch.randn(x.shape, generator=self.draws, device="cpu") for slot, x in outputs.items()}
        return {slot: g.to(part_of(outputs[slot])) for slot, g in draw.items()}

    def pull(
        self,
        places: Mapping[int, Layout],
        given: Mapping[int, Tensor],
        w: Tensor,
        free: bool = False,
        take: Take | None = None,
    ) -> dict[str, Tensor]:
        """One backward pass from w ∘ G: what arrives at inputs, by '#' and number.

        free: whether it is the last through this graph    take: gets what arrives at parameters, of which nothing is kept
        """
        ends = [*self.parameters.values(), *self.inputs.values()]
        roots = [self.outputs[slot] for slot in places]
        weighted = [given[slot] * at.over(given[slot], w.to(given[slot])) for slot, at in places.items()]
        grads = [cut_as(g, root) for g, root in zip(weighted, roots)]
        with ExitStack() as hooked:
            for name, p in self.parameters.items():
                hooked.enter_context(p.register_hook(partial(_taken, take, name, p)))
            found = torch.autograd.grad(roots, ends, grads, retain_graph=not free, allow_unused=True)
        names = (f"#{number}" for number in self.inputs)
        return {name: g.detach().to_dense() for name, g in zip(names, found[len(self.parameters) :]) if g is not None}

    def gradients_of(self, slot: int) -> Grads:
        """What a backward pass from a scalar output brings to calls."""
        found: Grads = {}
        with self.listening(lambda key, call, grad: found.update({key: (call, grad.detach())})):
            torch.autograd.grad(self.outputs[slot], list(self.parameters.values()), retain_graph=True, allow_unused=True)
        return found

    def recorded(self) -> Grads:
        """The gradients at calls that the record has of the first pass."""
        passes = [p for segment in self.recorder.record.segments for p in segment.passes]
        counts: dict[tuple[str, int], int] = {}
        found: Grads = {}
        for call, grads in passes[0].received.items() if passes else ():
            for slot, grad in enumerate(grads.at):
                if grad is not None:
                    number = counts[call.path, slot] = counts.get((call.path, slot), -1) + 1
                    found[call.path, number, slot] = call, settled(grad)
        return found

    def listening(self, note: Note) -> AbstractContextManager[None]:
        return listening(self.recorder.backward, note)


@contextmanager
def listening(backward: Backward, note: Note) -> Iterator[None]:
    """A context in which gradients at calls go to a callable, and into no record."""
    counts: dict[tuple[str, int], dict[int, int]] = {}

    def hear(call: RecordedCall, slot: int, grad: Tensor | None) -> None:
        if grad is not None:
            seen = counts.setdefault((call.path, slot), {})
            note((call.path, seen.setdefault(id(call), len(seen)), slot), call, settled(grad))

    with restored(lambda: setattr(backward, "listener", None)):
        backward.listener = hear
        yield


def _taken(take: Take | None, name: str, parameter: Tensor, grad: Tensor | None) -> Tensor | None:
    """A parameter's hook: what autograd is to hold in the gradient's place, which takes no memory."""
    if grad is None:
        return None
    if take is not None:
        take(name, own_of(grad.detach(), parameter))
    if is_part(grad):
        return None
    return grad.new_zeros(()).expand_as(grad) if grad.layout == torch.strided else None


def layout_in(call: RecordedCall, slot: int, samples: int) -> Layout | None:
    """Where samples are in a gradient at one of a call's outputs; None where that isn't known."""
    if isinstance(call.way, ByInner) and call.way.count != samples:
        return None
    if call.samples is None or slot >= len(call.layouts) or any(is_packed(x) for x in call.args):
        return None
    return call.layouts[slot]


@contextmanager
def _counting_nothing() -> Iterator[None]:
    """A context in which checkpointing around the model doesn't count what is saved."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda x: x):
        yield


@contextmanager
def _without_backward_hooks(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """A context in which backward passes run no hooks of the user's."""
    own = recorder.backward.own_hooks()
    tables = [h for module in modules_of(model) for h in (module._backward_hooks, module._backward_pre_hooks)]
    tables += [p._backward_hooks for p in model.parameters() if p._backward_hooks is not None]
    kept: Sequence[tuple[dict[int, Any], dict[int, Any]]] = [(table, dict(table)) for table in tables]

    def undo() -> None:
        for table, before in kept:
            table.clear()
            table.update(before)

    with restored(undo):
        for table, before in kept:
            for key in before.keys() - own:
                del table[key]
        yield
