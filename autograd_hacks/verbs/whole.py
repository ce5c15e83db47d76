"""What verbs say of whole parameters, where processes hold parts of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autograd_hacks.distributed.cut import each_norms, whole_norms, whole_sum
from autograd_hacks.distributed.spread import whole_of
from autograd_hacks.forms import Form, RandomMap
from autograd_hacks.support.parts import Cut
from autograd_hacks.verbs.arguments import Axes, unwrapped
from autograd_hacks.verbs.rounds import Verb, added, joint_norms, summed


class Whole(Mapping[str, Form]):
    """Forms by the parameter's name, some of a part of it.

    cuts: how those are cut over processes that hold parts
    """

    cuts: Mapping[str, Cut]
    _axes: Axes

    def shape_of(self, name: str) -> torch.Size:
        """A parameter's shape, that of the whole."""
        return self.cuts[name].shape if name in self.cuts else self[name].shape

    def _own(self, v: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A direction, as far as layers have the parameters here.  v: {name: shape}, in shards or alike on all processes"""
        return {name: self.cuts[name].own(x) if name in self.cuts else whole_of(x) for name, x in v.items()}

    def _joined(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """With a DTensor in the place of each part.  parts: {name: ... shape}"""
        return {name: self.cuts[name].joined(x) if name in self.cuts else x for name, x in parts.items()}

    def _summed(self, verb: Verb, budget: int, *shape: int) -> Tensor:
        """(N, *shape): what a verb says, added up over parameters."""
        rows = self._axes.rows
        return self._axes.placed(whole_sum(self, self.cuts, lambda own: summed(own, rows, verb, budget, *shape)))

    def _each(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same of each parameter.  found: {name: rows ...}, of what this process has of them"""
        whole = {
            name: whole_sum({name: own}, self.cuts, lambda parts: next(iter(parts.values()))) for name, own in found.items()
        }
        return {name: self._axes.placed(own) for name, own in whole.items()}

    def _products(self, other: Mapping[str, Form], shape: tuple[int, int], budget: int) -> Tensor:
        """J J′ᵀ of all rows."""
        return whole_sum(self, self.cuts, lambda own: added((form.gram(other[n], budget) for n, form in own.items()), shape))

    def _joint_norms(self, norms: Mapping[str, Tensor]) -> Tensor:
        """The norms of rows over all parameters.  norms: of each"""
        rows = self._axes.rows
        return self._axes.placed(whole_norms(norms, self.cuts, lambda own: joint_norms(list(own.values()), rows)))

    def _each_norms(self, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The norms of each parameter's rows.  norms: of what this process has of them"""
        return {name: self._axes.placed(own) for name, own in each_norms(norms, self.cuts).items()}

    def _map(self, name: str, dim: int, seed: int) -> RandomMap:
        return random_map(name, self[name].shape, dim, seed, self.cuts.get(name))


def random_map(name: str, shape: torch.Size, dim: int, seed: int, cut: Cut | None) -> RandomMap:
    """A parameter's random map, or what that of the whole is on a part.  shape: the part's"""
    within = None if cut is None else (cut.shape, cut.start(0), cut.start(1))
    return RandomMap(unwrapped(name), shape, dim, seed, within)
