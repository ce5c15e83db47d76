"""The base of forms that are made of others."""

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from autograd_hacks.forms.base import BUDGET, Form, Index
from autograd_hacks.forms.projection import RandomMap


class Composite(Form):
    """S J, where J has the rows of several forms below each other, and S scales rows, adds them up or reorders them.

    A composite says what S and Sᵀ do to something with an entry for each row; the verbs that are linear in J follow.

    parts: the forms
    """

    parts: Sequence[Form]

    @abstractmethod
    def _join(self, values: Iterable[Tensor]) -> Tensor:
        """S values, N ...  values: (M, ...) for each part of M rows, in memory that may be written to"""

    @abstractmethod
    def _split(self, w: Tensor) -> Sequence[Tensor]:
        """w S, (..., M) for each part of M rows.  w: ... N"""

    @abstractmethod
    def _of(self, parts: Sequence[Form]) -> Form:
        """S of other parts."""

    @property
    def like(self) -> Tensor:
        return self.parts[0].like

    @property
    def cuts_well(self) -> bool:  # type: ignore[override]
        return all(part.cuts_well for part in self.parts)

    @property
    def sums_cheaply(self) -> bool:  # type: ignore[override]
        return all(part.sums_cheaply for part in self.parts)

    def __getitem__(self, index: Index) -> Form:
        return self._of([part[index] for part in self.parts])

    def row_size(self) -> int:
        return max(part.row_size() for part in self.parts)

    def to(self, dtype: torch.dtype) -> Form:
        parts = [part.to(dtype) for part in self.parts]
        return self if all(now is part for now, part in zip(parts, self.parts)) else self._of(parts)

    def block(self, rows: slice) -> Form:
        return self._of([part.block(rows) for part in self.parts])

    def dot(self, v: Tensor, budget: int = BUDGET) -> Tensor:
        return self._join(part.dot(v, budget) for part in self.parts)

    def weighted_sum(self, w: Tensor, budget: int = BUDGET, total: Tensor | None = None) -> Tensor:
        for part, own in zip(self.parts, self._split(w)):
            total = part.weighted_sum(own, budget, total)
        assert total is not None  # there is a part
        return total

    def gram(self, other: Form, budget: int = BUDGET) -> Tensor:
        return self._join(part.gram(other, budget) for part in self.parts)

    def project(self, random: RandomMap, budget: int = BUDGET) -> Tensor:
        return self._join(part.project(random, budget) for part in self.parts)
