"""Which parameters a curvature is of, and why it is not of others, for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor

from autograd_hacks.support.display import Shown, Table


@dataclass(frozen=True, repr=False)
class Coverage(Shown):
    """What `compute_hess` and `compute_hess_over` return: a line for each parameter that trains.  It prints as a table, in a
    terminal and in a notebook, below the share of all their numbers that have the curvature."""

    kind: str  # that was asked for
    kinds: Mapping[str, str]  # {parameter: what it has}
    skipped: Mapping[str, str]  # {parameter: why it has none}
    sizes: Mapping[str, int]  # {parameter: how many numbers}
    frozen: int = 0  # numbers that don't train, of which none is asked for

    @property
    def covered(self) -> list[str]:
        """The parameters that have it, to give to ``per_sample_grads(model, only=...)`` say."""
        return list(self.kinds)

    @property
    def share(self) -> float:
        """The share of all numbers that train which have it, in [0, 1]."""
        return sum(self.sizes[name] for name in self.kinds) / max(1, sum(self.sizes.values()))

    def _table(self) -> Table:
        total = sum(self.sizes.values())
        count = f"{total:,}" if total < 10**6 else f"{total / 10**6:,.4g} M"
        percent = floor(1000 * self.share) / 10  # 100 where nothing is missing alone
        title = (
            f"{self.kind}: {len(self.kinds)} of {len(self.sizes)} tensors; attributed: {percent:g} % of {count} parameters"
        )
        title += f" that train; {self.frozen:,} are frozen" if self.frozen else ""
        rows = [("parameter", "numbers", self.kind)]
        for name, size in self.sizes.items():
            rows.append((name, f"{size:,}", self.kinds.get(name) or f"none: {self.skipped[name]}"))
        return Table(title, rows, is_whole=True)
