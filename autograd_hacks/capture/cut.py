"""A call's arguments, cut into samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from autograd_hacks.capture.records import RecordedCall
from autograd_hacks.probe.layout import PACKED, Layout
from autograd_hacks.support.trees import detached, is_packed, like_its_kind, map_tensors, opened


class Cut:
    """Of a call with N samples, which stand in its arguments as in its output, or on axis 0, by sizes.  The comparison of
    the outputs tells whether that was right."""

    def __init__(self, call: RecordedCall, layout: Layout, samples: int) -> None:
        given = map_tensors(detached, (call.args, call.kwargs))
        self._leaves, self._spec = tree_flatten(opened(given), is_packed)
        self._layouts = [_layout_of(leaf, layout, samples) for leaf in self._leaves]
        found = [(leaf, at) for leaf, at in zip(self._leaves, self._layouts) if at is not None]
        self.parts: list[Any] = [at.samples_first(leaf, samples) for leaf, at in found]  # N ... each, of what has samples
        self.is_packed = PACKED in self._layouts

    def batch_of_one(self, sample: list[Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments for one sample.  sample: its entry in each of `parts`"""
        parts = iter(sample)
        whole = [leaf if at is None else at.batch_of_one(next(parts)) for leaf, at in zip(self._leaves, self._layouts)]
        whole = [like_its_kind(leaf, x) if isinstance(leaf, Tensor) else x for leaf, x in zip(self._leaves, whole)]
        args, kwargs = tree_unflatten(whole, self._spec)
        return args, kwargs


def _layout_of(leaf: Any, layout: Layout, samples: int) -> Layout | None:
    if is_packed(leaf) and int(leaf.batch_sizes[0]) == samples:
        return PACKED
    if not isinstance(leaf, Tensor) or samples < 1 or leaf.layout != torch.strided:
        return None
    return next((at for at in (layout, Layout()) if at.fits(leaf, samples)), None)


@contextmanager
def no_word_of_speed() -> Iterator[None]:
    """A context in which vmap doesn't warn of operations that it runs sample by sample."""
    functorch: Any = torch._C._functorch  # torch has no types for these
    functorch._set_vmap_fallback_warning_enabled(False)
    try:
        yield
    finally:
        functorch._set_vmap_fallback_warning_enabled(True)
