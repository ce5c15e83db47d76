"""Laws of operations that move entries, by shapes and saved numbers alone: views, parts of an axis, copies side by side.

``law(label, o, outs, ins, samples, **numbers)`` gives the labels of the inputs from that of output number o.  It is called
with owned labels only.  Laws below get the three in the middle as `Sizes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from autograd_hacks.graph.axes import AXES, axis, some_axes
from autograd_hacks.graph.label import (
    ALONE,
    MIXED,
    SUM,
    At,
    Entries,
    Label,
    One,
    Owned,
    Shape,
    Shapes,
    Sizes,
    cut,
    entries,
    folded,
    linked,
    on_axis,
    order_on,
    put,
    scattered,
    varying,
    viewed,
)
from autograd_hacks.support.graph import signed

Law = Callable[..., "list[Label] | None"]


@dataclass(frozen=True)
class Move:
    """A law and the saved numbers that it reads."""

    law: Law
    reads: tuple[str, ...] = ()


MOVES: dict[str, Move] = {}


def move(names: str, reads: str = "") -> Callable[[Law], Law]:
    return entering(MOVES, names, reads)


def entering(table: dict[str, Move], names: str, reads: str) -> Callable[[Law], Law]:
    """A decorator that enters a law in a table."""

    def enter(law: Law) -> Law:
        def of(label: Owned, o: int, outs: Shapes, ins: Shapes, samples: int, **given: Any) -> list[Label] | None:
            return law(label, Sizes(o, outs, ins), samples, **given)

        table.update(dict.fromkeys(names.split(), Move(of, tuple(reads.split()))))
        return law

    return enter


def by_axes(name: str, label: Owned, sizes: Sizes, **numbers: Any) -> list[Label]:
    """The labels of an operation's inputs by its entry in `AXES`."""
    rule = AXES[name].rule
    assert rule is not None
    return [linked(label, links, own or ()) for links, own in zip(rule(*sizes, **numbers), sizes.ins)]


@move("view _unsafe_view _reshape_alias _mkldnn_reshape _reshape_copy reshape unflatten flatten")
def _(label: Owned, sizes: Sizes, samples: int) -> list[Label]:
    return [viewed(label, sizes.out, sizes.own, samples)]


# Parts of an axis.


@move("slice", reads="dim start step")
def _(label: Owned, sizes: Sizes, samples: int, dim: int, start: int | None, step: int) -> list[Label]:
    d = axis(dim, len(sizes.own))
    return [put(label, d, _begin(start, sizes.own[d]), sizes.out[d], step, sizes.own, samples)]


def _begin(start: int | None, size: int) -> int:
    return slice(None if start is None else signed(start), None).indices(size)[0]


@move("slice_backward slice_inverse", reads="dim start step")
def _(label: Owned, sizes: Sizes, samples: int, dim: int, start: int | None, step: int) -> list[Label]:
    d = axis(dim, len(sizes.own))
    return [cut(label, d, _begin(start, sizes.out[d]), sizes.own[d], step, sizes.out, samples)]


def _selected(label: Owned, d: int, index: int, whole: Shape, samples: int) -> Label:
    """The label of a tensor of which one entry of an axis was taken."""
    if isinstance(label, At):
        return label.moved(label.dim + (label.dim >= d))
    if isinstance(label, Entries):
        label = Entries(label.samples.unsqueeze(d))
    return put(label, d, index, 1, 1, whole, samples)


