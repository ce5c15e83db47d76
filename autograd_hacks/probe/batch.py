"""The batch given to a model: how many samples it has, in which arguments, and how to replace some of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, zip_longest
from itertools import count as counted
from math import comb
from typing import Any

import torch
from torch import Tensor

from autograd_hacks.errors import ON_BATCH
from autograd_hacks.support.internals import TreeSpec, tree_flatten, tree_leaves, tree_map_, tree_unflatten
from autograd_hacks.support.layout import same, samples_of_rows
from autograd_hacks.support.trees import is_packed, like_its_kind, unpacked

BatchDim = int | None | tuple[Any, ...] | list[Any] | dict[str, Any]
"""One axis for all arguments of a model, or a tree of axes with None for an argument without a batch.  A tree is a tuple
for positional arguments, like vmap's ``in_dims``, or a dictionary for keyword arguments."""


_LEAVES = {Tensor, type(None), bool, int, float, str}


@lru_cache(maxsize=64)
def _spec_of_leaves(count: int, *names: str) -> TreeSpec:
    """The tree of so many arguments and of arguments with names, each of which is a leaf."""
    return tree_flatten(((0,) * count, dict.fromkeys(names, 0)))[1]


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward."""

    leaves: list[Any]  # of the tree of arguments
    spec: TreeSpec  # the tree
    tree: Hashable  # the same, to be compared
    lists: frozenset[int]  # the lengths of lists of tensors among them, which may hold a sample each
    axes: list[int | None] | None  # for each leaf the axis of its samples or None, if the user gave them; else None

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim, names: Sequence[str] = ()) -> Batch:
        """The batch of a forward.  Raises ValueError if a tree of axes doesn't fit the arguments.

        names: of the positional arguments
        """
        if _LEAVES.issuperset(map(type, (*args, *kwargs.values()))):  # torch's tree functions take 30 µs
            tree: Hashable = (len(args), *kwargs)
            leaves, spec = [*args, *kwargs.values()], _spec_of_leaves(len(args), *kwargs)
        else:
            leaves, spec = tree_flatten(unpacked((args, kwargs)), is_leaf=is_packed)
            tree = spec
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, list | tuple) and len(x) > 1)
        lists = frozenset(len(x) for x in given if all(isinstance(part, Tensor) for part in x))
        if batch_dim is None or isinstance(batch_dim, int):
            tensors = [leaf.shape for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim] if batch_dim else ()
            if tensors and not any(-len(shape) <= (batch_dim or 0) < len(shape) for shape in tensors):
                raise ValueError(
                    f"batch_dim is {batch_dim}, but the model's arguments have the shapes {[*map(tuple, tensors)]}; "
                    "expected the axis of theirs that has the samples." + ON_BATCH
                )
            return Batch(leaves, spec, tree, lists, None)
        axes = _axes_of(batch_dim, args, kwargs, names)
        sizes = {_size(leaf, axis) for leaf, axis in zip(leaves, axes) if axis is not None}
        if len(sizes) > 1 or None in sizes:
            raise ValueError(
                f"batch_dim is {batch_dim!r}, but the model's arguments have the sizes {sizes} there; expected one size, "
                "the number of samples. Use None for an argument without a batch." + ON_BATCH
            )
        return Batch(leaves, spec, tree, lists, axes)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as given to the forward."""
        args, kwargs = tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    def samples(self, axis: int | None, counted_leaf: int | None = None) -> int | None:
        """N, or None if it can't be determined.

        axis: the samples' axis, in the first tensor that has it; None if the user gave the axes
        counted_leaf: the number of the leaf that shows N, if not the first
        """
        if self.axes is not None:
            return next((_size(leaf, at) for leaf, at in zip(self.leaves, self.axes) if at is not None), None)
        if axis is None:
            return None
        if counted_leaf is not None:
            return _size(self.leaves[counted_leaf], axis)
        there = [(leaf, size) for leaf in self.leaves if (size := _size(leaf, axis)) is not None]
        # A tensor with one entry is skipped if there are others: it may be a setting.
        large = (size for leaf, size in there if is_packed(leaf) or leaf.numel() != 1)
        return next(large, there[0][1] if there else None)

    def axes_of_samples(self, axis: int | None, samples: int, with_masks: bool = True) -> list[int | None]:
        """For each leaf the axis of its samples; None if it has none.

        with_masks: False leaves out masks over T = N positions: square matrices of booleans, or of 0 and -inf only, unless
        they are the first tensor with samples
        """
        if self.axes is not None:
            return self.axes
        axes = [None if axis is None or _size(leaf, axis) != samples else axis for leaf in self.leaves]
        first, is_odd = next((n for n, at in enumerate(axes) if at is not None), 0), [*map(_counts_up, self.leaves)]
        if not with_masks:
            is_odd = [own or _is_mask(leaf) for own, leaf in zip(is_odd, self.leaves)]
        return [None if n != first and is_odd[n] else at for n, at in enumerate(axes)]

    def replaced(
        self, axis: int | None, kept: Tensor, shift: int = 0, by_list: bool = False, donors: Tensor | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with the samples that are not kept replaced by kept ones; None if that changes nothing.

        axis: the samples' axis, see `samples`
        kept: N, the samples that are not replaced
        shift: selects the replacements, another number each time
        by_list: whether samples are the items of lists
        donors: for these samples instead, in this order
        """
        samples, choices = len(kept), kept.nonzero()[:, 0]
        every = torch.arange(samples, device="cpu")
        order = every.where(kept, choices[(every + shift) % len(choices)]) if donors is None else donors
        axes = [None] * len(self.leaves) if by_list else self.axes_of_samples(axis, samples, with_masks=False)
        taken = {(id(x), at): _taken(x, at, order) for x, at in zip(self.leaves, axes) if at is not None}
        leaves = [leaf if at is None else taken[id(leaf), at] for leaf, at in zip(self.leaves, axes)]
        if self.has_lists(samples, by_list):
            args, kwargs = replace(self, leaves=leaves).arguments()
            return tuple(_entries(x, order.tolist(), by_list) for x in args), _entries(kwargs, order.tolist(), by_list)
        if donors is None and all(new is old or same(_dense(new), _dense(old)) for new, old in zip(leaves, self.leaves)):
            return None
        return replace(self, leaves=leaves).arguments()

    def has_lists(self, samples: int, by_list: bool = False) -> bool:
        """Whether a list of numbers or strings, or an array, has an entry for each sample.  by_list: see `replaced`"""
        args, kwargs = self.arguments()
        return self.axes is None and any(_has_entries(x, samples, by_list) for x in (*args, *kwargs.values()))

    def told_otherwise(self, axis: int | None, size: int) -> int | None:
        """The first leaf with a given size on an axis, if the leaf that should show N has size 1, as position ids may."""
        if axis is None or self.axes is not None or self.samples(axis) != 1 or size == 1:
            return None
        return next((n for n, leaf in enumerate(self.leaves) if _size(leaf, axis) == size), None)

    def agreeing(self, axis: int | None) -> int:
        """How many of the tensors with the most axes have the same size on an axis as the first of them."""
        shapes = [leaf.shape for leaf in self.leaves if isinstance(leaf, Tensor)]
        most = max(map(len, shapes), default=0)
        sizes = [shape[axis] for shape in shapes if axis is not None and most == len(shape) > axis]
        return sizes.count(sizes[0]) if sizes else 0

    @property
    def is_ragged(self) -> bool:
        """Whether there may be a vector of entries, and a vector of the bags' starts."""
        vectors = (x for x in self.leaves if isinstance(x, Tensor) and x.ndim == 1 and not x.is_floating_point())
        return self.axes is None and len(list(vectors)) > 1

    def signature(self) -> tuple[object, ...]:
        """The arguments' tree and kinds, without sizes and numbers.

        Size 1 counts, because such an axis may be no batch.  It also counts which arguments are one tensor."""
        first: dict[int, int] = {}
        which = [first.setdefault(id(x), n) for n, x in enumerate(self.leaves) if isinstance(x, Tensor)]
        return self.tree, tuple(map(_kind, self.leaves)), tuple(which)


def kept_samples(samples: int, draws: torch.Generator) -> list[Tensor]:
    """Which samples each run keeps.  Each is N booleans.

    For every ordered pair of samples some run keeps the first and replaces the second, so no sample's runs are a subset of
    another's.  For three to six samples each half is used twice, with different replacements.
    Source: Sperner 1928, "Ein Satz über Untermengen einer endlichen Menge".
    """
    if samples < 2:
        return [torch.ones(samples, dtype=torch.bool, device="cpu")]
    count = next(count for count in counted(2) if comb(count, count // 2) >= samples)
    sets = torch.tensor([*combinations(range(count), (count + 1) // 2)], device="cpu")
    own = sets[torch.randperm(len(sets), generator=draws, device="cpu")[:samples]]
    halves = [(own == n).any(1) for n in range(count)]
    return halves * 2 if 2 < samples < 7 else halves


def _taken(leaf: Any, axis: int, donors: Tensor) -> Any:
    """A leaf with other samples.  donors: N, the sample whose values each one gets"""
    if is_packed(leaf):  # its samples have different lengths: only rows are replaced
        rows = (donors != torch.arange(len(donors), device="cpu")).to(leaf.data.device)[samples_of_rows(leaf)]
        others = leaf.data.detach().roll(1, 0).where(rows.view(-1, *[1] * (leaf.data.ndim - 1)), leaf.data.detach())
        return leaf._replace(data=others.requires_grad_(leaf.data.requires_grad))
    if leaf.layout != torch.strided:
        dense, blocks = _taken(leaf.detach().to_dense(), axis, donors), (torch.sparse_bsr, torch.sparse_bsc)
        if leaf.layout == torch.sparse_coo:
            return dense.to_sparse(leaf.sparse_dim()).requires_grad_(leaf.requires_grad)
        size = tuple(leaf.values().shape[1:3]) if leaf.layout in blocks else None
        return dense.to_sparse(layout=leaf.layout, blocksize=size).requires_grad_(leaf.requires_grad)
    # Keep the order in memory: otherwise other kernels may give the same numbers with other digits.
    plain = leaf.detach().as_subclass(Tensor)
    taken = plain.index_select(axis, donors.to(leaf.device))
    taken = torch.empty_like(plain).copy_(taken) if taken.shape == plain.shape else taken
    return like_its_kind(leaf, taken).requires_grad_(leaf.requires_grad)


def _dense(leaf: Any) -> Tensor:
    leaf = leaf.data if is_packed(leaf) else leaf
    return leaf if leaf.layout == torch.strided else leaf.to_dense()


def _axes_of(batch_dim: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: Sequence[str]) -> list[int | None]:
    by_position, by_name = batch_dim, dict[str, Any].fromkeys(kwargs)
    if isinstance(batch_dim, dict):
        if wrong := sorted(batch_dim.keys() - {*names, *kwargs}):
            raise ValueError(
                f"batch_dim is {batch_dim!r}, but the model has no argument {', '.join(map(repr, wrong))}; expected names "
                f"among {', '.join(names)}." + ON_BATCH
            )
        by_position = [batch_dim.get(name) for name, _ in zip_longest(names[: len(args)], args)]
        by_name = {name: batch_dim.get(name) for name in kwargs}
    axes: list[int | None] = []

    def add(axis: int | None, part: Any) -> None:
        leaves = tree_leaves(part, is_packed)
        axes.extend(axis if isinstance(x, Tensor) or is_packed(x) or len(leaves) == 1 else None for x in leaves)

    for prefix, tree in ((tuple(by_position), args), (by_name, kwargs)):
        try:
            tree_map_(add, unpacked(prefix), unpacked(tree))
        except ValueError:
            raise ValueError(
                f"batch_dim is {batch_dim!r}, which doesn't fit {len(args)} positional arguments and the keyword arguments "
                f"{', '.join(kwargs) or 'none'}; expected a number, a tree like the positional arguments, or a dictionary."
                + ON_BATCH
            ) from None
    return axes


def _size(leaf: Any, axis: int) -> int | None:
    if is_packed(leaf):
        return int(leaf.batch_sizes[0])
    return leaf.shape[axis] if isinstance(leaf, Tensor) and -leaf.ndim <= axis < leaf.ndim else None


def _counts_up(leaf: Any) -> bool:
    """Whether a leaf is a vector of positions, which may have as many entries as there are samples."""
    is_vector = isinstance(leaf, Tensor) and leaf.ndim == 1 and not leaf.is_meta and len(leaf) > 1
    is_whole = is_vector and not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool)
    return is_whole and bool((leaf.diff() == 1).all())


def _is_mask(leaf: Any) -> bool:
    is_square = isinstance(leaf, Tensor) and leaf.ndim == 2 and leaf.shape[0] == leaf.shape[1]
    is_float = is_square and leaf.is_floating_point()
    return is_square and (leaf.dtype == torch.bool or (is_float and bool(((leaf == 0) | (leaf == -torch.inf)).all())))


def _other(own: Any, other: Any) -> Any:
    """An item instead of another one.  It has the same shape, since with another one samples would be packed otherwise,
    and kernels would give other digits."""
    if other is own or not isinstance(own, Tensor) or (isinstance(other, Tensor) and other.shape == own.shape):
        return other
    return own.detach().flatten().roll(1).view(own.shape).requires_grad_(own.requires_grad)


def _has_entries(x: Any, samples: int, by_list: bool) -> bool:
    """Whether there is a container with an entry for each sample.  by_list: entries may be tensors"""
    if isinstance(x, dict):
        return any(_has_entries(own, samples, by_list) for own in x.values())
    if type(x) is list or (by_list and type(x) is tuple):
        held = [] if by_list else tree_leaves(x, is_packed)
        return len(x) == samples and not any(isinstance(leaf, Tensor) or is_packed(leaf) for leaf in held)
    shape: Any = getattr(x, "shape", ())
    return hasattr(x, "__array_interface__") and len(shape) > 0 and shape[0] == samples  # NumPy's


def _entries(x: Any, order: list[int], by_list: bool) -> Any:
    """A container with an entry for each sample, with other entries; anything else unchanged."""
    if isinstance(x, dict):
        return type(x)({key: _entries(own, order, by_list) for key, own in x.items()})
    if not _has_entries(x, len(order), by_list):
        return x
    return type(x)(_other(own, x[n]) for own, n in zip(x, order)) if isinstance(x, list | tuple) else x[order]


def _kind(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple([size == 1 for size in leaf.shape]), leaf.dtype
    if is_packed(leaf):  # rows lie in another order if lengths are equal or sequences are sorted
        of_one_length, order = bool((leaf.batch_sizes == leaf.batch_sizes[0]).all()), leaf.sorted_indices
        return of_one_length, order is None or bool((order.diff() == 1).all()), leaf.data.dtype
    return leaf if isinstance(leaf, bool | None) else type(leaf)
