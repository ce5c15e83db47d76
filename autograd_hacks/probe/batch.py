"""The batch that a model is given: how many samples, in which of its arguments, and the same with some samples replaced."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_, tree_unflatten

from autograd_hacks.probe.layout import samples_of_rows
from autograd_hacks.support.trees import is_packed, like_its_kind, opened, tensors_of

BatchDim = int | None | tuple[Any, ...] | list[Any] | dict[str, Any]
"""An axis for all of a model's arguments; or a tree of axes, None for what has no batch: a tuple for the positional ones, as
vmap's ``in_dims``, or a dictionary for those by keyword."""


@dataclass(frozen=True)
class Batch:
    """The arguments of one forward."""

    leaves: list[Any]  # of the arguments' tree
    spec: TreeSpec  # the tree
    axes: list[int | None] | None  # for each leaf the axis of its samples, or None, where the user has said so; else None

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], batch_dim: BatchDim) -> Batch:
        """Raises ValueError for a tree of axes that doesn't fit the arguments."""
        leaves, spec = tree_flatten(opened((args, kwargs)), is_leaf=is_packed)
        if batch_dim is None or isinstance(batch_dim, int):
            return Batch(leaves, spec, None)
        axes = _axes_of(batch_dim, args, kwargs)
        sizes = {_size(leaf, axis) for leaf, axis in zip(leaves, axes) if axis is not None}
        if len(sizes) > 1 or None in sizes:
            raise ValueError(
                f"batch_dim is {batch_dim!r}, and the model's arguments have the sizes {sizes} there; expected one size, "
                "the number of samples. Write None for an argument without a batch."
            )
        return Batch(leaves, spec, axes)

    def samples(self, axis: int | None, told_by: int | None = None) -> int | None:
        """N, or None where it can't be told.

        axis: of the samples in the first tensor that has it; None for what the user has said    told_by: the number of the
        leaf that tells, where it isn't the first
        """
        if self.axes is not None:
            return next((_size(leaf, at) for leaf, at in zip(self.leaves, self.axes) if at is not None), None)
        if axis is None:
            return None
        if told_by is not None:
            return _size(self.leaves[told_by], axis)
        first = self._first(axis)
        return None if first is None else _size(self.leaves[first], axis)

    def _first(self, axis: int) -> int | None:
        """The first leaf with an axis; before a tensor of one entry, which may be a setting, one of more."""
        having = [n for n, leaf in enumerate(self.leaves) if _size(leaf, axis) is not None]
        return next(
            (n for n in having if is_packed(self.leaves[n]) or self.leaves[n].numel() != 1), having[0] if having else None
        )

    def told_otherwise(self, axis: int | None, size: int) -> int | None:
        """The first leaf of a size on an axis, where the leaf before it that tells N has 1 there, as position ids may."""
        if axis is None or self.axes is not None or self.samples(axis) != 1 or size == 1:
            return None
        return next((n for n, leaf in enumerate(self.leaves) if _size(leaf, axis) == size), None)

    def opaque(self) -> list[str]:
        """The types of arguments that may hold tensors unseen."""
        plain = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
        return sorted({type(leaf).__name__ for leaf in self.leaves if not isinstance(leaf, plain) and not is_packed(leaf)})

    def carried(self, axis: int | None, samples: int) -> list[int | None]:
        """For each leaf the axis on which it has samples; None where it has none."""
        if self.axes is not None:
            return self.axes
        carried = [axis if axis is not None and _size(leaf, axis) == samples else None for leaf in self.leaves]
        first = next((n for n, at in enumerate(carried) if at is not None), 0)
        return [None if n != first and _counts_up(self.leaves[n]) else at for n, at in enumerate(carried)]

    def replaced(self, axis: int | None, kept: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments with others of the batch's values in the place of the samples that are not kept; None where all
        samples are alike.

        Behind the first tensor that carries samples, square matrices stay, which may be masks over T = N positions, and
        vectors of integers, which may be lengths.

        axis: of the samples, see `samples`    kept: N, the samples that are not replaced
        """
        carried = self.carried(axis, len(kept))
        first = next((n for n, at in enumerate(carried) if at is not None), 0)
        if self.axes is None:
            carried = [None if n != first and _stays(self.leaves[n]) else at for n, at in enumerate(carried)]
        for shift in range(1, min(len(kept), 8)):
            leaves = [leaf if at is None else _replace(leaf, at, kept, shift) for leaf, at in zip(self.leaves, carried)]
            if any(
                at is not None and not torch.equal(_dense(new), _dense(old))
                for new, old, at in zip(leaves, self.leaves, carried)
            ):
                for new, old in zip(leaves, self.leaves):
                    if new is not old:
                        tensors_of(new)[0].requires_grad_(tensors_of(old)[0].requires_grad)
                args, kwargs = tree_unflatten(leaves, self.spec)
                return args, kwargs
        return None

    def is_alike(self, axis: int | None, told_by: int | None) -> bool:
        """Whether its samples are all the same, so that nothing can be replaced.  See `samples` for the arguments"""
        return any(self.replaced(axis, kept) is None for kept in kept_samples(self.samples(axis, told_by) or 0))

    def signature(self) -> tuple[object, ...]:
        """What the arguments are but for their extents and values; an extent of one may be no axis at all."""
        return self.spec, tuple(map(_kind, self.leaves))


def kept_samples(samples: int, seed: int = 0) -> list[Tensor]:
    """Which samples the traces keep, the same at every call: a random half, and for two or three samples the others in a
    second trace.  Each is N booleans.

    Chosen so that shifting, reversing or scanning along the batch carries a replaced sample's value into a kept one.  For
    two or three samples that takes two traces.
    """
    if samples < 4:
        one = torch.arange(samples, device="cpu") > 0
        return [~one, one] if samples > 1 else [torch.ones(samples, dtype=torch.bool, device="cpu")]
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(samples, generator=generator, device="cpu")
        kept = torch.zeros(samples, dtype=torch.bool, device="cpu").index_fill(0, order[: samples - samples // 2], True)
        steps = kept[1:].int() - kept[:-1].int()
        if (steps > 0).any() and (steps < 0).any() and (kept != kept.flip(0)).any():
            return [kept]


def _replace(leaf: Any, axis: int, kept: Tensor, shift: int) -> Any:
    if is_packed(leaf):
        data = leaf.data.detach().roll(shift, 0) * (1.5 if leaf.data.is_floating_point() else 1)
        of_rows = kept.to(data.device)[samples_of_rows(leaf)]
        return leaf._replace(data=torch.where(of_rows.view(-1, *[1] * (data.ndim - 1)), leaf.data.detach(), data))
    if leaf.layout != torch.strided:
        return _laid_out(leaf, _replace(leaf.detach().to_dense(), axis, kept, shift))
    donors = leaf.detach().roll(shift, axis)
    if leaf.is_floating_point():
        donors = donors * 1.5  # beyond the batch's own values, or what takes their largest would stay the same
    by_sample = kept.to(leaf.device).view([-1 if n == axis % leaf.ndim else 1 for n in range(leaf.ndim)])
    return like_its_kind(leaf, torch.where(by_sample, leaf.detach(), donors))


def _dense(leaf: Any) -> Tensor:
    leaf = leaf.data if is_packed(leaf) else leaf
    return leaf if leaf.layout == torch.strided else leaf.to_dense()


def _laid_out(like: Tensor, dense: Tensor) -> Tensor:
    """A tensor as sparse as another."""
    if like.layout == torch.sparse_coo:
        return dense.to_sparse(like.sparse_dim())
    if like.layout in (torch.sparse_bsr, torch.sparse_bsc):
        return dense.to_sparse(layout=like.layout, blocksize=tuple(like.values().shape[1:3]))
    return dense.to_sparse(layout=like.layout)


def _axes_of(batch_dim: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int | None]:
    by_name = {name: batch_dim.get(name) for name in kwargs} if isinstance(batch_dim, dict) else dict.fromkeys(kwargs)
    axes: list[int | None] = []
    for prefix, tree in ((None if isinstance(batch_dim, dict) else tuple(batch_dim), args), (by_name, kwargs)):
        flat: list[int | None] = []
        add = partial(_add_axes, flat)
        try:
            tree_map_(add, opened(prefix), opened(tree))
        except ValueError:
            raise ValueError(
                f"batch_dim is {batch_dim!r}, which doesn't fit {len(args)} positional arguments and those by keyword, "
                f"{', '.join(kwargs) or 'none'}; expected a number, a tree like the positional ones, or a dictionary"
            ) from None
        axes += flat
    return axes


def _add_axes(axes: list[int | None], axis: int | None, part: Any) -> None:
    leaves = tree_leaves(part, is_packed)
    axes += [axis if isinstance(leaf, Tensor) or is_packed(leaf) or len(leaves) == 1 else None for leaf in leaves]


def _size(leaf: Any, axis: int) -> int | None:
    if is_packed(leaf):
        return int(leaf.batch_sizes[0])
    return leaf.shape[axis] if isinstance(leaf, Tensor) and -leaf.ndim <= axis < leaf.ndim else None


def _counts_up(leaf: Any) -> bool:
    """Whether a leaf is a vector of positions, which may be as many as there are samples."""
    if not isinstance(leaf, Tensor) or leaf.ndim != 1 or leaf.is_meta:
        return False
    if leaf.is_floating_point() or leaf.is_complex() or leaf.dtype == torch.bool:
        return False
    return len(leaf) > 1 and bool((leaf.diff() == 1).all())


def _stays(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor):
        return not is_packed(leaf)
    if leaf.ndim == 1:
        return not leaf.is_floating_point()
    has_values = leaf.is_floating_point() or leaf.dtype == torch.bool
    return has_values and leaf.ndim == 2 and leaf.shape[0] == leaf.shape[1]


def _kind(leaf: Any) -> object:
    if isinstance(leaf, Tensor):
        return tuple(size == 1 for size in leaf.shape), leaf.dtype
    if is_packed(leaf):  # of one length, and in their own order, or not: where rows are depends on it
        of_one_length, order = bool((leaf.batch_sizes == leaf.batch_sizes[0]).all()), leaf.sorted_indices
        return of_one_length, order is None or bool((order.diff() == 1).all()), leaf.data.dtype
    return leaf if isinstance(leaf, bool | int | float | str | None) else type(leaf)