def _taken(label: Owned, d: int, index: int, whole: Shape, samples: int) -> Label:
    """The label of one entry of an axis."""
    part = cut(label, d, index, 1, 1, whole, samples)
    if isinstance(part, At):
        return part.moved(part.dim - (part.dim > d)) if part.dim != d else One(index // part.inner % samples)
    return Entries(part.samples.squeeze(d)) if isinstance(part, Entries) else part


@move("select", reads="dim index")
def _(label: Owned, sizes: Sizes, samples: int, dim: int, index: int) -> list[Label]:
    d = axis(dim, len(sizes.own))
    return [_selected(label, d, axis(index, sizes.own[d]), sizes.own, samples)]


@move("select_backward", reads="dim index")
def _(label: Owned, sizes: Sizes, samples: int, dim: int, index: int) -> list[Label]:
    d = axis(dim, sizes.n)
    return [_taken(label, d, axis(index, sizes.out[d]), sizes.out, samples)]


@move("unbind", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, dim: int) -> list[Label]:
    return [_selected(label, axis(dim, len(sizes.own)), sizes.o, sizes.own, samples)]


@move("stack", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, dim: int) -> list[Label]:
    d = axis(dim, sizes.n)
    return [_taken(label, d, k, sizes.out, samples) for k in range(len(sizes.ins))]


@move("split unsafe_split split_with_sizes unsafe_split_with_sizes chunk", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, dim: int) -> list[Label]:
    d = axis(dim, len(sizes.own))
    starts = [0, *accumulate((s or ())[d] for s in sizes.outs)]
    return [put(label, d, starts[sizes.o], sizes.out[d], 1, sizes.own, samples)]


@move("cat", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, dim: int) -> list[Label] | None:
    """None if the sizes of several inputs without a graph, which no node keeps, would matter."""
    d = axis(dim, sizes.n)
    if d not in varying(label):
        return [label for _ in sizes.ins]
    hidden = [k for k, own in enumerate(sizes.ins) if own is None]
    if len(hidden) > 1 and max(hidden) - min(hidden) >= len(hidden):  # not all side by side
        return None
    left = sizes.out[d] - sum(_size(own, d) for own in sizes.ins if own is not None)
    lengths = [_size(own, d) if own is not None else left if k == hidden[0] else 0 for k, own in enumerate(sizes.ins)]
    starts = [0, *accumulate(lengths)]
    return [
        None if own is not None and len(own) != sizes.n else cut(label, d, start, size, 1, sizes.out, samples)
        for own, start, size in zip(sizes.ins, starts, lengths)
    ]


def _size(own: Shape, d: int) -> int:
    return own[d] if len(own) > d else 0  # an empty vector may stand beside anything


@move("constant_pad_nd", reads="pad")
def _(label: Owned, sizes: Sizes, samples: int, pad: Sequence[int]) -> list[Label]:
    own, found = list(sizes.out), label
    for k in range(len(pad) // 2):
        d, before = len(own) - 1 - k, signed(pad[2 * k])
        size, skipped, taken = sizes.own[d], max(before, 0), max(-before, 0)  # a negative number takes entries away
        there = min(size - taken, own[d] - skipped)
        found = cut(found, d, skipped, there, 1, own, samples)
        own[d] = size
        found = put(found, d, taken, there, 1, own, samples) if there != size else found
    return [found]


@move("repeat", reads="repeats")
def _(label: Owned, sizes: Sizes, samples: int, repeats: Sequence[int]) -> list[Label]:
    own, n = sizes.own, len(repeats)
    shape = [*[1] * (n - len(own)), *own]
    for d, times in enumerate(repeats):
        found = folded(label, d, signed(times), _before(shape, repeats, d), samples)
        if not isinstance(found, At | One | Entries):
            return [found]
        label = found
    return by_axes("expand", label, Sizes(0, [shape], [own]))


def _before(shape: Sequence[int], repeats: Sequence[int], d: int) -> list[int]:
    """The shape in which only axes after d are still repeated."""
    return [s * signed(repeats[k]) if k > d else s for k, s in enumerate(shape)]


@move("flip", reads="dims")
def _(label: Owned, sizes: Sizes, samples: int, dims: Any) -> list[Label]:
    own = [d for d in some_axes(dims, sizes.n) if d in varying(label)] if dims else []
    return [Entries(entries(label, sizes.out, samples).flip(own)) if own else label]


@move("roll", reads="dims shifts")
def _(label: Owned, sizes: Sizes, samples: int, dims: Any, shifts: Any) -> list[Label]:
    back = [-signed(s) for s in (shifts if isinstance(shifts, Sequence) else (shifts,))]
    if not dims:
        whole = entries(label, sizes.out, samples).expand(*sizes.out)
        return [label if isinstance(label, One) else Entries(whole.roll(back[0]))]
    over = [(d, k) for d, k in zip(some_axes(dims, sizes.n), back) if d in varying(label)]
    return [Entries(entries(label, sizes.out, samples).roll([k for _, k in over], [d for d, _ in over])) if over else label]


# Diagonals and windows.


@move("diag_embed diagonal_backward", reads="offset dim1 dim2")
def _(label: Owned, sizes: Sizes, samples: int, offset: int, dim1: int, dim2: int) -> list[Label]:
    a, b, by, last = axis(dim1, sizes.n), axis(dim2, sizes.n), signed(offset), len(sizes.own) - 1
    kept = [d for d in range(sizes.n) if d not in (a, b)]
    for d, start in ((a, max(0, -by)), (b, max(0, by))):
        if d in varying(label):
            order = order_on(label, d, sizes.out[d], samples)
            return [MIXED if order is None else on_axis(order[start : start + sizes.own[last]], last, len(sizes.own))]
    return [linked(label, [*kept, ALONE], sizes.own)]


@move("unfold", reads="dimension size step")
def _(label: Owned, sizes: Sizes, samples: int, dimension: int, size: int, step: int) -> list[Label]:
    """Windows on axis d, and places in a window on the last axis; windows may share entries."""
    out, own = sizes.out, sizes.own
    if not own:
        return [SUM if varying(label) else label]
    d, last = axis(dimension, len(own)), sizes.n - 1
    if not {d, last} & set(varying(label)):
        return [linked(label, [ALONE if k == d else k for k in range(len(own))], own)]
    at = entries(label, out, samples)
    at = at.expand([s if k in (d, last) else t for k, (s, t) in enumerate(zip(out, at.shape))])
    if at.numel() != out[d] * out[last]:
        return [MIXED]
    index = torch.arange(out[d], device=at.device)[:, None] * signed(step) + torch.arange(signed(size), device=at.device)
    order = scattered(at.reshape(out[d], out[last]).flatten(), index.flatten(), own[d])
    return [MIXED if order is None else on_axis(order, d, len(own))]


# Channels in groups.


@move("native_group_norm", reads="C group")
def _(label: Owned, sizes: Sizes, samples: int, C: int, group: int) -> list[Label]:
    if isinstance(label, At) and label.dim == 1 and sizes.o == 0 and label.inner % (C // group) == 0:
        return [label, *[At(0, label.outer, label.inner)] * (len(sizes.ins) - 1)]
    return by_axes("native_group_norm", label, sizes, C=C, group=group)


CONVOLUTIONS = [name for name, entry in AXES.items() if entry.rule is AXES["convolution"].rule]


@move(" ".join(CONVOLUTIONS), reads="groups")
def _(label: Owned, sizes: Sizes, samples: int, groups: int = 1) -> list[Label]:
    """Samples may be groups of channels."""
    each = sizes.out[1] // max(1, groups) if sizes.n > 1 else 0
    if not isinstance(label, At) or label.dim != 1 or groups == 1 or label.inner % each or (sizes.o, sizes.n) == (0, 2):
        return by_axes("convolution", label, sizes)
    of_groups = label.inner // each  # how many groups a sample has
    channels: list[Label] = [
        None if s is None else At(d, label.outer, of_groups * (s[d] // groups)) for d, s in zip((1, 0), sizes.ins)
    ]
    return [*channels, At(0, label.outer, label.inner)][: len(sizes.ins)]
