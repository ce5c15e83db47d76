"""Positions that are sorted by expert: labels that follow samples through sorts, indices and grouped products.

`torch.sort` of experts' numbers, (M) with samples folded into M, puts positions in an order that depends on all samples.
But an operation on a single position in that order, or of its own expert, depends only on that position, and the inverse
order restores the original places.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autograd_hacks.compiled.labels import Found, Labels, Routed, name_of, shape, size
from autograd_hacks.compiled.labels import register_operation as rule
from autograd_hacks.compiled.operations import counts_up, rule_of
from autograd_hacks.graph.label import At


@dataclass(frozen=True)
class Sorted(Routed):
    """Positions on axis ``dim``, in the order of a sort."""

    dim: int = 0


@dataclass(frozen=True)
class Keys(Sorted):
    """The sorted numbers themselves: the experts' numbers."""


@dataclass(frozen=True)
class Order(Routed):
    """The order of a sort: entry j is a place on an axis that holds samples as in ``at``."""

    at: At


@dataclass(frozen=True)
class Inverse(Routed):
    """The inverse order."""


@dataclass(frozen=True)
class Counts(Routed):
    """How many positions each of the experts has, or where they end."""

    experts: int = 0
    are_ends: bool = False


ALONG = frozenset(
    """view _unsafe_view reshape unsqueeze squeeze expand slice split split_with_sizes cat sum mean permute transpose t clone
    select constant_pad_nd slice_scatter select_scatter slice_backward amax softmax _softmax""".split()  # noqa: SIM905 to be read
)
"""Operations whose rules for samples on an axis also hold for sorted positions, if that axis stays whole."""
FILLED = frozenset("full full_like zeros zeros_like new_zeros new_full empty empty_like ones ones_like".split())  # noqa: SIM905
"""Operations that return the same number everywhere, or uninitialised memory."""
SAME = frozenset(("_to_copy", "clone", "alias", "detach", "lift_fresh_copy"))


@rule("sort")
def _(labels: Labels, node: fx.Node, x: fx.Node, *given: Any, **named: Any) -> Found:
    """A sort along an axis of each sample, or an ascending sort of numbers on the single axis that contains the samples."""
    numbers = [y for y in given if not isinstance(y, bool)]
    at, is_descending = labels[x], named.get("descending", False) or any(y is True for y in given)
    if len(shape(x)) == 1 and at.outer == 1 and not is_descending:
        return [Keys(node, at), Order(node, at, at)]
    return labels.along(node, x, named.get("dim", numbers[0] if numbers else -1), outputs=2)


