"""Rows that come of running a module again."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from autograd_hacks.forms.base import Dense, Form, Index


class Source(Protocol):
    """Something that runs a call again."""

    def prepare(self) -> None:
        """Works the rows out, for what is asked next."""

    def doubt(self) -> None:
        """Works the rows out in the way that takes least for granted, where another was taken."""

    def rows(self, name: str) -> Tensor:
        """A parameter's rows, (N, *shape)."""

    def weighted_sum(self, name: str, w: Tensor) -> Tensor:
        """The parameter's gradient where sample n's counts w[n]-fold.  w: N.  Returns shape."""


class Replay(Form):
    """J of a parameter inside a module, by backward passes through the module's own forward.

    source: runs it    name: the parameter's in the module    factor: what the rows are multiplied by
    """

    def __init__(self, source: Source, name: str, samples: int, shape: torch.Size, factor: float | Tensor = 1.0) -> None:
        self.source, self.name, self.samples, self.shape, self.factor = source, name, samples, shape, factor

    def dense(self, out: Tensor | None = None) -> Tensor:
        # Not in place: two parameters' rows may be one tensor, as of a token and a position that are added.
        return torch.mul(self.source.rows(self.name), self.factor, out=out)

    def __getitem__(self, index: Index) -> Form:
        return Dense(self.dense()[index])

    def scaled(self, factor: float | Tensor) -> Form:
        return Replay(self.source, self.name, self.samples, self.shape, self.factor * factor)

    def weighted_sum(self, w: Tensor) -> Tensor:
        return self.source.weighted_sum(self.name, w) * self.factor
