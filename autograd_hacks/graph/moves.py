"""Laws of operations that move entries, by shapes and saved numbers alone: views, parts of an axis, copies side by side.

``law(label, sizes, samples, **numbers)`` gives the labels of the inputs from that of the output of which `Sizes` tell.  It
is called with owned labels only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from autograd_hacks.graph.axes import AXES, axis, some_axes
from autograd_hacks.graph.label import (
    ALONE,
    MIXED,
    NOBODY,
    SUM,
    At,
    Label,
    Links,
    Owned,
    Shape,
    Sizes,
    linked,
    spread,
    taken,
    varying,
    viewed,
)
from autograd_hacks.support.graph import signed

Law = Callable[..., "list[Label] | None"]


@dataclass(frozen=True)
class Move:
    """A law, the saved numbers that it reads, and whether it reads saved tensors."""

    law: Law
    reads: tuple[str, ...] = ()
    by_values: bool = False


MOVES: dict[str, Move] = {}


def move(names: str, reads: str = "", by_values: bool = False) -> Callable[[Law], Law]:
    def enter(law: Law) -> Law:
        MOVES.update(dict.fromkeys(names.split(), Move(law, tuple(reads.split()), by_values)))
        return law

    return enter


def by_axes(name: str, label: Owned, sizes: Sizes, **numbers: Any) -> list[Label]:
    """The labels of an operation's inputs by its entry in `AXES`."""
    return [linked(label, links, own or ()) for links, own in zip(AXES[name].links(*sizes[:3], numbers) or (), sizes.ins)]


@move("view _unsafe_view _reshape_alias _mkldnn_reshape _reshape_copy reshape unflatten flatten")
def _(label: Owned, sizes: Sizes, samples: int) -> list[Label]:
    return [viewed(label, sizes.out, sizes.own, samples)]


# Parts of an axis.  Of an output that has parts of its input, the input's label is spread; else it is a part of the label.


def along(d: int, n: int) -> list[int]:
    """Links of a tensor to one that differs along an axis."""
    return [ALONE if e == d else e for e in range(n)]


def beside(d: int, n: int) -> list[int]:
    """Links of a tensor to one without an axis of it."""
    return [ALONE if e == d else e - (e > d) for e in range(n)]


def _part(label: Owned, links: Links, sizes: Sizes, samples: int, take: Callable[[Tensor], Tensor]) -> Label:
    """The label of an input of which each output is a part, and with this label all of it."""
    if sizes.is_shared and set(varying(label)) <= set(links):
        return linked(label, links, sizes.own)
    return spread(label, links, sizes.out, sizes.own, samples, take)


@move("slice slice_backward slice_inverse", reads="dim start step")
def _(label: Owned, sizes: Sizes, samples: int, dim: int, start: int | None, step: int) -> list[Label]:
    d = axis(dim, sizes.n)
    part, whole = sorted((sizes.own[d], sizes.out[d]))
    begin, *_ = slice(None if start is None else signed(start), None).indices(whole)
    take = lambda x: x[(slice(None),) * d + (slice(begin, None, step),)].narrow(d, 0, part)  # noqa: E731
    law = spread if sizes.own[d] == whole else taken
    return [law(label, along(d, sizes.n), sizes.out, sizes.own, samples, take)]


@move("select unbind", reads="dim index")
def _(label: Owned, sizes: Sizes, samples: int, dim: int, index: int | None = None) -> list[Label]:
    n = len(sizes.own)
    d, at = axis(dim, n), sizes.o if index is None else signed(index)
    return [_part(label, beside(d, n), sizes, samples, lambda x: x.select(d, at))]


@move("select_backward stack", reads="dim index")
def _(label: Owned, sizes: Sizes, samples: int, dim: int, index: int | None = None) -> list[Label]:
    d, links = axis(dim, sizes.n), [e for e in range(sizes.n) if e != axis(dim, sizes.n)]
    ats = range(len(sizes.ins)) if index is None else [signed(index)]
    return [
        taken(label, links, sizes.out, own or (), samples, lambda x, k=k: x.select(d, k))  # type: ignore[misc]  # k is bound now
        for own, k in zip(sizes.ins, ats)
    ]


@move("split unsafe_split split_with_sizes unsafe_split_with_sizes chunk", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, dim: int) -> list[Label]:
    d = axis(dim, sizes.n)
    start = sum((s or ())[d] for s in sizes.outs[: sizes.o])
    return [_part(label, along(d, sizes.n), sizes, samples, lambda x: x.narrow(d, start, sizes.out[d]))]