def routed(labels: Labels, node: fx.Node) -> Found:
    """The label of an operation with a routed tensor."""
    name, args = name_of(node), node.args
    given: dict[fx.Node, Any] = {x: labels[x] for x in node.all_input_nodes if labels[x] is not None}
    first = given.get(args[0]) if args and isinstance(args[0], fx.Node) else None
    if name in SAME:
        return first
    if name in ("floor_divide", "div") and isinstance(first, Order) and isinstance(args[1], int):
        is_floor = name == "floor_divide" or node.kwargs.get("rounding_mode") in ("floor", "trunc")
        if is_floor and first.at.inner % args[1] == 0:
            return replace(first, at=At(0, 1, first.at.inner // args[1]))
    if name == "index" and len(args[1]) == 1:  # type: ignore[arg-type]
        return _indexed(labels, node, first, given.get(args[1][0]))  # type: ignore[index, arg-type]
    if name == "index_put" and len(args[1]) == 1:  # type: ignore[arg-type]
        return _written(labels, node, first, args[1][0], args[2], len(args) > 3 and bool(args[3]))  # type: ignore[index]
    if name == "histc" and type(first) is Keys:
        return _counted(labels, node, first, *args[1:], **node.kwargs)
    if name == "cumsum" and isinstance(first, Counts) and not first.are_ends:
        return replace(first, are_ends=True)
    if name in ("_grouped_mm", "transformers::grouped_mm_fallback", "transformers::grouped_mm_fallback_backward"):
        return _grouped(labels, node, name, given)
    sorts = [label for label in given.values() if type(label) in (Sorted, Keys)]
    if len(sorts) == len(given):
        return _along(labels, node, name, given)
    return _refused(labels, node)


def _refused(labels: Labels, node: fx.Node) -> Any:
    return labels.unsupported(node, "positions that are sorted by values are taken together, or leave their order")


def _indexed(labels: Labels, node: fx.Node, x: Any, index: Any) -> Found:
    if isinstance(index, Order) and x == index.at:
        return Sorted(index.order, index.source)
    if isinstance(index, Inverse) and type(x) in (Sorted, Keys) and (x.order, x.dim) == (index.order, 0):
        return x.source
    if isinstance(index, Sorted) and x is None:  # a table of experts
        return Sorted(index.order, index.source)
    return _refused(labels, node)


def _written(labels: Labels, node: fx.Node, x: Any, index: Any, values: Any, adds: bool) -> Found:
    """The label of x[index] = values, where x is the same for all samples."""
    own, label = labels[index], labels[values]
    if x is None and isinstance(own, Order) and own.at == own.source and counts_up(values) and not adds:
        return Inverse(own.order, own.source)  # every entry is written
    if x is not None or name_of(node.args[0]) not in FILLED:  # type: ignore[arg-type]
        return _refused(labels, node)
    if isinstance(own, Order) and label == Sorted(own.order, own.source) and adds:
        return own.at
    if isinstance(own, Inverse) and label == own.source and adds:
        return Sorted(own.order, own.source)
    if isinstance(own, Sorted) and label == Sorted(own.order, own.source) and adds:
        return labels.contract(node, {index: own, values: label}, output=None)
    return _refused(labels, node)


def _counted(labels: Labels, node: fx.Node, keys: Keys, bins: Any = 100, min: Any = 0, max: Any = 0) -> Found:
    if (min, max) != (0, bins - 1):
        return _refused(labels, node)
    return Counts(keys.order, keys.source, bins)


def _grouped(labels: Labels, node: fx.Node, name: str, given: Mapping[fx.Node, Any]) -> Found:
    """Experts' products of sorted rows; or, in the backward pass, products over all rows of each expert."""
    tensors = [x for x in node.all_input_nodes if not isinstance(given.get(x), Counts)]
    ends = [label for label in given.values() if isinstance(label, Counts)]
    if len(ends) != 1 or not ends[0].are_ends:
        return _refused(labels, node)
    (own,) = ends
    sorts = {x: given[x] for x in tensors if x in given}
    if any(type(label) is not Sorted or label.order != own.order for label in sorts.values()):
        return _refused(labels, node)
    if name.endswith("_backward"):
        x, weight, _, g = node.args
        if [*sorts] != [x, g] or shape(weight)[0] != own.experts:  # type: ignore[arg-type]
            return _refused(labels, node)
        summed: Any = labels.contract(node, dict(sorts), 3, 1)
        return [given[g], summed]  # type: ignore[index]
    left, right, *_ = node.args
    dims = [label.dim for label in sorts.values()]
    if [*sorts] == [left] and dims == [0] and shape(right)[0] == own.experts:  # type: ignore[arg-type]
        return Sorted(own.order, own.source)
    if [*sorts] == [left, right] and dims == [1, 0]:
        return labels.contract(node, sorts)
    return _refused(labels, node)


def _is_even(x: fx.Node, axis: int) -> bool:
    """Whether a tensor without samples is the same at all places of an axis, counted from the last.

    Places of sorted positions depend on all samples.
    """
    if not isinstance(x.meta.get("val"), torch.Tensor) or len(shape(x)) < -axis or shape(x)[axis] == 1:
        return True
    return name_of(x) in FILLED or (name_of(x) == "expand" and _is_even(x.args[0], axis))  # type: ignore[arg-type]


def _along(labels: Labels, node: fx.Node, name: str, given: Mapping[fx.Node, Any]) -> Found:
    """The label of an operation that keeps the order of sorted positions, by the rules for samples on an axis."""
    one = next(iter(given.values()))
    if any((label.order, label.source) != (one.order, one.source) for label in given.values()):
        return _refused(labels, node)
    if name not in ALONG and torch.Tag.pointwise not in node.target.tags:  # type: ignore[union-attr]
        return _refused(labels, node)
    axis = one.dim - len(shape(next(iter(given))))
    if not all(x in given or _is_even(x, axis) for x in node.all_input_nodes):
        return _refused(labels, node)
    inner = size(shape(next(iter(given)))[one.dim]) // labels.samples
    labels.found.update({x: At(label.dim, 1, inner) for x, label in given.items()})
    try:
        found = rule_of(node)(labels, node, *node.args, **node.kwargs)
    finally:
        labels.found.update(given)
    many: list[Any] = found if isinstance(found, list) else [found]
    if any(not isinstance(at, At) or (at.outer, at.inner) != (1, inner) for at in many):
        return _refused(labels, node)
    sorts: list[Any] = [Sorted(one.order, one.source, at.dim) for at in many]
    return sorts if isinstance(found, list) else sorts[0]
