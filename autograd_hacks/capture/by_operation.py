"""The ways to rows by an operation at which values of parameters meet the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vjp, vmap
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from autograd_hacks.capture.by_copies import no_word_of_speed
from autograd_hacks.capture.calls import OutputGrads, RecordedCall
from autograd_hacks.capture.values import Value
from autograd_hacks.errors import UnsupportedLayer
from autograd_hacks.forms import Dense, Form, Outer, Placed, Zero, add, gathered
from autograd_hacks.probe.functions import aligned
from autograd_hacks.probe.labels import GROUPED
from autograd_hacks.probe.layout import Layout
from autograd_hacks.probe.plan import Read
from autograd_hacks.rules.operations import BY_CHANNEL, ELEMENTWISE, OPERATIONS


@dataclass(frozen=True, eq=False)
class ByExpansion:
    """By the copies of a value that an operation was given, one for each sample: the gradients there are the rows."""

    value: Value
    layout: Layout  # of the copies
    shape: tuple[int, ...]  # the value's, with as many axes as the copies have

    def rows(self, call: RecordedCall, grads: OutputGrads) -> int:
        return call.samples or 0

    def forms(self, call: RecordedCall, grads: OutputGrads) -> Mapping[str, Form]:
        g = self.layout.samples_first(grads.first.to(self.value.tensor.dtype), call.samples or 0)
        return _reached([(self.value, Dense(_summed(g, self.value.tensor.shape, self.layout, self.shape)))], grads)

    def with_input(self, call: RecordedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall:
        return call


@dataclass(frozen=True, eq=False)
class ByOperation:
    """By what the operation was given and the gradient at its output: as a layer's rule does, or by vmap."""

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]  # with a `Value` in the place of each; tensors outside the graph
    kwargs: dict[str, Any]
    read: Read
    labels: Tensor | None = None  # the sample of each row, where they stand in no order

    def rows(self, call: RecordedCall, grads: OutputGrads) -> int:
        return call.samples or 0

    def with_input(self, call: RecordedCall, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RecordedCall:
        left = iter(args)
        own_args, own_kwargs = tree_map(lambda x: next(left) if isinstance(x, Tensor) else x, (self.args, self.kwargs))
        return replace(call, way=replace(self, args=own_args, kwargs=own_kwargs))

    def forms(self, call: RecordedCall, grads: OutputGrads) -> Mapping[str, Form]:
        values = [x for x in tree_leaves((self.args, self.kwargs)) if isinstance(x, Value)]
        return _reached(self._pairs(grads.first, call.samples or 0, values[0].tensor.dtype), grads)

    def _pairs(self, g: Tensor, samples: int, dtype: torch.dtype) -> Iterator[tuple[Value, Form]]:
        def ready(x: Tensor) -> Tensor:
            x = x if x.layout == torch.strided else x.to_dense()
            return x.to(dtype) if x.is_floating_point() and dtype.is_floating_point else x

        g, labels, every = ready(g), self.labels, samples
        if self.name in GROUPED and labels is not None:
            yield self._by_group(g, labels, samples, ready)
            return
        layout, samples = (self.read.layout, samples) if labels is None else (Layout(), len(labels))
        ndim, operands = g.ndim, iter(self.read.operands)
        assert layout is not None  # or it would be no meeting
        first = layout.samples_first(g, samples)
        is_flat = self.name in BY_CHANNEL and bool(layout.fold)  # positions stay samples of their own
        wanted: dict[int | str, Value] = {n: x for n, x in enumerate(self.args) if isinstance(x, Value)}
        wanted |= {name: x for name, x in self.kwargs.items() if isinstance(x, Value)}

        def beside(x: Any) -> Any:  # as the output is
            if isinstance(x, Value):
                x = x.tensor
            if not isinstance(x, Tensor):
                return x
            x = ready(x).reshape(aligned(x.shape, ndim))
            is_own = layout.fits(x, samples) and x.shape[layout.axis] != 1
            return layout.samples_first(x, samples) if is_own else _without(x, layout)

        def own(x: Any) -> Any:
            if isinstance(x, Value):
                return x.tensor
            if not isinstance(x, Tensor):
                return x
            at = next(operands, layout if layout.fits(x, samples) else None)
            return ready(x) if at is None or is_flat else at.samples_first(ready(x), samples)

        if self.name in ELEMENTWISE:
            args, kwargs = tree_map(beside, (self.args, self.kwargs))
            if (terms := ELEMENTWISE[self.name](wanted, first, *args, **kwargs)) is not None:
                for place, rows in terms.items():
                    shape = wanted[place].tensor.shape
                    form = Dense(_summed(rows, shape, layout, aligned(shape, ndim)))
                    yield wanted[place], form if labels is None else gathered(form, labels, every)
                return
        args, kwargs = tree_map(own, (self.args, self.kwargs))
        if self.name in OPERATIONS and not (self.name in BY_CHANNEL and layout.axis):
            found = OPERATIONS[self.name](wanted, g if is_flat else first, *args, **kwargs)
            if found is not None:
                if labels is None and is_flat:
                    labels = layout.rows(len(g), samples, g.device)
                for place, form in found.items():
                    yield wanted[place], form if labels is None else gathered(form, labels, every)
                return
        if labels is not None:
            raise UnsupportedLayer(f"{self.name} of rows that were chosen by their values, {tuple(g.shape)}, has no formula")
        yield from self._by_vmap(g, samples, layout, ready)

    def _by_group(self, g: Tensor, labels: Tensor, samples: int, ready: Callable[[Tensor], Tensor]) -> tuple[Value, Form]:
        """By groups of rows, each with a matrix of its own.  The value: groups I O"""
        x, value = ready(self.args[0]), self.args[1]
        offsets = self.kwargs["offs"] if "offs" in self.kwargs else self.args[2]
        ends, shape = offsets.tolist(), torch.Size((1, *value.tensor.shape[1:]))
        pieces = {(e, e + 1): slice(start, end) for e, (start, end) in enumerate(zip([0, *ends], ends)) if start < end}
        entries = {at: gathered(Outer(x[s], g[s], shape), labels[s], samples) for at, s in pieces.items()}
        return value, Placed(entries, value.tensor.shape) if entries else Zero(samples, value.tensor.shape, value.tensor)

    def _by_vmap(
        self, g: Tensor, samples: int, layout: Layout, ready: Callable[[Tensor], Tensor]
    ) -> Iterator[tuple[Value, Form]]:
        leaves, spec = tree_flatten((self.args, self.kwargs))
        values = [n for n, x in enumerate(leaves) if isinstance(x, Value)]
        others = [n for n, x in enumerate(leaves) if isinstance(x, Tensor)]
        places = {n: at for n, at in zip(others, self.read.operands) if at is not None}

        def one(g: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
            def run(*values_here: Tensor) -> Any:
                own = list(leaves)
                for n, v in zip(values, values_here):
                    own[n] = v
                for n, x in zip(places, parts):
                    own[n] = places[n].batch_of_one(x)
                args, kwargs = tree_unflatten(own, spec)
                return self.func(*args, **kwargs)

            found: tuple[Tensor, ...] = vjp(run, *(leaves[n].tensor for n in values))[1](layout.batch_of_one(g))
            return found

        parts = [at.samples_first(ready(leaves[n]), samples) for n, at in places.items()]
        first = layout.samples_first(g, samples)
        try:
            with no_word_of_speed():
                rows = vmap(one)(first, *parts)
        except RuntimeError:  # what vmap can't run, by torch's own page on its limits
            each = [one(first[n], *(part[n] for part in parts)) for n in range(samples)]
            rows = tuple(torch.stack(own) for own in zip(*each))
        yield from ((leaves[n], Dense(own)) for n, own in zip(values, rows))


def _without(x: Tensor, layout: Layout) -> Tensor:
    """A tensor that has no samples, beside others with samples first."""
    return x.unsqueeze(0) if layout.fold else x.movedim(layout.axis, 0)


def _summed(rows: Tensor, shape: torch.Size, layout: Layout, aligned_shape: tuple[int, ...]) -> Tensor:
    """Gradients at copies of a value, samples first, added up along what it was broadcast over.  Returns ``(N, *shape)``.

    shape: the value's    aligned_shape: the same, with as many axes as what it was broadcast to
    """
    sizes = list(aligned_shape)
    if not layout.fold:  # else the positions stand where the folded axis was
        del sizes[layout.axis]
    over = [n + 1 for n, size in enumerate(sizes) if size == 1 and rows.shape[n + 1] != 1]
    return (rows.sum(over) if over else rows).reshape(len(rows), *shape)


def _reached(pairs: Iterator[tuple[Value, Form]] | list[tuple[Value, Form]], grads: OutputGrads) -> dict[str, Form]:
    """{name: form} of the parameters that a pass has reached, from the values' forms."""
    found: dict[str, Form] = {}
    for value, form in pairs:
        for name, own in value.forms(form, grads.live is not None).items():
            if name in grads.reached:
                found[name] = add([found[name], own]) if name in found else own
    return found