@move("cat", reads="dim")
def _(label: Owned, sizes: Sizes, samples: int, dim: int) -> list[Label] | None:
    """None if the sizes of several inputs without a graph, which no node keeps, would matter."""
    d = axis(dim, sizes.n)
    hidden = [k for k, own in enumerate(sizes.ins) if own is None]
    if d in varying(label) and len(hidden) > 1 and max(hidden) - min(hidden) >= len(hidden):  # not all side by side
        return None
    lengths = [0 if own is None or len(own) <= d else own[d] for own in sizes.ins]  # an empty vector may stand anywhere
    lengths = [sizes.out[d] - sum(lengths) if [k] == hidden[:1] else n for k, n in enumerate(lengths)]

    def of(own: Shape | None, start: int, n: int) -> Label:
        if own is not None and len(own) != sizes.n:
            return None
        return taken(label, along(d, sizes.n), sizes.out, own or (), samples, lambda x: x.narrow(d, start, n))

    return [*map(of, sizes.ins, accumulate(lengths, initial=0), lengths)]


@move("constant_pad_nd", reads="pad")
def _(label: Owned, sizes: Sizes, samples: int, pad: Sequence[int]) -> list[Label]:
    back, n = [-signed(k) for k in pad], sizes.n  # a negative number takes entries away
    links = [ALONE if any(back[2 * (n - 1 - d) :][:2]) else d for d in range(n)]
    return [taken(label, links, sizes.out, sizes.own, samples, lambda x: F.pad(x, back, value=NOBODY))]


@move("repeat", reads="repeats")
def _(label: Owned, sizes: Sizes, samples: int, repeats: Sequence[int]) -> list[Label]:
    times, more = [signed(k) for k in repeats], len(repeats) - len(sizes.own)
    links = [d + more if times[d + more] == 1 else ALONE for d in range(len(sizes.own))]
    return [spread(label, links, sizes.out, sizes.own, samples, lambda x: x.repeat(times), lost=SUM)]


@move("flip roll", reads="dims shifts")
def _(label: Owned, sizes: Sizes, samples: int, dims: Any, shifts: Any = None) -> list[Label]:
    """Entries in another order; without axes all of them are rolled, and none flipped."""
    back = [-signed(s) for s in (shifts if isinstance(shifts, Sequence) else (shifts or 0,))]
    over = some_axes(dims, sizes.n) if dims or shifts is not None else []
    links = [ALONE if d in over else d for d in range(sizes.n)]
    take = lambda x: x.flip(over) if shifts is None else x.roll(back, over if dims else [])  # noqa: E731
    return [taken(label, links, sizes.out, sizes.own, samples, take)]


# Diagonals and windows.


@move("diag_embed diagonal_backward", reads="offset dim1 dim2")
def _(label: Owned, sizes: Sizes, samples: int, offset: int, dim1: int, dim2: int) -> list[Label]:
    a, b = axis(dim1, sizes.n), axis(dim2, sizes.n)
    links = [*(d for d in range(sizes.n) if d not in (a, b)), ALONE]
    return [taken(label, links, sizes.out, sizes.own, samples, lambda x: x.diagonal(signed(offset), a, b))]


@move("diagonal", reads="offset dim1 dim2")
def _(label: Owned, sizes: Sizes, samples: int, offset: int, dim1: int, dim2: int) -> list[Label]:
    a, b = (axis(d, len(sizes.own)) for d in (dim1, dim2))
    links = [ALONE if d in (a, b) else d - (a < d) - (b < d) for d in range(len(sizes.own))]
    return [spread(label, links, sizes.out, sizes.own, samples, lambda x: x.diagonal(signed(offset), a, b))]


@move("unfold", reads="dimension size step")
def _(label: Owned, sizes: Sizes, samples: int, dimension: int, size: int, step: int) -> list[Label]:
    """Windows on axis d, and places in a window on the last axis; windows may share entries."""
    own, d = sizes.own, axis(dimension, len(sizes.own))
    return [
        spread(
            label, along(d, len(own)), sizes.out, own, samples, lambda x: x.unfold(d, signed(size), signed(step)),
            MIXED if own else SUM,
        )
    ]  # fmt: skip


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
